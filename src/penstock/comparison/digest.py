"""128-bit digests of rows, computed column by column: equal values have equal digests, wherever they were read.

Each cell is mixed with the number of its column, and a row's digest is made from the sum of its cells' digests, so that
swapped cells are noticed. The sum is scrambled once more, because digests of rows are added up too (`scan.BucketSums`)
and a value swapped between two rows must not cancel out. A digest consists of two *lanes* of 64 bits with separate
seeds. Digests do not protect against forgery; they ensure that two different rows have the same digest by accident only
once in 2¹²⁸.

Equality: NULL equals only NULL; a cell that its type cannot hold is compared as text; NaN equals itself, whatever its
bits; 0 differs from −0; integers of different widths are equal if their values are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
Digests: TypeAlias = NDArray[np.uint64]
"""Two rows, one for each lane."""

LANES = 2
_WORD = 8
_MOST_WORDS = 128
_LONG_BYTES = _MOST_WORDS * _WORD
"""Longer values are hashed one by one instead of word by word together."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SEEDS = np.array([0x243F6A8885A308D3, 0x13198A2E03707344], np.uint64)
_COLUMN_STEP = np.array([0xA4093822299F31D1, 0x082EFA98EC4E6C8B], np.uint64)
_LENGTH_STEP = np.uint64(0xD1B54A32D192ED03)
_NULL = np.array([0x452821E638D01377, 0xC0AC29B7C97C50DD], np.uint64)
_TEXT = np.array([0xBE5466CF34E90C6D, 0x3F84D5B5B5470917], np.uint64)
"""Added to the seeds of values that are not plain. The number that looks like NULL in one lane does not in the other.
"""
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_MASKS = np.array([(1 << (8 * count)) - 1 for count in range(_WORD + 1)], np.uint64)
_NAN = np.float64("nan").view(np.uint64)


@dataclass(frozen=True, slots=True)
class DigestedRows:
    """The digests of some rows."""

    keys: Digests
    rows: Digests

    def __len__(self) -> int:
        return self.rows.shape[1]

    def take(self, wanted: NDArray[np.bool_] | NDArray[np.int64]) -> DigestedRows:
        return DigestedRows(self.keys[:, wanted], self.rows[:, wanted])


def digest_rows(columns: Sequence[pa.Array], texts: Mapping[int, pa.Array], key: Sequence[int]) -> DigestedRows:
    """Return the digests of rows and of their keys: the cells of the columns `key`, or all cells if there is no key.

    `texts` has the texts of cells that their type cannot hold, by column number; NULL elsewhere.
    """
    count = len(columns[0]) if columns else 0
    rows, keys = np.zeros((LANES, count), np.uint64), np.zeros((LANES, count), np.uint64)
    for number, column in enumerate(columns):
        cells = digest_cells(column, number, texts.get(number))
        rows += cells
        if number in key:
            keys += cells
    for lane in rows:
        _scramble(lane)
    return DigestedRows(keys if key else rows, rows)


def digest_cells(column: pa.Array, number: int, texts: pa.Array | None = None) -> Digests:
    """Return the digests of one column's cells."""
    seeds = _SEEDS + np.uint64(number + 1) * _COLUMN_STEP
    cells = _digest(column, seeds)
    if texts is not None and texts.null_count < len(texts):
        there = np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False))
        cells[:, there] = _digest(texts.take(pa.array(there)), seeds + _TEXT)
    return cells


def _digest(array: pa.Array, seeds: Words) -> Digests:
    """Return the digests of any array; the null marks of nested arrays count too."""
    kind = array.type
    if pa.types.is_null(kind):
        digests = np.empty((LANES, len(array)), np.uint64)
    elif pa.types.is_dictionary(kind):
        return _digest(array.dictionary_decode(), seeds)
    elif _is_bytes(kind):
        digests = _digest_bytes(array, seeds)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        digests = _digest_lists(array, seeds)
    elif pa.types.is_struct(kind):
        digests = _digest_struct(array, seeds)
    elif pa.types.is_decimal(kind):
        digests = _digest_wide(array, seeds)
    else:
        digests = _scrambled(_as_words(array), seeds)
    if array.null_count:
        nulls = ~array.is_valid().to_numpy(zero_copy_only=False)
        digests[:, nulls] = _scrambled(np.zeros(1, np.uint64), seeds + _NULL)
    return digests


