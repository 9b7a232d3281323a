"""Who else writes while a batch is on its way: zombies, maintenance, strangers, tasks that run twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from penstock.changes.events import Unchanged
from penstock.changes.segment import UNREPRESENTABLE_TYPE
from penstock.destinations.base import TableResult
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import (
    CompactionSettings,
    commit_rewritten,
    plan_compaction,
    rewrite_group,
)
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.errors import ConfigError, IllegalTransition, PenstockError, TableOwned, TableRejected
from penstock.schema import Column, PostgresType
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import INT8, LINES, ORDERS, TEXT
from tests.unit.destinations.delta.reading import read_rows, read_table

TIME = PostgresType(1083, "time")


class InterruptedTasks(LocalTasks):
    """Runs jobs; before the next one ends something else happens, once."""

    interruption: Callable[[], None] | None = None

    def __init__(self) -> None:
        LocalTasks.__init__(self)
        self.interruption = None

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        results = LocalTasks.run(self, items, function, description=description)
        happen, self.interruption = self.interruption, None
        if happen is not None:
            happen()
        return results


class TwiceTasks(LocalTasks):
    """Every task runs twice, as Spark may do; the first answer counts."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        results = LocalTasks.run(self, items, function, description=description)
        LocalTasks.run(self, items, function, description=description)
        return results


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


def order(number: int, note: str = "n") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def started(lake: Path, tasks: LocalTasks | None = None, **options: Any) -> DeltaDestination:
    destination = DeltaDestination(lake, maintenance=False, **options)
    destination.startup(make_context(tasks=tasks))
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


def notes(lake: Path) -> dict[int, str]:
    rows = read_rows(lake, ORDERS) or []
    assert len(rows) == len({row["id"] for row in rows}), "a row is there twice"
    return {row["id"]: row["note"] for row in rows}


def expected(**changed: str) -> dict[int, str]:
    return dict.fromkeys(range(10), "n") | {int(number[1:]): note for number, note in changed.items()}


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


def assert_durable(result: TableResult) -> None:
    assert result == TableResult()


@pytest.mark.trap(37)
@pytest.mark.parametrize("vectors", [True, False])
def test_compaction_between_match_and_commit_keeps_all(lake: Path, source: ScriptedSource, vectors: bool) -> None:
    """The files that rows were found in are gone: they are looked for again."""
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks, deletion_vectors=vectors)
    for number in range(3):
        assert_durable(write(destination, update(source, number, number + 3, note=f"{number}")))

    def compact() -> None:
        storage = LocalStorage(lake / FOLDERS.table(ORDERS))
        log = DeltaLog(storage)
        snapshot = log.refresh()
        assert snapshot is not None
        groups = plan_compaction(storage, snapshot, CompactionSettings(min_files=2))
        assert groups
        assert commit_rewritten(log, [rewrite_group(group) for group in groups])

    tasks.interruption = compact
    assert_durable(write(destination, update(source, 4, 5, 6, note="last")))
    assert notes(lake) == expected(_0="0", _1="1", _2="2", _3="0", _4="last", _5="last", _6="last")


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


@pytest.mark.trap(38, 54)
@pytest.mark.parametrize("damage", ["deleted", "cut", "empty", "zeroed"])
def test_an_index_that_is_lost_or_broken_is_made_anew(lake: Path, source: ScriptedSource, damage: str) -> None:
    destination = copied(lake, source)
    assert_durable(write(destination, update(source, 1, note="first")))
    folder = lake / FOLDERS.table(ORDERS) / "_penstock" / "index"
    found = sorted(path for path in folder.iterdir())
    assert found
    for path in found:
        content = path.read_bytes()
        # Another file under the same name: what is mapped already stays as it is.
        path.unlink()
        if damage != "deleted":
            zeroed = content[:40] + bytes(len(content) - 40)
            path.write_bytes({"cut": content[:20], "empty": b"", "zeroed": zeroed}[damage])
    _forget_indexes()
    assert_durable(write(destination, update(source, 1, 2, note="second")))
    assert notes(lake) == expected(_1="second", _2="second")


def _forget_indexes() -> None:
    from penstock.destinations.delta import index

    index._open.cache_clear()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.trap(30)
def test_every_row_of_a_key_is_replaced(lake: Path, source: ScriptedSource) -> None:
    """A copy that was resumed may have a row twice."""
    destination = started(lake)
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    rows = [order(1), order(2), order(1), order(1)]
    destination.write_table_rows(ORDERS, source.copy(ORDERS, rows, ranges=2))
    assert_durable(write(destination, update(source, 1)))
    assert notes(lake) == {1: "new", 2: "n"}


