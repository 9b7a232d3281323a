"""Keys of rows: equal exactly if all cells are the same."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.changes.keys import fingerprints, row_keys
from tests.support.examples import examples


@pytest.mark.trap(31)
@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(4, pa.list_(pa.int64())),
        pa.nulls(4, pa.string()),
        pa.nulls(4, pa.date32()),
        pa.nulls(4, pa.decimal128(5, 2)),
        pa.nulls(4, pa.timestamp("us", "UTC")),
        pa.nulls(4, pa.time64("us")),
        pa.nulls(4, pa.float64()),
    ],
    ids=lambda column: str(column.type),
)
def test_cells_that_their_type_cannot_hold_are_told_apart_by_their_texts(column: pa.Array) -> None:
    keys = row_keys([pa.array([1, 1, 1, 1]), column], [None, pa.array([None, "", "a", "b"])]).to_pylist()
    assert len(set(keys)) == 4
    assert row_keys([pa.array([1]), column.slice(2, 1)], [None, pa.array(["a"])]).to_pylist() == keys[2:3]
    # Others of the batch do not matter.
    assert row_keys([pa.array([1]), column.slice(0, 1)]).to_pylist() == keys[:1]


def test_an_empty_list_is_not_null_and_lists_have_borders() -> None:
    lists = pa.array([None, [], [None], ["ab"], ["a", "b"], ["", "ab"]], pa.list_(pa.string()))
    assert len(set(row_keys([lists]).to_pylist())) == 6
    assert row_keys([lists.slice(3)]).to_pylist() == row_keys([lists]).to_pylist()[3:]


_TYPES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int16(): st.integers(-2, 2),
    pa.int32(): st.integers(-2, 2),
    # Above 2^53, neighbours are the same double.
    pa.int64(): st.integers(-2, 2) | st.integers(2**63 - 4, 2**63 - 1),
    pa.float32(): st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")]),
    pa.float64(): st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("inf")]),
    pa.decimal128(38, 2): st.sampled_from([Decimal("0.00"), Decimal("0.01"), Decimal("-1")]),
    pa.date32(): st.sampled_from([date(1970, 1, 1), date(1, 1, 1)]),
    pa.time64("us"): st.sampled_from([time(0), time(1)]),
    pa.timestamp("us"): st.sampled_from([datetime(1970, 1, 1), datetime(2000, 1, 1)]),
    pa.timestamp("us", "UTC"): st.sampled_from([datetime(1970, 1, 1, tzinfo=UTC), datetime(2000, 1, 1, tzinfo=UTC)]),
    pa.string(): st.text("a\0", max_size=2),
    pa.large_string(): st.text("a\0", max_size=2),
    pa.binary(): st.binary(max_size=2),
    pa.list_(pa.int64()): st.lists(st.none() | st.integers(0, 1), max_size=2),
    pa.list_(pa.string()): st.lists(st.none() | st.text("a", max_size=2), max_size=2),
    pa.list_(pa.list_(pa.bool_())): st.lists(st.none() | st.lists(st.none() | st.booleans(), max_size=2), max_size=2),
    pa.null(): st.none(),
}


@pytest.mark.parametrize("type_", _TYPES, ids=str)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_whole_rows_of_one_column_have_the_same_key_exactly_if_they_are_the_same(type_: pa.DataType, data: Any) -> None:
    values = data.draw(st.lists(st.none() | _TYPES[type_], max_size=12))
    keys = row_keys([pa.array(values, type_)], whole=True)
    assert keys.type == pa.large_binary()
    assert keys.null_count == 0
    numbers = fingerprints(keys).tolist()
    names = {repr(value): (key, number) for value, key, number in zip(values, keys.to_pylist(), numbers, strict=True)}
    assert [names[repr(value)] for value in values] == list(zip(keys.to_pylist(), numbers, strict=True))
    assert len({key for key, _ in names.values()}) == len(names)
    # Other rows, and whether there are NULLs among them, do not matter.
    start = data.draw(st.integers(0, len(values)))
    assert row_keys([pa.array(values, type_).slice(start)], whole=True).to_pylist() == keys.to_pylist()[start:]


@pytest.mark.parametrize("type_", [pa.int16(), pa.int32(), pa.int64()], ids=str)
def test_a_key_of_one_integer_is_never_null(type_: pa.DataType) -> None:
    assert row_keys([pa.array([2**15 - 1], type_)]).to_pylist() == [2**15 - 1]
    with pytest.raises(ValueError, match="a key that is NULL"):
        row_keys([pa.array([1, None], type_)])
