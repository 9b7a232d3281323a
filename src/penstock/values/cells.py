"""Whole-column operations on text cells that the families share: their bytes, their shape, blanking and casting.

Decoding is optimistic: it casts the column, and only if that fails finds the invalid cells, blanks them and retries.
Nothing here loops over cells, except `_cast_piecewise`, which says why it may.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.values.codec import MAX_TEXT_BYTES, Decoded


def layout(text: pa.LargeStringArray) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where each cell begins and ends, and the bytes of all cells, without copying.

    Cell i is `data[offsets[i]:offsets[i + 1]]`; `offsets[0]` is 0. A NULL may have bytes under it.
    """
    _, offset_buffer, data_buffer = text.buffers()
    if offset_buffer is None or offset_buffer.size == 0:
        return np.zeros(len(text) + 1, np.int64), np.empty(0, np.uint8)
    offsets = np.frombuffer(offset_buffer, np.int64, len(text) + 1, text.offset * 8)
    first, last = int(offsets[0]), int(offsets[-1])
    if first:
        offsets = offsets - first
    if data_buffer is None or last == first:
        return offsets, np.empty(0, np.uint8)
    return offsets, np.frombuffer(data_buffer, np.uint8, last - first, first)


def require_narrow(data: NDArray[np.uint8]) -> None:
    """Raise if 32-bit offsets cannot address this many bytes, before anything wraps around."""
    if len(data) > MAX_TEXT_BYTES:
        raise OverflowError(f"one call decodes at most {MAX_TEXT_BYTES} bytes, got {len(data)}: split the column")


def from_bytes(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], nulls: NDArray[np.bool_] | None = None
) -> pa.LargeStringArray:
    """A text column from its parts; the opposite of `layout`."""
    validity = None if nulls is None or not nulls.any() else pa.array(~nulls).buffers()[1]
    buffers = [validity, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers)


@cache
def large_text(value: str) -> pa.LargeStringScalar:
    """A constant typed like the cells it is compared with: a plain string costs a cast of 50 µs per call.

    Made when it is first used. The first array of a process imports pandas, and most commands never need one.
    """
    return pa.scalar(value, pa.large_string())


def to_numpy(flags: pa.BooleanArray) -> NDArray[np.bool_]:
    """Flags without NULLs, as a NumPy array."""
    return flags.to_numpy(zero_copy_only=False)


def fixed_values(array: pa.Array, kind: type[np.generic]) -> NDArray[Any]:
    """The numbers of a fixed-width array, without copying; those under NULLs are undefined."""
    buffer = array.buffers()[1]
    if buffer is None or len(array) == 0:
        return np.empty(0, kind)
    width = np.dtype(kind).itemsize
    return np.frombuffer(buffer, kind, len(array), array.offset * width)


def matches(text: pa.LargeStringArray, pattern: str) -> NDArray[np.bool_]:
    """Which cells match a regular expression (RE2; anchor it); NULLs count as matching."""
    return to_numpy(pc.fill_null(pc.match_substring_regex(text, pattern), True))


def blank(text: pa.LargeStringArray, unwanted: NDArray[np.bool_]) -> pa.LargeStringArray:
    """The column with NULL for unwanted cells, and no bytes under any NULL (Arrow's `if_else` leaves them there)."""
    offsets, data = layout(text)
    lengths = np.diff(offsets)
    wanted = ~unwanted
    if text.null_count:
        wanted &= to_numpy(text.is_valid())
    wanted_offsets = np.zeros_like(offsets)
    np.cumsum(np.where(wanted, lengths, 0), out=wanted_offsets[1:])
    return from_bytes(wanted_offsets, data[np.repeat(wanted, lengths)], ~wanted)


def tidy(text: pa.LargeStringArray) -> pa.LargeStringArray:
    """The column with no bytes under any NULL; the same object if there are none, as is usual."""
    if text.null_count:
        offsets, _ = layout(text)
        if np.diff(offsets)[~to_numpy(text.is_valid())].any():
            return blank(text, np.zeros(len(text), np.bool_))
    return text


def merge(rejected: NDArray[np.bool_] | None, more: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """Cells that are in either; None when there are none."""
    if rejected is None or more is None:
        either = more if rejected is None else rejected
    else:
        either = rejected | more
    return either if either is not None and either.any() else None


def reject(decoded: Decoded, unwanted: NDArray[np.bool_]) -> Decoded:
    """`decoded` with NULL for unwanted cells, which count as rejected."""
    if not unwanted.any():
        return decoded
    array = pc.if_else(pa.array(~unwanted), decoded.array, pa.scalar(None, decoded.array.type))
    return Decoded(array, merge(decoded.rejected, unwanted))


def cast_matching(text: pa.LargeStringArray, arrow_type: pa.DataType, pattern: str) -> Decoded:
    """Cast the cells that match a pattern and reject the others.

    The pattern should say exactly what fits. Where it lets through what Arrow refuses, the cells are still found.
    """
    unwanted = ~matches(text, pattern)
    text = blank(text, unwanted)
    try:
        decoded = Decoded(pc.cast(text, arrow_type), None)
    except pa.ArrowInvalid:
        decoded = _cast_piecewise(text, arrow_type)
    return Decoded(decoded.array, merge(decoded.rejected, unwanted))


def _cast_piecewise(text: pa.LargeStringArray, arrow_type: pa.DataType) -> Decoded:
    """Find cells that Arrow refuses by halving.

    Cold: the patterns are meant to be exact, so this runs only where one and Arrow disagree about a cell; it takes a
    dozen casts per such cell.
    """
    rejected = np.zeros(len(text), np.bool_)
    pieces: dict[int, pa.Array] = {}
    pending = [(0, len(text))]
    while pending:
        start, stop = pending.pop()
        try:
            pieces[start] = pc.cast(text.slice(start, stop - start), arrow_type)
        except pa.ArrowInvalid:
            if stop - start == 1:
                rejected[start] = True
                pieces[start] = pa.nulls(1, arrow_type)
            else:
                middle = (start + stop) // 2
                pending += [(start, middle), (middle, stop)]
    return Decoded(pa.concat_arrays([pieces[start] for start in sorted(pieces)]), rejected)
