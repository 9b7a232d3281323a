"""Statistics: never narrower than the values."""

from __future__ import annotations

import datetime
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.destinations.delta.statistics import StatisticsCollector, collect_statistics, loosened, record_count

pytestmark = pytest.mark.trap(39)


def of(values: list[Any], kind: pa.DataType) -> dict[str, Any]:
    return json.loads(collect_statistics(pa.table({"c": pa.array(values, kind)})), parse_float=decimal.Decimal)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1))
def test_texts_lie_between_their_bounds_in_the_order_of_bytes(values: list[str]) -> None:
    found = of(list(values), pa.string())
    low, high = found["minValues"]["c"].encode(), found["maxValues"]["c"].encode()
    assert all(low <= value.encode() <= high for value in values)
    assert len(found["maxValues"]["c"]) <= 60


@pytest.mark.parametrize("value", ["x" * 50, "x" * 32, "\U0010ffff" * 50, "x" * 32 + "\U0010ffff" * 3 + "y", "𝄞" * 40])
def test_long_texts_are_cut_outwards(value: str) -> None:
    found = of([value], pa.string())
    assert value.startswith(found["minValues"]["c"])
    assert found["maxValues"]["c"].encode() >= value.encode()
    assert len(found["minValues"]["c"]) <= 32


@given(st.lists(st.decimals(min_value=-(10**35), max_value=10**35, places=2), min_size=1))
def test_decimals_keep_all_their_digits(values: list[decimal.Decimal]) -> None:
    found = json.loads(
        collect_statistics(pa.table({"c": pa.array(values, pa.decimal128(38, 2))})),
        parse_float=decimal.Decimal,
        parse_int=decimal.Decimal,
    )
    assert (found["minValues"]["c"], found["maxValues"]["c"]) == (min(values), max(values))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_floats_that_engines_order_differently_have_no_bounds(value: float) -> None:
    found = of([1.0, value], pa.float64())
    assert found["minValues"] == found["maxValues"] == {}
    assert found["nullCount"] == {"c": 0}


def test_nan_in_one_piece_is_not_forgotten_by_the_next() -> None:
    schema = pa.schema([pa.field("c", pa.float64())])
    collector = StatisticsCollector(schema)
    for values in ([1.0], [float("nan")], [2.0]):
        collector.add(pa.table({"c": values}, schema=schema))
    assert json.loads(collector.result())["maxValues"] == {}


def test_moments_and_days_are_exact() -> None:
    moment = datetime.datetime(2024, 2, 29, 1, 2, 3, 456789)
    found = of([moment], pa.timestamp("us"))
    assert found["maxValues"]["c"] == "2024-02-29T01:02:03.456789"
    found = of([moment.replace(tzinfo=datetime.UTC)], pa.timestamp("us", "UTC"))
    assert found["minValues"]["c"] == "2024-02-29T01:02:03.456789Z"
    assert of([datetime.date(1, 1, 1)], pa.date32())["minValues"]["c"] == "0001-01-01"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (-719_163, pa.date32()),
        (2_932_897, pa.date32()),
        (253_402_300_800_000_000, pa.timestamp("us")),
        (-62_135_596_800_000_001, pa.timestamp("us", "UTC")),
    ],
)
def test_days_outside_of_the_calendar_have_no_bounds(value: int, kind: pa.DataType) -> None:
    column = pa.array([value], pa.int32() if kind == pa.date32() else pa.int64()).cast(kind)
    assert json.loads(collect_statistics(pa.table({"c": column})))["minValues"] == {}


def test_nulls_are_counted_and_columns_of_nulls_have_no_bounds() -> None:
    found = of([None, None], pa.int64())
    assert found["nullCount"] == {"c": 2}
    assert found["minValues"] == {}
    assert found["numRecords"] == 2
    assert found["tightBounds"] is True


def test_pieces_add_up() -> None:
    whole = pa.table({"id": range(100), "name": [f"n{each:03d}" for each in range(100)]})
    collector = StatisticsCollector(whole.schema)
    for start in (50, 0, 25, 75):
        collector.add(whole.slice(start, 25))
    assert collector.result() == collect_statistics(whole)
    assert record_count(collector.result()) == 100


def test_only_some_columns_have_statistics() -> None:
    wide = pa.table({f"c{number}": [1] for number in range(40)})
    assert len(json.loads(collect_statistics(wide))["nullCount"]) == 32
    assert list(json.loads(collect_statistics(wide, ["c39"]))["minValues"]) == ["c39"]


def test_a_text_that_looks_like_statistics_is_left_alone() -> None:
    stats = collect_statistics(pa.table({"c": ['"tightBounds":true']}))
    changed = json.loads(loosened(stats))
    assert changed["minValues"] == {"c": '"tightBounds":true'}
    assert changed["tightBounds"] is False
