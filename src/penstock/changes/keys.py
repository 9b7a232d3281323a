"""Keys of rows, computed column at a time: one value per row, equal exactly if all cells are the same.

The key of one integer column is that integer: columns of a key are never NULL. Any other key is a byte string, and so
is the key of a whole row, whose cells may be NULL: a part of fixed width (for each cell whether it is NULL, and its
value or the length of its value), then the values of variable width. NaN equals itself, 0 differs from −0, and an
unrepresentable value counts as its text.

Byte strings are found by a 64-bit fingerprint. Fingerprints can collide, so code that matches by them compares the
bytes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_WORD = 8
_MOST_WORDS = 128
"""Words of a key that go into its fingerprint; of longer keys, they are spread evenly."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)
_MASKS = np.array([(1 << (8 * count)) - 1 for count in range(_WORD + 1)], np.uint64)
_LENGTH = np.dtype("<u4")
_VALUE, _TEXT = 1, 2
"""The state of a cell; 0 for NULL."""


def row_keys(
    columns: Sequence[pa.Array], texts: Sequence[pa.Array | None] | None = None, *, whole: bool = False
) -> pa.Array:
    """One key per row, never NULL: `int64`, or `large_binary`.

    `texts` has for each column the texts of cells that their type cannot hold, NULL elsewhere; None if there are none.
    `whole` says that the columns are a whole row, not a key: the result is `large_binary`, whatever the columns hold.
    """
    if whole or len(columns) != 1 or not pa.types.is_integer(columns[0].type):
        return _encode(columns, texts or [None] * len(columns))
    if columns[0].null_count:
        raise ValueError("a key that is NULL")
    return pc.cast(columns[0], pa.int64())


def fingerprints(keys: pa.Array) -> NDArray[np.int64]:
    """A number per key, the same for equal keys; integers are their own fingerprints."""
    if pa.types.is_integer(keys.type):
        return np.asarray(keys.to_numpy(zero_copy_only=False), np.int64)
    offsets, content = _parts(keys)
    lengths = np.diff(offsets)
    padded = np.zeros(len(content) + _WORD, np.uint8)
    padded[: len(content)] = content
    # Eight bytes at any offset as a number.
    words: NDArray[np.uint64] = np.ndarray((len(content) + 1,), np.dtype("<u8"), padded.data, strides=(1,))
    counts = -(-lengths // _WORD)
    used = np.minimum(counts, _MOST_WORDS)
    found = lengths.astype(np.uint64) * _MULTIPLIER
    for turn in range(int(used.max(initial=0))):
        rows: Any = slice(None) if int(used.min()) > turn else np.flatnonzero(used > turn)
        at = turn * counts[rows] // used[rows] * _WORD
        word = words[offsets[:-1][rows] + at] & _MASKS[np.minimum(lengths[rows] - at, _WORD)]
        mixed = (found[rows] ^ word) * _MULTIPLIER
        found[rows] = mixed ^ (mixed >> _SHIFT)
    return found.view(np.int64)


def _encode(columns: Sequence[pa.Array], texts: Sequence[pa.Array | None]) -> pa.Array:
    fixed: list[NDArray[np.uint8]] = []
    variable: list[pa.Array] = []
    for column, text in zip(columns, texts, strict=True):
        states = column.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
        kept = None
        if text is not None and text.null_count < len(text):
            states[text.is_valid().to_numpy(zero_copy_only=False)] = _TEXT
            kept = pc.cast(text, pa.large_binary())
        if not _is_fixed(column.type):
            values = _variable(column)
            variable.append(values if kept is None else pc.if_else(kept.is_valid(), kept, values))
            fixed.append(_lengths(variable[-1]))
        else:
            content = _fixed(column)
            content[states != _VALUE] = 0
            fixed.append(content)
            if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
                # Postgres has values of other types that Arrow cannot hold.
                fixed.append(np.zeros((len(column), _LENGTH.itemsize), np.uint8) if kept is None else _lengths(kept))
                variable += [] if kept is None else [kept]
        fixed.append(states.reshape(-1, 1))
    head = np.ascontiguousarray(np.concatenate(fixed, axis=1))
    ends = np.arange(len(head) + 1, dtype=np.int64) * head.shape[1]
    first = pa.Array.from_buffers(pa.large_binary(), len(head), [None, pa.py_buffer(ends), pa.py_buffer(head)])
    if not variable:
        return first
    nothing = pa.scalar(b"", pa.large_binary())
    return pc.binary_join_element_wise(first, *variable, nothing, null_handling="replace", null_replacement="")


def _is_fixed(type_: pa.DataType) -> bool:
    return pa.types.is_primitive(type_) or pa.types.is_decimal(type_)


def _fixed(column: pa.Array) -> NDArray[np.uint8]:
    """The bytes of each value; those under NULL are undefined."""
    if pa.types.is_boolean(column.type):
        column = pc.cast(column, pa.uint8())
    width = column.type.bit_width // 8
    if pa.types.is_floating(column.type):
        numbers = np.array(pc.fill_null(column, 0.0).to_numpy(zero_copy_only=False))
        numbers[np.isnan(numbers)] = np.nan
        return numbers.view(np.uint8).reshape(-1, width)
    if len(column) == 0:
        return np.zeros((0, width), np.uint8)
    content = np.frombuffer(column.buffers()[1], np.uint8)
    start = column.offset * width
    return content[start : start + len(column) * width].reshape(-1, width).copy()


def _variable(column: pa.Array) -> pa.Array:
    """The bytes of each value; NULL stays NULL."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        borders = np.zeros(len(column) + 1, np.int64)
        np.cumsum(counts, out=borders[1:])
        ends, content = _parts(_encode([column.flatten()], [None]))
        buffers = [None, pa.py_buffer(np.ascontiguousarray(ends[borders])), pa.py_buffer(content)]
        return pa.Array.from_buffers(pa.large_binary(), len(column), buffers)
    return pc.cast(column, pa.large_binary())


def _lengths(values: pa.Array) -> NDArray[np.uint8]:
    lengths = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(_LENGTH)
    return np.ascontiguousarray(lengths).view(np.uint8).reshape(-1, _LENGTH.itemsize)


def _parts(keys: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets that begin at 0, and all bytes."""
    _, ends, content = keys.buffers()
    if len(keys) == 0 or content is None:
        return np.zeros(len(keys) + 1, np.int64), np.zeros(0, np.uint8)
    offsets = np.frombuffer(ends, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    return offsets - offsets[0], np.frombuffer(content, np.uint8)[offsets[0] : offsets[-1]]
