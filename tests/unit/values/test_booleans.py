"""Truth values."""

from __future__ import annotations

from tests.unit.values.columns import decode, values


def test_postgres_writes_one_letter() -> None:
    assert values("bool", ["t", None, "f"]) == [True, None, False]


def test_other_words_are_rejected() -> None:
    decoded = decode("bool", ["t", "true", "", None, "f", "T", "1"])
    assert decoded.array.to_pylist() == [True, None, None, None, False, None, None]
