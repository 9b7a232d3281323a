"""Column-at-a-time decoding of pgoutput's tuples.

A tuple is a run of columns of unknown width, so where a column starts depends on the one before. Row by row that
is a loop in Python; here all rows of a table advance together: one *wave* per column reads the kind and length of
that column in every row at once, and moves every row's cursor behind it. The bytes of a column are then cut out of
the buffer by one Arrow `take` (no index per byte), and typed by its codec.

Inserts, updates and deletes of a table travel in the same wave. What an update says about the row before comes
first in its message and is read by a wave of its own, over those rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import (
    OLD,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    Operation,
    SegmentColumn,
    SegmentLayout,
)
from penstock.errors import DecodeError
from penstock.values import OutOfRange, apply_policy

_NULL, _UNCHANGED, _TEXT = 1, 2, 3
_KIND = np.zeros(256, np.uint8)
_KIND[ord("n")], _KIND[ord("u")], _KIND[ord("t")] = _NULL, _UNCHANGED, _TEXT

_OPERATION = np.zeros(256, np.int8)
_OPERATION[ord("I")], _OPERATION[ord("U")], _OPERATION[ord("D")] = Operation.INSERT, Operation.UPDATE, Operation.DELETE

_NEW, _KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")


@cache
def _even_numbers() -> pa.Int64Array:
    """Made when it is first used: the first array of a process imports pandas, and most commands need none."""
    return pa.array(np.arange(0, 1 << 17, 2, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class WaveRows:
    """Rows of one table, in order: where their tuples lie and which change they are."""

    operation: NDArray[np.uint8]
    """`I`, `U` or `D`, as on the wire."""
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


class _Span(NamedTuple):
    """Where messages begin and end; nothing is read beyond."""

    message: NDArray[np.int64]
    end: NDArray[np.int64]


class Buffer:
    """Bytes of many messages, readable as bytes and as big-endian 32-bit numbers at any offset."""

    __slots__ = ("arrow", "bytes", "uint32")

    def __init__(self, raw: bytes | bytearray | memoryview) -> None:
        """`raw` ends in `penstock.capture.scan.PADDING`, so that reads at the last message's end stay inside."""
        self.bytes = np.frombuffer(raw, np.uint8)
        self.arrow = pa.py_buffer(raw)
        # One byte apart, so that indexing reads four bytes anywhere.
        self.uint32 = np.ndarray((len(self.bytes) - 3,), ">u4", self.bytes, 0, (1,))


def decode_rows(buffer: Buffer, rows: WaveRows, layout: SegmentLayout, policy: OutOfRange) -> pa.Table:
    """Turn the rows of one table into typed columns in the layout of segments.

    Under the policy `error` texts are kept as under `keep`: whoever applies the segment stops that table, and capture
    goes on for the others.
    """
    count = len(rows.start)
    span = _Span(rows.message, rows.end)
    policy = OutOfRange.KEEP if policy is OutOfRange.ERROR else policy
    kept = _KeptTexts()
    cursor = rows.start.copy()
    marker = buffer.bytes[cursor]
    with_old = np.flatnonzero((rows.operation == ord("U")) & ((marker == _KEY) | (marker == _OLD_ROW)))
    old = pa.nulls(count, layout.old_type) if layout.old_columns else None
    if len(with_old):
        old, cursor[with_old] = _decode_old(buffer, span, with_old, cursor[with_old], layout, policy, kept)
        marker = buffer.bytes[cursor]

    is_delete = rows.operation == ord("D")
    is_key = is_delete & (marker == _KEY)
    correct = np.where(is_delete, is_key | (marker == _OLD_ROW), marker == _NEW)
    _require(correct, span, cursor, layout, "an unknown tuple marker")
    _require_columns(buffer, cursor, span, layout)
    cursor += 3

    unchanged = _Bitmap(count, len(layout.columns))
    arrays: list[pa.Array] = []
    any_key = bool(is_key.any())
    for column in layout.columns:
        cursor, text, not_sent = _advance(buffer, cursor, span, layout)
        if any_key and not column.column.identity:
            # The other columns of a key tuple are padded with NULLs that mean "not sent".
            not_sent = is_key if not_sent is None else not_sent | is_key
        if not_sent is not None:
            unchanged.add(column.index, not_sent)
        arrays.append(_decode_column(column, text, layout, policy, kept, column.field_name))
    _require(cursor == rows.end, span, cursor, layout, "bytes behind the last column")

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
    return table.append_column(UNREPRESENTABLE, kept.array(count)) if kept else table


def _decode_old(
    buffer: Buffer,
    span: _Span,
    with_old: NDArray[np.int64],
    cursor: NDArray[np.int64],
    layout: SegmentLayout,
    policy: OutOfRange,
    kept: _KeptTexts,
) -> tuple[pa.Array | None, NDArray[np.int64]]:
    """The old tuples of some rows as a struct over all rows, and the cursors behind them."""
    count = len(span.end)
    span = _Span(span.message[with_old], span.end[with_old])
    _require_columns(buffer, cursor, span, layout)
    cursor = cursor + 3
    wanted = {column.index for column in layout.old_columns}
    place = np.full(count, -1, np.int64)
    place[with_old] = np.arange(len(with_old))
    absent = place < 0
    spread = pa.array(place, mask=absent)
    children: list[pa.Array] = []
    for column in layout.columns:
        cursor, text, _ = _advance(buffer, cursor, span, layout)
        if column.index in wanted:
            name = f"{OLD}.{column.field_name}"
            children.append(_decode_column(column, text, layout, policy, kept, name, rows=with_old).take(spread))
    if not children:
        return None, cursor
    return pa.StructArray.from_arrays(children, fields=list(layout.old_type or ()), mask=pa.array(absent)), cursor


