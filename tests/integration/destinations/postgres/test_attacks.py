"""The postgres destination against what could make its rows wrong: keys, constraints, settings, other people."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from penstock.changes.events import Unchanged
from penstock.destinations.postgres import PostgresDestination
from penstock.errors import ConfigError, DestinationUnavailable, PenstockError, TableRejected
from penstock.schema import Column, PostgresType, TypeKind
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import ITEMS, LINES, ORDERS, TEXT
from penstock.testing.destinations.script import make_context
from tests.integration.destinations.postgres.writing import copy, started, write

KEY = ORDERS.columns[0]


def order(number: int, note: Any = "a note", due: Any = None) -> dict[str, Any]:
    return {"id": number, "note": note, "due": due}


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


def table(*columns: Column) -> Any:
    return replace(ORDERS, columns=columns)


def key(type_: PostgresType, name: str = "id") -> Column:
    return Column(name, 1, type_, identity=True, primary_key_position=1)


def test_domains_that_refuse_null_may_omit_values(any_database, source):
    database = any_database
    database.execute("create schema app; create domain app.code as text not null check (value <> '')")
    code = PostgresType(50_010, "code", "app", TypeKind.DOMAIN, base=TEXT)
    schema = table(key(code), Column("note", 2, TEXT), Column("large", 3, code))
    destination = started(database)
    copy(destination, source, schema, [{"id": name, "note": "n", "large": name * 9} for name in "abc"])
    with source.transaction() as transaction:
        transaction.update(schema, {"id": "a", "note": "same key", "large": Unchanged})
        transaction.update(schema, {"id": "d", "note": "moved", "large": Unchanged}, old={"id": "b"})
        transaction.update(schema, {"id": "c", "note": "whole", "large": "new"})
    write(destination, source.batch())
    found = database.execute("select id, note, large, pg_typeof(large)::text from mirror.orders order by id")
    assert found == [
        ("a", "same key", "a" * 9, "app.code"),
        ("c", "whole", "new", "app.code"),
        ("d", "moved", "b" * 9, "app.code"),
    ]


def test_keys_with_null_inside_are_keys(database, source):
    database.execute("create schema app; create type app.pair as (a int, b int)")
    pair = PostgresType(50_011, "pair", "app", TypeKind.COMPOSITE)
    schema = table(key(pair), Column("note", 2, TEXT), Column("large", 3, TEXT))
    destination = started(database)
    copy(destination, source, schema, [{"id": f"({n},)", "note": "n", "large": str(n) * 9} for n in (1, 2)])
    with source.transaction() as transaction:
        transaction.update(schema, {"id": "(,3)", "note": "moved", "large": Unchanged}, old={"id": "(1,)"})
        transaction.update(schema, {"id": "(2,)", "note": "same key", "large": Unchanged})
    write(destination, source.batch())
    found = database.execute("select id::text, note, large from mirror.orders order by note")
    assert found == [("(,3)", "moved", "1" * 9), ("(2,)", "same key", "2" * 9)]


@pytest.mark.parametrize("kind", ["numeric", "citext"])
def test_keys_that_are_equal_but_not_the_same_keep_their_rows(database, source, kind):
    if kind == "citext":
        database.execute("create schema ext; create extension citext schema ext")
        type_, one, other = PostgresType(50_012, "citext", "ext"), "A", "a"
    else:
        type_, one, other = PostgresType(1700, "numeric"), "1.0", "1.00"
    schema = table(key(type_), Column("note", 2, TEXT), Column("large", 3, TEXT))
    destination = started(database)
    copy(destination, source, schema, [{"id": one, "note": "n", "large": "x" * 9}])
    with source.transaction() as transaction:
        transaction.update(schema, {"id": other, "note": "moved", "large": Unchanged}, old={"id": one})
        transaction.update(schema, {"id": one, "note": "back", "large": Unchanged}, old={"id": other})
    write(destination, source.batch())
    assert database.execute("select id::text, note, large from mirror.orders") == [(one, "back", "x" * 9)]
    with source.transaction() as transaction:
        transaction.update(schema, {"id": other, "note": "moved", "large": Unchanged}, old={"id": one})
    write(destination, source.batch())
    assert database.execute("select id::text, note, large from mirror.orders") == [(other, "moved", "x" * 9)]


def test_settings_of_the_database_change_no_value(any_database, source):
    database = any_database
    name = database.execute("select current_database()")[0][0]
    for setting in (
        "array_nulls = off",
        "xmloption = document",
        "datestyle = 'German'",
        "intervalstyle = 'sql_standard'",
        "timezone = 'Asia/Tokyo'",
        "extra_float_digits = -10",
        "default_transaction_isolation = 'serializable'",
        "default_transaction_deferrable = on",
        "transform_null_equals = on",
        "statement_timeout = '1ms'",
        "standard_conforming_strings = off",
        "escape_string_warning = on",
        "check_function_bodies = off",
    ):
        database.execute(f'alter database "{name}" set {setting}')
    schema = table(
        KEY,
        Column("list", 2, PostgresType(1009, "_text", kind=TypeKind.ARRAY, element=TEXT)),
        Column("document", 3, PostgresType(142, "xml") if database.server.major < 18 else TEXT),
        Column("moment", 4, PostgresType(1184, "timestamptz")),
        Column("number", 5, PostgresType(701, "float8")),
    )

    def row(number: int) -> dict[str, Any]:
        return {
            "id": number,
            "list": [None, "NULL", "null", ""],
            "document": "<a/>and <b/>",
            "moment": datetime(2020, 2, 1, 3, 4, 5, tzinfo=UTC),
            "number": 0.1 + 0.2,
        }

    destination = started(database)
    copy(destination, source, schema, [row(1)])
    with source.transaction() as transaction:
        transaction.insert(schema, row(2))
        transaction.update(schema, row(1))
    write(destination, source.batch())
    found = database.execute(
        "select list[1] is null, list[2] = 'NULL', document::text, "
        "extract(epoch from moment)::int8, number = 0.1::float8 + 0.2::float8 from mirror.orders"
    )
    assert found == [(True, True, "<a/>and <b/>", 1580526245, True)] * 2


def test_tables_of_one_name_do_not_take_each_others_place(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    other = replace(ORDERS, namespace="sales", table_id=ORDERS.table_id + 1)
    with pytest.raises(TableRejected, match=r"public\.orders"):
        copy(destination, source, other, [order(2)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(3))
    write(destination, source.batch())
    assert database.execute("select id from mirror.orders order by 1") == [(1,), (3,)]


@pytest.mark.parametrize("transactional", ["table", "batch"])
def test_unique_indexes_hold_whatever_order_values_move_in(database, source, transactional):
    destination = started(database, transactional=transactional)
    copy(destination, source, ORDERS, [order(n, f"n{n}") for n in (1, 2, 3, 4)])
    database.execute("create unique index on mirror.orders (note)")
    with source.transaction() as transaction:
        # 1 and 2 exchange their notes; 5 gets that of 3, which is deleted; 4 gets a new key.
        transaction.update(ORDERS, order(1, "tmp"))
        transaction.update(ORDERS, order(2, "n1"))
        transaction.update(ORDERS, order(1, "n2"))
        transaction.update(ORDERS, order(6, Unchanged), old={"id": 4})
        transaction.update(ORDERS, order(3, "other"))
        transaction.insert(ORDERS, order(5, "n3"))
    write(destination, source.batch())
    assert database.execute("select id, note from mirror.orders order by 1") == [
        (1, "n2"),
        (2, "n1"),
        (3, "other"),
        (5, "n3"),
        (6, "n4"),
    ]


def test_a_destination_that_lost_commits_is_noticed(database, source):
    """A failover to a standby that lagged, or a restore: what the pipeline has forgotten must not be skipped."""
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    before = database.execute("select position from penstock.destination_tables")[0][0]
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    write(destination, source.batch())
    database.execute("delete from mirror.orders where id = 2")
    database.execute("update penstock.destination_tables set position = %s", [before])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(3))
    with pytest.raises(PenstockError, match="lost"):
        write(destination, source.batch())
    assert database.execute("select id from mirror.orders order by 1") == [(1,)]


def test_a_locked_table_delays_its_batch_instead_of_breaking_foreign_keys(database, source):
    destination = started(database, transactional="batch", lock_timeout=0.2)
    copy(destination, source, ORDERS, [order(1)])
    copy(destination, source, ITEMS, [])
    database.execute(
        'alter table mirror."Order items" add foreign key (id) references mirror.orders deferrable initially deferred'
    )
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
        transaction.insert(ITEMS, order(2))
    batch = source.batch()
    with database.connect() as reader, reader.transaction():
        reader.execute("lock table mirror.orders in share mode")
        with pytest.raises(DestinationUnavailable, match=r"public\.orders"):
            write(destination, batch)
    write(destination, batch)
    assert database.execute('select count(*) from mirror."Order items"') == [(1,)]


def test_kept_rows_survive_a_key_of_another_type(database, source):
    destination = started(database, mode="soft_delete")
    copy(destination, source, ORDERS, [order(1), order(2)])
    with source.transaction() as transaction:
        transaction.delete(ORDERS, {"id": 1})
    write(destination, source.batch())
    changed = table(key(TEXT), *ORDERS.columns[1:])
    copy(destination, source, changed, [{**order(2), "id": "2"}], attempt="attempt-2")
    found = database.execute("select id, _deleted_at is null from mirror.orders order by 1")
    assert found == [("1", False), ("2", True)]


def test_what_users_added_stays_when_a_table_is_copied_again(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    database.execute("alter table mirror.orders add words text generated always as (upper(note)) stored")
    database.execute("alter table mirror.orders alter due set default '2020-01-01'")
    copy(destination, source, ORDERS, [order(2)], attempt="attempt-2")
    assert database.execute("select id, words from mirror.orders") == [(2, "A NOTE")]
    database.execute("drop schema mirror cascade")


def test_grants_on_columns_stay_when_a_table_is_copied_again(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    database.execute("grant select (id) on mirror.orders to public")
    copy(destination, source, ORDERS, [order(2)], attempt="attempt-2")
    found = database.execute(
        "select attacl is not null from pg_attribute where attrelid = 'mirror.orders'::regclass and attname = 'id'"
    )
    assert found == [(True,)]


@pytest.mark.parametrize("change", ["drop table mirror.orders", "alter table mirror.orders drop column note"])
def test_a_table_that_somebody_changed_says_how_to_get_it_back(database, source, change):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    database.execute(change)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    with pytest.raises(TableRejected) as caught:
        write(destination, source.batch())
    assert "penstock resync" in caught.value.hint


def test_forced_row_security_is_an_error_not_fewer_rows(database, source):
    ((name,),) = database.execute("select current_database()")
    role = f"writer_{name}"
    database.execute(f"create role {role} login password 'x'; grant all on database {name} to {role}")
    destination = PostgresDestination(make_conninfo(database.dsn, user=role, password="x"), schema="mirror")
    try:
        destination.startup(make_context())
        copy(destination, source, ORDERS, [order(1)])
        for change in ("enable", "force"):
            database.execute(f"alter table mirror.orders {change} row level security")
        with source.transaction() as transaction:
            transaction.update(ORDERS, order(1, "new"))
        with pytest.raises(ConfigError, match="row-level security"):
            write(destination, source.batch())
    finally:
        destination.shutdown()
        database.execute(f"drop owned by {role} cascade; drop role {role}")


def test_deferred_constraints_name_their_table(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    database.execute("alter table mirror.orders add constraint only_one unique (note) deferrable initially deferred")
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    with pytest.raises(TableRejected, match=r"public\.orders.*only_one"):
        write(destination, source.batch())


def test_a_deleted_row_that_came_back_under_an_equal_key_is_alive(database, source):
    schema = table(key(PostgresType(1700, "numeric")), Column("note", 2, TEXT))
    destination = started(database, mode="soft_delete")
    copy(destination, source, schema, [{"id": "1.0", "note": "old"}])
    with source.transaction() as transaction:
        transaction.update(schema, {"id": "1.00", "note": "new"}, old={"id": "1.0"})
    write(destination, source.batch())
    found = database.execute("select id::text, note, _deleted_at is null from mirror.orders")
    assert found == [("1.00", "new", True)]


def test_a_database_that_publishes_all_tables_accepts_deletes_from_tables_without_a_key(database, source):
    """Without a replica identity, the server would refuse them."""
    database.execute("create publication everything for all tables")
    destination = started(database)
    copy(destination, source, LINES, [{"level": 1, "line": "a"}, {"level": 2, "line": "b"}])
    with source.transaction() as transaction:
        transaction.delete(LINES, {"level": 1, "line": "a"})
    write(destination, source.batch())
    assert database.execute("select line from mirror.lines") == [("b",)]


def test_kept_rows_do_not_stop_a_copy_with_columns_of_other_types(database, source):
    """A column can be altered with any expression: old values may not be values of its new type."""
    destination = started(database, mode="soft_delete")
    copy(destination, source, ORDERS, [order(1, "no date"), order(2)])
    with source.transaction() as transaction:
        transaction.delete(ORDERS, {"id": 1})
    write(destination, source.batch())
    changed = table(KEY, replace(ORDERS.columns[1], type=PostgresType(1082, "date")), ORDERS.columns[2])
    copy(destination, source, changed, [order(2, date(2020, 1, 1))], attempt="attempt-2")
    found = database.execute("select id, note::text, _deleted_at is null from mirror.orders order by 1")
    assert found == [(1, None, False), (2, "2020-01-01", True)]
