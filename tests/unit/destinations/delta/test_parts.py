"""Partitions that are copied again: rows outside the bounds of the others go, and those of the snapshot come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.events import Unrepresentable
from penstock.changes.segment import segment_layout
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.layout import Mode, new_layout
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.parts import part_filter
from penstock.destinations.delta.statistics import collect_statistics
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.errors import IllegalTransition, SchemaNotFollowed
from penstock.schema import Column, PostgresType, TableSchema
from penstock.source.bounds import Bounds, Edge, InList, InRange
from penstock.testing.destinations import LocalTasks, ScriptedSource
from penstock.testing.destinations.contract import INT8, ORDERS
from tests.unit.destinations.delta.orders import assert_durable, copied, expected, notes, order, update, write
from tests.unit.destinations.delta.test_races import InterruptedTasks

OPTIONS: list[dict[str, Any]] = [{}, {"deletion_vectors": False}]
DATE, TEXT = PostgresType(1082, "date"), PostgresType(25, "text")
EVENTS = TableSchema(9, "public", "events", (Column("id", 1, INT8), Column("day", 2, DATE), Column("kind", 3, TEXT)))


def between(low: int, high: int) -> Bounds:
    return (InRange(("id",), (str(low),), (str(high),)),)


def stays(rows: list[dict[str, Any]], *leaves: Bounds, inside: bool = True) -> list[bool]:
    layout = new_layout(EVENTS, Mode.MIRROR, segment_layout(EVENTS).arrow_schema)
    schema = layout.schema
    found = part_filter(layout, leaves, inside=inside)
    table = pa.Table.from_pylist(rows, schema=schema).select(found.columns)
    answer = found.stays(table).to_pylist()
    everything = pa.Table.from_pylist(rows, schema=schema)
    # What statistics say is never more than what the rows say.
    file = Add("f", 1, 1, stats=collect_statistics(everything))
    assert not found.keeps_all(file) or all(answer)
    return answer


def days(*texts: str | None) -> list[dict[str, Any]]:
    return [{"id": 1, "day": None if text is None else pa.scalar(text).cast(pa.date32()).as_py()} for text in texts]


def test_a_range_has_its_lower_bound_and_not_its_upper_one() -> None:
    rows = [{"id": number} for number in (9, 10, 19, 20)] + [{"id": None}]
    assert stays(rows, between(10, 20)) == [False, True, True, False, False]
    assert stays(rows, between(10, 20), inside=False) == [True, False, False, True, True]
    assert stays(rows, between(0, 10), between(20, 30)) == [True, False, False, True, False]


def test_dates_and_open_ends() -> None:
    rows = days("2023-12-31", "2024-01-01", "2024-02-01", None)
    year = (InRange(("day",), ("2024-01-01",), (Edge.HIGHEST,)),)
    assert stays(rows, year) == [False, True, True, False]
    assert stays(rows, (InRange(("day",), (Edge.LOWEST,), ("2024-01-01",)),)) == [True, False, False, False]


def test_ranges_of_several_columns_are_compared_from_left_to_right() -> None:
    bound = (InRange(("id", "kind"), ("1", Edge.HIGHEST), ("3", Edge.LOWEST)),)
    layout = new_layout(EVENTS, Mode.MIRROR, segment_layout(EVENTS).arrow_schema)
    table = pa.Table.from_pylist([{"id": n, "kind": "k"} for n in (1, 2, 3)], schema=layout.schema)
    assert part_filter(layout, [bound], inside=True).stays(table).to_pylist() == [False, True, False]


def test_lists_may_have_null() -> None:
    rows = [{"kind": kind} for kind in ("a", "b", None)]
    assert stays(rows, (InList("kind", ("a",), True),)) == [True, False, True]
    assert stays(rows, (InList("kind", ("b",), False),)) == [False, True, False]


def test_all_levels_of_a_leaf_count() -> None:
    rows = [{"id": 1, "kind": "a"}, {"id": 1, "kind": "b"}, {"id": 9, "kind": "a"}]
    assert stays(rows, (InList("kind", ("a",), False), *between(0, 5))) == [True, False, False]


def test_statistics_spare_reading() -> None:
    layout = new_layout(EVENTS, Mode.MIRROR, segment_layout(EVENTS).arrow_schema)
    table = pa.Table.from_pylist(days("2024-01-01", "2024-01-31"), schema=layout.schema)
    file = Add("f", 1, 1, stats=collect_statistics(table))
    january = (InRange(("day",), ("2024-01-01",), ("2024-02-01",)),)
    later = (InRange(("day",), ("2024-02-01",), ("2024-03-01",)),)
    assert part_filter(layout, [later, january], inside=True).keeps_all(file)
    assert not part_filter(layout, [later], inside=True).keeps_all(file)
    assert part_filter(layout, [later], inside=False).keeps_all(file)
    assert not part_filter(layout, [january], inside=False).keeps_all(file)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_outside_are_replaced(lake: Path, source: ScriptedSource, options: dict[str, Any]) -> None:
    destination = copied(lake, source, **options)
    assert_durable(write(destination, update(source, 1, 2, 8)))
    rows = source.copy(ORDERS, [order(7, "copied"), order(50, "copied")])
    destination.replace_part(ORDERS, rows, [between(0, 3), between(3, 6)], inside=True)
    left = {key: note for key, note in expected(_1="new", _2="new").items() if key < 6}
    assert notes(lake) == left | {7: "copied", 50: "copied"}
    assert destination.position(ORDERS.table_id) == rows.position
    # Again, and then changes find the rows.
    destination.replace_part(ORDERS, rows, [between(0, 6)], inside=True)
    assert_durable(write(destination, update(source, 0, 7)))
    assert notes(lake) == left | {0: "new", 7: "new", 50: "copied"}


def test_rows_inside_are_replaced(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    rows = source.copy(ORDERS, [order(3, "copied")])
    destination.replace_part(ORDERS, rows, [between(3, 6)], inside=False)
    assert notes(lake) == {key: note for key, note in expected(_3="copied").items() if key not in (4, 5)}


def test_without_leaves_all_rows_stay(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    assert_durable(write(destination, update(source, 1)))
    destination.replace_part(ORDERS, source.copy(ORDERS, []), [], inside=False)
    assert notes(lake) == expected(_1="new")


def test_a_compaction_in_between_revives_nothing(lake: Path, source: ScriptedSource) -> None:
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks)
    for number in range(3):
        assert_durable(write(destination, update(source, 7 + number)))

    def exchange_files() -> None:
        log = DeltaLog(LocalStorage(lake / FOLDERS.table(ORDERS)))
        assert compact(log, LocalTasks(), CompactionSettings(min_files=2)) is not None

    tasks.interruption = exchange_files
    destination.replace_part(ORDERS, source.copy(ORDERS, [order(50, "copied")]), [between(0, 8)], inside=True)
    left = {key: note for key, note in expected(_7="new").items() if key < 8}
    assert notes(lake) == left | {50: "copied"}


def test_a_table_that_is_further_than_the_snapshot_is_left_alone(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    rows = source.copy(ORDERS, [])
    assert_durable(write(destination, update(source, 1)))
    with pytest.raises(IllegalTransition):
        destination.replace_part(ORDERS, rows, [between(0, 3)], inside=True)
    assert notes(lake) == expected(_1="new")


def test_other_columns_or_values_without_a_place_need_a_whole_copy(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    other = replace(ORDERS, columns=ORDERS.columns[:2])
    with pytest.raises(SchemaNotFollowed):
        destination.replace_part(other, source.copy(other, []), [between(0, 3)], inside=True)
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1) | {"due": Unrepresentable("infinity")})
    assert_durable(write(destination, source.batch()))
    by_due: Bounds = (InRange(("due",), ("2024-01-01",), (Edge.HIGHEST,)),)
    with pytest.raises(SchemaNotFollowed, match="its column 'due' may have values without a place"):
        destination.replace_part(ORDERS, source.copy(ORDERS, []), [by_due], inside=True)
    assert len(notes(lake)) == 10
