"""The postgres destination where something is odd: names, types, modes, other objects, other writers, lost answers."""

from __future__ import annotations

import threading
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.changes.events import Unchanged
from penstock.destinations.postgres import PostgresDestination, apply
from penstock.destinations.postgres.server import Session
from penstock.errors import (
    ConfigError,
    DestinationUnavailable,
    IllegalTransition,
    LeaseLost,
    SchemaNotFollowed,
    TableBusy,
    TableOwned,
    TableRejected,
    ValuesNotSent,
)
from penstock.schema import Column, PostgresType, ReplicaIdentity, TypeKind
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import DATE, INT8, ITEMS, LINES, ORDERS, TEXT
from penstock.testing.destinations.script import ANCESTRY, make_context
from tests.integration.destinations.postgres.writing import copy, started, write
from tests.support.proxy import Proxy

KEY = ORDERS.columns[0]


def order(number: int, note: Any = "a note", due: Any = None) -> dict[str, Any]:
    return {"id": number, "note": note, "due": due}


def notes(database: Any, table: str = "mirror.orders") -> list[tuple[Any, ...]]:
    return database.execute(f"select id, note from {table} order by id")


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


# Crashes, fences and lost answers


class Killed(BaseException):
    """Stands for a process that dies."""


@pytest.mark.trap(28)
def test_a_kill_between_rows_and_position_changes_nothing(database, source, monkeypatch):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1, "large")])
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(2, Unchanged), old={"id": 1})
        transaction.insert(ORDERS, order(3))
    batch = source.batch()

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(apply.Control, "move", die)
        with pytest.raises(Killed):
            destination.write_events(batch)
    assert notes(database) == [(1, "large")]
    assert destination.position(ORDERS.table_id) == batch.begin
    destination = started(database)
    write(destination, batch)
    write(destination, batch)
    assert notes(database) == [(2, "large"), (3, "a note")]


@pytest.mark.trap(28)
@pytest.mark.parametrize("reaches_the_server", [True, False], ids=["committed", "not committed"])
@pytest.mark.parametrize("transactional", ["table", "batch"])
def test_the_outcome_of_a_commit_need_not_be_known(database, source, monkeypatch, reaches_the_server, transactional):
    with Proxy(int(psycopg.conninfo.conninfo_to_dict(database.dsn)["port"])) as proxy:
        destination = PostgresDestination(proxy.dsn(database.dsn), schema="mirror", transactional=transactional)
        destination.startup(make_context())
        copy(destination, source, LINES, [{"level": 1, "line": "same"}])
        with source.transaction() as transaction:
            transaction.insert(LINES, {"level": 1, "line": "same"})
        batch = source.batch()
        commit = psycopg.Connection.commit

        def commit_and_cut(connection: psycopg.Connection[Any]) -> None:
            if reaches_the_server:
                commit(connection)
            proxy.cut()
            commit(connection)
            raise AssertionError("the connection is cut")

        with monkeypatch.context() as patched:
            patched.setattr(psycopg.Connection, "commit", _failing(commit_and_cut))
            with pytest.raises(DestinationUnavailable):
                destination.write_events(batch)
        write(destination, batch)
        assert database.execute("select count(*) from mirror.lines") == [(2,)]
        assert destination.position(LINES.table_id) == batch.end


def _failing(commit: Any) -> Any:
    """Return what fails as a commit whose connection is gone, even if the driver would find nothing to commit."""

    def failing(connection: psycopg.Connection[Any]) -> None:
        try:
            commit(connection)
        except AssertionError:
            raise psycopg.OperationalError("server closed the connection unexpectedly") from None

    return failing


def test_a_process_that_lost_its_lease_changes_nothing(database, source):
    old = started(database, replace(make_context(), epoch=1))
    copy(old, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    first = source.batch()
    new = started(database, replace(make_context(), epoch=2))
    write(new, first)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(3))
    batch = source.batch()
    error = old.write_events(batch).result().of(ORDERS.table_id).error
    assert isinstance(error, LeaseLost)
    assert notes(database) == [(1, "a note"), (2, "a note")]
    with pytest.raises(LeaseLost):
        old.drop_table_for_copy(ORDERS, "attempt-9")
    write(new, batch)
    assert [number for number, _ in notes(database)] == [1, 2, 3]


