"""Row filters: what they may say, and that columns are compared as the server compares them."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from penstock.changes.conditions import parse_filter
from penstock.changes.filters import Cells, RowFilter, bind_filter
from penstock.errors import ConfigError, ValuesNotSent
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema, TypeKind

MOOD = PostgresType(90001, "mood", "public", TypeKind.ENUM)
TYPES = {
    "id": (PostgresType(20, "int8"), -1),
    "country": (PostgresType(25, "text"), -1),
    "mood": (MOOD, -1),
    "active": (PostgresType(16, "bool"), -1),
    "price": (PostgresType(1700, "numeric"), ((10 << 16) | 2) + 4),
    "born": (PostgresType(1082, "date"), -1),
    "seen": (PostgresType(1184, "timestamptz"), -1),
    "weight": (PostgresType(701, "float8"), -1),
    "Odd Name": (PostgresType(23, "int4"), -1),
}
SCHEMA = TableSchema(
    1,
    "public",
    "users",
    tuple(
        Column(name, number, type_, modifier, identity=name == "id", primary_key_position=1 if name == "id" else None)
        for number, (name, (type_, modifier)) in enumerate(TYPES.items(), 1)
    ),
)


def bound(text: str, schema: TableSchema = SCHEMA) -> RowFilter:
    return bind_filter(parse_filter(text), schema)


def kept(text: str, **columns: Cells | pa.Array) -> list[bool]:
    cells = {name: each if isinstance(each, Cells) else Cells(each) for name, each in columns.items()}
    return bound(text).keep(cells, len(next(iter(cells.values())).values)).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("country = 'DE'", [True, False, False]),
        ("country <> 'DE'", [False, True, False]),
        ("country in ('DE', 'FR')", [True, True, False]),
        ("country not in ('DE')", [False, True, False]),
        ("country is null", [False, False, True]),
        ("country is not null", [True, True, False]),
        ("not country = 'DE'", [False, True, False]),
        ("id > 1 and country = 'FR'", [False, True, False]),
        ("id = 3 or country = 'FR'", [False, True, True]),
        ("not (id = 3 or country = 'FR')", [True, False, False]),
        ("COUNTRY = 'FR' OR id=-3", [False, True, False]),
    ],
)
def test_conditions_have_three_values_like_those_of_sql(text, expected):
    found = kept(text, id=pa.array([1, 2, 3]), country=pa.array(["DE", "FR", None]))
    assert found == expected


def test_a_flag_alone_is_a_condition():
    flags = pa.array([True, False, None])
    assert kept("active", active=flags) == [True, False, False]
    assert kept("not active", active=flags) == [False, True, False]
    assert kept("active = false", active=flags) == [False, True, False]


def test_numbers_and_times_are_compared_by_value():
    prices = pa.array([Decimal("1.50"), Decimal("-2.00")], pa.decimal128(10, 2))
    assert kept("price >= 1.5", price=prices) == [True, False]
    assert kept("price = 1.505", price=prices) == [False, False]
    assert kept("price > 123456789012345", price=prices) == [False, False]
    days = pa.array([date(2026, 1, 1), date(2025, 1, 1)])
    assert kept("born >= '2026-01-01'", born=days) == [True, False]
    moments = pa.array([0, 10**15], pa.timestamp("us", "UTC"))
    assert kept("seen < '1970-01-01 02:00:00+01:00'", seen=moments) == [True, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("born < '2026-01-01'", [True, False, True, False]),
        ("born >= '2026-01-01'", [False, True, False, True]),
        ("born = '2026-01-01'", [False, False, False, False]),
        ("born <> '2026-01-01'", [True, True, True, True]),
        ("born is null", [False, False, False, False]),
    ],
)
def test_values_beyond_the_ends_of_the_arrow_type_are_beyond_every_constant(text, expected):
    texts = pa.array(["-infinity", "infinity", "0044-03-15 BC", "12000-01-01"])
    assert kept(text, born=Cells(pa.nulls(4, pa.date32()), texts)) == expected


def test_a_large_value_that_was_left_out_equals_no_short_constant():
    cells = Cells(pa.array(["DE", None, None]), None, np.array([False, True, False]))
    assert kept("country = 'DE'", country=cells) == [True, False, False]
    assert kept("country <> 'DE'", country=cells) == [False, True, False]
    assert kept("country is null", country=cells) == [False, False, True]


def test_a_long_constant_needs_the_old_row():
    long = f"country = '{'x' * 21}'"
    with pytest.raises(ConfigError, match="more than 20 bytes") as refused:
        bound(long)
    assert "replica identity full" in refused.value.hint
    bound(f"country = '{'x' * 20}'")
    with pytest.raises(ConfigError, match="more than 20 bytes"):
        bound(f"country = '{'é' * 6}'")
    full = TableSchema(1, "public", "users", SCHEMA.columns, ReplicaIdentity.FULL)
    cells = {"country": Cells(pa.array([None], pa.string()), None, np.array([True]))}
    with pytest.raises(ValuesNotSent):
        bound(long, full).keep(cells, 1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "needs the name of a column"),
        ("country", "a text in single quotes"),
        ("country = null", "is null"),
        ("country = other", "something else than a constant"),
        ("lower(country) = 'x'", "calls a function"),
        ("country like 'x%'", "has 'like', which filters do not support"),
        ("id between 1 and 5", "has 'between', which filters do not support"),
        ("id 5", "has a constant where `and`, `or` or its end should be"),
        ("id = 1 or country ~ 'x'", "cannot be read from character 19 on, '~'"),
        ("country not like 'x%'", "has 'like', which filters do not support"),
        ("id not 5", "operator that filters do not support"),
        ("country < 'DE'", "by order"),
        ("country = 5", "a text in single quotes"),
        ("id = 'x'", "a whole number"),
        ("id = 1.5", "a whole number"),
        ("id = 99999999999999999999", "a whole number"),
        ("seen > '2026-01-01 00:00:00'", r"\+00:00"),
        ("born > 'yesterday'", "a date like"),
        ("weight > 1", "cannot compare column 'weight' of type float8"),
        ("id = 1 and", "needs the name of a column"),
        ("(id = 1", "lacks"),
        ("id = 1)", r"has '\)' where `and`, `or` or its end should be"),
        ("id = 1; drop table users", "cannot be read from character 7"),
    ],
)
def test_everything_else_is_refused(text, problem):
    with pytest.raises(ConfigError, match=problem):
        bound(text)


def test_the_servers_expression_quotes_and_casts():
    assert bound("country = 'it''s'").sql() == (
        """("country"::pg_catalog.text collate pg_catalog."C" = 'it''s'::pg_catalog.text)"""
    )
    assert bound('"Odd Name" in (1, 2)').sql() == (
        """(("Odd Name" = '1'::pg_catalog.int8) or ("Odd Name" = '2'::pg_catalog.int8))"""
    )
    assert bound("not active and weight is null").sql() == (
        """((not ("active" = 'true'::pg_catalog.bool)) and ("weight" is null))"""
    )
