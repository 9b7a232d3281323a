"""What a destination is handed: whole transactions, by table, in order.

An `EventBatch` covers the changes between two boundaries. For each table it has an ordered list of steps: rows (files,
nothing is read yet), truncates, changes of the schema. Batches and all they hold pickle, so that tasks can read rows
where they run. A batch may arrive again after a crash, with other boundaries: what is in already is told by
`_commit_lsn` against the position that the destination has stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.frames import frame_of_files, spark_columns
from penstock.changes.segment import COMMIT_LSN, UNREPRESENTABLE, require_representable
from penstock.changes.steps import Message, Segment, Step, Truncation
from penstock.lsn import Lsn, OrderKey, are_in, furthest, is_in, reaches
from penstock.schema import TableSchema

_THREADS_FROM_BYTES = 1 << 20
"""Handing the columns of a small file to threads takes as long as reading it."""


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment, or the part of it between two boundaries."""

    path: str
    rows: int
    """Of the whole file."""
    bytes: int
    after: Lsn | None = None
    """Changes that this boundary covers are not meant; None when there are none in the file."""
    until: Lsn | None = None
    """Changes that this boundary does not cover are not meant; None when there are none in the file."""
    refused_of: str | None = None
    """The table's name, if cells that their type cannot hold are refused (`out_of_range = "error"`) and there are some
    in the file; None otherwise."""

    def read(self, columns: list[str] | None = None) -> pa.Table:
        """The rows that are meant. Raises `ValueOutOfRange` if one of them has a cell that is refused."""
        whole = self.after is None and self.until is None
        needed = [] if whole else [COMMIT_LSN]
        if self.refused_of is not None:
            needed.append(UNREPRESENTABLE)
        wanted = None if columns is None else list(dict.fromkeys([*columns, *needed]))
        with pq.ParquetFile(self.path) as file:
            table = file.read(columns=wanted, use_threads=self.bytes >= _THREADS_FROM_BYTES)
        if not whole:
            table = self._cut(table)
        if self.refused_of is not None:
            require_representable(table, self.refused_of)
        return table if columns is None or table.column_names == columns else table.select(columns)

    def _cut(self, table: pa.Table) -> pa.Table:
        commits = table.column(COMMIT_LSN).to_numpy()
        keep = np.ones(len(commits), np.bool_)
        if self.after is not None:
            keep &= ~are_in(commits, self.after)
        if self.until is not None:
            keep &= are_in(commits, self.until)
        return table.filter(pa.array(keep))


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive changes of a table in one schema version; columns as in `penstock.changes.segment`."""

    schema: TableSchema
    version: str
    segments: tuple[SegmentFile, ...]
    unrepresentable: int = 0
    """Rows with cells whose type cannot hold them."""

    def arrow(self) -> Iterator[pa.Table]:
        """Read the segments, one at a time."""
        for segment in self.segments:
            yield segment.read()

    def frame(self, session: Any) -> Any:
        """All rows as a typed data frame of the Spark session that is passed in, read by its JVM when it is computed.

        Columns as in `arrow`, with `_unrepresentable` if some segment has it. The order of a frame means nothing: sort
        by `_commit_lsn` and `_ordinal`. It can be computed until the result of the batch is known; executors elsewhere
        must see the spool under the same path. Raises `ValueOutOfRange` if a cell is refused.
        """
        for segment in self.segments:
            if segment.refused_of is not None:
                # Rare, and one narrow column: here, because Spark would say it as an error of its own.
                segment.read([])
        # Segments with the same boundaries are one scan: in most batches there is one, or two.
        parts: dict[tuple[Lsn | None, Lsn | None], list[str]] = {}
        for segment in self.segments:
            parts.setdefault((segment.after, segment.until), []).append(Path(segment.path).absolute().as_uri())
        columns = spark_columns(self._arrow_schema())
        frames = [frame_of_files(session, columns, paths, *boundaries) for boundaries, paths in parts.items()]
        return reduce(lambda one, other: one.unionAll(other), frames)

    def _arrow_schema(self) -> pa.Schema:
        """Of all segments: those of the first, and `_unrepresentable` if one has it."""
        schemas = [pq.read_schema(segment.path) for segment in self.segments]
        with_texts = [schema for schema in schemas if UNREPRESENTABLE in schema.names]
        return (with_texts or schemas)[0]


@dataclass(frozen=True, slots=True)
class Truncate:
    """The table was emptied."""

    key: OrderKey
    commit_time: int
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """The rows that follow have another schema than those before, or than the table has at the destination."""

    old: TableSchema | None
    """None when nothing is known of the table."""
    new: TableSchema
    version: str
    """Of the new schema: names the order key from which on it holds."""


TableStep = Rows | Truncate | SchemaChange


@dataclass(frozen=True, slots=True)
class TableChanges:
    """What happened to one table."""

    table_id: int
    table: str
    """Namespace and name, for people."""
    steps: tuple[TableStep, ...]

    @property
    def last_schema_change(self) -> SchemaChange | None:
        """The last one, if there is any."""
        return next((step for step in reversed(self.steps) if isinstance(step, SchemaChange)), None)

    @property
    def row_count(self) -> int:
        """Rows in the files; some of them may be in already."""
        return sum(segment.rows for step in self.steps if isinstance(step, Rows) for segment in step.segments)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Whole transactions: those that `end` covers and `begin` does not."""

    begin: Lsn
    end: Lsn
    transactions: int
    first_commit_time: int
    last_commit_time: int
    """Unix microseconds, by the source's clock; zero in a batch without transactions."""
    tables: tuple[TableChanges, ...]

    @property
    def row_count(self) -> int:
        return sum(table.row_count for table in self.tables)