def test_a_task_that_runs_twice_writes_once(database, source, monkeypatch):
    """Spark may run a task again although the first run goes on: both write the range, and one of them has it."""
    destination = started(database)
    destination.drop_table_for_copy(LINES, "attempt-1")
    rows = source.copy(LINES, [{"level": 1, "line": "same"}] * 6, ranges=2)
    twice = replace(rows, ranges=(*rows.ranges, rows.ranges[0]))
    destination.write_table_rows(LINES, twice)
    assert database.execute("select count(*) from mirror.lines") == [(6,)]
    with source.transaction() as transaction:
        transaction.insert(LINES, {"level": 2, "line": "new"})
    batch = source.batch()
    done = apply.apply_work

    def again(work: Any) -> Any:
        done(work)
        return done(work)

    monkeypatch.setattr("penstock.destinations.postgres.destination.apply_work", again)
    monkeypatch.setattr("penstock.testing.destinations.script.pickle.dumps", lambda value: value)
    monkeypatch.setattr("penstock.testing.destinations.script.pickle.loads", lambda value: value)
    write(destination, batch)
    assert database.execute("select count(*) from mirror.lines") == [(7,)]


def test_a_late_task_of_an_earlier_attempt_reaches_nothing(database, source):
    destination = started(database)
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    late = source.copy(ORDERS, [order(9)])
    copy(destination, source, ORDERS, [order(1)], attempt="attempt-2")
    with pytest.raises(IllegalTransition):
        destination.write_table_rows(ORDERS, late)
    assert notes(database) == [(1, "a note")]
    assert database.execute("select tablename from pg_tables where tablename like 'copy%%'") == []


