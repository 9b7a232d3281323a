"""Decodes pgoutput's tuples column at a time, in waves (see `penstock.changes.wire`).

Each field has a kind (text, NULL or omitted) and, if it is text, a length. Inserts, updates and deletes of a table
share a wave. The old row of an update comes first in its message and is read by a wave over those rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import OLD, UNREPRESENTABLE, Operation, SegmentLayout
from penstock.changes.wire import Buffer, Cells, DecodedColumns, Flags, Positions, Records

_NULL, _UNCHANGED, _TEXT = 1, 2, 3
_KIND = np.zeros(256, np.uint8)
_KIND[ord("n")], _KIND[ord("u")], _KIND[ord("t")] = _NULL, _UNCHANGED, _TEXT

_OPERATION = np.zeros(256, np.int8)
_OPERATION[ord("I")], _OPERATION[ord("U")], _OPERATION[ord("D")] = Operation.INSERT, Operation.UPDATE, Operation.DELETE

_NEW, _KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")


@dataclass(frozen=True, slots=True)
class WaveRows:
    """Rows of one table, in order: where their tuples are, and which changes they are."""

    operation: NDArray[np.uint8]
    """`I`, `U` or `D`."""
    start: NDArray[np.int64]
    """Offset of the marker before the first tuple."""
    end: NDArray[np.int64]
    """Offset behind the message."""
    message: NDArray[np.int64]
    """Offset of the message's first byte, for errors."""
    commit_lsn: NDArray[np.int64]
    ordinal: NDArray[np.int64]
    commit_time: NDArray[np.int64]
    xid: NDArray[np.int64]


def decode_rows(buffer: Buffer, rows: WaveRows, layout: SegmentLayout) -> pa.Table:
    """Decode the rows of one table into columns in the layout of segments.

    Under the policy `error`, texts are kept as under `keep`: the apply worker stops that table, and capture continues
    for the others.
    """
    count = len(rows.start)
    records = Records(rows.message, rows.end, f"row of {layout.schema}")
    decoded = DecodedColumns(str(layout.schema), count, raises=False)
    cursor = rows.start.copy()
    marker = buffer.bytes[cursor]
    with_old = np.flatnonzero((rows.operation == ord("U")) & ((marker == _KEY) | (marker == _OLD_ROW)))
    old = pa.nulls(count, layout.old_type) if layout.old_columns else None
    if len(with_old):
        old, cursor[with_old] = _decode_old(buffer, records, with_old, cursor[with_old], layout, decoded)
        marker = buffer.bytes[cursor]

    is_delete = rows.operation == ord("D")
    correct = np.where(is_delete, (marker == _KEY) | (marker == _OLD_ROW), marker == _NEW)
    records.require(correct, cursor, "an unknown tuple marker")
    _require_columns(buffer, cursor, records, layout)
    cursor += 3

    unchanged = _Bitmap(count, len(layout.columns))
    arrays: list[pa.Array] = []
    any_delete = bool(is_delete.any())
    for column in layout.columns:
        cursor, text, not_sent = _advance(buffer, cursor, records)
        if any_delete and not column.column.identity:
            # The server pads the other columns of a key with NULL; they are omitted values. Its marker does not tell a
            # key from a whole row: it follows the root of a partitioned table, and the row its leaf.
            not_sent = is_delete if not_sent is None else not_sent | is_delete
        if not_sent is not None:
            unchanged.add(column.index, not_sent)
        arrays.append(decoded.decode(column, text))
    records.require(cursor == rows.end, cursor, "bytes behind the last column")

    ours = [
        pa.array(_OPERATION[rows.operation]),
        pa.array(rows.commit_lsn),
        pa.array(rows.ordinal),
        pa.array(rows.commit_time).view(pa.timestamp("us", "UTC")),
        pa.array(rows.xid),
        unchanged.array(),
    ]
    if old is not None:
        ours.append(old)
    table = pa.Table.from_arrays([*ours, *arrays], schema=layout.arrow_schema)
    texts = decoded.unrepresentable()
    return table if texts is None else table.append_column(UNREPRESENTABLE, texts)


def _decode_old(
    buffer: Buffer,
    records: Records,
    with_old: Positions,
    cursor: Positions,
    layout: SegmentLayout,
    decoded: DecodedColumns,
) -> tuple[pa.Array | None, Positions]:
    """The old tuples of some rows as a struct over all rows, and the cursors behind them."""
    place = np.full(len(records.end), -1, np.int64)
    place[with_old] = np.arange(len(with_old))
    absent = place < 0
    spread = pa.array(place, mask=absent)
    records = records.select(with_old)
    _require_columns(buffer, cursor, records, layout)
    cursor = cursor + 3
    wanted = {column.index for column in layout.old_columns}
    children: list[pa.Array] = []
    for column in layout.columns:
        cursor, text, _ = _advance(buffer, cursor, records)
        if column.index in wanted:
            array = decoded.decode(column, text, f"{OLD}.{column.field_name}", spread)
            children.append(array.take(spread))
    if not children:
        return None, cursor
    return pa.StructArray.from_arrays(children, fields=list(layout.old_type or ()), mask=pa.array(absent)), cursor


def _advance(buffer: Buffer, cursor: Positions, records: Records) -> tuple[Positions, pa.Array, Flags | None]:
    """One wave: read a column in every row. Returns the new cursors, its bytes, and which values were omitted."""
    kind = _KIND[buffer.bytes[cursor]]
    is_text = kind == _TEXT
    if is_text.all():
        start = cursor + 5
        end = start + buffer.uint32[cursor + 1]
        absent = unchanged = None
    else:
        records.require(kind != 0, cursor, "an unknown kind of column")
        start = np.where(is_text, cursor + 5, cursor + 1)
        end = start + np.where(is_text, buffer.uint32[cursor + 1], 0)
        absent = ~is_text
        unchanged = kind == _UNCHANGED
    records.require(end <= records.end, cursor, "a value longer than its message")
    cells = Cells(buffer, start, end, absent).array(pa.large_binary())
    return end, cells, unchanged if unchanged is not None and unchanged.any() else None


def _require_columns(buffer: Buffer, cursor: Positions, records: Records, layout: SegmentLayout) -> None:
    """Raise unless every tuple has as many columns as the relation."""
    records.require(cursor + 3 <= records.end, cursor, "the message ends inside a tuple's header")
    found = buffer.uint32[cursor] >> 8 & 0xFFFF
    records.require(found == len(layout.columns), cursor, "another number of columns than the relation's")


class _Bitmap:
    """The omitted columns of each row."""

    __slots__ = ("_bits", "_count", "_width")

    def __init__(self, count: int, columns: int) -> None:
        self._count = count
        self._width = (columns + 7) // 8
        self._bits: NDArray[np.uint8] | None = None

    def add(self, column: int, rows: NDArray[np.bool_]) -> None:
        if self._bits is None:
            self._bits = np.zeros((self._count, self._width), np.uint8)
        self._bits[:, column >> 3] |= rows.astype(np.uint8) << (column & 7)

    def array(self) -> pa.Array:
        if self._bits is None:
            return pa.nulls(self._count, pa.binary())
        some = self._bits.any(axis=1)
        used = np.ascontiguousarray(self._bits[some])
        offsets = np.zeros(self._count + 1, np.int32)
        np.cumsum(some * self._width, out=offsets[1:])
        validity = pa.array(some).buffers()[1]
        return pa.Array.from_buffers(pa.binary(), self._count, [validity, pa.py_buffer(offsets), pa.py_buffer(used)])
