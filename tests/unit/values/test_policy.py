"""What becomes of values that do not fit."""

from __future__ import annotations

import datetime as dt
import pickle
from decimal import Decimal
from typing import Any

import pytest

from penstock.errors import ValueOutOfRange
from penstock.schema import PostgresType
from penstock.values import (
    NumericPolicy,
    OutOfRange,
    PolicyResult,
    TypeSettings,
    apply_policy,
    codec_for,
    merging_setting,
)
from tests.unit.values.columns import array_of, builtin, numeric_modifier, text_column


def settle(
    type_: PostgresType | str, cells: list[str | None], policy: OutOfRange, modifier: int = -1, **settings: Any
) -> PolicyResult:
    type_ = builtin(type_) if isinstance(type_, str) else type_
    text = text_column(cells)
    codec = codec_for(type_, modifier, TypeSettings(out_of_range=policy, **settings))
    settled = apply_policy(codec.decode(text), text, policy, table="public.orders", column="placed")
    settled.array.validate(full=True)
    assert settled.array.type == codec.arrow_type
    assert settled.kept is None or len(settled.kept) == len(cells)
    return settled


def kept(settled: PolicyResult) -> list[str | None]:
    assert settled.kept is not None
    settled.kept.validate(full=True)
    return settled.kept.to_pylist()


@pytest.mark.parametrize("policy", OutOfRange)
def test_a_column_that_fits_is_left_alone(policy: OutOfRange) -> None:
    settled = settle("int4", ["1", None], policy)
    assert settled.array.to_pylist() == [1, None]
    assert settled.kept is None


@pytest.mark.trap(31)
def test_keep_loses_nothing() -> None:
    settled = settle("date", ["2024-01-01", "infinity", None, "0044-03-15 BC"], OutOfRange.KEEP)
    assert settled.array.to_pylist() == [dt.date(2024, 1, 1), None, None, None]
    assert kept(settled) == [None, "infinity", None, "0044-03-15 BC"]


@pytest.mark.trap(31)
def test_error_names_table_and_column_and_never_the_value() -> None:
    with pytest.raises(ValueOutOfRange) as raised:
        settle("date", ["2024-01-01", "0044-03-15 BC"], OutOfRange.ERROR)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.table, error.column) == ("public.orders", "placed")
    assert "public.orders.placed" in str(error)
    assert "0044" not in repr(error.__dict__)


def test_null_forgets_the_text() -> None:
    settled = settle("time", ["24:00:00", "01:00:00"], OutOfRange.NULL)
    assert settled.array.to_pylist() == [None, dt.time(1)]
    assert settled.kept is None


@pytest.mark.trap(31)
def test_text_columns_hold_everything() -> None:
    settled = settle("timestamptz", ["infinity", "0044-03-15 00:00:00+00 BC"], OutOfRange.TEXT)
    assert settled.array.to_pylist() == ["infinity", "0044-03-15 00:00:00+00 BC"]
    assert settled.kept is None


def test_text_policy_keeps_what_a_type_without_such_values_rejects() -> None:
    assert kept(settle("int4", ["1", "x"], OutOfRange.TEXT)) == [None, "x"]


@pytest.mark.trap(31)
def test_clamp_gives_the_nearest_end() -> None:
    days = settle("date", ["infinity", "-infinity", "0044-03-15 BC", "12024-01-01", None], OutOfRange.CLAMP)
    assert days.array.to_pylist() == [dt.date.max, dt.date.min, dt.date.min, dt.date.max, None]
    assert days.kept is None
    moments = settle("timestamp", ["infinity", "0044-03-15 00:00:00.5 BC", "10000-01-01 00:00:00"], OutOfRange.CLAMP)
    assert moments.array.to_pylist() == [dt.datetime.max, dt.datetime.min, dt.datetime.max]
    zoned = settle(
        "timestamptz", ["-infinity", "0044-03-15 00:00:00+00 BC", "10000-01-01 00:00:00+00"], OutOfRange.CLAMP
    )
    assert [moment.replace(tzinfo=None) for moment in zoned.array.cast("timestamp[us]").to_pylist()] == [
        dt.datetime.min,
        dt.datetime.min,
        dt.datetime.max,
    ]
    times = settle("time", ["24:00:00", "01:00:00"], OutOfRange.CLAMP)
    assert times.array.to_pylist() == [dt.time(23, 59, 59, 999999), dt.time(1)]


@pytest.mark.trap(31)
def test_clamp_keeps_what_has_no_nearest_value() -> None:
    numbers = settle("numeric", ["Infinity", "NaN", "-Infinity", "1.50"], OutOfRange.CLAMP, numeric_modifier(4, 2))
    assert numbers.array.to_pylist() == [Decimal("99.99"), None, Decimal("-99.99"), Decimal("1.50")]
    assert kept(numbers) == [None, "NaN", None, None]
    wide = settle("numeric", ["-" + "9" * 40, "0." + "1" * 20], OutOfRange.CLAMP, numeric=NumericPolicy.DECIMAL)
    assert wide.array.to_pylist()[0] == Decimal("-" + "9" * 20 + "." + "9" * 18)
    assert kept(wide) == [None, "0." + "1" * 20]
    assert kept(settle(array_of("date"), ["{infinity}", "{}"], OutOfRange.CLAMP)) == ["{infinity}", None]


@pytest.mark.trap(31)
@pytest.mark.parametrize(
    ("type_", "modifier", "changes", "setting"),
    [
        ("int8", -1, {"out_of_range": OutOfRange.NULL, "numeric": NumericPolicy.DOUBLE}, None),
        ("text", -1, {"out_of_range": OutOfRange.CLAMP}, None),
        ("date", -1, {"out_of_range": OutOfRange.KEEP}, None),
        ("date", -1, {"out_of_range": OutOfRange.ERROR}, None),
        ("date", -1, {"out_of_range": OutOfRange.TEXT}, None),
        ("date", -1, {"out_of_range": OutOfRange.NULL}, "out_of_range"),
        ("timestamptz", -1, {"out_of_range": OutOfRange.CLAMP}, "out_of_range"),
        ("time", -1, {"out_of_range": OutOfRange.CLAMP}, "out_of_range"),
        ("numeric", -1, {"numeric": NumericPolicy.DOUBLE}, "numeric"),
        ("numeric", numeric_modifier(10, 2), {"numeric": NumericPolicy.DOUBLE}, None),
        ("numeric", numeric_modifier(10, 2), {"out_of_range": OutOfRange.NULL}, "out_of_range"),
        ("numeric", -1, {"numeric": NumericPolicy.DECIMAL}, None),
        ("numeric", -1, {"numeric": NumericPolicy.DECIMAL, "out_of_range": OutOfRange.CLAMP}, "out_of_range"),
        ("numeric", -1, {"out_of_range": OutOfRange.NULL}, None),
        (array_of("numeric"), -1, {"numeric": NumericPolicy.DOUBLE}, "numeric"),
        (array_of("int4"), -1, {"out_of_range": OutOfRange.NULL}, "out_of_range"),
        # Clamping keeps the text of an array.
        (array_of("date"), -1, {"out_of_range": OutOfRange.CLAMP}, None),
    ],
)
def test_settings_that_can_make_different_values_the_same_are_known(
    type_: PostgresType | str, modifier: int, changes: dict[str, Any], setting: str | None
) -> None:
    type_ = builtin(type_) if isinstance(type_, str) else type_
    assert merging_setting(type_, modifier, TypeSettings(**changes)) == setting
