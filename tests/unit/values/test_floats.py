"""Floating point numbers."""

from __future__ import annotations

import math
import struct

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.values.columns import fits, values


def same_bits(left: float, right: float) -> bool:
    return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)


def test_special_values_are_values() -> None:
    for name in ("float4", "float8"):
        decoded = values(name, ["NaN", "Infinity", "-Infinity", "-0", None])
        expected = [math.nan, math.inf, -math.inf, -0.0]
        assert all(same_bits(left, right) for left, right in zip(decoded, expected, strict=False))
        assert decoded[4] is None


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20))
def test_doubles_come_back_to_the_last_bit(numbers: list[float]) -> None:
    decoded = values("float8", [repr(number) for number in numbers])
    assert all(same_bits(left, right) for left, right in zip(decoded, numbers, strict=True))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_the_shortest_text_of_a_float4_gives_the_same_float4(numbers: list[float]) -> None:
    decoded = values("float4", [str(np.float32(number)) for number in numbers])
    assert all(same_bits(left, right) for left, right in zip(decoded, numbers, strict=True))


def test_what_overflows_is_not_infinity() -> None:
    assert fits("float4", ["1e39", "-1e39", "3.4028235e+38", "Infinity", None]) == [0, 0, 1, 1, 1]
    assert fits("float8", ["1e400", "1.7976931348623157e+308", "Infinity", "x"]) == [0, 1, 1, 0]
