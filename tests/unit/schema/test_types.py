"""Which changes of a column's type leave its values as they are."""

from __future__ import annotations

import pytest

from penstock.schema import PostgresType, TypeKind
from penstock.schema.types import keeps_values

OIDS = {
    name: oid
    for oid, name in enumerate(
        ["text", "varchar", "bpchar", "json", "jsonb", "numeric", "timestamp", "timestamptz", "varbit", "cidr", "inet"],
        start=1,
    )
}


def numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale) + 4


def known(name: str) -> PostgresType:
    return PostgresType(OIDS[name], name)


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (("text", -1), ("text", -1), True),
        (("varchar", 14), ("varchar", 24), True),
        (("varchar", 24), ("varchar", 14), False),
        (("varchar", 14), ("text", -1), True),
        (("text", -1), ("varchar", 14), False),
        (("text", -1), ("varchar", -1), True),
        (("text", -1), ("bpchar", 14), False),
        (("bpchar", 14), ("bpchar", 24), False),
        (("json", -1), ("jsonb", -1), False),
        (("timestamp", -1), ("timestamp", 0), False),
        (("timestamp", 3), ("timestamp", 6), True),
        (("timestamp", -1), ("timestamp", 6), True),
        (("timestamp", 3), ("timestamp", -1), True),
        (("timestamp", -1), ("timestamptz", -1), False),
        (("numeric", -1), ("numeric", numeric(50, 2)), False),
        (("numeric", numeric(50, 2)), ("numeric", numeric(60, 2)), True),
        (("numeric", numeric(50, 2)), ("numeric", numeric(60, 3)), False),
        (("numeric", numeric(50, 2)), ("numeric", -1), True),
        (("varbit", 5), ("varbit", 9), True),
        (("varbit", 9), ("varbit", 5), False),
        (("cidr", -1), ("inet", -1), False),
        (("inet", -1), ("cidr", -1), False),
    ],
)
def test_values_are_kept_by_what_the_server_does_without_rewriting(
    before: tuple[str, int], after: tuple[str, int], kept: bool
) -> None:
    assert keeps_values((known(before[0]), before[1]), (known(after[0]), after[1])) is kept


def test_a_domain_is_what_is_under_it_and_types_of_ones_own_are_only_themselves() -> None:
    domain = PostgresType(1000, "name", "public", TypeKind.DOMAIN, base=known("varchar"), base_modifier=14)
    assert keeps_values((domain, -1), (known("text"), -1))
    assert not keeps_values((known("text"), -1), (domain, -1))
    mood, other = (PostgresType(oid, "mood", "public", TypeKind.ENUM) for oid in (1001, 1002))
    assert keeps_values((mood, -1), (mood, -1))
    assert not keeps_values((mood, -1), (other, -1))
    assert not keeps_values((mood, -1), (known("text"), -1))
