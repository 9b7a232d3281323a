"""The rows of a stream as data frames have them: one table with its columns, or the changes of several in one form.

A segment has the columns of its own schema version. Here they become the columns of the data frame: those of the table
when the frame was made, found by attribute number, so that rows from before a change of the schema fit as well; and
then what describes the change. Everything works on columns, and everything pickles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    XID,
    SegmentColumn,
    refused_columns,
    segment_layout,
    settled_columns,
    unsent_cells,
)
from penstock.changes.steps import Segment, Truncation
from penstock.errors import SourceError
from penstock.lsn import Lsn, OrderKey
from penstock.schema import TableSchema
from penstock.values import OutOfRange, TypeSettings

TABLE, KEY, ROW = "_table", "_key", "_row"
TRUNCATE, COPIED = "truncate", "snapshot"
_DESCRIPTION = (
    pa.field(OP, pa.string()),
    pa.field(COMMIT_LSN, pa.int64()),
    pa.field(ORDINAL, pa.int64()),
    pa.field(COMMIT_TIME, pa.timestamp("us", "UTC")),
    pa.field(XID, pa.int64()),
    pa.field(UNCHANGED, pa.list_(pa.string())),
)
_TEXTS = pa.map_(pa.string(), pa.string())
_BEFORE_ALL = -1
"""The ordinal of copied rows: they come before all changes of the same position."""
BATCH_ROWS = 20_000
"""Rows of a batch for Spark; the JVM has all of them in memory at once."""


@dataclass(frozen=True, slots=True)
class TableForm:
    """The columns of one table, as it was when the frame was made, and then what describes the change."""

    schema: TableSchema
    types: TypeSettings

    def columns(self) -> pa.Schema:
        """Return the columns of the frame."""
        layout = segment_layout(self.schema, self.types)
        fields = [pa.field(each.field_name, each.codec.arrow_type) for each in layout.columns]
        fields += _DESCRIPTION
        if layout.old_columns:
            fields.append(layout.arrow_schema.field(OLD))
        if self.types.out_of_range is OutOfRange.KEEP:
            fields.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE))
        return pa.schema(fields)

    def shape(self, rows: pa.Table, schema: TableSchema) -> pa.Table:
        """Return changes in the layout of a segment, whose schema is given, with the columns of the frame."""
        shown, written = segment_layout(self.schema, self.types), segment_layout(schema, self.types)
        there = {each.column.attnum: each for each in written.columns}
        sources = [there.get(each.column.attnum) for each in shown.columns]
        arrays: dict[str, pa.ChunkedArray | pa.Array] = {}
        for target, source in zip(shown.columns, sources, strict=True):
            arrays[target.field_name] = _taken(rows, target, source, str(schema))
        arrays |= _description(rows)
        names = [each.field_name for each in shown.columns]
        omitted = _omitted(rows, [None if each is None else each.index for each in sources])
        arrays[UNCHANGED] = _names(names, omitted, rows.num_rows)
        if shown.old_columns:
            arrays[OLD] = _old(rows, shown.old_columns, written.old_columns, str(schema))
        if self.types.out_of_range is OutOfRange.KEEP:
            is_there = UNREPRESENTABLE in rows.column_names
            nothing = pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE)
            arrays[UNREPRESENTABLE] = rows.column(UNREPRESENTABLE) if is_there else nothing
        return pa.table(arrays, schema=self.columns())

    def differences(self, schema: TableSchema) -> list[str]:
        """Return how a table differs from what the frame was made for; empty if its rows fit as they are."""
        before, after = ({c.attnum: c for c in each.columns} for each in (self.schema, schema))
        found = [f"{before[number].name} was dropped" for number in before.keys() - after.keys()]
        found += [f"{after[number].name} was added" for number in after.keys() - before.keys()]
        shown, written = (segment_layout(each, self.types).columns for each in (self.schema, schema))
        types = {each.column.attnum: each.codec.arrow_type for each in shown}
        names = {each.column.attnum: each.field_name for each in shown}
        for each in written:
            number = each.column.attnum
            if number in before and names[number] != each.field_name:
                found.append(f"{before[number].name} was renamed to {each.column.name}")
            if number in before and types[number] != each.codec.arrow_type:
                found.append(f"the type of {each.column.name} was changed")
        if not found and _identity(self.schema, self.types) != _identity(schema, self.types):
            found.append("its replica identity was changed")
        return sorted(found)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The same columns for all tables: the row as a map from column names to the text that Postgres writes."""

    types: TypeSettings

    def columns(self) -> pa.Schema:
        """Return the columns of the frame."""
        maps = [pa.field(name, _TEXTS) for name in (KEY, ROW, OLD)]
        return pa.schema([pa.field(TABLE, pa.string()), *_DESCRIPTION, *maps])

    def shape(self, rows: pa.Table, schema: TableSchema) -> pa.Table:
        """Return changes in the layout of a segment, whose schema is given, with the columns of the frame."""
        layout = segment_layout(schema, self.types)
        names = [column.name for column in schema.columns]
        omitted = _omitted(rows, [each.index for each in layout.columns])
        sent = np.ones((rows.num_rows, len(names)), np.bool_) if omitted is None else ~omitted
        cells = [_whole(rows.column(each.field_name)) for each in layout.columns]
        keyed = [names.index(column.name) for column in schema.key]
        arrays: dict[str, pa.ChunkedArray | pa.Array] = {TABLE: _repeated(str(schema), pa.string(), rows.num_rows)}
        arrays |= _description(rows)
        arrays[UNCHANGED] = _names(names, omitted, rows.num_rows)
        arrays[KEY] = _maps([names[at] for at in keyed], [cells[at] for at in keyed], sent[:, keyed])
        arrays[ROW] = _maps(names, cells, sent)
        arrays[OLD] = pa.nulls(rows.num_rows, _TEXTS)
        if layout.old_columns:
            old = _whole(rows.column(OLD))
            there = old.is_valid().to_numpy(zero_copy_only=False)
            parts = [pc.struct_field(old, number) for number in range(len(layout.old_columns))]
            present = np.repeat(there[:, None], len(parts), axis=1)
            arrays[OLD] = _maps([each.column.name for each in layout.old_columns], parts, present, there)
        return pa.table(arrays, schema=self.columns())

    def differences(self, schema: TableSchema) -> list[str]:
        """Return nothing: rows of any table fit."""
        return []


