"""Rows by their keys, as the source has them now."""

from __future__ import annotations

import datetime
import pickle
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE
from penstock.copy.fetch import SourceFetch
from penstock.schema import TableSchema
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.source.connections import Role, SourceSettings, connect


def schema_of(database: Any, table: str) -> TableSchema:
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        [(table_id,)] = database.execute(f"select '{table}'::regclass::oid::int8")
        found = load_table(connection, table_id)
        assert found is not None
        return schema_from_catalog(found, load_types(connection, [each.type_oid for each in found.live_attributes]))


def fetch(database: Any, table: str, keys: pa.Table) -> list[dict[str, Any]]:
    fetcher = pickle.loads(pickle.dumps(SourceFetch(SourceSettings(database.dsn))))
    return fetcher.fetch(schema_of(database, table), keys).to_pylist()


def test_rows_that_are_there_come_whole(database):
    database.execute(
        "create type mood as enum ('sad', 'glad');"
        "create table things (a int, b text, flag bool, padded char(4), mood mood, body text, day date, "
        "primary key (b, a));"
        "insert into things select i, 'k,' || i, i = 1, 'x', 'glad', repeat('y', 5000), "
        "case i when 2 then 'infinity' else date '2026-01-01' end from generate_series(1, 5) i"
    )
    keys = pa.table({"a": pa.array([1, 2, 99], pa.int32()), "b": ["k,1", "k,2", "k,99"]})
    first, second = sorted(fetch(database, "things", keys), key=lambda row: row["a"])
    assert first == {
        "a": 1,
        "b": "k,1",
        "flag": True,
        "padded": "x   ",
        "mood": "glad",
        "body": "y" * 5000,
        "day": datetime.date(2026, 1, 1),
        UNREPRESENTABLE: None,
    }
    assert (second["day"], second[UNREPRESENTABLE]) == (None, [("day", "infinity")])
    assert fetch(database, "things", keys.slice(0, 0)) == []


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("bytea", b"\x00\xff'"),
        ("numeric(10,2)", "1.50"),
        ("timestamptz", datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)),
        ("timestamp", datetime.datetime(2026, 1, 2, 3, 4, 5, 6)),
        ("uuid", "4b5b1d0e-0000-4000-8000-000000000001"),
        ("float8", 0.1),
        ("bool", True),
    ],
)
def test_keys_of_many_types_find_their_rows(database, type_, value):
    database.execute(f"create table keyed (k {type_} primary key, n int)")
    database.execute("insert into keyed values (%s, 7)", [value])
    [row] = fetch(database, "keyed", pa.table({"k": pa.array([value])}))
    assert row["n"] == 7


def test_a_key_that_its_type_cannot_hold_is_asked_for_by_its_text(database):
    database.execute("create table keyed (k date primary key, n int); insert into keyed values ('infinity', 7)")
    maps = pa.array([[("k", "infinity")]], UNREPRESENTABLE_TYPE)
    [row] = fetch(database, "keyed", pa.table({"k": pa.nulls(1, pa.date32()), UNREPRESENTABLE: maps}))
    assert row["n"] == 7
