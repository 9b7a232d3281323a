"""Tables by pattern."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.source.patterns import TableName, TablePattern, select_tables

TABLES = [
    TableName("public", "orders"),
    TableName("public", "Orders"),
    TableName("public", "order_items"),
    TableName("sales", "orders"),
    TableName("odd.schema", "a*b"),
]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("orders", 1),
        ("public.orders", 1),
        ("public.order*", 2),
        ("*.orders", 2),
        ("*.*", 5),
        ("*", 5),
        ('"odd.schema"."a*b"', 1),
        ('"odd.schema".*', 1),
        ("public.[oO]rders", 2),
        ("nothing.*", 0),
    ],
)
def test_patterns_match_by_part(pattern: str, count: int) -> None:
    assert len(select_tables(TABLES, [pattern])) == count


def test_exclusions_win() -> None:
    assert select_tables(TABLES, ["public.*"], ["*.order_*"]) == TABLES[:2]


@pytest.mark.parametrize("pattern", ["", ".", "a.", ".a", "a.b.c", '"open', 'a"b', "a..b"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError):
        TablePattern(pattern)
