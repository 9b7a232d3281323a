"""Single changes in the exact order of their commits: for people, tests, and destinations that work row by row.

This is the slow path. Everything else in Penstock works on columns; here each row becomes a Python object, which costs
some ten microseconds per row. Use it for few rows, or for people. A destination that has to keep up with a busy server
reads segments.

    for event in iterate_events(reader, reader.entries(position), after=position):
        match event:
            case Insert(table=table, row=row): ...

Within an entry, segments of all tables are merged by order key. A segment is opened when its first change is due and
closed after its last, and only a slice of its rows becomes objects at a time. So memory depends on the number of
overlapping segments, not on the size of the entry.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from itertools import groupby
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from penstock.changes import steps
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    Operation,
    field_names,
)
from penstock.changes.steps import Entry, Segment, Step, Truncation
from penstock.lsn import Lsn, OrderKey, are_in, is_in
from penstock.schema import TableSchema

SLICE_ROWS = 2_000
"""Rows of a segment that are Python objects at the same time."""


class UnchangedType(Enum):
    """The type of `Unchanged`."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "Unchanged"


Unchanged: Final = UnchangedType.UNCHANGED
"""An omitted value of an update: large (TOAST) and unchanged, so the server does not send it.

It is not None, which is SQL's NULL. It survives pickling and copying, so `is` works everywhere.
"""


@dataclass(frozen=True, slots=True)
class Unrepresentable:
    """A value that its column's type cannot hold (`infinity`, `24:00:00`, numeric NaN …), as Postgres writes it."""

    text: str


Row = Mapping[str, Any]
"""Column name → value: Arrow's Python value, None, `Unchanged` or `Unrepresentable`."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begins the changes of a transaction. Transactions without a requested change do not appear."""

    commit_lsn: Lsn
    """The start of its commit record."""
    commit_time: datetime
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Ends the changes of a transaction: only now may a position move past it."""

    commit_lsn: Lsn
    commit_time: datetime
    xid: int


@dataclass(frozen=True, slots=True)
class Relation:
    """The schema of a table's rows from here on; comes before its first row, and again when it changes."""

    key: OrderKey
    """Of the row that follows."""
    table: TableSchema


@dataclass(frozen=True, slots=True)
class Insert:
    """A new row."""

    key: OrderKey
    commit_time: datetime
    xid: int
    table: TableSchema
    row: Row


@dataclass(frozen=True, slots=True)
class Update:
    """An updated row, with its new values."""

    key: OrderKey
    commit_time: datetime
    xid: int
    table: TableSchema
    row: Row
    old: Row | None
    """The old identity, if the key changed; with REPLICA IDENTITY FULL, the whole old row. Otherwise None."""


@dataclass(frozen=True, slots=True)
class Delete:
    """A deleted row."""

    key: OrderKey
    commit_time: datetime
    xid: int
    table: TableSchema
    old: Row
    """The columns of the replica identity; with FULL, all columns. Omitted values are absent."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables that one statement truncated."""

    key: OrderKey
    commit_time: datetime
    xid: int
    table_ids: tuple[int, ...]
    tables: tuple[str, ...]
    """Namespace and name of each."""
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A logical message (`pg_logical_emit_message`); its key is that of the change after it."""

    key: OrderKey
    commit_time: datetime
    xid: int
    prefix: str
    content: bytes


Change = Insert | Update | Delete | Truncate | Message
Event = Begin | Commit | Relation | Change


class SegmentReader(Protocol):
    """The source of rows and schemas, for example a `SpoolReader`. Called from the iterating thread."""

    def read(self, segment: Segment) -> pa.Table:
        """The rows of a segment, in the layout of `penstock.changes.segment`. Called once per segment."""
        ...

    def schema(self, segment: Segment) -> TableSchema:
        """The schema of a segment's rows."""
        ...


def iterate_events(
    reader: SegmentReader,
    entries: Iterable[Entry],
    *,
    after: Lsn | None = None,
    tables: Callable[[Segment | Truncation], bool] | None = None,
) -> Iterator[Event]:
    """Iterate over the events of entries, in the order `(commit_lsn, ordinal)` over all tables.

    `after` is a boundary: transactions before it are left out. `tables` selects the tables. Entries are consumed one at
    a time, and may come from a generator that waits for them.
    """
    schemas: dict[int, TableSchema] = {}
    for entry in entries:
        wanted = [step for step in entry.steps if _is_wanted(step, after, tables)]
        yield from _frame_transactions(_merge(_sources(reader, wanted, after)), schemas)


def _is_wanted(step: Step, after: Lsn | None, tables: Callable[[Segment | Truncation], bool] | None) -> bool:
    last = step.last if isinstance(step, Segment) else step.key
    if after is not None and is_in(last.commit_lsn, after):
        return False
    return isinstance(step, steps.Message) or tables is None or tables(step)


# A message has the key of the next change, and comes before it.
_BEFORE, _AT = 0, 1


@dataclass(slots=True)
class _Source:
    """Changes in order, the first at `key` or later. Nothing is read before it is due."""

    key: OrderKey
    rank: int
    number: int
    changes: Iterator[Change]
    change: Change | None = None

    def __lt__(self, other: _Source) -> bool:
        return (self.key, self.rank, self.number) < (other.key, other.rank, other.number)

    def advance(self) -> bool:
        """Take the next change; False when there is none."""
        self.change = next(self.changes, None)
        if self.change is not None:
            self.key = self.change.key
        return self.change is not None