@pytest.mark.trap(29)
def test_a_row_without_a_key_that_is_not_there_stops_its_table(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, [{"level": 1, "line": "there"}]))
    with source.transaction() as transaction:
        transaction.delete(LINES, {"level": 1, "line": "not there"})
    error = destination.write_events(source.batch()).result().of(LINES.table_id).error
    assert isinstance(error, PenstockError)
    assert "not there" not in str(error)[len("audit.lines") :].replace("are not there", "")
    assert read_rows(lake, LINES) == [{"level": 1, "line": "there"}]


@dataclass(frozen=True)
class SourceOf:
    """A source whose rows are at hand (`penstock.destinations.base.SourceRows`)."""

    rows: tuple[tuple[int, str], ...]

    def fetch(self, schema: Any, keys: pa.Table) -> pa.Table:
        wanted = set(keys["id"].to_pylist())
        found = [(number, note) for number, note in self.rows if number in wanted]
        return pa.table(
            {
                "id": pa.array([number for number, _ in found], pa.int64()),
                "note": pa.array([f"large {number}" for number, _ in found]),
                "due": pa.nulls(len(found), pa.date32()),
                "state": pa.array([note for _, note in found]),
                "_unrepresentable": pa.nulls(len(found), UNREPRESENTABLE_TYPE),
            }
        )


@pytest.mark.trap(25)
def test_a_row_that_came_into_view_and_changed_since_waits_for_that_change(lake: Path, source: ScriptedSource) -> None:
    """The cells that were not sent are taken from the source only if all others are the same there."""
    schema = replace(ORDERS, columns=(*ORDERS.columns, Column("state", 4, TEXT)))
    destination = DeltaDestination(lake, maintenance=False)
    context = make_context()
    destination.startup(replace(context, source_rows=SourceOf(((1, "same"), (2, "newer")))))
    destination.drop_table_for_copy(schema, "attempt-1")
    destination.write_table_rows(schema, source.copy(schema, []))

    def row(number: int, state: str, note: Any = Unchanged) -> dict[str, Any]:
        return {"id": number, "note": note, "due": None, "state": state}

    with source.transaction() as transaction:
        transaction.insert(schema, row(1, "same"))
        transaction.insert(schema, row(2, "older"))
        transaction.insert(schema, row(3, "gone at the source"))
    assert_durable(write(destination, source.batch()))
    assert read_rows(lake, schema) == [row(1, "same", "large 1")]
    with source.transaction() as transaction:
        transaction.update(schema, row(2, "newer"))
        transaction.delete(schema, {"id": 3})
        transaction.update(schema, row(4, "same"), old={"id": 1})
    assert_durable(write(destination, source.batch()))
    rows = sorted(read_rows(lake, schema) or [], key=lambda cells: cells["id"])
    assert rows == [row(2, "newer", "large 2"), row(4, "same", "large 1")]


@pytest.mark.trap(25)
def test_without_a_source_to_ask_such_a_row_stops_its_table(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, {"id": 50, "note": Unchanged, "due": None})
    assert isinstance(write(destination, source.batch()).error, PenstockError)
    assert notes(lake) == expected()


@pytest.mark.trap(31)
def test_times_of_day_are_printed_alike_wherever_they_stand(lake: Path, source: ScriptedSource) -> None:
    """Delta has no type for them; a key of one is found again, and a history says the same before and after."""
    hour = Column("hour", 1, TIME, identity=True, primary_key_position=1)
    schema = replace(ORDERS, table_id=17_000, columns=(hour, Column("note", 2, TEXT)))
    noon, later = time(12), time(12, 30, 0, 250_000)
    for mode in ("mirror", "history"):
        destination = started(lake / mode, mode=mode)
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, [{"hour": noon, "note": "n"}]))
        with source.transaction() as transaction:
            transaction.update(schema, {"hour": later, "note": Unchanged}, old={"hour": noon})
        result = destination.write_events(source.batch()).result()
        assert result.tables == {}
    assert read_rows(lake / "mirror", schema) == [{"hour": "12:30:00.25", "note": "n"}]
    history = read_table(lake / "history", schema)
    assert history is not None
    changes = sorted(history.to_pylist(), key=lambda row: row["_ordinal"])
    assert [(row["hour"], row["_old"]) for row in changes] == [
        ("12:00:00", None),
        ("12:30:00.25", {"hour": "12:00:00"}),
    ]


def test_a_table_without_columns_is_refused(lake: Path) -> None:
    with pytest.raises(TableRejected, match="no columns"):
        started(lake).drop_table_for_copy(replace(ORDERS, columns=()), "attempt-1")


