"""Every event as a line of JSON on standard output: for display, and for programs that read a pipe.

At least once: after a crash some lines appear again. `(commit_lsn, ordinal)` identifies a change across all tables.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from penstock.changes.events import Event, Row
from penstock.destinations.json_lines import copied_row_to_json, event_to_json
from penstock.destinations.rows import RowDestination
from penstock.lsn import Lsn
from penstock.schema import TableSchema


class StdoutDestination(RowDestination):
    """`type = "stdout"`: rows of a copy as `{"op": "copy", …}`, then changes, each on a line of its own."""

    name = "stdout"

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream

    def clear(self, table: TableSchema, attempt: str) -> None:
        """Do nothing: lines cannot be taken back. Readers start over when a copy starts again."""

    def write(self, event: Event) -> None:
        """Print the event."""
        line = event_to_json(event)
        if line is not None:
            self._print(line)

    def write_copied(self, table: TableSchema, row: Row, position: Lsn) -> None:
        """Print the row as a copied row."""
        self._print(copied_row_to_json(table, row, position))

    def flush(self, positions: Mapping[int, Lsn]) -> None:
        """Flush the lines to the reader of the pipe."""
        (self._stream or sys.stdout).flush()

    def _print(self, line: str) -> None:
        (self._stream or sys.stdout).write(line + "\n")