Form = TableForm | Envelope
"""What the data frame of a stream looks like."""


def read_segment(segment: Segment, schema: TableSchema, form: Form) -> Iterator[pa.RecordBatch]:
    """Read a segment, whose schema is given, as batches of the frame."""
    if segment.unrepresentable:
        refuses, settled = refused_columns(schema, form.types), settled_columns(schema, form.types)
        segment = replace(segment, refuses=refuses, settled=settled)
    try:
        rows = segment.read()
    except FileNotFoundError:
        raise SourceError(
            f"a file of the spool is missing: {segment.path}",
            hint="Executors must see the folder 'spoolLocation' of the driver under the same path. If it was deleted, "
            "start the query again: it reads the changes from the slot once more.",
        ) from None
    for start in range(0, rows.num_rows, BATCH_ROWS):
        yield from form.shape(rows.slice(start, BATCH_ROWS), schema).combine_chunks().to_batches()


def emptied(table_id: int, table: str, position: Lsn, time: int) -> Truncation:
    """Return the truncate that precedes another copy of a table; it is part of no transaction."""
    return Truncation(table_id, table, OrderKey(position, _BEFORE_ALL - 1), time, 0, False, False)


def shape_truncation(step: Truncation, form: Form) -> Iterator[pa.RecordBatch]:
    """Return a truncation as a row without values."""
    described = {
        TABLE: step.table,
        OP: TRUNCATE,
        COMMIT_LSN: int(step.key.commit_lsn),
        ORDINAL: step.key.ordinal,
        COMMIT_TIME: step.commit_time,
        XID: step.xid or None,
        UNCHANGED: [],
    }
    yield pa.RecordBatch.from_arrays(
        [pa.array([described.get(field.name)], field.type) for field in form.columns()], schema=form.columns()
    )


def shape_copied(
    batch: pa.RecordBatch, schema: TableSchema, form: Form, position: Lsn, time: int
) -> Iterator[pa.RecordBatch]:
    """Return rows of a table at a position as changes; `time` is when they were read, in Unix microseconds."""
    count = batch.num_rows
    layout = segment_layout(schema, form.types)
    meta = {
        OP: pa.array(np.ones(count, np.int8)),
        COMMIT_LSN: _repeated(int(position), pa.int64(), count),
        ORDINAL: _repeated(_BEFORE_ALL, pa.int64(), count),
        COMMIT_TIME: _repeated(time, pa.timestamp("us", "UTC"), count),
        XID: pa.nulls(count, pa.int64()),
        UNCHANGED: pa.nulls(count, pa.binary()),
    }
    if layout.old_type is not None:
        meta[OLD] = pa.nulls(count, layout.old_type)
    rows = pa.table(meta | {name: batch.column(name) for name in batch.schema.names})
    shaped = form.shape(rows, schema)
    place = shaped.schema.get_field_index(OP)
    shaped = shaped.set_column(place, shaped.schema.field(OP), _repeated(COPIED, pa.string(), count))
    yield from shaped.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)


