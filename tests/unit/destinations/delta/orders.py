"""A table of ten orders in a lake, and what happens to it: for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.destinations.base import TableResult
from penstock.destinations.delta.destination import DeltaDestination
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import ORDERS
from tests.unit.destinations.delta.reading import read_rows


def order(number: int, note: str = "n") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def started(
    lake: Path, tasks: LocalTasks | None = None, *, records_ddl: bool = False, **options: Any
) -> DeltaDestination:
    destination = DeltaDestination(lake, maintenance=False, **options)
    destination.startup(make_context(tasks=tasks, records_ddl=records_ddl))
    return destination


def copied(lake: Path, source: ScriptedSource, tasks: LocalTasks | None = None, **options: Any) -> DeltaDestination:
    destination = started(lake, tasks, **options)
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    rows = [order(number) for number in range(10)]
    destination.write_table_rows(ORDERS, source.copy(ORDERS, rows, ranges=2))
    return destination


def update(source: ScriptedSource, *numbers: int, note: str = "new") -> Any:
    with source.transaction() as transaction:
        for number in numbers:
            transaction.update(ORDERS, order(number, note))
    return source.batch()


def write(destination: DeltaDestination, batch: Any) -> TableResult:
    return destination.write_events(batch).result().of(ORDERS.table_id)


def assert_durable(result: TableResult) -> None:
    assert result == TableResult()


def notes(lake: Path) -> dict[int, str]:
    rows = read_rows(lake, ORDERS) or []
    assert len(rows) == len({row["id"] for row in rows}), "a row is there twice"
    return {row["id"]: row["note"] for row in rows}


def expected(**changed: str) -> dict[int, str]:
    return dict.fromkeys(range(10), "n") | {int(number[1:]): note for number, note in changed.items()}
