"""One-dimensional arrays into lists; arrays with more dimensions or a lower bound of their own are rejected.

`{1,NULL,"a \\"quoted\\" one"}`: the whole column is split at once. Positions of quotes, separators and braces are
found in the bytes of all cells together, the elements become one text column, and the element's own codec decodes
that. Postgres quotes every element that holds a brace, a quote, a backslash, the delimiter, white space or the word
NULL, so what stands outside quotes is structure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.schema import PostgresType, TypeKind
from penstock.values.cells import blank, from_bytes, layout, merge, require_narrow, tidy, to_numpy
from penstock.values.codec import Codec, Decoded, codec_for, register_kind
from penstock.values.settings import TypeSettings
from penstock.values.text import unknown_codec

_OPEN, _CLOSE, _QUOTE, _BACKSLASH = (ord(character) for character in '{}"\\')
_NULL = np.frombuffer(b"NULL", np.uint8)
_UPPERCASE = 0xDF
"""Clears the bit that makes an ASCII letter lower-case."""

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Elements:
    """All elements of a column."""

    text: pa.LargeStringArray
    counts: Positions
    """The number of elements of each cell."""


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Cells that cannot be split; the others are yet to be."""

    cells: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ArrayCodec:
    """Lists of what the element's codec returns; a rejected element rejects the whole cell."""

    element: Codec
    delimiter: str

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.list_(self.element.arrow_type)

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        text = tidy(text)
        rejected: NDArray[np.bool_] | None = None
        # Each round either succeeds or rejects the cells that fail one check. There are five checks, and a cell that
        # passed one passes it again, so this ends after a few rounds regardless of the number of cells.
        while True:
            split = _split(text, ord(self.delimiter))
            if isinstance(split, _Elements):
                values = self.element.decode(split.text)
                if values.rejected is None:
                    return Decoded(self._lists(text, split, values.array), rejected)
                split = _Malformed(_any_per_cell(values.rejected, split.counts))
            rejected = merge(rejected, split.cells)
            text = blank(text, split.cells)

    def _lists(self, text: pa.LargeStringArray, elements: _Elements, values: pa.Array) -> pa.Array:
        ends = np.zeros(len(text) + 1, np.int32)
        np.cumsum(elements.counts, out=ends[1:])
        validity = text.is_valid().buffers()[1] if text.null_count else None
        return pa.Array.from_buffers(self.arrow_type, len(text), [validity, pa.py_buffer(ends)], children=[values])


def _split(text: pa.LargeStringArray, delimiter: int) -> _Elements | _Malformed:
    offsets, data = layout(text)
    require_narrow(data)
    starts, ends = offsets[:-1], offsets[1:]
    lengths = ends - starts
    present = to_numpy(text.is_valid()) if text.null_count else np.ones(len(text), np.bool_)

    framed = lengths >= 2
    framed[framed] = (data[starts[framed]] == _OPEN) & (data[ends[framed] - 1] == _CLOSE)
    if not np.array_equal(framed, present):
        return _Malformed(present & ~framed)

    escapes = _escapes(data)
    is_quote = data == _QUOTE
    is_quote[escapes + 1] = False
    quotes = np.flatnonzero(is_quote)
    if len(quotes):
        odd = (np.diff(np.searchsorted(quotes, offsets)) & 1).astype(np.bool_)
        if odd.any():
            return _Malformed(odd)

    def outside(positions: Positions) -> Positions:
        return positions[(np.searchsorted(quotes, positions) & 1) == 0] if len(quotes) else positions

    is_brace = (data == _OPEN) | (data == _CLOSE)
    is_brace[starts[framed]] = False
    is_brace[ends[framed] - 1] = False
    stray = np.concatenate([outside(escapes), outside(np.flatnonzero(is_brace))])
    if len(stray):
        return _Malformed(_cells_at(stray, offsets))

    separators = outside(np.flatnonzero(data == delimiter))
    filled = lengths > 2
    element_starts = _merge_sorted(starts[filled] + 1, separators + 1)
    element_ends = _merge_sorted(separators, ends[filled] - 1)
    counts = np.diff(np.searchsorted(separators, offsets)) + filled
    return _cut(data, offsets, element_starts, element_ends, counts, quotes, escapes)


