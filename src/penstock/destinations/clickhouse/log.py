"""Mode `history`: changes, copied rows and truncates as rows of a log.

A row of the log is identified by its order key; copied rows, which all have the copy's position and the ordinal -1,
also by the attempt and their number in it.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNCHANGED,
    XID,
    Operation,
    field_names,
    split_texts,
    unsent_cells,
)
from penstock.changes.steps import Truncation
from penstock.destinations.clickhouse.encoding import encode, name_lists, one_array
from penstock.destinations.clickhouse.layout import COPY, NUMBER, Layout
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.values.datetimes import print_times

COPIED, TRUNCATED, COPIED_AGAIN = "copy", "truncate", "resync"
BEFORE_ALL = -1
"""`_ordinal` of a copied row, which precedes the changes at the copy's position."""
_OPERATIONS = (None, *(operation.name.lower() for operation in Operation))
"""By number."""
_TIME = pa.timestamp("us", "UTC")


def log_rows(segment: pa.Table, schema: TableSchema, layout: Layout) -> pa.Table:
    """Return the changes of a segment."""
    count = segment.num_rows
    names = {name: each.name for name, column in zip(field_names(schema), schema.columns, strict=True)
             if (each := layout.of(column.attnum)) is not None}  # fmt: skip
    at, bits = unsent_cells(segment.column(UNCHANGED))
    omitted = {name: np.zeros(count, np.bool_) for name in names.values()}
    for number, name in enumerate(field_names(schema)):
        if len(at) and name in names:
            omitted[names[name]][at] = bits[:, number].astype(np.bool_)
    columns: dict[str, pa.Array | pa.ChunkedArray] = {
        OP: pa.array(_OPERATIONS).take(one_array(segment.column(OP))),
        COMMIT_LSN: segment.column(COMMIT_LSN),
        ORDINAL: segment.column(ORDINAL),
        COMMIT_TIME: segment.column(COMMIT_TIME),
        XID: segment.column(XID),
        UNCHANGED: name_lists(omitted, count),
        **encode(segment, split_texts(segment), schema, layout),
    }
    if OLD in segment.column_names:
        columns[OLD] = _old(one_array(segment.column(OLD)), names)
    return _numbered(pa.table(columns), layout)


def log_truncate(step: Truncation, layout: Layout) -> pa.Table:
    """Return the row of a truncate."""
    row = {
        OP: [TRUNCATED],
        COMMIT_LSN: [int(step.key.commit_lsn)],
        ORDINAL: [step.key.ordinal],
        COMMIT_TIME: pa.array([step.commit_time], pa.int64()).cast(_TIME),
        XID: [step.xid],
    }
    return _numbered(pa.table(row), layout)


def log_copy(
    columns: dict[str, pa.Array], count: int, position: Lsn, attempt: str, first: int, layout: Layout
) -> pa.Table:
    """Return copied rows; `first` is the number of the first one."""
    head = {OP: pa.repeat(COPIED, count), COMMIT_LSN: pa.repeat(pa.scalar(int(position), pa.int64()), count)}
    head |= {ORDINAL: pa.repeat(pa.scalar(BEFORE_ALL, pa.int64()), count)}
    numbers = pa.array(np.arange(first, first + count, dtype=np.uint64))
    return _numbered(pa.table(head | columns), layout, attempt, numbers)


def log_marker(position: Lsn, attempt: str, layout: Layout) -> pa.Table:
    """Return the row that precedes a new copy in a log: rows from before it no longer count as the table's rows."""
    row = {OP: [COPIED_AGAIN], COMMIT_LSN: [int(position)], ORDINAL: [BEFORE_ALL - 1]}
    return _numbered(pa.table(row), layout, attempt)


def _numbered(rows: pa.Table, layout: Layout, attempt: str = "", numbers: pa.Array | None = None) -> pa.Table:
    count = rows.num_rows
    rows = rows.append_column(SCHEMA_VERSION, pa.repeat(pa.scalar(layout.version, pa.int32()), count))
    rows = rows.append_column(COPY, pa.repeat(attempt, count))
    return rows.append_column(NUMBER, pa.array(np.zeros(count, np.uint64)) if numbers is None else numbers)


def _old(old: pa.Array, names: dict[str, str]) -> pa.Array:
    """Return the identities before changes as maps of texts by column; empty if the server did not send one."""
    fields = [(number, names[field.name]) for number, field in enumerate(old.type) if field.name in names]
    at = np.flatnonzero(old.is_valid().to_numpy(zero_copy_only=False))
    taken = old.take(pa.array(at))
    counts = np.zeros(len(old) + 1, np.int32)
    counts[at + 1] = len(fields)
    # Column by column, then in the order of the rows.
    order = pa.array(np.arange(len(at) * len(fields)).reshape(len(fields), len(at)).T.reshape(-1))
    texts = [_text(pc.struct_field(taken, number)) for number, _ in fields]
    values = pa.concat_arrays(texts).take(order) if texts else pa.nulls(0, pa.string())
    keys = pa.array([name for _, name in fields] * len(at), pa.string())
    return pa.MapArray.from_arrays(pa.array(np.cumsum(counts).astype(np.int32)), keys, values)


def _text(cells: pa.Array) -> pa.Array:
    cells = print_times(cells)
    # Cell by cell: such columns are rarely part of an identity.
    if pa.types.is_nested(cells.type):
        texts = [None if cell is None else json.dumps(cell, default=str) for cell in cells.to_pylist()]
        return pa.array(texts, pa.string())
    if pa.types.is_binary(cells.type) or pa.types.is_large_binary(cells.type):
        return pa.array([None if cell is None else cell.hex() for cell in cells.to_pylist()], pa.string())
    return pc.cast(cells, pa.string())