def _scrambled(words: Words, seeds: Words) -> Digests:
    digests = np.empty((LANES, len(words)), np.uint64)
    for lane in range(LANES):
        np.add(words, seeds[lane], out=digests[lane])
        _scramble(digests[lane])
    return digests


def _scramble(words: Words) -> None:
    """Make every bit depend on every other, in place; different words stay different."""
    words ^= words >> _SHIFTS[0]
    words *= _MULTIPLIERS[0]
    words ^= words >> _SHIFTS[1]
    words *= _MULTIPLIERS[1]
    words ^= words >> _SHIFTS[2]


def _as_words(array: pa.Array) -> Words:
    """Return numbers, times and flags as 64 bits each; the bits under NULL are arbitrary."""
    kind = array.type
    if pa.types.is_floating(kind):
        # Exact: every narrower number is a double.
        values = _plain(pc.cast(array, pa.float64()), np.float64)
        return np.where(np.isnan(values), _NAN, values.view(np.uint64))
    if pa.types.is_unsigned_integer(kind):
        return _plain(pc.cast(array, pa.uint64()), np.uint64)
    if pa.types.is_timestamp(kind) and kind.unit != "us":
        array = pc.cast(array, pa.timestamp("us", kind.tz))
    elif pa.types.is_time(kind) and kind.unit != "us":
        array = pc.cast(array, pa.time64("us"))
    elif pa.types.is_boolean(kind):
        array = pc.cast(array, pa.int8())
    widths = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
    values = _plain(array, widths[array.type.bit_width // 8])
    return values.astype(np.int64).view(np.uint64)


def _digest_wide(array: pa.Array, seeds: Words) -> Digests:
    """Digest decimals, which have several words each."""
    count = array.type.byte_width // _WORD
    if not count:
        array = pc.cast(array, pa.decimal128(array.type.precision, array.type.scale))
        count = 2
    words = _plain(array, np.uint64, count).reshape(-1, count)
    digests = _scrambled(words[:, 0], seeds)
    for place in range(1, count):
        digests += words[:, place]
        for lane in digests:
            _scramble(lane)
    return digests


def _digest_bytes(array: pa.Array, seeds: Words) -> Digests:
    """Digest texts and binaries by words of eight bytes, the last one padded with zeros.

    The longest values come first, so that the values with an n-th word form a prefix: each pass takes one word of all
    of them.
    """
    starts, lengths, data = _spans(array)
    if array.null_count:
        lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    counts = (lengths + _WORD - 1) // _WORD
    long = np.flatnonzero(lengths > _LONG_BYTES)
    counts[long] = 0
    order = np.argsort(_MOST_WORDS - counts.astype(np.int16), kind="stable")
    left, at = lengths[order], starts[order]
    reached = np.cumsum(np.bincount(counts, minlength=1)[::-1])[::-1]
    # One byte apart, so that a word can be read at any offset.
    words = np.ndarray((len(data) - _WORD + 1,), np.dtype("<u8"), data, 0, (1,))
    state = np.repeat(_SEEDS[:, None], len(array), axis=1)
    for wave in range(1, len(reached)):
        size = int(reached[wave])
        ending = int(reached[wave + 1]) if wave + 1 < len(reached) else 0
        taken = words[at[:size]]
        taken[ending:] &= _MASKS[left[ending:size]]
        for lane in range(LANES):
            mixed = state[lane, :size]
            mixed ^= taken
            mixed *= _MULTIPLIERS[lane]
            mixed ^= mixed >> _HALF
            # A difference in only the highest bits would pass through all of this unmixed, and could cancel out with
            # the same difference in the next word.
            mixed *= _MULTIPLIERS[1 - lane]
        at[:ending] += _WORD
        left[:ending] -= _WORD
    digests = np.empty_like(state)
    digests[:, order] = state
    for row in long:
        # Cold: few values are this long, and each is enough work for a call.
        value = data[starts[row] : starts[row] + lengths[row]].data
        content = hashlib.blake2b(value, digest_size=LANES * _WORD).digest()
        digests[:, row] = np.frombuffer(content, np.uint64)
    return _finished(digests, lengths, seeds)


def _digest_lists(array: pa.Array, seeds: Words) -> Digests:
    """Digest lists by the digests of their elements, in order."""
    wide = pa.types.is_large_list(array.type)
    ends = _offsets(array, np.int64 if wide else np.int32)
    lengths = np.diff(ends)
    if array.null_count:
        lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    children = _children(array)
    first = int(ends[0]) if len(ends) else 0
    elements = _digest(children.slice(first, int(ends[-1]) - first), _SEEDS)
    owners, places = _spread(lengths)
    taken = (ends[:-1] - first)[owners] + places
    return _finished(_sums(elements[:, taken], places, lengths), lengths, seeds)


def _digest_struct(array: pa.StructArray, seeds: Words) -> Digests:
    sums = np.zeros((LANES, len(array)), np.uint64)
    for number in range(array.type.num_fields):
        sums += _digest(pc.struct_field(array, number), _SEEDS + np.uint64(number + 1) * _COLUMN_STEP)
    return _finished(sums, np.zeros(len(array), np.int64), seeds)


def _sums(elements: Digests, places: NDArray[np.int64], counts: NDArray[np.int64]) -> Digests:
    """Combine the digests of each owner's elements, weighted by their places."""
    sums = np.zeros((LANES, len(counts)), np.uint64)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return sums
    firsts = (np.cumsum(counts) - counts)[filled]
    steps = places.view(np.uint64) * _GOLDEN
    for lane in range(LANES):
        mixed = elements[lane] + steps
        mixed ^= _SEEDS[lane]
        _scramble(mixed)
        sums[lane, filled] = np.add.reduceat(mixed, firsts)
    return sums


def _finished(sums: Digests, lengths: NDArray[np.int64], seeds: Words) -> Digests:
    sums += lengths.astype(np.uint64) * _LENGTH_STEP
    for lane in range(LANES):
        sums[lane] += seeds[lane]
        _scramble(sums[lane])
    return sums


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each element, its owner and its place among the owner's elements."""
    owners = np.repeat(np.arange(len(counts)), counts)
    firsts = np.cumsum(counts) - counts
    return owners, np.arange(len(owners)) - firsts[owners]


def _is_bytes(kind: pa.DataType) -> bool:
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _spans(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Return where values begin, how long they are, and their bytes, padded with a word of zeros."""
    if pa.types.is_fixed_size_binary(array.type):
        array = pc.cast(array, pa.binary())
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    ends = _offsets(array, np.int64 if wide else np.int32)
    first, last = (int(ends[0]), int(ends[-1])) if len(ends) else (0, 0)
    data = np.zeros(last - first + _WORD, np.uint8)
    buffer = array.buffers()[2]
    if buffer is not None and last > first:
        data[: last - first] = np.frombuffer(buffer, np.uint8, last - first, first)
    return ends[:-1] - first, np.diff(ends), data


def _offsets(array: pa.Array, kind: type[np.int32 | np.int64]) -> NDArray[np.int64]:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    width = np.dtype(kind).itemsize
    return np.frombuffer(buffer, kind, len(array) + 1, array.offset * width).astype(np.int64)


def _children(array: pa.Array) -> pa.Array:
    """Return the elements of all lists; the offsets say which list each belongs to."""
    if pa.types.is_map(array.type):
        keys, items = array.keys, array.items
        return pa.StructArray.from_arrays([keys, items], ["key", "value"])
    return array.values


def _plain(array: pa.Array, kind: type[np.generic], per_value: int = 1) -> NDArray[Any]:
    """Return the numbers in a buffer, without copying."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) * per_value, kind)
    width = np.dtype(kind).itemsize * per_value
    return np.frombuffer(buffer, kind, len(array) * per_value, array.offset * width)