def test_a_table_that_others_made_is_left_alone(lake: Path, source: ScriptedSource) -> None:
    row = pa.table({"id": [1]})
    folder = lake / FOLDERS.table(ORDERS)
    folder.mkdir(parents=True)
    write_deltalake(str(folder), row)
    with pytest.raises(TableOwned):
        started(lake).drop_table_for_copy(ORDERS, "attempt-1")


def test_a_renamed_table_goes_on_and_moves_with_its_next_copy(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    renamed = replace(ORDERS, name="purchases")
    with source.transaction() as transaction:
        transaction.update(renamed, order(1, "after"))
    assert_durable(write(destination, source.batch()))
    assert notes(lake)[1] == "after"
    destination = started(lake)
    destination.drop_table_for_copy(renamed, "attempt-2")
    destination.write_table_rows(renamed, source.copy(renamed, [order(5)], attempt="attempt-2"))
    with source.transaction() as transaction:
        transaction.update(renamed, order(5, "moved"))
    assert_durable(write(destination, source.batch()))
    assert read_rows(lake, renamed) == [order(5, "moved")]
    assert notes(lake)[1] == "after"


def test_vectors_can_be_turned_on_and_off(lake: Path, source: ScriptedSource) -> None:
    """The tables stay; files that have vectors lose them when they are rewritten."""
    destination = copied(lake, source, deletion_vectors=False)
    for number, vectors in enumerate([False, True, False, True]):
        destination = started(lake, deletion_vectors=vectors)
        assert_durable(write(destination, update(source, number, 9, note=f"{number}")))
        assert notes(lake)[9] == f"{number}"
    assert notes(lake) == expected(_0="0", _1="1", _2="2", _3="3", _9="3")


def test_another_mode_needs_another_copy(lake: Path, source: ScriptedSource) -> None:
    copied(lake, source)
    batch = update(source, 1)
    error = write(started(lake, mode="soft_delete"), batch).error
    assert isinstance(error, TableRejected)
    assert "resync" in error.hint
    assert notes(lake) == expected()
    other = started(lake, mode="soft_delete")
    other.drop_table_for_copy(ORDERS, "attempt-2")
    other.write_table_rows(ORDERS, source.copy(ORDERS, [order(1), order(2)], attempt="attempt-2"))
    with source.transaction() as transaction:
        transaction.delete(ORDERS, {"id": 1})
    assert_durable(write(other, source.batch()))
    assert notes(lake) == {2: "n"}
    assert len(read_rows(lake, ORDERS, deleted=True) or []) == 2


def test_a_pinned_version_stays_while_the_table_goes_on(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    renamed = replace(ORDERS, name="purchases")
    pinned = destination.pin(renamed)
    assert pinned is not None
    assert pinned.schema == ORDERS
    assert_durable(write(destination, update(source, *range(10))))
    batches = [batch for part in pinned.parts for batch in pinned.reader.read(part)]
    assert {note for batch in batches for note in batch["note"].to_pylist()} == {"n"}
    assert sum(batch.num_rows for batch in batches) == 10
    pinned.close()
    assert destination.pin(replace(ORDERS, table_id=1)) is None


@pytest.mark.trap(29)
def test_rows_without_a_key_are_found_after_a_column_was_added(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    line = {"level": 1, "line": "same"}
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, [line, line, line]))
    added = replace(LINES, columns=(*LINES.columns, Column("extra", 9, INT8, identity=True)))
    with source.transaction() as transaction:
        transaction.delete(LINES, line)
    with source.transaction() as transaction:
        transaction.delete(added, line | {"extra": None})
        transaction.insert(added, line | {"extra": 5})
    assert destination.write_events(source.batch()).result().tables == {}
    with source.transaction() as transaction:
        transaction.delete(added, line | {"extra": 5})
    assert destination.write_events(source.batch()).result().tables == {}
    assert read_rows(lake, LINES) == [line | {"extra": None}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "mirrored"}, "unknown mode"),
        ({"deletion_vectors": "yes"}, "true or false"),
        ({"commit_interval": 0}, "commit_interval"),
        ({"commit_interval": "1s"}, "commit_interval"),
        ({"file_retention_hours": 0.01}, "file_retention_hours"),
        ({"storage_options": {"aws_region": "x"}}, "storage options"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeltaDestination(tmp_path, **options)


def test_a_lake_of_a_newer_version_is_refused(lake: Path) -> None:
    started(lake).shutdown()
    (lake / "_penstock" / "lake.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match="newer version"):
        started(lake)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        started(tmp_path / "file" / "lake")


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
