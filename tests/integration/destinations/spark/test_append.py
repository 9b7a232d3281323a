"""`mode = "append"` in formats without transactions: what comes twice after a crash, and how to read it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged
from penstock.destinations.naming import FOLDERS
from penstock.destinations.spark import SparkDestination
from penstock.destinations.spark.append import AppendTarget
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import ORDERS
from tests.integration.destinations.spark.started import copy, started
from tests.support.delta_jars import jdbc_url


@dataclass(frozen=True, slots=True)
class Place:
    """Where a format writes, and how Spark reads it."""

    options: dict[str, Any]
    read: Callable[[], Any]


def parquet_files(session: Any, folder: Path, database: Any) -> Place:
    path = f"{folder}/lake/{FOLDERS.table(ORDERS)}"
    return Place(
        {"format": "parquet", "path": f"{folder}/lake"},
        lambda: session.read.option("mergeSchema", True).parquet(path),
    )


def parquet_table(session: Any, folder: Path, database: Any) -> Place:
    name = f"shop_{uuid.uuid4().hex[:8]}"
    session.sql(f"create database {name} location '{folder}/warehouse'")

    def read() -> Any:
        # A session remembers the files that it found.
        session.catalog.refreshTable(f"{name}.orders")
        return session.table(f"{name}.orders")

    return Place({"format": "parquet", "table": f"{name}.{{table}}"}, read)


def postgres(session: Any, folder: Path, database: Any) -> Place:
    options = {"url": jdbc_url(database.dsn), "driver": "org.postgresql.Driver"}
    return Place(
        {"format": "jdbc", "table": "{table}", "options": options},
        lambda: session.read.format("jdbc").options(**options, dbtable="orders").load(),
    )


def derby(session: Any, folder: Path, database: Any) -> Place:
    """Another database than PostgreSQL: the one that comes with Spark."""
    session._jvm.java.lang.System.setProperty("derby.stream.error.file", f"{folder}/derby.log")
    options = {
        "url": f"jdbc:derby:memory:{uuid.uuid4().hex};create=true",
        "driver": "org.apache.derby.iapi.jdbc.AutoloadedDriver",
    }
    return Place(
        {"format": "jdbc", "table": "{table}", "options": options},
        lambda: session.read.format("jdbc").options(**options, dbtable="orders").load(),
    )


PLACES = (parquet_files, parquet_table, postgres, derby)


class Killed(BaseException):
    """The process ends."""


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def written(place: Place) -> list[dict[str, Any]]:
    rows = [row.asDict() for row in place.read().collect()]
    return sorted(rows, key=lambda row: (row["_batch"], row["_commit_lsn"], row["_ordinal"]))


def state_of(rows: list[dict[str, Any]]) -> dict[int, Any]:
    """Apply rows as docs/reference/destinations/spark.md says: those since the last copy, each change once."""
    first = max(row["_batch"] for row in rows if row["_op"] == "truncate" and row["_ordinal"] == -2)
    changes: dict[tuple[int, int], dict[str, Any]] = {}
    state: dict[int, Any] = {}
    for row in (row for row in rows if row["_batch"] >= first):
        if row["_op"] == "copy":
            state[row["id"]] = row["note"]
        else:
            changes.setdefault((row["_commit_lsn"], row["_ordinal"]), row)
    for place in sorted(place for place in changes if place[1] >= 0):
        row = changes[place]
        if row["_op"] == "truncate":
            state.clear()
        elif row["_op"] == "delete":
            del state[row["id"]]
        else:
            old = json.loads(row["_old"])["id"] if row["_old"] else row["id"]
            before = state.pop(old, None)
            state[row["id"]] = before if "note" in (row["_unchanged"] or ()) else row["note"]
    return state


def die_after_the_call(number: int, monkeypatch: pytest.MonkeyPatch, destination: SparkDestination) -> None:
    """Let the process end after so many calls of the format, before it notes that they are done."""
    target: Any = destination._target
    assert isinstance(target, AppendTarget)
    write, left = target._write, iter(range(number))

    def call(frame: Any, batch: Any) -> None:
        write(frame, batch)
        if next(left, None) is None:
            raise Killed

    monkeypatch.setattr(target, "_write", call)


@pytest.mark.trap(20, 25, 27, 28, 32)
@pytest.mark.parametrize("place_of", PLACES, ids=lambda each: each.__name__)
def test_rows_that_come_again_have_the_same_number(
    place_of: Any, jdbc_spark: Any, database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of(jdbc_spark, tmp_path, database)
    source = ScriptedSource(tmp_path / "segments")
    checkpoint = str(tmp_path / "checkpoint")

    def opened() -> SparkDestination:
        return started(jdbc_spark, mode="append", checkpoint=checkpoint, **place.options)

    copy(opened(), source, ORDERS, [order(1, "large"), order(2)])
    begin = source.position
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(3, Unchanged), old={"id": 1})
        transaction.delete(ORDERS, {"id": 2})
    middle = source.position
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(4))
        transaction.truncate(ORDERS)
        transaction.insert(ORDERS, order(5))
    # Three calls: changes, the truncate, changes. The process ends after each of them.
    for number in range(3):
        destination = opened()
        die_after_the_call(number, monkeypatch, destination)
        with pytest.raises(Killed):
            destination.write_events(source.batch(begin)).result()
    interrupted = written(place)
    assert state_of(interrupted) == {5: "a note"}
    # The next process gets other boundaries.
    destination = opened()
    assert not destination.write_events(source.batch(begin, middle)).result().tables[ORDERS.table_id].durable
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(6))
    assert destination.write_events(source.batch(middle)).result().tables[ORDERS.table_id].durable
    rows = written(place)
    assert state_of(rows) == {5: "a note", 6: "a note"}
    numbers: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        numbers.setdefault((row["_commit_lsn"], row["_ordinal"], row["id"]), set()).add(row["_batch"])
    assert all(len(each) == 1 for each in numbers.values()), "a row that comes again has its number"
    repeats = len(rows) - len(numbers)
    # 3 changes came with every one of four calls, the truncate with three, the last change with two.
    assert repeats == 3 * 3 + 2 + 1
    # What is noted does not come again.
    opened().write_events(source.batch(begin, source.position)).result()
    assert len(written(place)) == len(rows)


@pytest.mark.trap(19, 22)
def test_a_copy_without_rows_says_that_the_earlier_ones_are_gone(spark: Any, tmp_path: Path) -> None:
    place = parquet_files(spark, tmp_path, None)
    source = ScriptedSource(tmp_path / "segments")
    destination = started(spark, mode="append", checkpoint=str(tmp_path / "checkpoint"), **place.options)
    copy(destination, source, ORDERS, [order(1), order(2)])
    assert state_of(written(place)) == {1: "a note", 2: "a note"}
    destination.drop_table_for_copy(ORDERS, "attempt-2")
    destination.write_table_rows(ORDERS, source.copy(ORDERS, [], attempt="attempt-2"))
    assert state_of(written(place)) == {}