def _sources(reader: SegmentReader, wanted: list[Step], after: Lsn | None) -> list[_Source]:
    sources: list[_Source] = []
    for step in wanted:
        if isinstance(step, Segment):
            sources.append(_Source(step.first, _AT, len(sources), _iterate_segment(reader, step, after)))
        elif isinstance(step, steps.Message):
            event = Message(step.key, _to_datetime(step.commit_time), step.xid, step.prefix, step.content)
            sources.append(_Source(step.key, _BEFORE, len(sources), iter([event])))
    truncations = sorted((step for step in wanted if isinstance(step, Truncation)), key=lambda step: step.key)
    for key, group in groupby(truncations, key=lambda step: step.key):
        sources.append(_Source(key, _AT, len(sources), iter([_truncate(list(group))])))
    return sources


def _truncate(group: list[Truncation]) -> Truncate:
    return Truncate(
        group[0].key,
        _to_datetime(group[0].commit_time),
        group[0].xid,
        tuple(step.table_id for step in group),
        tuple(step.table for step in group),
        group[0].cascade,
        group[0].restart_identity,
    )


def _merge(sources: list[_Source]) -> Iterator[Change]:
    heapq.heapify(sources)
    while sources:
        source = sources[0]
        if source.change is not None:
            yield source.change
        if source.advance():
            heapq.heapreplace(sources, source)
        else:
            heapq.heappop(sources)


def _frame_transactions(changes: Iterator[Change], schemas: dict[int, TableSchema]) -> Iterator[Event]:
    """Insert begins, commits and relations; an entry holds whole transactions."""
    opened: Begin | None = None
    for change in changes:
        if opened is None or opened.commit_lsn != change.key.commit_lsn:
            if opened is not None:
                yield Commit(opened.commit_lsn, opened.commit_time, opened.xid)
            opened = Begin(change.key.commit_lsn, change.commit_time, change.xid)
            yield opened
        if isinstance(change, Insert | Update | Delete):
            table, known = change.table, schemas.get(change.table.table_id)
            if known is not table and known != table:
                yield Relation(change.key, table)
            schemas[table.table_id] = table
        yield change
    if opened is not None:
        yield Commit(opened.commit_lsn, opened.commit_time, opened.xid)


def _iterate_segment(reader: SegmentReader, segment: Segment, after: Lsn | None) -> Iterator[Change]:
    rows = reader.read(segment)
    schema = reader.schema(segment)
    first = 0
    if after is not None:
        # Rows are in commit order, so the ones to skip come first.
        first = int(np.count_nonzero(are_in(rows.column(COMMIT_LSN).to_numpy(), after)))
    for start in range(first, rows.num_rows, SLICE_ROWS):
        yield from _convert(rows.slice(start, SLICE_ROWS), schema)


def _convert(rows: pa.Table, schema: TableSchema) -> Iterator[Insert | Update | Delete]:
    """Turn a slice of a segment into events."""
    # Cold: only callers that want single rows, as Python objects, come here.
    values = {name: rows.column(name).to_pylist() for name in rows.column_names}
    fields = field_names(schema)
    names = tuple(column.name for column in schema.columns)
    renamed = dict(zip(fields, names, strict=True))
    cells = list(zip(*(values[field] for field in fields), strict=True)) if fields else [()] * rows.num_rows
    nothing = [None] * rows.num_rows
    for operation, commit_lsn, ordinal, commit_time, xid, bitmap, old, texts, row_cells in zip(
        values[OP],
        values[COMMIT_LSN],
        values[ORDINAL],
        values[COMMIT_TIME],
        values[XID],
        values[UNCHANGED],
        values.get(OLD, nothing),
        values.get(UNREPRESENTABLE, nothing),
        cells,
        strict=True,
    ):
        row = dict(zip(names, row_cells, strict=True))
        old_row = None if old is None else {renamed[field]: value for field, value in old.items()}
        for field, text in texts or ():
            _put_text(field, text, renamed, row, old_row)
        key = OrderKey(Lsn(commit_lsn), ordinal)
        if operation == Operation.INSERT:
            yield Insert(key, commit_time, xid, schema, row | _not_sent(bitmap, names))
        elif operation == Operation.UPDATE:
            yield Update(key, commit_time, xid, schema, row | _not_sent(bitmap, names), old_row)
        else:
            absent = _not_sent(bitmap, names)
            yield Delete(
                key, commit_time, xid, schema, {name: value for name, value in row.items() if name not in absent}
            )


def _put_text(
    field: str, text: str, renamed: Mapping[str, str], row: dict[str, Any], old: dict[str, Any] | None
) -> None:
    """Replace a cell by the text of its unrepresentable value; `_old.` marks cells of the old identity."""
    if field in renamed:
        row[renamed[field]] = Unrepresentable(text)
    elif old is not None:
        old[renamed[field.removeprefix(f"{OLD}.")]] = Unrepresentable(text)


def _not_sent(bitmap: bytes | None, names: tuple[str, ...]) -> dict[str, UnchangedType]:
    if bitmap is None:
        return {}
    return {name: Unchanged for index, name in enumerate(names) if bitmap[index >> 3] >> (index & 7) & 1}


def _to_datetime(microseconds: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=microseconds)
