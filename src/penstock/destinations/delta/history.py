"""The mode `history`: every change as a row, with what happened, where it stands, and what was not sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.batch import Rows
from penstock.changes.columns import unsent_cells
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
    join_texts,
    split_texts,
)
from penstock.changes.steps import Truncation
from penstock.destinations.batch_events import read_segment
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.schema import fit
from penstock.lsn import Lsn
from penstock.schema import TableSchema

COPIED, TRUNCATED = "copy", "truncate"
BEFORE_ALL = -1
"""`_ordinal` of a row that was copied: it stands before the changes at the copy's position."""
_OPERATIONS = (None, *(operation.name.lower() for operation in Operation))
"""By number."""
_TIME = pa.timestamp("us", "UTC")


def history_rows(steps: Sequence[Rows | Truncation], layout: TableLayout) -> pa.Table:
    """The changes of a batch, in order."""
    parts: list[pa.Table] = []
    for step in steps:
        if isinstance(step, Truncation):
            parts.append(_truncated(step))
        else:
            parts += [_changes(read_segment(segment), step.schema, layout) for segment in step.segments]
    has_texts = any(UNREPRESENTABLE in part.column_names for part in parts)
    schema = pa.schema([field for field in layout.schema if has_texts or field.name != UNREPRESENTABLE])
    return pa.concat_tables([fit(part, schema) for part in parts]) if parts else schema.empty_table()


def copied_rows(rows: pa.Table, position: Lsn) -> pa.Table:
    """Rows of a copy, which are named as in the lake, in the form of changes."""
    head = {
        OP: pa.repeat(pa.scalar(COPIED), rows.num_rows),
        COMMIT_LSN: pa.repeat(pa.scalar(int(position), pa.int64()), rows.num_rows),
        ORDINAL: pa.repeat(pa.scalar(BEFORE_ALL, pa.int64()), rows.num_rows),
    }
    for number, (name, column) in enumerate(head.items()):
        rows = rows.add_column(number, name, column)
    return rows


def _truncated(step: Truncation) -> pa.Table:
    row = {
        OP: [TRUNCATED],
        COMMIT_LSN: [int(step.key.commit_lsn)],
        ORDINAL: [step.key.ordinal],
        COMMIT_TIME: pa.array([step.commit_time], pa.int64()).cast(_TIME),
    }
    return pa.table(row)


def _changes(segment: pa.Table, schema: TableSchema, layout: TableLayout) -> pa.Table:
    names = {
        name: layout.names[column.attnum] for name, column in zip(field_names(schema), schema.columns, strict=True)
    }
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        OP: pa.array(_OPERATIONS).take(segment.column(OP).combine_chunks()),
        COMMIT_LSN: segment.column(COMMIT_LSN),
        ORDINAL: segment.column(ORDINAL),
        COMMIT_TIME: segment.column(COMMIT_TIME),
        XID: segment.column(XID),
        UNCHANGED: _names_not_sent(segment.column(UNCHANGED), list(names.values())),
    }
    if OLD in segment.column_names and OLD in layout.schema.names:
        columns[OLD] = _old(segment.column(OLD).combine_chunks(), names, layout.schema.field(OLD).type)
    columns |= {lake: segment.column(name) for name, lake in names.items()}
    renamed = {**names, **{f"{OLD}.{name}": f"{OLD}.{lake}" for name, lake in names.items()}}
    maps = join_texts({renamed[name]: texts for name, texts in split_texts(segment).items()}, segment.num_rows)
    if maps is not None:
        columns[UNREPRESENTABLE] = maps
    return pa.table(columns)


def _old(old: pa.StructArray, names: Mapping[str, str], wanted: pa.StructType) -> pa.Array:
    """The identity before a change, in the names and types of the lake."""
    there = pa.table({names[field.name]: pc.struct_field(old, field.name) for field in old.type})
    fitted = fit(there, pa.schema(list(wanted))).combine_chunks()
    arrays = [column.chunk(0) if column.num_chunks else pa.nulls(0, column.type) for column in fitted.columns]
    return pa.StructArray.from_arrays(arrays, fields=list(wanted), mask=old.is_null())


def _names_not_sent(bitmaps: pa.ChunkedArray, names: list[str]) -> pa.Array:
    """The columns that were not sent, by name; NULL where all were."""
    at, bits = unsent_cells(bitmaps)
    bits = bits[:, : len(names)]
    counts = np.zeros(len(bitmaps), np.int64)
    counts[at] = bits.sum(axis=1)
    offsets = np.zeros(len(bitmaps) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    values = pa.array(names, pa.string()).take(pa.array(np.nonzero(bits)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets, mask=np.append(counts == 0, False)), values)
