"""Digests are the same exactly if values are, whatever the chunks, offsets and types around them."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.comparison import digest
from penstock.comparison.digest import digest_cells, digest_rows
from tests.support.examples import examples

_DECIMALS = st.integers(-(10**37), 10**37).map(lambda value: Decimal(value).scaleb(-10))
_TEXTS = st.one_of(
    st.text(max_size=40),
    st.integers(0, 3000).map(lambda size: "x" * size),
    st.sampled_from(["", "\0", "\0\0", "a" * 8, "a" * 7 + "\0", "a" * 1024, "a" * 1025]),
)
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int16": (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "float32": (pa.float32(), st.floats(width=32)),
    "float64": (pa.float64(), st.floats()),
    "string": (pa.string(), _TEXTS),
    "binary": (pa.binary(), st.binary(max_size=30)),
    "timestamp": (pa.timestamp("us", "UTC"), st.integers(-(10**15), 10**15)),
    "date": (pa.date32(), st.integers(-700_000, 2_900_000)),
    "time": (pa.time64("us"), st.integers(0, 86_399_999_999)),
    "decimal": (pa.decimal128(38, 10), _DECIMALS),
    "list of int": (pa.list_(pa.int32()), st.lists(st.none() | st.integers(-5, 5), max_size=4)),
    "list of text": (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=9), max_size=4)),
    "map": (pa.map_(pa.string(), pa.string()), st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)))),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.none() | st.integers(0, 3), "b": st.none() | st.text(max_size=2)}),
    ),
}


def identity(value: Any) -> Any:
    """Something that is equal exactly if the values are the same."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else (value, math.copysign(1, value))
    return repr(value)


@settings(max_examples=examples(15))
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_digests_are_equal_exactly_if_values_are(kind: str, data: st.DataObject) -> None:
    arrow_type, strategy = KINDS[kind]
    values = data.draw(st.lists(st.none() | strategy, min_size=1, max_size=12))
    array = pa.array(values, arrow_type)
    cells = digest_cells(array, 3)
    found = [tuple(pair) for pair in cells.T.tolist()]
    # As the type holds them: a float32 may have been rounded.
    held = [identity(value) for value in array.to_pylist()]
    for one, left in zip(held, found, strict=True):
        for other, right in zip(held, found, strict=True):
            assert (one == other) == (left == right)
    # Neither lane depends on the other to tell values apart. NULL has a twin in each: there are 2⁶⁴ numbers without it.
    there = cells[:, array.is_valid().to_numpy(zero_copy_only=False)]
    assert len(set(there[0].tolist())) == len(set(there[1].tolist())) == len(set(held) - {identity(None)})


def test_no_number_is_null_in_both_lanes() -> None:
    twins = [int(each) for each in digest._NULL.view(np.int64)]
    cells = digest_cells(pa.array([None, *twins]), 3)
    assert len({tuple(pair) for pair in cells.T.tolist()}) == 3


@settings(max_examples=examples(15))
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_digests_do_not_depend_on_offsets(kind: str, data: st.DataObject) -> None:
    arrow_type, strategy = KINDS[kind]
    values = data.draw(st.lists(st.none() | strategy, min_size=2, max_size=12))
    whole = pa.array(values, arrow_type)
    first = data.draw(st.integers(0, len(values) - 1))
    sliced = whole.slice(first)
    fresh = pa.array(whole.to_pylist()[first:], arrow_type)
    assert np.array_equal(digest_cells(sliced, 0), digest_cells(fresh, 0))
    assert np.array_equal(digest_cells(whole, 0)[:, first:], digest_cells(fresh, 0))


@pytest.mark.parametrize("kind", ["int64", "string", "list of text", "decimal"])
def test_what_is_under_a_null_is_not_seen(kind: str) -> None:
    arrow_type, _ = KINDS[kind]
    values = {"int64": 5, "string": "five", "list of text": ["five"], "decimal": Decimal(5)}
    full = pa.array([values[kind]] * 2, arrow_type)
    masked = pa.Array.from_buffers(
        arrow_type,
        2,
        [pa.array([True, False]).buffers()[1], *full.buffers()[1 : 2 if pa.types.is_list(arrow_type) else None]],
        children=[full.values] if pa.types.is_list(arrow_type) else None,
    )
    assert masked.to_pylist() == [full[0].as_py(), None]
    assert np.array_equal(digest_cells(masked, 0), digest_cells(pa.array([full[0].as_py(), None], arrow_type), 0))


