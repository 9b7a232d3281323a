"""The checkpoint of a Spark destination: a folder of the driver in which it notes what it writes."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from penstock.destinations.refusals import require_same_folder
from penstock.durable import aside, sync_folder, write_synced
from penstock.state import Store

_MARKER = "batches.json"
_BLOCK = 1 << 16
"""Numbers that are reserved at once: each start skips the rest of a block."""


class Checkpoint:
    """The folder in which the destination notes what it writes; durable. Thread-safe for different tables."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._next = self._reserved = 0

    @property
    def marker(self) -> Path:
        """The file that shows that the folder was used."""
        return self._folder / _MARKER

    def open(self, store: Store) -> None:
        """Create the folder, or continue after the numbers that were reserved in it.

        Raises `DestinationUnavailable` if it is missing although tables were copied.
        """
        require_same_folder(self.marker, store)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.marker.exists():
            self._next = self._reserved = json.loads(self.marker.read_text())["reserved"]
        self._reserve(0)

    def numbers(self, count: int) -> int:
        """Return the first of some numbers that were never used."""
        with self._lock:
            if self._next + count > self._reserved:
                self._reserve(count)
            first, self._next = self._next, self._next + count
            return first

    def load(self, table_id: int) -> dict[str, Any] | None:
        """Return what is noted of a table."""
        try:
            return json.loads(self._file(table_id).read_text())
        except FileNotFoundError:
            return None

    def store(self, table_id: int, record: dict[str, Any]) -> None:
        """Replace what is noted of a table."""
        self._write(self._file(table_id), record)

    def _reserve(self, count: int) -> None:
        self._reserved = self._next + count + _BLOCK
        self._write(self.marker, {"format": 1, "reserved": self._reserved})

    def _file(self, table_id: int) -> Path:
        return self._folder / f"{table_id}.json"

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        with aside(path) as temporary:
            write_synced(temporary, json.dumps(record).encode())
            os.replace(temporary, path)
        sync_folder(self._folder)