def _description(rows: pa.Table) -> dict[str, pa.ChunkedArray | pa.Array]:
    operations = _operations().take(_whole(rows.column(OP)))
    return {OP: operations} | {name: rows.column(name) for name in (COMMIT_LSN, ORDINAL, COMMIT_TIME, XID)}


@cache
def _operations() -> pa.StringArray:
    """By the number in a segment. Made when it is first used: the first array of a process imports pandas."""
    return pa.array([None, "insert", "update", "delete"])


def _omitted(rows: pa.Table, indexes: Sequence[int | None]) -> NDArray[np.bool_] | None:
    """Which of the columns with these indexes were omitted in each row; a column that has none was, in all of them."""
    at, bits = unsent_cells(rows.column(UNCHANGED))
    if not at.size and None not in indexes:
        return None
    flags = np.zeros((rows.num_rows, len(indexes)), np.bool_)
    for place, index in enumerate(indexes):
        if index is None:
            flags[:, place] = True
        elif at.size:
            flags[at, place] = bits[:, index].astype(np.bool_)
    return flags


def _names(names: Sequence[str], flags: NDArray[np.bool_] | None, count: int) -> pa.Array:
    """The names of the columns that are flagged in each row; None if there are none."""
    if flags is None:
        return pa.ListArray.from_arrays(_borders(np.zeros(count, np.int64)), pa.nulls(0, pa.string()))
    _, columns = np.nonzero(flags)
    return pa.ListArray.from_arrays(_borders(flags.sum(axis=1)), _take(pa.array(names, pa.string()), columns))


def _maps(
    names: Sequence[str], cells: Sequence[pa.Array], present: NDArray[np.bool_], rows: NDArray[np.bool_] | None = None
) -> pa.Array:
    """Maps of names to cells, with those that are present; NULL in rows that are not in `rows`."""
    at, columns = np.nonzero(present)
    values = pa.concat_arrays(cells) if cells else pa.nulls(0, pa.string())
    counts = present.sum(axis=1) if len(names) else np.zeros(len(present), np.int64)
    borders = _borders(counts, None if rows is None else ~rows)
    keys = _take(pa.array(names, pa.string()), columns)
    return pa.MapArray.from_arrays(borders, keys, _take(values, columns * len(present) + at))


def _borders(counts: NDArray[np.int64], nulls: NDArray[np.bool_] | None = None) -> pa.Array:
    borders = np.append(0, np.cumsum(counts)).astype(np.int32)
    return pa.array(borders, mask=None if nulls is None else np.append(nulls, False))


def _take(values: pa.Array, at: NDArray[np.int64]) -> pa.Array:
    return values.take(pa.array(at, pa.int64()))


def _taken(rows: pa.Table, target: SegmentColumn, source: SegmentColumn | None, table: str) -> pa.Array:
    """A column of the frame; NULL if the rows are older than the column."""
    if source is None:
        return pa.nulls(rows.num_rows, target.codec.arrow_type)
    return _cast(_whole(rows.column(source.field_name)), target, table)


def _cast(cells: pa.Array, target: SegmentColumn, table: str) -> pa.Array:
    wanted = target.codec.arrow_type
    try:
        return cells if cells.type == wanted else cells.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SourceError(
            f"rows of {table} from before the type of {target.column.name} was changed do not fit into the new type",
            hint="Start a new query, with a new checkpoint and another slot.",
            table=table,
        ) from None


def _old(rows: pa.Table, shown: Sequence[SegmentColumn], written: Sequence[SegmentColumn], table: str) -> pa.Array:
    fields = [pa.field(each.field_name, each.codec.arrow_type) for each in shown]
    if not written:
        return pa.nulls(rows.num_rows, pa.struct(fields))
    old = _whole(rows.column(OLD))
    if old.type == pa.struct(fields):
        return old
    there = {each.column.attnum: number for number, each in enumerate(written)}
    arrays = [
        _cast(pc.struct_field(old, there[each.column.attnum]), each, table)
        if each.column.attnum in there
        else pa.nulls(len(old), each.codec.arrow_type)
        for each in shown
    ]
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=old.is_null())


def _identity(schema: TableSchema, types: TypeSettings) -> list[int]:
    return [each.column.attnum for each in segment_layout(schema, types).old_columns]


def _repeated(value: object, type_: pa.DataType, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, type_), count)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
