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

import numpy as np
import pyarrow as pa
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
    Operation,
    SegmentColumn,
    SegmentLayout,
)
from penstock.errors import DecodeError
from penstock.values import OutOfRange, apply_policy

PADDING = 8
"""Bytes that a buffer must have behind its last message, so that reads at a cursor stay inside."""

_NULL, _UNCHANGED, _TEXT = 1, 2, 3
_KIND = np.zeros(256, np.uint8)
_KIND[ord("n")], _KIND[ord("u")], _KIND[ord("t")] = _NULL, _UNCHANGED, _TEXT

_OPERATION = np.zeros(256, np.int8)
_OPERATION[ord("I")], _OPERATION[ord("U")], _OPERATION[ord("D")] = Operation.INSERT, Operation.UPDATE, Operation.DELETE

_NEW, _KEY, _OLD_ROW = ord("N"), ord("K"), ord("O")

_EVEN = pa.array(np.arange(0, 1 << 16, 2, dtype=np.int64))


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


class Buffer:
    """Bytes of many messages, readable as bytes and as big-endian 32-bit numbers at any offset."""

    __slots__ = ("arrow", "bytes", "uint32")

    def __init__(self, raw: bytes | bytearray | memoryview) -> None:
        """`raw` ends in `PADDING` bytes that belong to no message."""
        self.bytes = np.frombuffer(raw, np.uint8)
        self.arrow = pa.py_buffer(raw)
        # One byte apart, so that indexing reads four bytes anywhere.
        self.uint32 = np.ndarray((len(self.bytes) - 3,), ">u4", self.bytes, 0, (1,))


def decode_rows(buffer: Buffer, rows: WaveRows, layout: SegmentLayout, policy: OutOfRange) -> pa.Table:
    """Turn the rows of one table into typed columns in the layout of segments."""
    count = len(rows.start)
    kept = _KeptTexts()
    operation = _OPERATION[rows.operation]
    cursor, old_rows, is_key = _old_cursors(buffer, rows)
    old: pa.Array | None = None
    if layout.old_columns:
        old = pa.nulls(count, layout.old_type)
    if len(old_rows):
        old, behind = _decode_old(buffer, rows, old_rows, cursor, layout, policy, kept)
        cursor[old_rows] = behind
    marker = buffer.bytes[cursor]
    is_delete = rows.operation == ord("D")
    expected = (marker == _NEW) != is_delete
    if is_delete.any():
        expected &= ~is_delete | (marker == _KEY) | (marker == _OLD_ROW)
        is_key = is_delete & (marker == _KEY)
    _require(expected, rows, cursor, layout, "an unknown tuple marker")
    _require_columns(buffer, cursor, rows, layout)
    cursor += 3

    unchanged = _Bitmap(count, len(layout.columns))
    arrays: list[pa.Array] = []
    any_key = bool(is_key.any())
    for column in layout.columns:
        cursor, text, not_sent, _ = _advance(buffer, cursor, rows, layout)
        if any_key and not column.column.identity:
            # The other columns of a key tuple are padded with NULLs that mean "not sent".
            not_sent = is_key if not_sent is None else not_sent | is_key
        if not_sent is not None:
            unchanged.add(column.index, not_sent)
        arrays.append(_decode_column(column, text, layout, policy, kept, column.field_name))
    _require(cursor == rows.end, rows, cursor, layout, "bytes behind the last column")

    columns: dict[str, pa.Array] = {
        OP: pa.array(operation),
        COMMIT_LSN: pa.array(rows.commit_lsn),
        ORDINAL: pa.array(rows.ordinal),
        COMMIT_TIME: pa.array(rows.commit_time).view(pa.timestamp("us", "UTC")),
        XID: pa.array(rows.xid),
        UNCHANGED: unchanged.array(),
    }
    if old is not None:
        columns[OLD] = old
    table = pa.Table.from_arrays([*columns.values(), *arrays], schema=layout.arrow_schema)
    if kept:
        table = table.append_column(UNREPRESENTABLE, kept.array(count))
    return table


