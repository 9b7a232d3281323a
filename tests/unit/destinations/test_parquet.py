"""The parquet destination under the contract, and what makes it exactly once."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.base import Destination, DestinationContext
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.destinations.parquet.folder import Generation, NewSchema, TableFolder, put_if_absent
from penstock.errors import ConfigError, IllegalTransition, LeaseLost
from penstock.schema import Column, ReplicaIdentity, TableSchema
from penstock.source.lineage import Ancestry, Lineage
from penstock.testing.destinations import DestinationContract, LocalTasks, ScriptedSource, make_context
from penstock.testing.destinations.contract import INT8, ITEMS, LINES, ORDERS


class ParquetHarness:
    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Destination:
        return ParquetDestination(self.path)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        try:
            return ParquetReader(self.path).mirror(str(schema)).rows()
        except KeyError:
            return None


class TestParquet(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> ParquetHarness:
        return ParquetHarness(tmp_path / "lake")


class DyingTasks(LocalTasks):
    """Finishes a job, and then the process is gone before anything is committed."""

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        for _ in range(2):
            LocalTasks.run(self, items, function, description=description)
        raise KeyboardInterrupt


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


def started(lake: Path, context: DestinationContext | None = None) -> ParquetDestination:
    destination = ParquetDestination(lake)
    destination.startup(context or make_context())
    return destination


def copy(destination: ParquetDestination, source: ScriptedSource, schema: TableSchema, rows: list[Any]) -> None:
    destination.drop_table_for_copy(schema, "attempt-1")
    destination.write_table_rows(schema, source.copy(schema, rows))


def line(number: int) -> dict[str, Any]:
    return {"level": number, "line": "a line"}


def write_line(source: ScriptedSource, number: int) -> None:
    with source.transaction() as transaction:
        transaction.insert(LINES, line(number))


def levels(lake: Path) -> list[int]:
    return sorted(row["level"] for row in ParquetReader(lake).mirror("audit.lines").rows())


@pytest.mark.trap(28, 40)
def test_files_of_a_process_that_died_before_its_manifest_are_never_seen_and_swept(
    lake: Path, source: ScriptedSource
) -> None:
    destination = started(lake)
    copy(destination, source, LINES, [line(0)])
    write_line(source, 1)
    destination.write_events(source.batch())
    dying = started(lake, make_context(tasks=DyingTasks()))
    write_line(source, 2)
    batch = source.batch()
    with pytest.raises(KeyboardInterrupt):
        dying.write_events(batch)
    data = next(lake.glob("audit/lines/generations/*/data"))
    assert levels(lake) == [0, 1]
    assert len(list(data.iterdir())) == 4
    successor = started(lake)
    successor.write_events(batch)
    assert levels(lake) == [0, 1, 2]
    assert sorted(data.iterdir()) == sorted(ParquetReader(lake).files("audit.lines"))


@pytest.mark.trap(28)
def test_a_process_that_was_replaced_cannot_write_any_more(lake: Path, source: ScriptedSource) -> None:
    zombie = started(lake)
    copy(zombie, source, LINES, [])
    write_line(source, 1)
    first = source.batch()
    assert zombie.write_events(first).result().tables == {}
    successor = started(lake)
    write_line(source, 2)
    second = source.batch()
    assert successor.write_events(second).result().tables == {}
    assert isinstance(zombie.write_events(second).result().of(LINES.table_id).error, LeaseLost)
    write_line(source, 3)
    third = source.batch()
    assert isinstance(zombie.write_events(third).result().of(LINES.table_id).error, LeaseLost)
    assert successor.write_events(third).result().tables == {}
    assert levels(lake) == [1, 2, 3]


def test_a_process_of_an_earlier_lease_cannot_take_a_table_back(lake: Path, source: ScriptedSource) -> None:
    copy(started(lake), source, LINES, [])
    write_line(source, 1)
    successor = started(lake, replace(make_context(), epoch=2))
    successor.write_events(source.batch())
    zombie = started(lake, replace(make_context(), epoch=1))
    write_line(source, 2)
    assert isinstance(zombie.write_events(source.batch()).result().of(LINES.table_id).error, LeaseLost)
    assert successor.write_events(source.batch()).result().tables == {}
    assert levels(lake) == [1, 2]


@pytest.mark.trap(19)
def test_changes_of_a_process_that_missed_the_new_copy_do_not_land(lake: Path, source: ScriptedSource) -> None:
    zombie = started(lake)
    copy(zombie, source, LINES, [line(0)])
    write_line(source, 1)
    zombie.write_events(source.batch())
    successor = started(lake)
    successor.drop_table_for_copy(LINES, "attempt-2")
    write_line(source, 2)
    error = zombie.write_events(source.batch()).result().of(LINES.table_id).error
    assert isinstance(error, IllegalTransition)
    assert levels(lake) == [0, 1]
    successor.write_table_rows(LINES, source.copy(LINES, [line(7)], attempt="attempt-2"))
    assert zombie.write_events(source.batch()).result().of(LINES.table_id).error is not None
    assert levels(lake) == [7]


@pytest.mark.trap(20, 50)
def test_a_copy_in_equal_ranges_by_tasks_that_run_twice_has_every_row_once(lake: Path, source: ScriptedSource) -> None:
    class TwiceTasks(LocalTasks):
        def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
            LocalTasks.run(self, items, function, description=description)
            return LocalTasks.run(self, items, function, description=description)

    destination = started(lake, make_context(tasks=TwiceTasks()))
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, [line(1)] * 4, ranges=2))
    assert levels(lake) == [1] * 4


def test_a_copy_that_is_repeated_is_written_once(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    rows = source.copy(LINES, [line(1)])
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, rows)
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, rows)
    assert levels(lake) == [1]


def test_only_one_of_many_gets_a_name(tmp_path: Path) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda each=each: results.append(put_if_absent(tmp_path / "taken", str(each))))
        for each in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 7 + [True]
    assert os.listdir(tmp_path) == ["taken"]


def test_every_change_is_there_in_order(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    copy(destination, source, ORDERS, [{"id": 1, "note": "x", "due": None}])
    added = replace(ORDERS, columns=(*ORDERS.columns, Column("amount", 4, INT8)))
    with source.transaction() as transaction:
        transaction.update(ORDERS, {"id": 1, "note": "y", "due": None})
    with source.transaction() as transaction:
        transaction.insert(added, {"id": 2, "note": "z", "due": None, "amount": 5})
        transaction.delete(added, {"id": 1})
    destination.write_events(source.batch())
    changes = ParquetReader(lake).read_changes("public.orders")
    assert changes.column("_op").to_pylist() == [0, 2, 1, 3]
    assert changes.column("amount").to_pylist() == [None, None, 5, None]
    keys = list(zip(changes.column("_commit_lsn").to_pylist(), changes.column("_ordinal").to_pylist(), strict=True))
    assert keys == sorted(keys)
    table = ParquetReader(lake).read_table("public.orders")
    assert table.to_pylist() == [{"id": 2, "note": "z", "due": None, "amount": 5}]


def test_tables_and_positions_can_be_listed(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    copy(destination, source, ITEMS, [])
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    reader = ParquetReader(lake)
    assert reader.tables() == ["public.Order items"]
    assert reader.positions() == {"public.Order items": source.position}
    assert reader.read_changes("public.Order items").num_rows == 0
    with pytest.raises(KeyError):
        reader.mirror("public.orders")


def test_a_new_copy_keeps_earlier_ones_unless_they_failed(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    for number in range(3):
        destination.drop_table_for_copy(LINES, f"failed-{number}")
        destination.drop_table_for_copy(LINES, f"attempt-{number}")
        destination.write_table_rows(LINES, source.copy(LINES, [line(number)], attempt=f"attempt-{number}"))
    numbers = ["00000002", "00000004", "00000006"]
    assert [path.name for path in sorted(lake.glob("audit/lines/generations/*"))] == numbers
    assert levels(lake) == [2]
    reader = ParquetReader(lake)
    assert reader.read_changes("audit.lines", earlier=True).column("level").to_pylist() == [0, 1, 2]
    assert reader.read_changes("audit.lines").column("_schema_version").to_pylist() == [1]


def test_a_version_says_which_schema_a_row_had(lake: Path, source: ScriptedSource) -> None:
    copy(started(lake), source, ORDERS, [{"id": 1, "note": "x", "due": None}])
    begin = source.position
    key, note, due = ORDERS.columns
    renamed = replace(ORDERS, columns=(key, replace(note, name="remark"), due))
    retyped = replace(ORDERS, columns=(key, replace(note, type=INT8), due), replica_identity=ReplicaIdentity.FULL)
    rows = [(ORDERS, {"note": "y"}), (renamed, {"remark": "z"}), (retyped, {"note": 5}), (ORDERS, {"note": "z"})]
    for number, (schema, cells) in enumerate(rows, 2):
        row = {"id": number, "due": None, **cells}
        with source.transaction() as transaction:
            transaction.insert(schema, row)
            transaction.update(schema, row, old=row)
        # The next process gets it again from the beginning, as after a crash.
        assert started(lake).write_events(source.batch(begin)).result().tables == {}
    reader = ParquetReader(lake)
    changes = reader.read_changes("public.orders")
    assert changes.column("_schema_version").to_pylist() == [1, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [changes.column(name).to_pylist()[::2] for name in ("note", "remark", "note_2")] == [
        ["x", "y", None, None, "z"],
        [None, None, "z", None, None],
        [None, None, None, 5, None],
    ]
    assert changes.column("_old").to_pylist()[6]["note_2"] == 5
    assert [len(reader.files("public.orders", version=number)) for number in range(1, 6)] == [2, 1, 1, 1, 0]
    assert (
        len([step for each in reader.manifests("public.orders") for step in each.steps if isinstance(step, NewSchema)])
        == 4
    )
    later = started(lake)
    later.drop_table_for_copy(renamed, "attempt-2")
    later.write_table_rows(renamed, source.copy(renamed, [{"id": 9, "remark": "r", "due": None}], attempt="attempt-2"))
    assert reader.read_changes("public.orders").column("_schema_version").to_pylist() == [5]
    everything = reader.read_changes("public.orders", earlier=True)
    assert everything.column("_schema_version").to_pylist() == [1, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_process_killed_while_it_removes_a_generation_does_not_stop_the_next_copy(
    lake: Path, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    def remove_log_only(path: Path, **options: Any) -> None:
        remove(path / "log")
        raise Killed

    def copy(number: int) -> None:
        destination = started(lake)
        destination.drop_table_for_copy(LINES, f"attempt-{number}")
        destination.write_table_rows(LINES, source.copy(LINES, [line(number)], attempt=f"attempt-{number}"))

    remove = shutil.rmtree
    copy(0)
    started(lake).drop_table_for_copy(LINES, "failed")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_log_only)
        with pytest.raises(Killed):
            copy(2)
    copy(3)
    assert [path.name for path in sorted(lake.glob("audit/lines/generations/*"))] == [
        "00000001",
        "00000003",
        "00000004",
    ]
    assert levels(lake) == [3]


def test_a_renamed_table_keeps_its_folder_until_it_is_copied_again(lake: Path, source: ScriptedSource) -> None:
    destination = started(lake)
    copy(destination, source, LINES, [line(1)])
    renamed = replace(LINES, name="renamed")
    with source.transaction() as transaction:
        transaction.insert(renamed, line(2))
    destination.write_events(source.batch())
    assert levels(lake) == [1, 2]
    destination = started(lake)
    with source.transaction() as transaction:
        transaction.insert(renamed, line(3))
    destination.write_events(source.batch())
    assert levels(lake) == [1, 2, 3]
    destination.drop_table_for_copy(renamed, "attempt-2")
    destination.write_table_rows(renamed, source.copy(renamed, [line(9)], attempt="attempt-2"))
    with source.transaction() as transaction:
        transaction.insert(renamed, line(10))
    destination = started(lake)
    assert destination.write_events(source.batch()).result().tables == {}
    rows = ParquetReader(lake).mirror("audit.renamed").rows()
    assert sorted(row["level"] for row in rows) == [9, 10]
    # The folder that it left is no longer listed; nothing in it is removed.
    assert ParquetReader(lake).tables() == ["audit.renamed"]
    assert len(list((lake / "audit/lines").rglob("*.parquet"))) == 3


def test_tables_that_exchange_their_names_are_copied_at_the_same_time(
    lake: Path, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of one begins between any two looks at the folder which the other one leaves."""
    first, second = LINES, replace(LINES, table_id=LINES.table_id + 1, name="others")
    after = [replace(first, name="others"), replace(second, name="lines")]
    looks, at = 0, 0
    generations = TableFolder.generations

    def look(folder: TableFolder) -> list[Generation]:
        nonlocal looks
        found = generations(folder)
        if folder.path == lake / "audit" / "lines":
            looks += 1
            if looks == at:
                destination.drop_table_for_copy(after[1], "attempt-2")
        return found

    for at in (1, 2, 3):
        shutil.rmtree(lake, ignore_errors=True)
        destination = started(lake)
        copy(destination, source, first, [line(1)])
        copy(destination, source, second, [line(2)])
        looks = 0
        monkeypatch.setattr(TableFolder, "generations", look)
        destination.drop_table_for_copy(after[0], "attempt-2")
        monkeypatch.undo()
        if looks < at:
            destination.drop_table_for_copy(after[1], "attempt-2")
        for number, schema in enumerate(after, 11):
            destination.write_table_rows(schema, source.copy(schema, [line(number)], attempt="attempt-2"))
        levels_of = {name: ParquetReader(lake).mirror(f"audit.{name}").rows() for name in ("others", "lines")}
        assert {name: [row["level"] for row in rows] for name, rows in levels_of.items()} == {
            "others": [11],
            "lines": [12],
        }


