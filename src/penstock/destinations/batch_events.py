"""The events of a batch one by one, in the exact order of their commits: the slow path, for row-by-row destinations.

Also the rows of a copy as dictionaries. Both take about ten microseconds per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, TableStep
from penstock.changes.events import Event, Row, Unrepresentable, iterate_events
from penstock.changes.segment import COMMIT_LSN, UNREPRESENTABLE, field_names
from penstock.changes.steps import Entry, Segment, Step, Truncation
from penstock.destinations.refusals import unreadable
from penstock.errors import PenstockError
from penstock.lsn import Lsn, is_in, reaches
from penstock.schema import TableSchema

PositionOf = Callable[[int], Lsn | None]
"""A table's recorded position."""


def batch_events(batch: EventBatch, position_of: PositionOf | None = None) -> Iterator[Event]:
    """Yield the events of a batch, all tables merged, without those that a table's recorded position covers."""
    tables = [
        leave_out(table, None if position_of is None else position_of(table.table_id), batch.begin)
        for table in batch.tables
    ]
    return _events(batch, tables)


def table_events(batch: EventBatch, table: TableChanges, position: Lsn | None) -> Iterator[Event]:
    """Yield the events of one table, without those that its recorded position covers."""
    return _events(batch, [leave_out(table, position, batch.begin)])


def _events(batch: EventBatch, tables: list[TableChanges]) -> Iterator[Event]:
    reader = _SegmentReader()
    steps: list[Step] = []
    for table in tables:
        for step in table.steps:
            if isinstance(step, Rows):
                steps += step.segments
                reader.schemas |= dict.fromkeys(step.segments, step.schema)
            elif isinstance(step, Truncation):
                steps.append(step)
    return iterate_events(reader, [Entry(0, batch.begin, batch.end, steps=tuple(steps))])


@dataclass(slots=True)
class _SegmentReader:
    """Reads the segments of a batch for `iterate_events`."""

    schemas: dict[Segment, TableSchema] = field(default_factory=dict[Segment, TableSchema])

    def read(self, segment: Segment) -> pa.Table:
        return read_segment(segment)

    def schema(self, segment: Segment) -> TableSchema:
        return self.schemas[segment]


def leave_out(table: TableChanges, position: Lsn | None, begin: Lsn) -> TableChanges:
    """Return a table's changes without those that a recorded position covers; `begin` is the batch's.

    A schema change stays with the rows that follow it: if those are covered, applying it again would undo a later one.
    """
    if position is None or reaches(begin, position):
        return table
    kept: list[TableStep] = []
    change: SchemaChange | None = None
    for step in table.steps:
        if isinstance(step, SchemaChange):
            change = step
            continue
        left = _rows_after(step, position) if isinstance(step, Rows) else step
        if left is None or (isinstance(left, Truncation) and is_in(left.key.commit_lsn, position)):
            continue
        if change is not None:
            kept.append(change)
            change = None
        kept.append(left)
    return replace(table, steps=tuple(kept))


def read_segment(segment: Segment, columns: list[str] | None = None) -> pa.Table:
    """Read a segment; errors name the table."""
    try:
        return segment.read(columns)
    except PenstockError:
        raise
    except Exception as error:
        raise unreadable(segment.table, segment.table_id, error) from error


def copied_rows(batch: pa.RecordBatch | pa.Table, schema: TableSchema) -> Iterator[Row]:
    """Yield the rows of a copy by column name; a cell that its type cannot hold is `Unrepresentable`."""
    fields = field_names(schema)
    renamed = dict(zip(fields, (column.name for column in schema.columns), strict=True))
    names = tuple(renamed.values())
    # Cold: only row-by-row destinations call this.
    cells = zip(*(batch.column(name).to_pylist() for name in fields), strict=True) if fields else [()] * batch.num_rows
    texts = [None] * batch.num_rows
    if UNREPRESENTABLE in batch.schema.names:
        texts = batch.column(UNREPRESENTABLE).to_pylist()
    for row_cells, kept in zip(cells, texts, strict=True):
        row = dict(zip(names, row_cells, strict=True))
        for name, text in kept or ():
            row[renamed[name]] = Unrepresentable(text)
        yield row


def _rows_after(rows: Rows, position: Lsn) -> Rows | None:
    """Return the part of the rows that a position does not cover; None if there is none."""
    narrowed = (segment.between(position) for segment in rows.segments)
    segments = tuple(segment for segment in narrowed if segment is not None and not is_empty(segment))
    return replace(rows, segments=segments) if segments else None


def is_empty(segment: Segment) -> bool:
    """Return True if no change lies between the boundaries. The keys show that, unless both boundaries lie inside the
    file."""
    inside = segment.after is not None and segment.until is not None
    return inside and not read_segment(segment, [COMMIT_LSN]).num_rows