def test_a_destination_that_is_away_makes_all_tables_wait(make_server, tmp_path):
    server = make_server()
    name = server.create_database()
    source = ScriptedSource(tmp_path / "segments")
    destination = PostgresDestination(server.dsn(name))
    destination.startup(make_context())
    copy(destination, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    batch = source.batch()
    server.stop("immediate")
    for _ in range(2):
        with pytest.raises(DestinationUnavailable):
            destination.write_events(batch)
    server.start()
    write(destination, batch)
    assert server.execute("select count(*) from public.orders", database=name) == [(2,)]


def test_a_lock_of_another_session_stops_its_table_alone(database, source):
    destination = started(database, lock_timeout=0.2)
    for schema in (ORDERS, ITEMS):
        copy(destination, source, schema, [order(1)])
    with source.transaction() as transaction:
        for schema in (ORDERS, ITEMS):
            transaction.insert(schema, order(2))
    batch = source.batch()
    with database.connect(autocommit=False) as reader:
        reader.execute("lock table mirror.orders in access exclusive mode")
        result = destination.write_events(batch).result()
        assert isinstance(result.of(ORDERS.table_id).error, TableBusy)
        assert result.of(ITEMS.table_id).error is None
    write(destination, batch)
    assert len(notes(database)) == len(notes(database, 'mirror."Order items"')) == 2


def test_a_complete_copy_waits_for_readers_of_the_old_rows(database, source):
    destination = started(database, lock_timeout=0.2)
    copy(destination, source, ORDERS, [order(1)])
    reading = threading.Event()

    def read() -> None:
        with database.connect(autocommit=False) as reader:
            reader.execute("select * from mirror.orders")
            reading.set()
            reader.execute("select pg_sleep(1)")

    thread = threading.Thread(target=read)
    thread.start()
    reading.wait(30)
    copy(destination, source, ORDERS, [order(2)], attempt="attempt-2")
    thread.join()
    assert notes(database) == [(2, "a note")]


# Values, names and types


def test_omitted_values_stay_where_they_are(database, source):
    """Traps 25 and 27, with keys of several columns that exchange their rows."""
    schema = replace(
        ORDERS,
        columns=(
            Column("shop", 1, TEXT, identity=True, primary_key_position=2),
            Column("id", 2, INT8, identity=True, primary_key_position=1),
            Column("note", 3, TEXT),
            Column("large", 4, TEXT),
        ),
    )

    def row(shop: str, number: int, note: Any, large: Any) -> dict[str, Any]:
        return {"shop": shop, "id": number, "note": note, "large": large}

    destination = started(database)
    copy(destination, source, schema, [row("a", number, "n", "x" * number) for number in range(1, 6)])
    with source.transaction() as transaction:
        for number in (1, 2):
            transaction.update(schema, row("a", number, "same key", Unchanged))
        # 3 and 4 exchange their keys by way of another one.
        transaction.update(schema, row("b", 0, "moved", Unchanged), old={"shop": "a", "id": 3})
        transaction.update(schema, row("a", 3, "moved", Unchanged), old={"shop": "a", "id": 4})
        transaction.update(schema, row("a", 4, Unchanged, Unchanged), old={"shop": "b", "id": 0})
        transaction.delete(schema, {"shop": "a", "id": 5})
        transaction.insert(schema, row("a", 5, "new", None))
        transaction.update(schema, row("a", 5, Unchanged, "new"))
    write(destination, source.batch())
    found = database.execute("select shop, id, note, length(large) from mirror.orders order by shop, id")
    assert found == [
        ("a", 1, "same key", 1),
        ("a", 2, "same key", 2),
        ("a", 3, "moved", 4),
        ("a", 4, "moved", 3),
        ("a", 5, "new", 3),
    ]


def test_an_omitted_value_that_nobody_has_is_never_null(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(7, Unchanged))
    result = destination.write_events(source.batch()).result()
    assert isinstance(result.of(ORDERS.table_id).error, ValuesNotSent)
    assert notes(database) == [(1, "a note")]


def test_names_may_be_hostile(database, source):
    hostile = replace(
        ORDERS,
        namespace='a "b".c%s',
        name="t'; drop table x; -- {0} %s \\ é" + "x" * 30,
        columns=(
            KEY,
            Column('"quoted" %s', 2, TEXT),
            Column("c0", 3, TEXT),
            Column("omits", 4, TEXT),
            Column("_deleted_at", 5, TEXT),
            Column("x" * 63, 6, TEXT),
            Column("{}", 7, TEXT),
        ),
    )
    names = [column.name for column in hostile.columns[1:]]
    for mode in ("mirror", "soft_delete", "history"):
        destination = started(database, schema=f"{mode} {{schema}}", control_schema=f"control '{mode}'", mode=mode)
        copy(destination, source, hostile, [{"id": 1, **dict.fromkeys(names, "a\tb\\N\n")}], attempt=mode)
        with source.transaction() as transaction:
            transaction.update(hostile, {"id": 2, **dict.fromkeys(names, Unchanged), "c0": "new"}, old={"id": 1})
            transaction.insert(hostile, {"id": 3, **dict.fromkeys(names, "\\.")})
        write(destination, source.batch())
    quoted = hostile.name.replace('"', '""')
    found = database.execute(f'select * from "mirror a ""b"".c%s"."{quoted}" order by id')
    assert found == [(2, "a\tb\\N\n", "new", *["a\tb\\N\n"] * 4), (3, *["\\."] * 6)]
    found = database.execute(
        f'select id, "_deleted_at_5" from "soft_delete a ""b"".c%s"."{quoted}" where _deleted_at is null'
    )
    assert sorted(found) == [(2, "a\tb\\N\n"), (3, "\\.")]


def test_types_of_ones_own_are_kept_by_name_or_become_text(database, source):
    mood = PostgresType(50_001, "mood", "app", TypeKind.ENUM)
    small = PostgresType(
        50_002, "small", "app", TypeKind.DOMAIN, base=PostgresType(1700, "numeric"), base_modifier=786438
    )
    several = PostgresType(50_003, "_mood", "app", TypeKind.ARRAY, element=mood)
    pair = PostgresType(50_004, "pair", "app", TypeKind.COMPOSITE)
    schema = replace(
        ORDERS,
        columns=(
            KEY,
            Column("mood", 2, mood),
            Column("small", 3, small),
            Column("moods", 4, several),
            Column("pair", 5, pair),
            Column("short", 6, PostgresType(1043, "varchar"), 14),
        ),
    )
    query = (
        "select attname, format_type(atttypid, atttypmod) from pg_attribute "
        "where attrelid = 'mirror.orders'::regclass and attnum > 1 order by attnum"
    )

    row = {
        "id": 1,
        "mood": "fine",
        "small": Decimal("1.50"),
        "moods": ["fine", None],
        "pair": '(1,"a b")',
        "short": "x",
    }
    destination = started(database)
    copy(destination, source, schema, [row])
    assert [kind for _, kind in database.execute(query)] == [
        *("text", "numeric(12,2)", "text[]", "text", "character varying(10)")
    ]
    database.execute("create schema app")
    database.execute("create type app.mood as enum ('fine', 'sad'); create domain app.small as numeric(12,2)")
    database.execute("create type app.pair as (a int, b text)")
    copy(destination, source, schema, [row], attempt="attempt-2")
    assert [kind for _, kind in database.execute(query)] == [
        *("app.mood", "app.small", "app.mood[]", "app.pair", "character varying(10)")
    ]
    assert database.execute("select (pair).b, moods[1]::text from mirror.orders") == [("a b", "fine")]


# Schema changes


def test_columns_follow_the_source(database, source):
    destination = started(database, make_context(records_ddl=True))
    copy(destination, source, ORDERS, [order(1, "first"), order(2)])
    key, note, due = ORDERS.columns
    added = Column("amount", 4, INT8, backfilled=True, missing="7")
    swapped = replace(
        ORDERS, columns=(key, replace(note, name="due"), replace(due, name="note"), replace(added, name="amount"))
    )
    with source.transaction() as transaction:
        transaction.insert(replace(ORDERS, columns=(*ORDERS.columns, added)), order(3) | {"amount": 3})
    with source.transaction() as transaction:
        transaction.insert(swapped, {"id": 4, "due": "text", "note": None, "amount": 4})
    write(destination, source.batch())
    found = database.execute("select id, due, note::text, amount from mirror.orders order by id")
    assert found == [(1, "first", None, 7), (2, "a note", None, 7), (3, "a note", None, 3), (4, "text", None, 4)]
    wider = replace(
        swapped, columns=(key, replace(note, name="due", type=PostgresType(1043, "varchar")), *swapped.columns[2:])
    )
    with source.transaction() as transaction:
        transaction.insert(wider, {"id": 5, "due": "wider", "note": None, "amount": 5})
    write(destination, source.batch())
    query = "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = 'mirror.orders'::regclass"
    assert database.execute(f"{query} and attname = 'due'") == [("character varying",)]


def test_a_type_whose_values_were_converted_needs_a_new_copy(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    key, note, due = ORDERS.columns
    changed = replace(ORDERS, columns=(key, note, replace(due, type=TEXT)))
    with source.transaction() as transaction:
        transaction.insert(changed, order(2))
    error = destination.write_events(source.batch()).result().of(ORDERS.table_id).error
    assert isinstance(error, SchemaNotFollowed)
    assert notes(database) == [(1, "a note")]


def test_dropped_columns_may_stay(database, source):
    context = replace(make_context(), keeps_dropped_columns=lambda _: True)
    destination = started(database, context)
    copy(destination, source, ORDERS, [order(1, "kept")])
    key, _, due = ORDERS.columns
    with source.transaction() as transaction:
        transaction.insert(replace(ORDERS, columns=(key, due)), {"id": 2, "due": None})
    write(destination, source.batch())
    with source.transaction() as transaction:
        again = replace(ORDERS, columns=(key, due, Column("note", 4, INT8)))
        transaction.insert(again, {"id": 3, "due": None, "note": 3})
    write(destination, source.batch())
    assert database.execute("select id, note, note_4 from mirror.orders order by id") == [
        (1, "kept", None),
        (2, None, None),
        (3, None, 3),
    ]


# Modes


def test_deleted_rows_stay_marked(database, source):
    destination = started(database, mode="soft_delete")
    copy(destination, source, ORDERS, [order(1), order(2), order(3)])
    with source.transaction() as transaction:
        transaction.delete(ORDERS, {"id": 1})
        transaction.update(ORDERS, order(20, Unchanged), old={"id": 2})
        transaction.insert(ORDERS, order(4))
        transaction.delete(ORDERS, {"id": 4})
        transaction.delete(ORDERS, {"id": 99})
    write(destination, source.batch())
    query = "select id, note, _deleted_at is not null from mirror.orders order by id"
    gone = [(1, "a note", True), (2, "a note", True)]
    assert database.execute(query) == [*gone, (3, "a note", False), (4, "a note", True), (20, "a note", False)]
    with source.transaction() as transaction:
        transaction.truncate(ORDERS)
        transaction.insert(ORDERS, order(3, "again"))
    write(destination, source.batch())
    assert [row for row in database.execute(query) if not row[2]] == [(3, "again", False)]
    copy(destination, source, ORDERS, [order(5)], attempt="attempt-2")
    found = database.execute(query)
    assert [number for number, _, _ in found] == [1, 2, 3, 4, 5, 20]
    assert [row for row in found if not row[2]] == [(5, "a note", False)]


def test_rows_without_a_key_stay_marked(database, source):
    destination = started(database, mode="soft_delete")
    same = {"level": 1, "line": "same"}
    copy(destination, source, LINES, [same] * 3)
    with source.transaction() as transaction:
        transaction.delete(LINES, same)
        transaction.update(LINES, {"level": 2, "line": "new"}, old=same)
    write(destination, source.batch())
    query = "select level, count(*), count(_deleted_at) from mirror.lines group by level order by level"
    assert database.execute(query) == [(1, 3, 2), (2, 1, 0)]
    copy(destination, source, LINES, [same, same], attempt="attempt-2")
    assert database.execute(query) == [(1, 4, 2), (2, 1, 1)]


def test_history_has_every_change(database, source):
    destination = started(database, mode="history")
    copy(destination, source, ORDERS, [order(1, 'a "quoted"\x01 note')])
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(2, Unchanged), old={"id": 1})
        transaction.delete(ORDERS, {"id": 2})
        transaction.truncate(ORDERS)
    batch = source.batch()
    write(destination, batch)
    write(destination, batch)
    wider = replace(ORDERS, columns=(*ORDERS.columns, Column("amount", 4, INT8)))
    renamed = replace(wider, columns=(KEY, Column("note", 2, INT8), replace(ORDERS.columns[2], name="until")))
    with source.transaction() as transaction:
        transaction.insert(wider, order(3) | {"amount": 3})
        transaction.insert(renamed, {"id": 4, "note": 4, "until": None})
    write(destination, source.batch())
    found = database.execute(
        "select _op, id, note, _unchanged, _old, amount, note_2, _schema_version from mirror.orders "
        "order by _commit_lsn, _ordinal"
    )
    assert found == [
        ("copy", 1, 'a "quoted"\x01 note', None, None, None, None, 1),
        ("update", 2, None, ["note"], {"id": "1"}, None, None, 1),
        ("delete", 2, None, ["note", "due"], None, None, None, 1),
        ("truncate", None, None, None, None, None, None, 1),
        ("insert", 3, "a note", None, None, 3, None, 2),
        ("insert", 4, None, None, None, None, 4, 3),
    ]
    copy(destination, source, renamed, [{"id": 5, "note": 5, "until": None}], attempt="attempt-2")
    found = database.execute(
        "select _op, id, note_2 from mirror.orders where _ordinal < 0 order by _commit_lsn, _ordinal"
    )
    assert found == [("copy", 1, None), ("resync", None, None), ("copy", 5, 5)]


def test_old_rows_of_a_history_are_json(database, source):
    text = 'a "b"\\ \n\x02é'
    full = replace(ORDERS, replica_identity=ReplicaIdentity.FULL)
    destination = started(database, mode="history")
    copy(destination, source, full, [])
    with source.transaction() as transaction:
        transaction.update(full, order(1), old=order(1, text))
    write(destination, source.batch())
    assert database.execute("select _old from mirror.orders") == [({"id": "1", "note": text, "due": None},)]


def test_another_mode_needs_a_new_copy(database, source):
    copy(started(database), source, ORDERS, [order(1)])
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
    batch = source.batch()
    other = started(database, mode="soft_delete")
    assert isinstance(other.write_events(batch).result().of(ORDERS.table_id).error, TableRejected)
    copy(other, source, ORDERS, [order(1)], attempt="attempt-2")
    assert database.execute("select _deleted_at from mirror.orders") == [(None,)]


# Transactions and other objects


CHILDREN = replace(
    ORDERS, table_id=16_999, name="children", columns=(KEY, Column("parent", 2, INT8), Column("due", 3, DATE))
)


def test_foreign_keys_hold_in_batches_of_one_transaction(database, source):
    destination = started(database, transactional="batch")
    copy(destination, source, ORDERS, [order(1), order(2)])
    copy(destination, source, CHILDREN, [{"id": 1, "parent": 1, "due": None}])
    database.execute(
        "alter table mirror.children add foreign key (parent) references mirror.orders deferrable initially immediate"
    )
    with source.transaction() as transaction:
        transaction.insert(CHILDREN, {"id": 2, "parent": 3, "due": None})
        transaction.insert(ORDERS, order(3))
        transaction.delete(CHILDREN, {"id": 1})
        transaction.delete(ORDERS, {"id": 1})
    write(destination, source.batch())
    assert database.execute("select id, parent from mirror.children") == [(2, 3)]
    with source.transaction() as transaction:
        transaction.insert(CHILDREN, {"id": 4, "parent": 99, "due": None})
        transaction.insert(ORDERS, order(4))
    result = destination.write_events(source.batch()).result()
    assert isinstance(result.of(CHILDREN.table_id).error, TableRejected)
    assert result.of(ORDERS.table_id).error is None
    assert [number for number, _ in notes(database)] == [2, 3, 4]
    with source.transaction() as transaction:
        transaction.truncate(ORDERS, CHILDREN)


def test_readers_see_all_tables_of_a_transaction_or_none(database, source, monkeypatch):
    destination = started(database, transactional="batch")
    for schema in (ORDERS, ITEMS):
        copy(destination, source, schema, [])
    seen: list[tuple[Any, ...]] = []
    query = 'select (select count(*) from mirror.orders), (select count(*) from mirror."Order items")'
    move = apply.Control.move

    def look_and_move(*arguments: Any, **named: Any) -> None:
        move(*arguments, **named)
        seen.extend(database.execute(query))

    monkeypatch.setattr(apply.Control, "move", look_and_move)
    with source.transaction() as transaction:
        for schema in (ORDERS, ITEMS):
            transaction.insert(schema, order(1))
    write(destination, source.batch())
    assert seen == [(0, 0), (0, 0)]
    assert database.execute(query) == [(1, 1)]


def test_rows_without_a_key_are_hashed_also_after_a_table_with_a_key(database, source, monkeypatch):
    """Keys are found by index, whatever the server thinks. Without a key, that would compare each row with each."""
    destination = started(database, transactional="batch")
    row = {"level": 1, "line": "same"}
    copy(destination, source, ORDERS, [order(1)])
    copy(destination, source, LINES, [row])
    run, seen = Session.run, list[tuple[str, Any]]()

    def look_and_run(session: Session, statement: str, *arguments: Any) -> int:
        if (found := statement.partition("delete from ")[2]).startswith('"mirror"'):
            seen.append((found.split()[0], session.rows("show enable_hashjoin")[0][0]))
        return run(session, statement, *arguments)

    monkeypatch.setattr(Session, "run", look_and_run)
    with source.transaction() as transaction:
        transaction.delete(ORDERS, {"id": 1})
        transaction.delete(LINES, row)
    write(destination, source.batch())
    assert seen == [('"mirror"."orders"', "off"), ('"mirror"."lines"', "on")]


def test_a_table_that_others_depend_on_stays_with_its_views_indexes_and_grants(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    database.execute("create view mirror.seen as select id, note from mirror.orders")
    database.execute("create index on mirror.orders (note)")
    copy(destination, source, ORDERS, [order(2)], attempt="attempt-2")
    assert notes(database, "mirror.seen") == [(2, "a note")]
    assert database.execute("select count(*) from pg_indexes where tablename = 'orders'") == [(2,)]
    fewer = replace(ORDERS, columns=ORDERS.columns[:1])
    destination.drop_table_for_copy(fewer, "attempt-3")
    with pytest.raises(TableRejected, match=r"depend on mirror\.orders"):
        destination.write_table_rows(fewer, source.copy(fewer, [{"id": 3}], attempt="attempt-3"))
    assert notes(database, "mirror.seen") == [(2, "a note")]


def test_a_table_that_penstock_writes_is_never_a_source(database, source):
    """In one database, a pattern of all tables matches the copies, too: each would be copied again and again."""
    lineage = replace(ANCESTRY, current=replace(ANCESTRY.current, database=database.name))
    destination = started(database, make_context(ancestry=lineage))
    copy(destination, source, ORDERS, [order(1)])
    for name in ("mirror.orders", "penstock.destination_tables"):
        ((number,),) = database.execute("select %s::regclass::oid::int8", [name])
        namespace, _, table = name.partition(".")
        own = replace(ORDERS, table_id=number, namespace=namespace, name=table)
        with pytest.raises(TableRejected, match="cannot be a source as well"):
            destination.drop_table_for_copy(own, "attempt-2")
    assert destination.position(ORDERS.table_id) == source.position


def test_tables_that_penstock_did_not_create_are_refused(database, source):
    database.execute("create schema mirror")
    database.execute("create table mirror.orders (id int)")
    destination = started(database)
    with pytest.raises(TableRejected, match="Penstock did not create it"):
        destination.drop_table_for_copy(ORDERS, "attempt-1")
    database.execute("drop table mirror.orders")
    copy(destination, source, ORDERS, [order(1)])


def test_a_table_that_was_dropped_can_have_another_owner(database, source):
    copy(started(database), source, ORDERS, [order(1)])
    other = started(database, make_context("another"))
    with pytest.raises(TableOwned):
        other.drop_table_for_copy(ORDERS, "attempt-1")
    database.execute("drop table mirror.orders")
    copy(other, source, ORDERS, [order(2)])
    assert notes(database) == [(2, "a note")]
    # The first copy of a table takes a while, and nobody else gets its name meanwhile.
    other.drop_table_for_copy(ITEMS, "attempt-1")
    with pytest.raises(TableOwned):
        started(database).drop_table_for_copy(ITEMS, "attempt-1")


def test_a_renamed_table_moves_and_another_takes_its_name(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    renamed = replace(ORDERS, name="former orders")
    copy(destination, source, renamed, [order(1)], attempt="attempt-2")
    assert database.execute("select tablename from pg_tables where schemaname = 'mirror'") == [("former orders",)]
    copy(destination, source, replace(ITEMS, name="orders"), [order(5)])
    assert notes(database) == [(5, "a note")]
    # They exchange their names.
    copy(destination, source, ORDERS, [order(1)], attempt="attempt-3")
    assert destination.position(ITEMS.table_id) is None
    copy(destination, source, replace(ITEMS, name="former orders"), [order(5)], attempt="attempt-4")
    assert notes(database) == [(1, "a note")]
    assert notes(database, 'mirror."former orders"') == [(5, "a note")]


def test_dropped_tables_may_be_dropped(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    assert destination.drop_table(ORDERS.table_id)
    assert not destination.drop_table(ORDERS.table_id)
    assert database.execute("select count(*) from pg_tables where schemaname = 'mirror'") == [(0,)]
    assert destination.position(ORDERS.table_id) is None


# Access


def test_access_is_tried_and_nothing_is_left_behind(database):
    PostgresDestination(database.dsn, schema="mirror").probe()
    assert database.execute("select count(*) from pg_namespace where nspname in ('penstock', 'mirror')") == [(0,)]


def test_a_role_without_privileges_is_told_which(database):
    role = f"poor_{database.name[-12:]}"
    database.execute(f"create role {role} login password 'secret'")
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user=role, password="secret")
    with pytest.raises(ConfigError, match="permission denied") as caught:
        PostgresDestination(dsn).probe()
    assert "secret" not in caught.value.message
    with pytest.raises(ConfigError, match="password authentication failed"):
        PostgresDestination(psycopg.conninfo.make_conninfo(dsn, password="wrong")).probe()
    with pytest.raises(ConfigError, match="does not exist"):
        PostgresDestination(psycopg.conninfo.make_conninfo(database.dsn, dbname="nowhere")).probe()
    with pytest.raises(DestinationUnavailable):
        PostgresDestination(psycopg.conninfo.make_conninfo(database.dsn, port="1")).probe()
    database.execute("create schema mirror")
    database.execute(f"create schema penstock authorization {role}")
    with pytest.raises(ConfigError, match="may not create tables in the schema mirror"):
        PostgresDestination(dsn, schema="mirror").probe()
    database.execute(f"grant create, usage on schema mirror to {role}")
    PostgresDestination(dsn, schema="mirror").probe()


def test_errors_contain_no_values(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [order(1)])
    database.execute("alter table mirror.orders add constraint no_secrets check (note <> 'a secret')")
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2, "a secret"))
    error = destination.write_events(source.batch()).result().of(ORDERS.table_id).error
    assert isinstance(error, TableRejected)
    assert "no_secrets" in error.message
    assert "a secret" not in f"{error.message} {error.hint}"


def test_connections_are_used_again(database, source):
    destination = started(database)
    copy(destination, source, ORDERS, [])
    for number in range(5):
        with source.transaction() as transaction:
            transaction.update(ORDERS, order(number))
        write(destination, source.batch())
    query = "select count(*) from pg_stat_activity where application_name = 'penstock:destination' and datname = %s"
    assert database.execute(query, [database.name])[0][0] <= 2
    destination.shutdown()


def test_sessions_are_durable(database):
    database.execute(f"alter database {database.name} set synchronous_commit = off")
    destination = started(database)
    with destination._server.session() as session:
        assert isinstance(session, Session)
        assert session.rows("show synchronous_commit") == [("on",)]