def _advance(
    buffer: Buffer, cursor: NDArray[np.int64], span: _Span, layout: SegmentLayout
) -> tuple[NDArray[np.int64], pa.Array, NDArray[np.bool_] | None]:
    """One wave: read a column in every row; the new cursors, its texts, and where it was not sent."""
    kind = _KIND[buffer.bytes[cursor]]
    is_text = kind == _TEXT
    if is_text.all():
        start = cursor + 5
        end = start + buffer.uint32[cursor + 1]
        absent = unchanged = None
    else:
        _require(kind != 0, span, cursor, layout, "an unknown kind of column")
        start = np.where(is_text, cursor + 5, cursor + 1)
        end = start + np.where(is_text, buffer.uint32[cursor + 1], 0)
        absent = ~is_text
        unchanged = kind == _UNCHANGED
    _require(end <= span.end, span, cursor, layout, "a value longer than its message")
    return end, _cut(buffer, start, end, absent), unchanged if unchanged is not None and unchanged.any() else None


def _cut(buffer: Buffer, start: NDArray[np.int64], end: NDArray[np.int64], null: NDArray[np.bool_] | None) -> pa.Array:
    """Copy byte ranges into an Arrow array without an index per byte.

    The offsets start0, end0, start1, end1, … describe the ranges and the gaps between them; the even ones are ours.
    """
    count = len(start)
    offsets = np.empty(2 * count, np.int64)
    offsets[0::2] = start
    offsets[1::2] = end
    ranges = pa.Array.from_buffers(pa.large_binary(), 2 * count - 1, [None, pa.py_buffer(offsets), buffer.arrow])
    if null is not None:
        return ranges.take(pa.array(np.arange(0, 2 * count - 1, 2), mask=null))
    even = _even_numbers()
    return ranges.take(even[:count] if count <= len(even) else pa.array(np.arange(0, 2 * count - 1, 2)))


def _decode_column(
    column: SegmentColumn,
    raw: pa.Array,
    layout: SegmentLayout,
    policy: OutOfRange,
    kept: _KeptTexts,
    name: str,
    rows: NDArray[np.int64] | None = None,
) -> pa.Array:
    try:
        text = raw.cast(pa.large_string())
    except pa.ArrowInvalid:
        raise DecodeError(
            f"a value of {layout.schema}.{column.column.name} is not UTF-8", offset=0, table=str(layout.schema)
        ) from None
    decoded = column.codec.decode(text)
    if decoded.rejected is None:
        return decoded.array
    array, texts = apply_policy(decoded, text, policy, table=str(layout.schema), column=column.column.name)
    if texts is not None:
        kept.add(name, texts, rows)
    return array


def _require(
    correct: NDArray[np.bool_], span: _Span, cursor: NDArray[np.int64], layout: SegmentLayout, what: str
) -> None:
    if not correct.all():
        row = int(np.argmin(correct))
        offset = int(cursor[row] - span.message[row])
        raise DecodeError(f"malformed row of {layout.schema} at offset {offset}: {what}", offset=offset)


def _require_columns(buffer: Buffer, cursor: NDArray[np.int64], span: _Span, layout: SegmentLayout) -> None:
    """Every tuple must have as many columns as the relation has, and room for their count."""
    _require(cursor + 3 <= span.end, span, cursor, layout, "the message ends inside a tuple's header")
    found = buffer.uint32[cursor] >> 8 & 0xFFFF
    _require(found == len(layout.columns), span, cursor, layout, "another number of columns than the relation's")


class _Bitmap:
    """Columns that were not sent, by row."""

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


class _KeptTexts:
    """Texts of cells that their type cannot hold, gathered by column and given out by row."""

    __slots__ = ("_names", "_rows", "_texts")

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: list[NDArray[np.int64]] = []
        self._texts: list[pa.Array] = []

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, name: str, texts: pa.Array, rows: NDArray[np.int64] | None) -> None:
        present = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
        self._names.append(name)
        self._rows.append(present if rows is None else rows[present])
        self._texts.append(texts.take(pa.array(present)).cast(pa.string()))

    def array(self, count: int) -> pa.Array:
        row = np.concatenate(self._rows)
        name = pa.array(np.repeat(np.arange(len(self._names)), [len(rows) for rows in self._rows]))
        order = np.argsort(row, kind="stable")
        keys = pa.array(self._names).take(name).take(pa.array(order))
        items = pa.concat_arrays(self._texts).take(pa.array(order))
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(row, minlength=count), out=offsets[1:])
        none = np.diff(offsets) == 0
        starts = pa.array(offsets.astype(np.int32), mask=np.append(none, False))
        return pa.MapArray.from_arrays(starts, keys, items).cast(UNREPRESENTABLE_TYPE)
