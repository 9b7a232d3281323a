"""Whole numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.values.columns import fits, values

BITS = {"int2": 16, "int4": 32, "int8": 64}


@pytest.mark.parametrize("name", BITS)
def test_both_ends_of_the_range_are_exact(name: str) -> None:
    low, high = -(2 ** (BITS[name] - 1)), 2 ** (BITS[name] - 1) - 1
    assert values(name, [str(low), "0", None, str(high)]) == [low, 0, None, high]


@pytest.mark.parametrize("name", BITS)
def test_numbers_beyond_the_range_are_rejected_and_the_others_stay(name: str) -> None:
    low, high = -(2 ** (BITS[name] - 1)), 2 ** (BITS[name] - 1) - 1
    assert fits(name, ["1", str(low - 1), str(low), None, str(high), str(high + 1)]) == [1, 0, 1, 1, 1, 0]


def test_identifiers_of_the_system_are_unsigned() -> None:
    for name in ("oid", "xid", "cid"):
        assert values(name, ["4294967295", "0"]) == [4294967295, 0]


def test_only_decimal_digits_are_numbers() -> None:
    # Arrow would take 0x10 for 16 and 0xFFFF for -1.
    assert not any(fits("int2", ["0x10", "0xFFFF", "+1", " 1", "1 ", "", "-", "--1", "1_0", "١", "1.0", "1e2"]))


@given(st.lists(st.integers(-(2**70), 2**70), max_size=30))
def test_any_number_is_exact_or_rejected(numbers: list[int]) -> None:
    inside = [-(2**63) <= number < 2**63 for number in numbers]
    cells = [str(number) for number in numbers]
    assert fits("int8", cells) == inside
    kept = [number for number, fit in zip(numbers, inside, strict=True) if fit]
    assert values("int8", [str(number) for number in kept]) == kept