def _old_cursors(
    buffer: Buffer, rows: WaveRows
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Cursors at the first markers, and which updates begin with an old tuple."""
    cursor = rows.start.copy()
    marker = buffer.bytes[cursor]
    updates = (rows.operation == ord("U")) & ((marker == _KEY) | (marker == _OLD_ROW))
    return cursor, np.flatnonzero(updates), np.zeros(len(cursor), np.bool_)


def _decode_old(
    buffer: Buffer,
    rows: WaveRows,
    old_rows: NDArray[np.int64],
    cursor: NDArray[np.int64],
    layout: SegmentLayout,
    policy: OutOfRange,
    kept: _KeptTexts,
) -> tuple[pa.Array | None, NDArray[np.int64]]:
    """The old tuples of updates as a struct over all rows, and the cursors behind them."""
    selected = WaveRows(
        rows.operation[old_rows], rows.start[old_rows], rows.end[old_rows], rows.message[old_rows],
        rows.commit_lsn, rows.ordinal, rows.commit_time, rows.xid,
    )  # fmt: skip
    cursor = cursor[old_rows]
    _require_columns(buffer, cursor, selected, layout)
    cursor = cursor + 3
    wanted = {column.index for column in layout.old_columns}
    children: list[pa.Array] = []
    count = len(rows.start)
    scatter = np.full(count, -1, np.int64)
    scatter[old_rows] = np.arange(len(old_rows))
    absent = scatter < 0
    index = pa.array(scatter, mask=absent)
    for column in layout.columns:
        cursor, text, _, _ = _advance(buffer, cursor, selected, layout)
        if column.index in wanted:
            name = f"{OLD}.{column.field_name}"
            decoded = _decode_column(column, text, layout, policy, kept, name, rows=old_rows)
            children.append(decoded.take(index))
    if not children:
        return None, cursor
    assert layout.old_type is not None
    return pa.StructArray.from_arrays(children, fields=list(layout.old_type), mask=pa.array(absent)), cursor


def _advance(
    buffer: Buffer, cursor: NDArray[np.int64], rows: WaveRows, layout: SegmentLayout
) -> tuple[NDArray[np.int64], pa.Array, NDArray[np.bool_] | None, NDArray[np.bool_] | None]:
    """One wave: read a column's kind and length in every row; give its texts, what was not sent, and new cursors."""
    kind = _KIND[buffer.bytes[cursor]]
    is_text = kind == _TEXT
    if is_text.all():
        start = cursor + 5
        behind = start + buffer.uint32[cursor + 1]
        _require(behind <= rows.end, rows, cursor, layout, "a value longer than its message")
        return behind, _cut(buffer, start, behind, None), None, None
    _require(kind != 0, rows, cursor, layout, "an unknown kind of column")
    start = np.where(is_text, cursor + 5, cursor + 1)
    length = np.where(is_text, buffer.uint32[cursor + 1], 0)
    behind = start + length
    _require(behind <= rows.end, rows, cursor, layout, "a value longer than its message")
    missing = kind == _UNCHANGED
    return behind, _cut(buffer, start, behind, ~is_text), missing if missing.any() else None, ~is_text


def _cut(
    buffer: Buffer, start: NDArray[np.int64], end: NDArray[np.int64], null: NDArray[np.bool_] | None
) -> pa.Array:
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
    even = _EVEN[:count] if count <= len(_EVEN) else pa.array(np.arange(0, 2 * count - 1, 2))
    return ranges.take(even)


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
    correct: NDArray[np.bool_], rows: WaveRows, cursor: NDArray[np.int64], layout: SegmentLayout, what: str
) -> None:
    if not correct.all():
        row = int(np.argmin(correct))
        offset = int(cursor[row] - rows.message[row])
        raise DecodeError(f"malformed row of {layout.schema} at offset {offset}: {what}", offset=offset)


def _require_columns(buffer: Buffer, cursor: NDArray[np.int64], rows: WaveRows, layout: SegmentLayout) -> None:
    """Every tuple must have as many columns as the relation has, and room for their count."""
    _require(cursor + 3 <= rows.end, rows, cursor, layout, "the message ends inside a tuple's header")
    found = buffer.uint32[cursor] >> 8 & 0xFFFF
    _require(found == len(layout.columns), rows, cursor, layout, "another number of columns than the relation's")


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
        return pa.Array.from_buffers(
            pa.binary(), self._count, [validity, pa.py_buffer(offsets), pa.py_buffer(used)]
        )


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
