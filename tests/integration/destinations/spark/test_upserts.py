"""Upserts into PostgreSQL where something goes wrong: a process that dies, names like Penstock's, transforms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged
from penstock.destinations.spark import SparkDestination, postgres
from penstock.errors import LeaseLost, PenstockError, TableRejected
from penstock.schema import Column
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import INT8, LINES, ORDERS, TEXT
from tests.integration.destinations.spark.started import copy, started
from tests.support.delta_jars import jdbc_url


def opened(session: Any, database: Any, transform: str | None = None) -> SparkDestination:
    options = {"url": jdbc_url(database.dsn)}
    return started(session, transform, format="jdbc", mode="upsert", table="mirror.{table}", options=options)


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def notes(database: Any) -> list[tuple[Any, ...]]:
    return database.execute("select id, note from mirror.orders order by id")


def no_error(destination: SparkDestination, batch: Any) -> None:
    errors = [each.error for each in destination.write_events(batch).result().tables.values() if each.error]
    assert not errors


@pytest.mark.trap(28)
def test_a_kill_between_staging_and_commit_changes_nothing(
    jdbc_spark: Any, database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ScriptedSource(tmp_path / "segments")
    destination = opened(jdbc_spark, database)
    copy(destination, source, ORDERS, [order(1, "large")])
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(2, Unchanged), old={"id": 1})
        transaction.update(ORDERS, order(3, Unchanged), old={"id": 2})
    batch = source.batch()

    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(postgres, "_delete_keys", die)
        with pytest.raises(Killed):
            destination.write_events(batch).result()
    assert notes(database) == [(1, "large")]
    late = destination
    destination = opened(jdbc_spark, database)
    no_error(destination, batch)
    assert notes(database) == [(3, "large")]
    # The process that lost its lease had looked at the position before.
    known = postgres._Known("contract", ORDERS.table_id, "", "attempt-1", "", batch.begin, ORDERS)
    target: Any = late._target
    with pytest.raises(LeaseLost), target._transaction(jdbc_spark) as connection:
        target._lock(connection, batch.tables[0], known)
    assert database.execute("select count(*) from pg_tables where tablename like 'stage%%'") == [(0,)]


def test_columns_may_be_named_like_those_of_penstock(jdbc_spark: Any, database: Any, tmp_path: Path) -> None:
    names = ("_op", "_limit", "_origin_0", "_row_hash", "_batch", "_unrepresentable")
    odd = replace(
        ORDERS,
        name="odd",
        columns=(ORDERS.columns[0], *(Column(name, number, TEXT) for number, name in enumerate(names, 2))),
    )
    heap = replace(LINES, name="heap", columns=tuple(replace(each, identity=True) for each in odd.columns))
    heap = replace(heap, columns=tuple(replace(each, primary_key_position=None) for each in heap.columns))
    source = ScriptedSource(tmp_path / "segments")
    destination = opened(jdbc_spark, database)
    row = {"id": 1, **dict.fromkeys(names, "x")}
    for schema in (odd, heap):
        copy(destination, source, schema, [row])
    with source.transaction() as transaction:
        transaction.update(odd, row | {"id": 2, "_limit": Unchanged, "_op": "y"}, old={"id": 1})
        transaction.delete(heap, row)
        transaction.insert(heap, row | {"_row_hash": "z"})
    no_error(destination, source.batch())
    assert database.execute('select id, _limit, _origin_0, "_op#2" from mirror.odd') == [(2, "x", "x", "y")]
    assert database.execute("select id, _row_hash, _limit from mirror.heap") == [(1, "z", "x")]


def test_what_a_transform_computes_keeps_its_value_if_its_input_is_omitted(
    jdbc_spark: Any, database: Any, tmp_path: Path
) -> None:
    source = ScriptedSource(tmp_path / "segments")
    text = "select id, upper(note) as loud, concat(note, due) as mixed, id * 2 as twice from changes"
    destination = opened(jdbc_spark, database, text.replace(", concat(note, due) as mixed", ""))
    copy(destination, source, ORDERS, [order(1, "large")])
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(5, Unchanged), old={"id": 1})
        transaction.insert(ORDERS, order(6, "new"))
    no_error(destination, source.batch())
    found = database.execute("select id, loud, twice from mirror.orders order by id")
    assert found == [(5, "LARGE", 10), (6, "NEW", 12)]
    mixed = opened(jdbc_spark, database, text)
    mixed.drop_table_for_copy(ORDERS, "attempt-2")
    mixed.write_table_rows(ORDERS, source.copy(ORDERS, [order(1, "large")], attempt="attempt-2"))
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, Unchanged))
    error = mixed.write_events(source.batch()).result().of(ORDERS.table_id).error
    assert isinstance(error, TableRejected)
    assert "replica identity full" in error.hint


def test_tables_that_penstock_did_not_create_are_refused(jdbc_spark: Any, database: Any) -> None:
    database.execute("create schema mirror")
    database.execute("create table mirror.orders (mine text)")
    with pytest.raises(PenstockError, match="Penstock did not create it"):
        opened(jdbc_spark, database).drop_table_for_copy(ORDERS, "attempt-1")


def test_two_tables_cannot_share_a_name(jdbc_spark: Any, database: Any, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    destination = opened(jdbc_spark, database)
    upper = replace(ORDERS, table_id=1, name="Orders")
    for schema in (ORDERS, upper):
        copy(destination, source, schema, [order(schema.table_id % 7)])
    assert len(database.execute('select from mirror.orders union all select from mirror."Orders"')) == 2
    other = replace(ORDERS, table_id=2, namespace="other", columns=(*ORDERS.columns, Column("more", 4, INT8)))
    destination._target._tables.context.store.acquire_lease()  # type: ignore[attr-defined]
    from penstock.state.transitions import discover

    destination._target._tables.context.store.update_table_replication_state(  # type: ignore[attr-defined]
        ORDERS.table_id, discover(None)
    )
    with pytest.raises(TableRejected, match="in use by another table"):
        destination.drop_table_for_copy(other, "attempt-1")