def _cut(
    data: NDArray[np.uint8],
    offsets: Positions,
    starts: Positions,
    ends: Positions,
    counts: Positions,
    quotes: Positions,
    escapes: Positions,
) -> _Elements | _Malformed:
    """Copy the elements out of the cells, without quotes and escapes."""
    empty = starts == ends
    if empty.any():  # nothing between two separators: Postgres writes "" for an empty text
        return _Malformed(_cells_at(starts[empty], offsets))
    lengths = ends - starts
    if len(quotes):
        quoted = data[starts] == _QUOTE
        is_misplaced = np.zeros(len(data), np.bool_)
        is_misplaced[quotes] = True
        is_misplaced[starts[quoted]] = False
        is_misplaced[ends[quoted] - 1] ^= True  # where an element that begins with a quote does not end with one, too
        if is_misplaced.any():
            return _Malformed(_cells_at(np.flatnonzero(is_misplaced), offsets))
        lengths = lengths - 2 * quoted
        candidates = np.flatnonzero((lengths == len(_NULL)) & ~quoted)
    else:
        candidates = np.flatnonzero(lengths == len(_NULL))
    if len(escapes):
        lengths -= np.searchsorted(escapes, ends) - np.searchsorted(escapes, starts)

    words = starts[candidates][:, None] + np.arange(len(_NULL))
    null_words = ((data[words] & _UPPERCASE) == _NULL).all(axis=1)
    nulls = np.zeros(len(starts), np.bool_)
    nulls[candidates[null_words]] = True
    lengths[nulls] = 0

    wanted = np.ones(len(data), np.bool_)
    cell_starts, cell_ends = offsets[:-1], offsets[1:]
    filled = cell_ends > cell_starts
    wanted[cell_starts[filled]] = False
    wanted[ends] = False  # separators and closing braces
    wanted[cell_ends[filled] - 1] = False
    wanted[quotes] = False
    wanted[escapes] = False
    wanted[words[null_words].ravel()] = False

    element_offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=element_offsets[1:])
    return _Elements(from_bytes(element_offsets, data[wanted], nulls), counts)


def _escapes(data: NDArray[np.uint8]) -> Positions:
    """Backslashes that escape the next byte: the first, third, fifth … of a run."""
    backslashes = np.flatnonzero(data == _BACKSLASH)
    if not len(backslashes):
        return backslashes
    first = np.ones(len(backslashes), np.bool_)
    first[1:] = np.diff(backslashes) != 1
    run_starts = np.maximum.accumulate(np.where(first, backslashes, 0))
    return backslashes[((backslashes - run_starts) & 1) == 0]


def _merge_sorted(left: Positions, right: Positions) -> Positions:
    return np.sort(np.concatenate([left, right]), kind="stable")


def _cells_at(positions: Positions, offsets: Positions) -> NDArray[np.bool_]:
    """The cells that these bytes belong to."""
    cells = np.zeros(len(offsets) - 1, np.bool_)
    cells[np.searchsorted(offsets, positions, side="right") - 1] = True
    return cells


def _any_per_cell(elements: NDArray[np.bool_], counts: Positions) -> NDArray[np.bool_]:
    cells = np.zeros(len(counts), np.bool_)
    cells[np.repeat(np.arange(len(counts)), counts)[elements]] = True
    return cells


def array_codec(type_: PostgresType, modifier: int, settings: TypeSettings) -> Codec:
    """A list of the element's type; the column's modifier is the element's."""
    if type_.element is None:
        return unknown_codec(type_, modifier, settings)
    return ArrayCodec(codec_for(type_.element, modifier, settings), type_.element.delimiter)


register_kind(TypeKind.ARRAY, factory=array_codec, rejects=True)
