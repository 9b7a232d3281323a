"""A batch as single events, in the exact order of its commits: the slow path, for those who think in rows.

Here also: the rows of a copy as dictionaries. Both cost some ten microseconds a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from penstock.changes.batch import EventBatch, Rows, SchemaChange, SegmentFile, TableChanges, TableStep, Truncate
from penstock.changes.events import Event, Row, Unrepresentable, iterate_events
from penstock.changes.segment import COMMIT_LSN, ORDINAL, UNREPRESENTABLE, field_names
from penstock.changes.steps import Segment, Step, Truncation
from penstock.destinations.refusals import unreadable
from penstock.errors import ValueOutOfRange
from penstock.lsn import Lsn, OrderKey, is_in, reaches
from penstock.schema import TableSchema

PositionOf = Callable[[int], Lsn | None]
"""A table's recorded position."""


def batch_events(batch: EventBatch, position_of: PositionOf | None = None) -> Iterator[Event]:
    """The events of a batch, all tables merged; what `position_of` a table covers is left out."""
    reader = _BatchReader()
    steps: list[Step] = []
    for table in batch.tables:
        position = None if position_of is None else position_of(table.table_id)
        steps += reader.add(leave_out(table, position, batch.begin))
    return iterate_events(reader, [_Entry(tuple(steps))])


def table_events(batch: EventBatch, table: TableChanges, position: Lsn | None) -> Iterator[Event]:
    """The events of one table; what its recorded position covers is left out."""
    reader = _BatchReader()
    return iterate_events(reader, [_Entry(tuple(reader.add(leave_out(table, position, batch.begin))))])


def leave_out(table: TableChanges, position: Lsn | None, begin: Lsn) -> TableChanges:
    """A table's changes without those that a recorded position covers; `begin` is the batch's.

    A change of schema goes with the rows that follow it: where they are in, going back to it would undo a later one.
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
        if left is None or (isinstance(left, Truncate) and is_in(left.key.commit_lsn, position)):
            continue
        if change is not None:
            kept.append(change)
            change = None
        kept.append(left)
    return replace(table, steps=tuple(kept))


def read_segment(file: SegmentFile, rows: Rows, columns: list[str] | None = None) -> pa.Table:
    """Read a file of a step; an error says of which table."""
    try:
        return file.read(columns)
    except ValueOutOfRange as error:
        error.facts["table_id"] = rows.schema.table_id
        raise
    except Exception as error:
        raise unreadable(str(rows.schema), rows.schema.table_id, error) from error


def copied_rows(batch: pa.RecordBatch | pa.Table, schema: TableSchema) -> Iterator[Row]:
    """Rows of a copy by the names of the table's columns; a cell that its type cannot hold is `Unrepresentable`."""
    fields = field_names(schema)
    renamed = dict(zip(fields, (column.name for column in schema.columns), strict=True))
    names = tuple(renamed.values())
    # Cold: only destinations that asked for single rows come here.
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
    """The part of the rows that a position does not cover; None if there is none."""
    segments = tuple(
        segment
        for segment in (_after(segment, position) for segment in rows.segments)
        if segment.after is None or read_segment(segment, rows, [COMMIT_LSN]).num_rows
    )
    return replace(rows, segments=segments) if segments else None


def _after(segment: SegmentFile, position: Lsn) -> SegmentFile:
    if segment.after is not None and reaches(segment.after, position):
        return segment
    return replace(segment, after=position)


@dataclass(frozen=True, slots=True)
class _Entry:
    steps: tuple[Step, ...]


@dataclass(slots=True)
class _BatchReader:
    """Gives the segments of a batch the form that `iterate_events` merges."""

    files: dict[str, tuple[SegmentFile, Rows]] = field(default_factory=dict[str, tuple[SegmentFile, Rows]])

    def add(self, table: TableChanges) -> Iterator[Step]:
        for step in table.steps:
            if isinstance(step, Rows):
                for file in step.segments:
                    segment = self._segment(table, step, file)
                    if segment is not None:
                        yield segment
            elif isinstance(step, Truncate):
                yield Truncation(
                    table.table_id, table.table, step.key, step.commit_time, 0, step.cascade, step.restart_identity
                )

    def _segment(self, table: TableChanges, rows: Rows, file: SegmentFile) -> Segment | None:
        keys = read_segment(file, rows, [COMMIT_LSN, ORDINAL])
        if keys.num_rows == 0:
            return None
        name = f"{len(self.files)}"
        self.files[name] = (file, rows)
        first, last = (
            OrderKey(Lsn(keys.column(COMMIT_LSN)[at].as_py()), keys.column(ORDINAL)[at].as_py()) for at in (0, -1)
        )
        return Segment(table.table_id, table.table, rows.version, name, keys.num_rows, file.bytes, first, last)

    def read(self, segment: Segment) -> pa.Table:
        return read_segment(*self.files[segment.file])

    def schema(self, segment: Segment) -> TableSchema:
        return self.files[segment.file][1].schema
