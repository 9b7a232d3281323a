"""The texts in which the server prints the bounds of partitions."""

from __future__ import annotations

import pytest

from penstock.source.bounds import Edge, InList, InRange, parse_bound


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FOR VALUES FROM (10) TO (20)", InRange(("a",), ("10",), ("20",))),
        ("FOR VALUES FROM ('-5') TO ('2024-01-01 00:00:00')", InRange(("a",), ("-5",), ("2024-01-01 00:00:00",))),
        ("FOR VALUES FROM (MINVALUE) TO (MAXVALUE)", InRange(("a",), (Edge.LOWEST,), (Edge.HIGHEST,))),
        ("FOR VALUES FROM ('a, b') TO ('it''s')", InRange(("a",), ("a, b",), ("it's",))),
        ("FOR VALUES FROM (1, 2) TO (3, 4)", None),
        ("FOR VALUES FROM (f(1)) TO (2)", None),
        ("DEFAULT", None),
        (None, None),
    ],
)
def test_ranges(text: str | None, expected: InRange | None) -> None:
    assert parse_bound("r", ["a"], text) == expected


def test_ranges_of_several_columns() -> None:
    text = "FOR VALUES FROM (1, MINVALUE) TO (1, '5')"
    assert parse_bound("r", ["a", "b"], text) == InRange(("a", "b"), ("1", Edge.LOWEST), ("1", "5"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FOR VALUES IN ('a', 'b')", InList("a", ("a", "b"), False)),
        ("FOR VALUES IN (1, NULL)", InList("a", ("1",), True)),
        ("FOR VALUES IN ('NULL')", InList("a", ("NULL",), False)),
        ("FOR VALUES IN (true)", InList("a", ("true",), False)),
        ("FOR VALUES IN (E'a\\\\b')", None),
    ],
)
def test_lists(text: str, expected: InList | None) -> None:
    assert parse_bound("l", ["a"], text) == expected


def test_a_hash_has_no_bounds() -> None:
    assert parse_bound("h", ["a"], "FOR VALUES WITH (modulus 2, remainder 0)") is None
