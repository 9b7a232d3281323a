"""The kit that reads rows of the wire column at a time: for pgoutput (capture), binary COPY (copy) and texts (fetch).

A row is a run of fields of unknown width, so where a field starts depends on the one before. Row by row that would be
a loop in Python; here all rows of a table advance together: one *wave* per column reads the length of that column in
every row at once, and moves every row's cursor behind it. Arrow then copies the bytes of the whole column
(`Cells.array`), and `DecodedColumns` gives them their type and keeps the texts of values that the type cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import UNREPRESENTABLE_TYPE, SegmentColumn, join_texts
from penstock.errors import DecodeError
from penstock.values import Decoded, OutOfRange, apply_policy

PADDING = bytes(16)
"""Behind the last row, so that reading a fixed width there stays inside."""
TEXT = pa.large_string()
"""The type of texts that are still to be decoded; no column of a segment has it."""

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]


class Buffer:
    """The bytes of many rows, readable as bytes and as big-endian numbers at any offset; ends in `PADDING`."""

    __slots__ = ("arrow", "bytes", "uint32")

    def __init__(self, raw: bytes | bytearray | memoryview) -> None:
        self.bytes = np.frombuffer(raw, np.uint8)
        self.arrow = pa.py_buffer(raw)
        self.uint32 = self._view(np.dtype(">u4"))

    def read(self, kind: str, at: Positions) -> NDArray[Any]:
        """Numbers of a big-endian kind, in native order."""
        dtype = np.dtype(kind)
        return self._view(dtype)[at].astype(dtype.newbyteorder("="))

    def _view(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        # One byte apart, so that indexing reads anywhere.
        return np.ndarray((len(self.bytes) - dtype.itemsize + 1,), dtype, self.bytes, 0, (1,))


@dataclass(frozen=True, slots=True)
class Records:
    """Where rows begin and end; nothing is read beyond."""

    start: Positions
    end: Positions
    what: str
    """For errors: `row of public.orders`."""

    def require(self, correct: Flags, at: Positions, fault: str) -> None:
        """Raise `DecodeError` with its offset if something is wrong in any row."""
        if not correct.all():
            row = int(np.argmin(correct))
            offset = int(at[row] - self.start[row])
            raise DecodeError(f"malformed {self.what} at offset {offset}: {fault}", offset=offset)

    def select(self, rows: Positions) -> Records:
        """Some of them."""
        return Records(self.start[rows], self.end[rows], self.what)


@dataclass(frozen=True, slots=True)
class Cells:
    """Where the values of one column lie."""

    buffer: Buffer
    start: Positions
    end: Positions
    null: Flags | None
    """None when there is no NULL."""

    def __len__(self) -> int:
        return len(self.start)

    def array(self, type_: pa.DataType, *, skipped: int = 0) -> pa.Array:
        """Copy the bytes into an array without an index per byte; `skipped` bytes in front of each value are left out.

        The offsets start0, end0, start1, end1, … describe the values and the gaps between them; the even ones are ours.
        """
        count = len(self)
        offsets = np.empty(2 * count, np.int64 if pa.types.is_large_binary(type_) else np.int32)
        offsets[0::2] = self.start
        offsets[1::2] = self.end
        if skipped:
            offsets[0::2] += skipped if self.null is None else np.where(self.null, 0, skipped)
        ranges = pa.Array.from_buffers(type_, 2 * count - 1, [None, pa.py_buffer(offsets), self.buffer.arrow])
        even = _even_numbers()
        if self.null is None and count <= len(even):
            return ranges.take(even[:count])
        return ranges.take(pa.array(np.arange(0, 2 * count - 1, 2), mask=self.null))


@cache
def _even_numbers() -> pa.Int64Array:
    # Not by `pa.array`, which imports pandas: that takes longer than reading a small table.
    even = np.arange(0, 1 << 17, 2, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(even), [None, pa.py_buffer(even)])


def pack_flags(flags: Flags) -> pa.Buffer:
    """Flags as Arrow stores them: for validity, and for booleans. Unlike `pa.array`, this does not import pandas."""
    return pa.py_buffer(np.packbits(flags, bitorder="little"))


class DecodedColumns:
    """Columns in the types of segments, and the texts of values that these cannot hold, under each column's policy.

    Without `raises`, texts are kept under the policy `error` as under `keep`.
    """

    __slots__ = ("_count", "_raises", "_table", "_texts")

    def __init__(self, table: str, count: int, *, raises: bool = True) -> None:
        self._table = table
        self._raises = raises
        self._texts: dict[str, pa.Array] = {}
        self._count = count

    def decode(
        self, column: SegmentColumn, cells: pa.Array, name: str | None = None, spread: pa.Array | None = None
    ) -> pa.Array:
        """Decode a column of `TEXT` or bytes; what is of another type is a value already.

        Texts are kept under `name`, which is the column's own by default; `spread` says for each row of the table which
        of these cells it has, if not all have one.
        """
        if not (cells.type == TEXT or pa.types.is_large_binary(cells.type)):
            return cells
        text = self.text(column, cells, TEXT)
        return self.keep(column, column.codec.decode(text), lambda: text, name, spread)

    def text(self, column: SegmentColumn, cells: pa.Array, type_: pa.DataType) -> pa.Array:
        """Bytes as text; what is no UTF-8 is refused."""
        try:
            return cells.cast(type_)
        except pa.ArrowInvalid:
            name = column.column.name
            raise DecodeError(f"a value of {self._table}.{name} is not UTF-8", offset=0, table=self._table) from None

    def keep(
        self,
        column: SegmentColumn,
        decoded: Decoded,
        text: Callable[[], pa.LargeStringArray],
        name: str | None = None,
        spread: pa.Array | None = None,
    ) -> pa.Array:
        """Decoded values under the policy; `text` gives the server's text of those that were rejected."""
        if decoded.rejected is None:
            return decoded.array
        keeps = column.policy is OutOfRange.ERROR and not self._raises
        policy = OutOfRange.KEEP if keeps else column.policy
        found = apply_policy(decoded, text(), policy, table=self._table, column=column.column.name)
        if found.kept is not None:
            self._texts[name or column.field_name] = found.kept if spread is None else found.kept.take(spread)
        return found.array

    def unrepresentable(self) -> pa.Array | None:
        """The column `_unrepresentable`; None if there is no text."""
        return join_texts(self._texts, self._count)


def decode_columns(
    columns: Sequence[SegmentColumn], cells: Sequence[pa.Array], row_count: int, table: str
) -> list[pa.Array]:
    """Whole columns in the types of segments, then `_unrepresentable`. What is no `TEXT` is a value already."""
    decoded = DecodedColumns(table, row_count)
    arrays = [decoded.decode(column, array) for column, array in zip(columns, cells, strict=True)]
    maps = decoded.unrepresentable()
    return [*arrays, pa.nulls(row_count, UNREPRESENTABLE_TYPE) if maps is None else maps]
