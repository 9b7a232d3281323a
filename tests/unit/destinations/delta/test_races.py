"""Who else writes while a batch is on its way: zombies, maintenance, strangers, tasks that run twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import (
    CompactionSettings,
    commit_rewritten,
    plan_compaction,
    rewrite_group,
)
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.errors import IllegalTransition, Retry, TableBusy, TableRejected
from penstock.testing.destinations import LocalTasks, ScriptedSource
from penstock.testing.destinations.contract import ORDERS
from tests.unit.destinations.delta.orders import assert_durable, copied, expected, notes, order, started, update, write


class InterruptedTasks(LocalTasks):
    """Runs jobs; before the next one ends something else happens, once, or each time if it is `lasting`."""

    interruption: Callable[[], None] | None = None

    def __init__(self) -> None:
        LocalTasks.__init__(self)
        self.interruption = None
        self.lasting = False

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        results = LocalTasks.run(self, items, function, description=description)
        happen = self.interruption
        if not self.lasting:
            self.interruption = None
        if happen is not None:
            happen()
        return results


class TwiceTasks(LocalTasks):
    """Every task runs twice, as Spark may do; the first answer counts."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        results = LocalTasks.run(self, items, function, description=description)
        LocalTasks.run(self, items, function, description=description)
        return results


def compact(lake: Path, settings: CompactionSettings) -> None:
    storage = LocalStorage(lake / FOLDERS.table(ORDERS))
    log = DeltaLog(storage)
    snapshot = log.refresh()
    assert snapshot is not None
    groups = plan_compaction(storage, snapshot, settings)
    assert groups
    assert commit_rewritten(log, [rewrite_group(group) for group in groups])


@pytest.mark.trap(28, 35)
def test_a_zombie_with_the_same_batch_doubles_nothing(lake: Path, source: ScriptedSource) -> None:
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(20))
        transaction.update(ORDERS, order(3, "new"))
    batch = source.batch()
    zombie = started(lake)
    tasks.interruption = lambda: assert_durable(write(zombie, batch))
    assert_durable(write(destination, batch))
    assert notes(lake) == expected(_3="new", _20="n")
    assert destination.position(ORDERS.table_id) == batch.end


@pytest.mark.trap(37)
@pytest.mark.parametrize("vectors", [True, False])
def test_compaction_between_match_and_commit_keeps_all(lake: Path, source: ScriptedSource, vectors: bool) -> None:
    """The files that rows were found in are gone: they are looked for again."""
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks, deletion_vectors=vectors)
    for number in range(3):
        assert_durable(write(destination, update(source, number, number + 3, note=f"{number}")))

    tasks.interruption = lambda: compact(lake, CompactionSettings(min_files=2))
    assert_durable(write(destination, update(source, 4, 5, 6, note="last")))
    assert notes(lake) == expected(_0="0", _1="1", _2="2", _3="0", _4="last", _5="last", _6="last")


@pytest.mark.remedy("TableBusy")
def test_a_table_that_others_keep_rewriting_is_written_once_they_stop(lake: Path, source: ScriptedSource) -> None:
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks)
    every_file = CompactionSettings(dead_fraction=0.0)
    tasks.lasting, tasks.interruption = True, lambda: compact(lake, every_file)
    batch = update(source, 1, 2, note="late")
    error = write(destination, batch).error
    assert isinstance(error, TableBusy)
    assert error.retry is Retry.TIMED
    assert notes(lake) == expected()
    tasks.interruption = None
    assert_durable(write(destination, batch))
    assert notes(lake) == expected(_1="late", _2="late")


@pytest.mark.trap(35)
def test_a_stranger_stops_the_table(lake: Path, source: ScriptedSource) -> None:
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks, deletion_vectors=False)

    def append() -> None:
        row = pa.table({"id": [99], "note": ["foreign"], "due": pa.array([None], pa.date32())})
        write_deltalake(str(lake / FOLDERS.table(ORDERS)), row, mode="append")

    tasks.interruption = append
    before = destination.position(ORDERS.table_id)
    error = write(destination, update(source, 1)).error
    assert isinstance(error, TableRejected)
    assert notes(lake) == expected(_99="foreign")
    assert destination.position(ORDERS.table_id) == before


@pytest.mark.trap(19, 34)
def test_a_zombie_lands_neither_before_nor_after_a_new_copy(lake: Path, source: ScriptedSource) -> None:
    """One that was stopped before its commit, and goes on after the table was copied anew."""
    tasks = InterruptedTasks()
    zombie = copied(lake, source, tasks)
    batch = update(source, 1, note="zombie")

    def copy_again() -> None:
        successor = started(lake)
        successor.drop_table_for_copy(ORDERS, "attempt-2")
        successor.write_table_rows(ORDERS, source.copy(ORDERS, [order(1, "copied")], attempt="attempt-2"))

    tasks.interruption = copy_again
    assert isinstance(write(zombie, batch).error, IllegalTransition)
    assert notes(lake) == {1: "copied"}
    # It finds the new copy, whose position covers the batch.
    assert_durable(write(zombie, batch))
    assert notes(lake) == {1: "copied"}


@pytest.mark.trap(19)
def test_a_late_copy_of_a_zombie_is_refused(lake: Path, source: ScriptedSource) -> None:
    tasks = InterruptedTasks()
    zombie = started(lake, tasks)
    zombie.drop_table_for_copy(ORDERS, "attempt-1")
    late = source.copy(ORDERS, [order(99)])
    successor = started(lake)
    tasks.interruption = lambda: successor.drop_table_for_copy(ORDERS, "attempt-2")
    with pytest.raises(IllegalTransition):
        zombie.write_table_rows(ORDERS, late)
    assert notes(lake) == {}
    successor.write_table_rows(ORDERS, source.copy(ORDERS, [order(1)], attempt="attempt-2"))
    with pytest.raises(IllegalTransition):
        zombie.write_table_rows(ORDERS, late)
    assert notes(lake) == {1: "n"}


@pytest.mark.trap(50)
def test_tasks_that_run_twice_change_nothing(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source, TwiceTasks())
    for number in range(3):
        assert_durable(write(destination, update(source, number, 9, note=f"{number}")))
    assert notes(lake) == expected(_0="0", _1="1", _2="2", _9="2")


def test_files_that_no_commit_names_are_all_that_a_dead_batch_leaves(lake: Path, source: ScriptedSource) -> None:
    class DyingTasks(LocalTasks):
        def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
            LocalTasks.run(self, items, function, description=description)
            raise KeyboardInterrupt

    copied(lake, source)
    batch = update(source, 1, 2)
    with pytest.raises(KeyboardInterrupt):
        write(started(lake, DyingTasks()), batch)
    assert notes(lake) == expected()
    assert_durable(write(started(lake), batch))
    assert notes(lake) == expected(_1="new", _2="new")
    shutil.rmtree(lake / FOLDERS.table(ORDERS) / "_penstock")