@given(st.lists(st.none() | st.integers(-(2**15), 2**15 - 1), min_size=1))
def test_whole_numbers_are_the_same_in_every_width(values: list[int | None]) -> None:
    digests = [digest_cells(pa.array(values, kind), 1) for kind in (pa.int16(), pa.int32(), pa.int64())]
    assert np.array_equal(digests[0], digests[1])
    assert np.array_equal(digests[1], digests[2])


@given(st.lists(st.none() | _TEXTS, min_size=1))
def test_texts_are_the_same_with_wide_offsets_and_dictionaries(values: list[str | None]) -> None:
    narrow = pa.array(values, pa.string())
    expected = digest_cells(narrow, 0)
    assert np.array_equal(digest_cells(narrow.cast(pa.large_string()), 0), expected)
    assert np.array_equal(digest_cells(narrow.dictionary_encode(), 0), expected)


def test_nans_are_one_value_and_zeros_are_two() -> None:
    bits = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0x0, 0x8000000000000000], np.uint64)
    digests = digest_cells(pa.array(bits.view(np.float64)), 0)
    assert (digests[:, 0] == digests[:, 1]).all()
    assert (digests[:, 2] != digests[:, 3]).all()


@given(st.integers(), st.integers())
@example(0, 0)
def test_cells_that_changed_places_show(one: int, other: int) -> None:
    values = [pa.array([hash(value) >> 1]) for value in (one, other)]
    straight = digest_rows(values, {}, [0])
    swapped = digest_rows(values[::-1], {}, [0])
    same = values[0].equals(values[1])
    assert np.array_equal(straight.rows, swapped.rows) == same
    assert np.array_equal(straight.keys, swapped.keys) == same


def test_a_text_that_its_type_cannot_hold_is_neither_null_nor_a_value() -> None:
    cells = pa.array([None, None, None], pa.date32())
    texts = pa.array([None, "infinity", "-infinity"])
    digests = digest_cells(cells, 0, texts)
    assert len({tuple(pair) for pair in digests.T.tolist()}) == 3
    of_text = digest_cells(texts, 0)
    assert (digests[:, 1:] != of_text[:, 1:]).all()
    assert (digests[:, 0] == of_text[:, 0]).all()


def test_without_a_key_the_whole_row_is_the_key() -> None:
    columns = [pa.array([1, 1]), pa.array(["a", "b"])]
    keyed, whole = digest_rows(columns, {}, [0]), digest_rows(columns, {}, [])
    assert (keyed.keys[:, 0] == keyed.keys[:, 1]).all()
    assert np.array_equal(whole.keys, whole.rows)
    assert np.array_equal(whole.rows, keyed.rows)


def test_a_column_of_nulls_needs_no_type() -> None:
    assert np.array_equal(digest_cells(pa.nulls(2), 4), digest_cells(pa.nulls(2, pa.string()), 4))


def test_single_bits_spread_over_both_lanes() -> None:
    values = pa.array([0, *(1 << bit for bit in range(63))])
    digests = digest_cells(values, 0)
    for lane in digests:
        changed = np.bitwise_count(lane[1:] ^ lane[0])
        assert changed.min() > 12
        assert changed.max() < 52


def test_no_few_bits_of_a_binary_make_up_for_each_other() -> None:
    """All differences of one, two and three bits, within a word and over several."""
    value = np.random.default_rng(1).integers(0, 256, 16, np.uint8)
    bits = 8 * len(value)
    place = np.arange(bits)
    pairs = place[:, None] < place
    flipped = [np.argwhere(each) for each in (place >= 0, pairs, pairs[:, :, None] & pairs)]
    total = sum(map(len, flipped))
    values = np.repeat(value[None, :], total, axis=0)
    first = 0
    for places in flipped:
        for bit in places.T:
            values[np.arange(first, first + len(places)), bit // 8] ^= (1 << bit % 8).astype(np.uint8)
        first += len(places)
    content = pa.py_buffer(values.tobytes())
    digests = digest_cells(pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), total, [None, content]), 0)
    assert [len(np.unique(lane)) for lane in digests] == [total, total]
