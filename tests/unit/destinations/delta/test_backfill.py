"""Columns that are added with a constant: rows from before have it, whatever else the batch does to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.errors import ValuesNotSent
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource
from penstock.testing.destinations.contract import INT8, ORDERS
from tests.unit.destinations.delta.orders import assert_durable, copied, order, started, write
from tests.unit.destinations.delta.reading import read_rows
from tests.unit.destinations.delta.test_races import InterruptedTasks

DATE = PostgresType(1082, "date", "pg_catalog")
AMOUNT = Column("amount", 4, INT8, backfilled=True, missing="5")
WITH_AMOUNT = replace(ORDERS, columns=(*ORDERS.columns, AMOUNT))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"deletion_vectors": False},
    {"mode": "soft_delete"},
    {"mode": "soft_delete", "deletion_vectors": False},
]


def amounts(lake: Path, schema: TableSchema = WITH_AMOUNT) -> dict[int, tuple[str, int | None]]:
    rows = read_rows(lake, schema) or []
    found = {row["id"]: (row["note"], row["amount"]) for row in rows}
    assert len(found) == len(rows)
    return found


def change_all(source: ScriptedSource) -> Any:
    """Rows that are changed, deleted and inserted before and after the column is added, in one batch."""
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "before"))
        transaction.update(ORDERS, order(2, "before"))
        transaction.delete(ORDERS, {"id": 3})
        transaction.insert(ORDERS, order(20, "before"))
        transaction.insert(ORDERS, order(21, "before"))
    with source.transaction() as transaction:
        transaction.update(WITH_AMOUNT, order(2, "after") | {"amount": 7})
        transaction.delete(WITH_AMOUNT, {"id": 4})
        transaction.update(WITH_AMOUNT, order(21, "after") | {"amount": None})
        transaction.insert(WITH_AMOUNT, order(30, "after") | {"amount": 8})
    return source.batch()


EXPECTED: dict[int, tuple[str, int | None]] = {
    **dict.fromkeys((0, 5, 6, 7, 8, 9), ("n", 5)),
    1: ("before", 5),
    2: ("after", 7),
    20: ("before", 5),
    21: ("after", None),
    30: ("after", 8),
}


@pytest.mark.trap(25)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_from_before_have_the_constant(lake: Path, source: ScriptedSource, options: dict[str, Any]) -> None:
    tasks = LocalTasks()
    destination = copied(lake, source, tasks, **options)
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(9, "n"))
        transaction.update(ORDERS, order(8, "n"))
    assert_durable(write(destination, source.batch()))
    batch = change_all(source)
    jobs = len(tasks.jobs)
    assert_durable(write(destination, batch))
    assert len(tasks.jobs) == jobs + 2
    assert amounts(lake) == EXPECTED
    # Again, by another process; and what follows touches rows that were filled.
    destination = started(lake, **options)
    assert_durable(write(destination, batch))
    with source.transaction() as transaction:
        transaction.update(WITH_AMOUNT, order(0, "last") | {"amount": 1})
        transaction.delete(WITH_AMOUNT, {"id": 5})
    assert_durable(write(destination, source.batch()))
    assert amounts(lake) == {key: row for key, row in EXPECTED.items() if key != 5} | {0: ("last", 1)}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_after_a_truncate_nothing_is_left_to_fill(lake: Path, source: ScriptedSource, options: dict[str, Any]) -> None:
    destination = copied(lake, source, **options)
    with source.transaction() as transaction:
        transaction.truncate(ORDERS)
        transaction.insert(ORDERS, order(1, "before"))
    with source.transaction() as transaction:
        transaction.insert(WITH_AMOUNT, order(2, "after") | {"amount": 7})
    assert_durable(write(destination, source.batch()))
    assert amounts(lake) == {1: ("before", 5), 2: ("after", 7)}


def test_rows_of_a_table_without_a_key_are_found_with_the_constant(lake: Path, source: ScriptedSource) -> None:
    before = replace(
        ORDERS,
        replica_identity=ReplicaIdentity.FULL,
        columns=tuple(replace(each, identity=True, primary_key_position=None) for each in ORDERS.columns),
    )
    after = replace(before, columns=(*before.columns, replace(AMOUNT, identity=True)))
    destination = started(lake)
    destination.drop_table_for_copy(before, "attempt-1")
    destination.write_table_rows(before, source.copy(before, [order(1), order(1), order(2), order(3)]))
    with source.transaction() as transaction:
        transaction.delete(before, order(1))
        transaction.update(before, order(2, "before"), old=order(2))
    with source.transaction() as transaction:
        transaction.delete(after, order(3) | {"amount": 5})
        transaction.update(after, order(2, "after") | {"amount": 6}, old=order(2, "before") | {"amount": 5})
    assert_durable(write(destination, source.batch()))
    rows = read_rows(lake, after) or []
    assert sorted((row["id"], row["note"], row["amount"]) for row in rows) == [(1, "n", 5), (2, "after", 6)]


@pytest.mark.trap(37)
def test_a_compaction_in_between_makes_it_begin_anew(lake: Path, source: ScriptedSource) -> None:
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks)
    for number in range(3):
        with source.transaction() as transaction:
            transaction.update(ORDERS, order(7 + number, "n"))
        assert_durable(write(destination, source.batch()))

    def exchange_files() -> None:
        log = DeltaLog(LocalStorage(lake / FOLDERS.table(ORDERS)))
        assert compact(log, LocalTasks(), CompactionSettings(min_files=2)) is not None

    tasks.interruption = exchange_files
    assert_durable(write(destination, change_all(source)))
    assert amounts(lake) == EXPECTED


def test_a_constant_that_the_type_cannot_hold_stops_the_table(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    ever = Column("ever", 4, DATE, backfilled=True, missing="infinity")
    schema = replace(ORDERS, columns=(*ORDERS.columns, ever))
    with source.transaction() as transaction:
        transaction.insert(schema, order(30) | {"ever": None})
    result = write(destination, source.batch())
    assert isinstance(result.error, ValuesNotSent)
    assert "infinity" not in str(result.error)
    assert len(read_rows(lake, ORDERS) or []) == 10


def test_history_does_not_say_that_it_fills(lake: Path) -> None:
    assert DeltaDestination(lake).capabilities.fills_added_columns
    assert not DeltaDestination(lake, mode="history").capabilities.fills_added_columns
