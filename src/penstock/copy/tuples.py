"""Rows of binary COPY into record batches, a column at a time.

A row is a count of fields, then for each field its length (-1 for NULL) and its bytes, so where a field starts
depends on the one before. All rows advance together: one *wave* per column reads its length in every row at once and
moves every row's cursor behind it (as `penstock.capture.waves` does for pgoutput).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, SegmentColumn, segment_layout
from penstock.copy.wire import Buffer, Cells, WireForm, decode_column, wire_form
from penstock.errors import DecodeError
from penstock.schema import TableSchema
from penstock.values import OutOfRange, TypeSettings, apply_policy

SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER_BYTES = len(SIGNATURE) + 8
TRAILER = b"\xff\xff"
_NULL_LENGTH = -1


@dataclass(frozen=True, slots=True)
class TupleLayout:
    """A table's columns as they travel and as they end up."""

    table: str
    columns: tuple[SegmentColumn, ...]
    forms: tuple[WireForm, ...]
    arrow_schema: pa.Schema
    policy: OutOfRange


def tuple_layout(schema: TableSchema, settings: TypeSettings) -> TupleLayout:
    """Decide how columns travel; names and types are those of segments, then `_unrepresentable`."""
    columns = segment_layout(schema, settings).columns
    fields = [pa.field(column.field_name, column.codec.arrow_type) for column in columns]
    return TupleLayout(
        table=str(schema),
        columns=columns,
        forms=tuple(wire_form(column.column.type, column.codec) for column in columns),
        arrow_schema=pa.schema([*fields, pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)]),
        policy=settings.out_of_range,
    )


def strip_header(message: memoryview) -> memoryview:
    """The first message without the header of the stream."""
    if len(message) < _HEADER_BYTES or message[: len(SIGNATURE)] != SIGNATURE:
        raise DecodeError("not a stream of binary COPY", offset=0)
    extension = int.from_bytes(message[len(SIGNATURE) + 4 : _HEADER_BYTES], "big")
    return message[_HEADER_BYTES + extension :]


def decode_tuples(raw: bytes | bytearray, lengths: NDArray[np.int64], layout: TupleLayout) -> pa.RecordBatch:
    """Rows of these lengths, one behind the other in `raw`, which ends in `wire.PADDING`."""
    buffer = Buffer(raw)
    row_ends = np.cumsum(lengths)
    row_starts = row_ends - lengths
    _require(buffer.read(">i2", row_starts) == len(layout.columns), row_starts, row_starts, "another number of fields")
    cursor = row_starts + 2
    arrays: list[pa.Array] = []
    kept: list[tuple[str, pa.Array]] = []
    for column, form in zip(layout.columns, layout.forms, strict=True):
        length = buffer.read(">i4", cursor)
        start = cursor + 4
        null: NDArray[np.bool_] | None = None
        if len(length) and length.min() < 0:
            null = length == _NULL_LENGTH
            length[null] = 0
        # Nothing is read beyond a row's end, and no length goes backwards.
        end = start + length
        _require((end <= row_ends) & (length >= 0), row_starts, cursor, "a value longer than its row")
        if form.width is not None:
            expected = length == form.width
            _require(expected if null is None else expected | null, row_starts, cursor, "a value of another width")
        values = decode_column(form, Cells(buffer, start, end, null), column, layout.table)
        array = values.decoded.array
        if values.decoded.rejected is not None:
            name = column.column.name
            array, texts = apply_policy(values.decoded, values.text(), layout.policy, table=layout.table, column=name)
            if texts is not None:
                kept.append((column.field_name, texts))
        arrays.append(array)
        cursor = end
    _require(cursor == row_ends, row_starts, cursor, "bytes behind the last field")
    arrays.append(_kept_texts(kept, len(lengths)))
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def _kept_texts(kept: list[tuple[str, pa.Array]], count: int) -> pa.Array:
    """Texts of cells that their type cannot hold, by row; columns in their order."""
    if not kept:
        return pa.nulls(count, UNREPRESENTABLE_TYPE)
    present = [np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False)) for _, texts in kept]
    rows = np.concatenate(present)
    names = np.repeat(np.arange(len(kept)), [len(each) for each in present])
    order = np.argsort(rows, kind="stable")
    keys = pa.array([name for name, _ in kept]).take(pa.array(names[order]))
    texts = [texts.take(pa.array(each)) for (_, texts), each in zip(kept, present, strict=True)]
    items = pa.concat_arrays(texts).take(pa.array(order))
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    none = np.append(np.diff(offsets) == 0, False)
    return pa.MapArray.from_arrays(pa.array(offsets, mask=none), keys, items).cast(UNREPRESENTABLE_TYPE)


def _require(correct: NDArray[np.bool_], row_starts: NDArray[np.int64], at: NDArray[np.int64], what: str) -> None:
    if not correct.all():
        row = int(np.argmin(correct))
        offset = int(at[row] - row_starts[row])
        raise DecodeError(f"malformed row of binary COPY at offset {offset}: {what}", offset=offset)