class EntryLike(Protocol):
    """What a batch is made of: entries of the spool."""

    @property
    def begin(self) -> Lsn: ...
    @property
    def end(self) -> Lsn: ...
    @property
    def transactions(self) -> int: ...
    @property
    def first_commit_time(self) -> int: ...
    @property
    def last_commit_time(self) -> int: ...
    @property
    def steps(self) -> tuple[Step, ...]: ...


def build_batch(
    entries: Iterable[EntryLike],
    *,
    begin: Lsn,
    end: Lsn,
    positions: Mapping[int, Lsn],
    schemas: Mapping[int, TableSchema],
    schema_of: Callable[[int, str], TableSchema],
    root: Path,
    refuse_unrepresentable: bool = False,
) -> EventBatch:
    """The changes between two boundaries, of the tables in `positions` and from their positions on.

    `schemas` are those that tables have at the destination; where rows have another one, a change of the schema comes
    before them. With `refuse_unrepresentable` reading a row with a cell that its type cannot hold raises: the batch is
    handed over all the same, so that this concerns its table alone, and where the data work is done.
    """
    entries = [entry for entry in entries if not reaches(begin, entry.end) and not reaches(entry.begin, end)]
    steps: dict[int, list[TableStep]] = {}
    names: dict[int, str] = {}
    current = dict(schemas)
    for entry in entries:
        for step in entry.steps:
            if isinstance(step, Message) or step.table_id not in positions:
                continue
            after = furthest(begin, positions[step.table_id])
            if isinstance(step, Truncation):
                if not is_in(step.key.commit_lsn, after) and is_in(step.key.commit_lsn, end):
                    names[step.table_id] = step.table
                    steps.setdefault(step.table_id, []).append(
                        Truncate(step.key, step.commit_time, step.cascade, step.restart_identity)
                    )
                continue
            file = _part(step, after, end, root, refuse_unrepresentable)
            if file is not None:
                names[step.table_id] = step.table
                _append_rows(steps.setdefault(step.table_id, []), step, file, current, schema_of)
    timed = [entry for entry in entries if entry.transactions]
    return EventBatch(
        begin=begin,
        end=end,
        transactions=sum(entry.transactions for entry in entries),
        first_commit_time=min((entry.first_commit_time for entry in timed), default=0),
        last_commit_time=max((entry.last_commit_time for entry in timed), default=0),
        tables=tuple(TableChanges(table_id, names[table_id], tuple(found)) for table_id, found in steps.items()),
    )


def _part(segment: Segment, after: Lsn, until: Lsn, root: Path, refuse: bool) -> SegmentFile | None:
    """The part of a segment between two boundaries; None if there is none."""
    if is_in(segment.last.commit_lsn, after) or not is_in(segment.first.commit_lsn, until):
        return None
    return SegmentFile(
        path=str(root / segment.file),
        rows=segment.rows,
        bytes=segment.bytes,
        after=after if is_in(segment.first.commit_lsn, after) else None,
        until=until if not is_in(segment.last.commit_lsn, until) else None,
        refused_of=segment.table if refuse and segment.unrepresentable else None,
    )


def _append_rows(
    steps: list[TableStep],
    segment: Segment,
    file: SegmentFile,
    current: dict[int, TableSchema],
    schema_of: Callable[[int, str], TableSchema],
) -> None:
    known = current.get(segment.table_id)
    schema = schema_of(segment.table_id, segment.version)
    if known != schema:
        steps.append(SchemaChange(known, schema, segment.version))
        current[segment.table_id] = schema
    last = steps[-1] if steps else None
    if isinstance(last, Rows) and last.schema == schema:
        unrepresentable = last.unrepresentable + segment.unrepresentable
        steps[-1] = Rows(schema, last.version, (*last.segments, file), unrepresentable)
    else:
        steps.append(Rows(schema, segment.version, (file,), segment.unrepresentable))
