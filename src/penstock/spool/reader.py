"""Reads a spool: the entries after a position, of some tables or of all.

There may be any number of readers, in any process. A reader that must not miss anything registers first
(`penstock.spool.registry`), and advances its position when it has finished something.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from penstock.changes.segment_files import origin_of
from penstock.changes.steps import Entry, Message, Segment
from penstock.errors import PositionGone
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema
from penstock.source.lineage import Ancestry
from penstock.spool.folder import SpoolFolder
from penstock.spool.lineage import load_ancestry
from penstock.spool.log import LogTail
from penstock.spool.registry import Readers
from penstock.spool.schemas import SchemaVersions

POLL_SECONDS = 0.01


class SpoolReader:
    """A view of a growing spool; not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._folder = SpoolFolder(path)
        self._tail = LogTail(self._folder)
        self._entries: list[Entry] = []
        self._schemas = SchemaVersions(self._folder)
        self.readers = Readers(self._folder)

    @property
    def begin(self) -> Lsn | None:
        """The boundary where the available entries begin; None while there are none."""
        self._refresh()
        return self._entries[0].begin if self._entries else None

    @property
    def captured(self) -> Lsn | None:
        """The boundary up to which everything is in the spool; None while there are no entries."""
        self._refresh()
        return self._entries[-1].end if self._entries else None

    @property
    def ancestry(self) -> Ancestry | None:
        """The server of all entries that were returned so far, or of later ones; None in a new spool."""
        return load_ancestry(self._folder)

    def entries(self, after: Lsn, tables: Collection[int] | None = None) -> list[Entry]:
        """The entries that end after a boundary, in order, with messages and the steps of these tables.

        The first one may begin before `after`; skip its earlier transactions by their commit positions
        (`penstock.lsn.are_in`).
        """
        self._refresh()
        if self._entries and not reaches(after, self._entries[0].begin):
            raise PositionGone(
                f"entries after {after} were requested, but the spool begins at {self._entries[0].begin}",
                position=after,
            )
        found = [entry for entry in self._entries if not reaches(after, entry.end)]
        if tables is None:
            return found
        return [
            replace(
                entry,
                steps=tuple(step for step in entry.steps if isinstance(step, Message) or step.table_id in tables),
            )
            for entry in found
        ]

    def wait(self, after: Lsn, timeout: float) -> bool:
        """Wait until the spool extends beyond a boundary; return False after the timeout."""
        deadline = time.monotonic() + timeout
        while True:
            captured = self.captured
            if captured is not None and not reaches(after, captured):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)

    def forget(self, before: Lsn) -> None:
        """Remove entries that this reader has passed from memory."""
        while len(self._entries) > 1 and reaches(before, self._entries[0].end):
            del self._entries[0]

    def schema(self, segment: Segment) -> TableSchema:
        """The schema that a segment's rows have."""
        return self.load_schema(segment.table_id, segment.version)

    def load_schema(self, table_id: int, version: str) -> TableSchema:
        """One version of a table's schema."""
        return self._schemas.load(table_id, version)

    def read(self, segment: Segment) -> pa.Table:
        """A segment's rows."""
        try:
            return segment.read()
        except FileNotFoundError:
            raise PositionGone(
                f"a segment of {segment.table} was already deleted", position=segment.first.commit_lsn
            ) from None

    def _refresh(self) -> None:
        for entry in map(self._served, self._tail.read_new()):
            if self._entries and entry.begin != self._entries[-1].end:
                raise PositionGone(
                    f"entries after {self._entries[-1].end} were deleted before they were read",
                    position=self._entries[-1].end,
                )
            self._entries.append(entry)

    def _served(self, entry: Entry) -> Entry:
        """Return an entry whose segments say where tasks on other machines get them from."""
        origin = origin_of(self._folder.root)
        if origin is None:
            return entry
        steps = (replace(step, origin=origin) if isinstance(step, Segment) else step for step in entry.steps)
        return replace(entry, steps=tuple(steps))