def test_a_table_that_takes_over_a_folder_is_not_mistaken_for_the_one_before(
    lake: Path, source: ScriptedSource
) -> None:
    """Tables that exchanged their names: each goes to the folder of the other."""
    one, other = LINES, replace(LINES, table_id=LINES.table_id + 1, name="others")
    destination = started(lake)
    copy(destination, source, one, [line(1)])
    copy(destination, source, other, [line(2)])
    for schema, attempt in ((replace(one, name="others"), "a"), (replace(other, name="lines"), "b")):
        destination.drop_table_for_copy(schema, attempt)
    # Until the copies are complete, readers see what was there, also after a crash.
    destination = started(lake)
    assert levels(lake) == [1]
    assert destination.folder_of(one.table_id) == "audit/lines"
    assert destination.folder_of(other.table_id) == "audit/others"
    for schema, attempt, level in ((replace(one, name="others"), "c", 1), (replace(other, name="lines"), "d", 2)):
        destination.drop_table_for_copy(schema, attempt)
        destination.write_table_rows(schema, source.copy(schema, [line(level)], attempt=attempt))
    assert levels(lake) == [2]
    assert started(lake).folder_of(one.table_id) == "audit/others"
    assert ParquetReader(lake).tables() == ["audit.lines", "audit.others"]


def test_a_table_of_another_server_has_no_folder(lake: Path, source: ScriptedSource) -> None:
    copy(started(lake), source, LINES, [line(1)])
    assert started(lake).folder_of(LINES.table_id) == "audit/lines"
    assert (
        started(lake, make_context(ancestry=Ancestry(Lineage("another", 1, "shop", "slot")))).folder_of(LINES.table_id)
        is None
    )


def test_a_batch_without_tables_runs_no_job(lake: Path, source: ScriptedSource) -> None:
    tasks = LocalTasks()
    destination = started(lake, make_context(tasks=tasks))
    copy(destination, source, LINES, [])
    with source.transaction() as transaction:
        transaction.truncate(LINES)
    before = len(tasks.jobs)
    destination.write_events(source.batch())
    assert len(tasks.jobs) == before
    assert destination.position(LINES.table_id) == source.position


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        started(tmp_path / "file")
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "_penstock.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ConfigError, match="newer version"):
        started(newer)
    with pytest.raises(ConfigError, match="object store"):
        ParquetDestination("s3://bucket/lake")
    with pytest.raises(ConfigError, match="compression"):
        ParquetDestination(tmp_path, compression="brotlii")
