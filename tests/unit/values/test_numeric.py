"""Exact decimals, and numerics that no 128-bit decimal holds."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.values import NumericPolicy, OutOfRange, TypeSettings, codec_for
from tests.unit.values.columns import builtin, decode, fits, numeric_modifier, values


def arrow_type(precision: int, scale: int) -> pa.DataType:
    return codec_for(builtin("numeric"), numeric_modifier(precision, scale)).arrow_type


def test_a_constrained_numeric_is_a_decimal() -> None:
    assert arrow_type(12, 2) == pa.decimal128(12, 2)
    decoded = values("numeric", ["1.50", "-0.01", None, "9999999999.99"], numeric_modifier(12, 2))
    assert decoded == [Decimal("1.50"), Decimal("-0.01"), None, Decimal("9999999999.99")]


def test_scales_outside_the_precision_get_a_decimal_that_lakes_can_store() -> None:
    assert arrow_type(3, 5) == pa.decimal128(5, 5)
    assert values("numeric", ["0.00999", "-0.00001", "0"], numeric_modifier(3, 5))[0] == Decimal("0.00999")
    assert arrow_type(3, -2) == pa.decimal128(5, 0)
    assert values("numeric", ["99900", "-100", "0"], numeric_modifier(3, -2)) == [99900, -100, 0]
    assert arrow_type(38, -1) == pa.string()
    assert arrow_type(2, 39) == pa.string()


@pytest.mark.trap(31)
def test_more_than_38_digits_are_text_and_lose_nothing() -> None:
    wide = "9" * 60 + "." + "1" * 30
    assert arrow_type(39, 0) == pa.string()
    assert values("numeric", [wide, "NaN", "-Infinity", "1.10"]) == [wide, "NaN", "-Infinity", "1.10"]


@pytest.mark.trap(31)
def test_nan_and_infinity_are_rejected() -> None:
    cells = ["NaN", "1.50", "Infinity", "-Infinity", None]
    assert fits("numeric", cells, numeric_modifier(12, 2)) == [0, 1, 0, 0, 1]
    assert fits("numeric", cells, numeric_modifier(38, 18)) == [0, 1, 0, 0, 1]


@pytest.mark.trap(31)
def test_digits_that_overflow_never_become_another_number() -> None:
    # Arrow's own cast makes the first 0, the second negative and the third 1.
    cells = [str(2**128), "9" * 39, str(2**256 + 1), "12345678901234567890123456", "9" * 20]
    assert fits("numeric", cells, numeric=NumericPolicy.DECIMAL) == [0, 0, 0, 0, 1]
    assert fits("numeric", ["1" + "0" * 38, "9" * 38, "-" + "9" * 38], numeric_modifier(38, 0)) == [0, 1, 1]


def test_nothing_is_rounded() -> None:
    cells = ["1.005", "1.00500", "1.0050" + "0" * 60, "1.0051", "1e2"]
    assert fits("numeric", cells, numeric_modifier(10, 3)) == [1, 1, 1, 0, 0]


def test_unconstrained_numerics_follow_the_policy() -> None:
    as_decimal = decode("numeric", ["3.14", None, "0." + "1" * 19], numeric=NumericPolicy.DECIMAL)
    assert as_decimal.array.type == pa.decimal128(38, 18)
    assert as_decimal.array.to_pylist() == [Decimal("3.14"), None, None]
    assert values("numeric", ["3.14", "NaN", None], numeric=NumericPolicy.DOUBLE)[0] == 3.14
    assert fits("numeric", ["Infinity", "1" + "0" * 400], numeric=NumericPolicy.DOUBLE) == [1, 0]
    wide = decode("numeric", ["1.25"], numeric_modifier(50, 4), numeric=NumericPolicy.DECIMAL)
    assert wide.array.type == pa.decimal128(38, 4)


def test_text_policy_leaves_numerics_alone_that_hold_everything() -> None:
    as_text = TypeSettings(out_of_range=OutOfRange.TEXT)
    assert codec_for(builtin("numeric"), numeric_modifier(12, 2), as_text).arrow_type == pa.string()
    as_double = TypeSettings(out_of_range=OutOfRange.TEXT, numeric=NumericPolicy.DOUBLE)
    assert codec_for(builtin("numeric"), -1, as_double).arrow_type == pa.float64()


@given(
    st.integers(1, 38).flatmap(lambda precision: st.tuples(st.just(precision), st.integers(0, precision))),
    st.lists(st.tuples(st.integers(-(10**42), 10**42), st.integers(0, 42)), max_size=8),
)
def test_any_decimal_is_exact_or_rejected(shape: tuple[int, int], numbers: list[tuple[int, int]]) -> None:
    precision, scale = shape
    decimals = [Decimal(f"{digits}e-{places}") for digits, places in numbers]
    decoded = decode("numeric", [f"{number:f}" for number in decimals], numeric_modifier(precision, scale))
    for number, got in zip(decimals, decoded.array.to_pylist(), strict=True):
        shifted = number.as_tuple()
        unscaled = int("".join(map(str, shifted.digits))) * 10 ** max(int(shifted.exponent) + scale, 0)
        divisor = 10 ** max(-int(shifted.exponent) - scale, 0)
        holds = unscaled % divisor == 0 and unscaled // divisor < 10**precision
        assert (got is not None) == holds
        assert got is None or got == number
