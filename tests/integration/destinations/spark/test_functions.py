"""Functions that get data frames: numbers that are the same in every repeat, errors, and transforms."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged
from penstock.destinations.spark import Batch, SparkDestination
from penstock.errors import TableRejected
from penstock.schema import ReplicaIdentity
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import ITEMS, ORDERS
from tests.integration.destinations.spark.started import copy, started

CALLS: list[tuple[str, int, str, list[dict[str, Any]]]] = []
RAISES: list[str] = []
"""Tables for which the function raises, after it has seen the rows."""


def write(frame: Any, number: int, batch: Batch) -> None:
    CALLS.append((batch.table, number, batch.kind, [row.asDict() for row in frame.collect()]))
    if batch.table in RAISES and batch.kind != "copy":
        raise ValueError("secret 42")


def write_two(frame: Any, number: int) -> None:
    CALLS.append(("", number, "", [row.asDict() for row in frame.collect()]))


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    CALLS.clear()
    RAISES.clear()


def opened(session: Any, folder: Path, transform: str | None = None, name: str = "write") -> SparkDestination:
    module = next(each for each, found in sys.modules.items() if found is sys.modules[__name__])
    return started(session, transform, function=f"{module}:{name}", checkpoint=str(folder / "checkpoint"))


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def insert(source: ScriptedSource, number: int) -> None:
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(number))


def ids(call: tuple[str, int, str, list[dict[str, Any]]]) -> list[int]:
    return sorted(row["id"] for row in call[3])


@pytest.mark.trap(28)
def test_a_repeated_batch_has_the_same_number_and_rows_whatever_its_boundaries(spark: Any, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    destination = opened(spark, tmp_path)
    copy(destination, source, ORDERS, [order(1)])
    begin = source.position
    insert(source, 2)
    middle = source.position
    insert(source, 3)
    RAISES.append("public.orders")
    result = destination.write_events(source.batch(begin)).result()
    error = result.of(ORDERS.table_id).error
    assert error is not None
    assert "ValueError for batch 1" in error.message
    assert "42" not in error.message + error.hint
    RAISES.clear()
    first = CALLS[-1]
    assert ids(first) == [2, 3]

    # The next process gets less at first: it waits for the rest.
    destination = opened(spark, tmp_path)
    held = destination.write_events(source.batch(begin, middle)).result()
    assert not held.of(ORDERS.table_id).durable
    assert CALLS[-1] is first
    insert(source, 4)
    rest = destination.write_events(source.batch(middle, source.position)).result()
    assert rest.of(ORDERS.table_id).durable
    assert [call[1] for call in CALLS[-2:]] == [first[1], CALLS[-1][1]]
    assert CALLS[-2] == first
    assert ids(CALLS[-1]) == [4]
    assert CALLS[-1][1] > first[1]

    # Everything is written: nothing comes again, with any boundaries.
    count = len(CALLS)
    destination.write_events(source.batch(begin, source.position)).result()
    assert len(CALLS) == count


def test_a_batch_that_waits_is_written_when_an_empty_one_passes_its_end(spark: Any, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    destination = opened(spark, tmp_path, name="write_two")
    copy(destination, source, ORDERS, [])
    begin = source.position
    insert(source, 1)
    middle = source.position
    with source.transaction() as transaction:
        transaction.insert(ITEMS, order(1))
    whole = source.batch(begin, source.position)
    orders = replace(whole, tables=tuple(each for each in whole.tables if each.table_id == ORDERS.table_id))
    destination = opened(spark, tmp_path)
    RAISES.append("public.orders")
    assert destination.write_events(orders).result().of(ORDERS.table_id).error is not None
    RAISES.clear()
    destination = opened(spark, tmp_path)
    assert not destination.write_events(source.batch(begin, middle)).result().of(ORDERS.table_id).durable
    empty = replace(whole, begin=middle, tables=())
    result = destination.write_events(empty).result()
    assert result.tables[ORDERS.table_id].durable
    assert CALLS[-1] == CALLS[-2]


def test_a_transform_masks_copies_and_changes_alike(spark: Any, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    full = replace(ORDERS, replica_identity=ReplicaIdentity.FULL)
    transform = "select id, due, sha2(note, 256) as digest, concat(note, id) as both from changes"
    destination = opened(spark, tmp_path, transform)
    copy(destination, source, full, [order(1, "secret")])
    with source.transaction() as transaction:
        transaction.update(full, order(1, Unchanged), old=order(1, "secret"))
        transaction.delete(full, order(1, "secret"))
    destination.write_events(source.batch()).result()
    copied, changed = CALLS[-2][3], sorted(CALLS[-1][3], key=lambda row: row["_ordinal"])
    assert "note" not in copied[0]
    assert copied[0]["digest"] is not None
    assert changed[0]["_unchanged"] == ["digest", "both"]
    assert changed[0]["digest"] is changed[0]["both"] is None
    assert changed[0]["_old"].asDict() == {"id": 1}
    assert "secret" not in repr((copied, [row | {"both": None} for row in changed])).replace("secret1", "")


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        ("select id, nothing from changes", "UNRESOLVED_COLUMN"),
        ("select id, due due due from changes", "Syntax error"),
        ("select note, due from changes", "drops or changes columns of the key: id"),
        ("select id + 1 as id, note from changes", "drops or changes columns of the key: id"),
        ("select max(id) as id from changes", "aggregate"),
        ("select distinct id from changes", "distinct"),
        ("select id, row_number() over (order by id) as n from changes", "window"),
        ("select id, explode(array(1, 2)) as n from changes", "generate"),
        ("select id, rand() as n from changes", "'n' is not computed from its row alone"),
        ("select id, (select max(due) from changes) as n from changes", "'n' is not computed from its row alone"),
        ("select id, note as a, due as A from changes", "the same name: a"),
        ("select id, note as _op from changes", "names of Penstock's: _op"),
    ],
)
def test_a_transform_that_does_not_work_row_by_row_is_refused(
    transform: str, reason: str, spark: Any, tmp_path: Path
) -> None:
    source = ScriptedSource(tmp_path / "segments")
    destination = opened(spark, tmp_path, transform)
    with pytest.raises(TableRejected, match=r"public\.orders") as refused:
        copy(destination, source, ORDERS, [])
    assert reason in refused.value.message
    assert not CALLS
