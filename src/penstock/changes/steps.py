"""The steps of a table: rows (segments), truncations, and logical messages between them.

The same objects flow from the spool to a destination. A `Segment` names a file and the keys of its changes; a batch
narrows it to the part between two boundaries. Nothing is read before `Segment.read`. Everything here pickles, so that
tasks read rows where they run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.segment import COMMIT_LSN, UNREPRESENTABLE, Settled, require_representable, settle_rows
from penstock.changes.segment_files import Origin
from penstock.changes.transform import TableTransform
from penstock.lsn import Lsn, OrderKey, are_in, earliest, furthest, is_in
from penstock.observe.reports import tell

_THREADS_FROM_BYTES = 1 << 20
"""Handing the columns of a small file to threads takes as long as reading it."""


@dataclass(frozen=True, slots=True)
class CellsChanged:
    """A report of `Segment.read`: so many cells were changed because their type cannot hold them."""

    table_id: int
    path: str
    """Of the segment: it may be read more than once."""
    count: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A file with consecutive changes of one table in one schema version; see `penstock.changes.segment`."""

    table_id: int
    table: str
    """Namespace and name, for people."""
    version: str
    """Of the table's schema: the order key from which it is valid."""
    path: str
    rows: int
    """In the whole file."""
    bytes: int
    first: OrderKey
    """No change in the file comes before this key; in the spool, that of the first change."""
    last: OrderKey
    """No change in the file comes after this key; in the spool, that of the last change."""
    unrepresentable: int = 0
    """Rows with cells whose type cannot hold them; their texts are in `_unrepresentable`."""
    memory: int = 0
    """Bytes of the rows when they are read; `bytes` says little about it, because the file is compressed."""
    operations: tuple[int, ...] = ()
    """How many rows were inserted, updated and deleted; empty if that is not known."""
    after: Lsn | None = None
    """Changes before this boundary are left out; None if there are none in the file."""
    until: Lsn | None = None
    """Changes after this boundary are left out; None if there are none in the file."""
    refuses: tuple[str, ...] = ()
    """Reading a row with an unrepresentable value in one of these columns raises (`out_of_range = "error"`)."""
    settled: Settled = ()
    """Unrepresentable values of these columns are changed by `read` (`out_of_range = "null"` and `"clamp"`), which
    reports their number (`CellsChanged`)."""
    transform: TableTransform | None = None
    """What `read` makes of the rows; their columns are those of its `output`."""
    origin: Origin | None = None
    """Where a task on another machine gets the file from; None if every reader sees it under its path."""

    def between(self, after: Lsn | None, until: Lsn | None = None) -> Segment | None:
        """The part between two boundaries; None if the keys show that there is none."""
        if after is not None and is_in(self.last.commit_lsn, after):
            return None
        if until is not None and not is_in(self.first.commit_lsn, until):
            return None
        if after is None or not is_in(self.first.commit_lsn, after):
            after = self.after
        elif self.after is not None:
            after = furthest(self.after, after)
        if until is None or is_in(self.last.commit_lsn, until):
            until = self.until
        elif self.until is not None:
            until = earliest(self.until, until)
        return replace(self, after=after, until=until)

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """The rows between the boundaries. Raises `ValueOutOfRange` if one has a value that is refused."""
        whole = self.after is None and self.until is None
        checked = bool(self.refuses or self.settled) and self.unrepresentable > 0
        wanted = columns if self.transform is None else None
        if wanted is not None:
            needed = [*([] if whole else [COMMIT_LSN]), *([UNREPRESENTABLE] if checked else [])]
            wanted = list(dict.fromkeys([*wanted, *needed]))
        with self.open() as source, pq.ParquetFile(source, pre_buffer=isinstance(source, pa.PythonFile)) as file:
            table = file.read(columns=wanted, use_threads=self.bytes >= _THREADS_FROM_BYTES)
        if not whole:
            table = self._narrow(table)
        if checked:
            require_representable(table, self.table, self.table_id, self.refuses)
            table, changed = settle_rows(table, self.settled)
            if changed:
                tell(CellsChanged(self.table_id, self.path, changed))
        if self.transform is not None:
            table = self.transform.segment(table)
        return table if columns is None or table.column_names == columns else table.select(columns)

    def open(self) -> Any:
        """Return the whole file for pyarrow, in any process and on any machine to which the segment was sent."""
        return pa.OSFile(self.path, "rb") if self.origin is None else self.origin.open(self.path, self.bytes)

    def arrow_schema(self) -> pa.Schema:
        """The schema of the rows that `read` returns."""
        with self.open() as source:
            schema = pq.read_schema(source)
        return schema if self.transform is None else self.transform.arrow_schema(schema)

    def _narrow(self, table: pa.Table) -> pa.Table:
        commits = table.column(COMMIT_LSN).to_numpy()
        keep = np.ones(len(commits), np.bool_)
        if self.after is not None:
            keep &= ~are_in(commits, self.after)
        if self.until is not None:
            keep &= are_in(commits, self.until)
        return table.filter(pa.array(keep))


@dataclass(frozen=True, slots=True)
class Truncation:
    """A table was emptied. One TRUNCATE of several tables gives each of them one, with the same key."""

    table_id: int
    table: str
    key: OrderKey
    commit_time: int
    xid: int
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A logical message (`pg_logical_emit_message`) inside a transaction."""

    key: OrderKey
    commit_time: int
    xid: int
    prefix: str
    content: bytes


Step = Segment | Truncation | Message


@dataclass(frozen=True, slots=True)
class Entry:
    """Whole transactions between two boundaries, in commit order: one record of the spool's log."""

    number: int
    begin: Lsn
    end: Lsn
    transactions: int = 0
    first_commit_time: int = 0
    last_commit_time: int = 0
    """Unix microseconds, by the source's clock."""
    steps: tuple[Step, ...] = ()
    """The steps of one table are in the order of its changes."""

    @property
    def rows(self) -> int:
        return sum(step.rows for step in self.steps if isinstance(step, Segment))

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps if isinstance(step, Segment))
