"""Compaction, checkpoints, retention, vacuum and pins: the rows stay the same, and what somebody needs stays there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from hypothesis import given
from hypothesis import strategies as st

from penstock.destinations.delta.actions import Action, Add, VectorDescriptor
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.files import now_milliseconds, vector_of, write_data_file
from penstock.destinations.delta.log import Committed, DeltaLog, Lost
from penstock.destinations.delta.maintenance.cleanup import (
    Vacuum,
    clean_log,
    commits_since_checkpoint,
    vacuum,
    write_checkpoint,
)
from penstock.destinations.delta.maintenance.compaction import (
    CompactionSettings,
    Source,
    commit_rewritten,
    compact,
    plan_compaction,
    rewrite_group,
)
from penstock.destinations.delta.maintenance.pins import (
    WritesInFlight,
    pin_version,
    read_pins,
    release_pin,
)
from penstock.destinations.delta.maintenance.schedule import Maintenance, MaintenanceSettings
from penstock.destinations.delta.snapshot import Snapshot, Verdict
from penstock.destinations.delta.storage import LocalStorage, Storage
from penstock.destinations.delta.vectors import Vector, write_vectors
from penstock.errors import ConfigError, DestinationUnavailable, TasksFailed
from penstock.testing.destinations import LocalTasks, make_context
from penstock.testing.destinations.contract import ITEMS, ORDERS
from tests.unit.destinations.delta.lake import LakeTable, make_rows

SOON = CompactionSettings(min_files=2)


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    table = LakeTable(LocalStorage(tmp_path / "items"))
    table.create(range(100))
    return table


def grow(table: LakeTable, files: int = 4) -> list[int]:
    """Some small files with dead rows."""
    for number in range(files):
        table.append(range(1000 + 10 * number, 1010 + 10 * number))
    table.delete([5, 50, 1003, 1011, 1012])
    return table.ids()


def rewrite(table: LakeTable) -> Any:
    groups = plan_compaction(table.storage, table.snapshot, SOON)
    assert groups
    return LocalTasks().run(groups, rewrite_group, description="compact")


@given(st.sets(st.integers(0, 49)), st.data())
def test_rows_are_found_where_they_went(dead: set[int], data: st.DataObject) -> None:
    alive = [row for row in range(50) if row not in dead]
    later = data.draw(st.sets(st.sampled_from(alive))) if alive else set()
    source = Source(None, Vector.of(dead), 1000, 50)  # pyright: ignore[reportArgumentType]
    moved = source.new_rows(np.array(sorted(later), np.uint64))
    assert moved.tolist() == [1000 + alive.index(row) for row in sorted(later)]


def test_compaction_keeps_the_rows_and_has_no_dead_ones(table: LakeTable) -> None:
    expected = grow(table)
    before = table.snapshot
    after = compact(table.log, LocalTasks(), SOON)
    assert after is not None
    assert table.ids() == expected
    assert len(after.files) < len(before.files)
    assert all(add.vector is None for add in after.files.values())
    assert after.position(table.application) == before.position(table.application)
    assert table.ids(table.log.read_at(before.version)) == expected


def test_a_table_in_shape_is_left_alone(table: LakeTable) -> None:
    table.delete([1])
    assert compact(table.log, LocalTasks()) is None
    assert table.snapshot.version == 1


@pytest.mark.trap(37)
def test_a_lone_file_of_dead_rows_is_rewritten(table: LakeTable) -> None:
    table.delete(range(50))
    assert compact(table.log, LocalTasks()) is not None
    [add] = table.snapshot.files.values()
    assert (add.vector, add.row_count) == (None, 50)
    assert table.ids() == list(range(50, 100))


@pytest.mark.trap(37)
def test_deletions_during_a_compaction_are_carried_over(table: LakeTable) -> None:
    expected = grow(table)
    rewritten = rewrite(table)
    gone = [0, 51, 99, 1000, 1004, 1039]
    table.delete(gone[:3])
    table.delete(gone[3:])
    table.append([7000])
    assert commit_rewritten(table.log, rewritten) is not None
    assert table.ids() == [*(each for each in expected if each not in gone), 7000]
    # And once more on top of the carried vector.
    table.delete([1005])
    assert 1005 not in table.ids()


@pytest.mark.trap(37)
def test_a_file_that_died_during_a_compaction_stays_dead(table: LakeTable) -> None:
    expected = grow(table)
    rewritten = rewrite(table)
    table.delete(range(1000, 1010))
    assert commit_rewritten(table.log, rewritten) is not None
    assert table.ids() == [each for each in expected if not 1000 <= each < 1010]


@pytest.mark.trap(19)
def test_a_compaction_never_brings_back_rows_of_an_old_copy(table: LakeTable) -> None:
    grow(table)
    rewritten = rewrite(table)
    table.copy([1, 2], attempt="2")
    version = table.snapshot.version
    assert commit_rewritten(table.log, rewritten) is None
    assert table.ids() == [1, 2]
    assert table.snapshot.version == version
    assert not [file.path for file in table.storage.list() if file.path.startswith("compacted")]


def test_two_compactions_of_the_same_files_do_not_double_them(table: LakeTable) -> None:
    expected = grow(table)
    one, other = rewrite(table), rewrite(table)
    assert commit_rewritten(table.log, one) is not None
    assert commit_rewritten(DeltaLog(table.storage), other) is None
    assert table.ids() == expected


def test_rows_that_came_back_to_life_stop_a_compaction(table: LakeTable) -> None:
    grow(table)
    before = table.log.read_at(table.snapshot.version - 1)
    rewritten = rewrite(table)
    current = table.snapshot
    restored = [
        action
        for path, add in current.files.items()
        for action in (add.removed(now_milliseconds()), before.files[path])
        if add != before.files[path]
    ]
    assert isinstance(table.log.commit(current, [*table.head("RESTORE"), *restored]), Committed)
    expected = table.ids()
    commit_rewritten(table.log, rewritten)
    assert table.ids() == expected


@pytest.mark.trap(39)
def test_a_table_without_vectors_never_gets_one_by_compaction(tmp_path: Path) -> None:
    table = LakeTable(LocalStorage(tmp_path / "items"), vectors=False)
    table.create(range(100))
    for number in range(3):
        table.append(range(1000 + 10 * number, 1010 + 10 * number))
    rewritten = rewrite(table)
    # What copy-on-write does: a file goes, and its rows are in another one.
    gone = list(table.snapshot.files.values())[1]
    left = write_data_file(table.storage, make_rows(range(1001, 1010)))
    table.write(lambda snapshot: [snapshot.files[gone.path].removed(now_milliseconds()), left])
    assert commit_rewritten(table.log, rewritten) is None
    expected = [*range(100), *range(1001, 1030)]
    assert table.ids() == expected
    assert compact(table.log, LocalTasks(), SOON) is not None
    assert table.ids() == expected
    assert len(table.snapshot.files) == 1


@pytest.mark.trap(37)
def test_a_compaction_wins_against_a_busy_writer_and_undoes_nothing(table: LakeTable) -> None:
    expected = set(grow(table, 8))
    stop = threading.Event()
    deleted: list[int] = []
    writer = LakeTable(table.storage)

    def write() -> None:
        for each in sorted(expected):
            if stop.is_set():
                return
            writer.delete([each])
            deleted.append(each)

    thread = threading.Thread(target=write)
    thread.start()
    won = 0
    while won < 3 and thread.is_alive():
        won += compact(table.log, LocalTasks(), SOON) is not None
    stop.set()
    thread.join(60)
    assert won
    assert table.ids() == sorted(expected - set(deleted))


def test_a_writer_sees_that_it_lost_to_maintenance(table: LakeTable) -> None:
    grow(table)
    loser = LakeTable(table.storage)
    snapshot = loser.snapshot
    compact(table.log, LocalTasks(), SOON)
    answer = loser.log.commit(snapshot, loser.head())
    assert isinstance(answer, Lost)
    assert answer.verdict(loser.application) is Verdict.MAINTENANCE


def test_files_are_merged_with_those_of_their_size(table: LakeTable) -> None:
    def plan(*sizes: int) -> list[list[int]]:
        files = {f"{number}": Add(f"{number}", size, number) for number, size in enumerate(sizes)}
        planned = plan_compaction(table.storage, replace(table.snapshot, files=files))
        return [[add.size for add in group.files] for group in planned]

    small, medium, large = 1000, 20 << 20, 100 << 20
    assert plan(*[small] * 7, *[medium] * 7, *[large] * 20) == []
    assert plan(*[small] * 9, *[medium] * 3) == [[small] * 9]
    assert plan(*[small] * 3, *[medium] * 13) == [[medium] * 6, [medium] * 6]
    assert [len(group) for group in plan(*[small] * 600)] == [256, 256, 88]


def test_files_of_many_narrow_rows_are_merged_up_to_a_number_of_rows(table: LakeTable) -> None:
    def plan(rows: int) -> list[int]:
        stats = f'{{"numRecords": {rows}}}'
        files = {f"{number}": Add(f"{number}", 1 << 20, number, stats=stats) for number in range(20)}
        planned = plan_compaction(table.storage, replace(table.snapshot, files=files))
        return [sum(add.row_count or 0 for add in group.files) for group in planned]

    assert plan(500_000) == [4_000_000, 4_000_000, 2_000_000]
    assert plan(2_000_000) == []


def test_a_table_is_not_rewritten_because_it_was_copied(table: LakeTable) -> None:
    def plan(size: int, dead: int) -> int:
        vector = VectorDescriptor("i", "", 0, dead) if dead else None
        names = [f"copy-attempt-{number}.parquet" for number in range(20)]
        files = {name: Add(name, size, 1, stats='{"numRecords": 100}', vector=vector) for name in names}
        return len(plan_compaction(table.storage, replace(table.snapshot, files=files)))

    assert plan(20 << 20, dead=0) == 0
    assert plan(20 << 20, dead=30) == 20, "each by itself"
    assert plan(1000, dead=0) == 1, "small ones, of many partitions"


def test_checkpoints_keep_vectors_and_positions(table: LakeTable) -> None:
    grow(table)
    snapshot = table.snapshot
    assert commits_since_checkpoint(table.storage, snapshot.version) == snapshot.version + 1
    assert write_checkpoint(table.storage) == snapshot.version
    assert commits_since_checkpoint(table.storage, snapshot.version) == 0
    for path in (table.storage.root / "_delta_log").glob("*.json"):
        path.unlink()
    assert DeltaLog(table.storage).refresh() == snapshot


def test_a_checkpoint_that_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    with pytest.raises(DestinationUnavailable):
        write_checkpoint(LocalStorage(tmp_path / "nothing"))


def age(storage: Storage, seconds: float = 7200) -> None:
    """Let all files be older."""
    for file in storage.list():
        path = storage.local_path(file.path)
        assert path is not None
        os.utime(path, (file.modified - seconds, file.modified - seconds))


def test_the_log_is_cleaned_up_behind_a_checkpoint(table: LakeTable) -> None:
    grow(table)
    assert clean_log(table.storage, older_than_seconds=0) is None
    write_checkpoint(table.storage)
    checkpointed = table.snapshot.version
    table.append([5000])
    table.append([5001])
    assert clean_log(table.storage, older_than_seconds=3600) is None
    age(table.storage)
    table.append([5002])
    assert clean_log(table.storage, older_than_seconds=3600) == checkpointed
    names = sorted(path.name for path in (table.storage.root / "_delta_log").glob("0*.json"))
    assert names == [f"{version:020d}.json" for version in range(checkpointed, checkpointed + 4)]
    assert DeltaLog(table.storage).refresh() == table.snapshot


def test_a_pinned_version_stays_readable(table: LakeTable) -> None:
    expected = grow(table)
    write_checkpoint(table.storage)
    pin = pin_version(table.storage, table.snapshot.version, seconds=60, reason="verify")
    compact(table.log, LocalTasks(), SOON)
    write_checkpoint(table.storage)
    age(table.storage)
    for _ in range(2):
        clean_log(table.storage, older_than_seconds=0)
        vacuum(Vacuum(table.storage, 0, time.time()))
    assert table.ids(DeltaLog(table.storage).read_at(pin.version)) == expected
    release_pin(table.storage, pin)
    assert vacuum(Vacuum(table.storage, 0, time.time())).files > 0
    assert table.ids() == expected


def test_pins_run_out(table: LakeTable) -> None:
    pin = pin_version(table.storage, 0, seconds=60, reason="a reader")
    pin_version(table.storage, 0, seconds=-1, reason="a reader that died")
    assert read_pins(table.storage) == [pin]
    assert len(list(table.storage.list("_penstock/pins"))) == 1


@pytest.mark.trap(36)
def test_vacuum_keeps_live_vectors_and_what_readers_may_still_need(table: LakeTable) -> None:
    grow(table)
    table.delete([7])
    table.delete([8])
    before = {file.path for file in table.storage.list()}
    age(table.storage)
    assert vacuum(Vacuum(table.storage, 3600, time.time())).files == 0
    assert {file.path for file in table.storage.list()} == before
    gone = vacuum(Vacuum(table.storage, 0, time.time()))
    assert gone.files == len(before) - len({file.path for file in table.storage.list()}) > 0
    assert set(table.snapshot.stored_files()) <= {file.path for file in table.storage.list()}
    assert 8 not in table.ids()


def touch(table: LakeTable, row: int, *, ago: float = 0) -> None:
    """Mark a row of every file as dead, by a commit of some seconds ago."""
    when = now_milliseconds() - int(ago * 1000)

    def actions(snapshot: Snapshot) -> list[Action]:
        files = list(snapshot.files.values())
        dead = [vector_of(table.storage, add).union(Vector.of([row])) for add in files]
        vectors = write_vectors(table.storage, dead)
        pairs = zip(files, vectors, strict=True)
        return [each for add, vector in pairs for each in (add.removed(when), add.with_vector(vector))]

    table.write(actions)


@pytest.mark.trap(36)
def test_a_file_stays_for_its_retention_after_the_last_of_its_removals(table: LakeTable) -> None:
    [data] = table.snapshot.files
    for row in range(20):
        touch(table, row, ago=3000 - row)
    write_checkpoint(table.storage)
    before = table.snapshot
    table.delete(range(100))
    write_checkpoint(table.storage)
    assert not table.snapshot.files
    vacuum(Vacuum(table.storage, 1800, 0))
    left = {file.path for file in table.storage.list()}
    assert set(before.stored_files()) <= left, "readers of the version before need them"
    assert sum(path.endswith(".bin") for path in left) == 1, "the other vectors were removed long ago"
    assert data in left


def test_a_checkpoint_has_one_tombstone_for_each_file_and_other_readers_see_the_same_rows(table: LakeTable) -> None:
    for number in range(4):
        table.append(range(1000 * number + 1000, 1000 * number + 1100))
    for row in range(10):
        touch(table, row)
        if row % 3 == 0:
            write_checkpoint(table.storage)
    touch(table, 10, ago=7200)
    write_checkpoint(table.storage)
    [*_, newest] = sorted((table.storage.root / "_delta_log").glob("*.checkpoint.parquet"))
    removed = pq.read_table(newest)["remove"].combine_chunks().drop_null().to_pylist()
    assert len(removed) == 9, "all data files live; 10 files of vectors do not, one of them since before the retention"
    ids = table.ids()
    for path in (table.storage.root / "_delta_log").glob("0*.json"):
        path.unlink()
    assert table.ids(DeltaLog(table.storage).refresh()) == ids
    items = QueryBuilder().register("items", DeltaTable(table.storage.url))
    assert pa.table(items.execute("select id from items order by id").read_all())["id"].to_pylist() == ids


@pytest.mark.trap(36)
def test_orphans_are_swept_when_nobody_can_commit_them_any_more(table: LakeTable) -> None:
    writes = WritesInFlight()
    with writes.writing():
        since = writes.oldest()
        add = write_data_file(table.storage, make_rows([500]))
        index = f"_penstock/index/{add.path}.1a2b"
        table.storage.put(index, b"keys")
        table.storage.put("notes.txt", b"somebody's")
        # Files get their time from a clock that moves in steps.
        assert vacuum(Vacuum(table.storage, 0, writes.oldest() - 0.05)).files == 0
        assert since == writes.oldest()
    sleeper = LakeTable(table.storage)
    snapshot = sleeper.snapshot
    assert vacuum(Vacuum(table.storage, 0, time.time() + 1)).files == 2
    left = {file.path for file in table.storage.list()}
    assert "notes.txt" in left
    assert not {add.path, index} & left
    # Whoever wrote it and slept has lost the version for which it was meant.
    assert isinstance(sleeper.log.commit(snapshot, [*sleeper.head(), add]), Lost)


def test_indexes_go_with_their_files_and_no_sooner(table: LakeTable) -> None:
    [add] = table.snapshot.files.values()
    live = f"_penstock/index/{add.path}.1a2b"
    table.storage.put(live, b"keys")
    table.storage.put("_penstock/index/part-gone.parquet.1a2b", b"keys")
    assert vacuum(Vacuum(table.storage, 0, time.time() + 1)).files == 1
    assert table.storage.get(live) == b"keys"


def test_what_a_killed_process_left_half_written_goes(table: LakeTable) -> None:
    folder = table.storage.root
    for path in (f"_delta_log/.{7:020d}.json.{'0' * 32}", f".deletion_vector.bin.{'a' * 32}", ".somebody's"):
        (folder / path).write_bytes(b"half")
    assert vacuum(Vacuum(table.storage, 0, time.time() - 60)).files == 0
    assert vacuum(Vacuum(table.storage, 0, time.time() + 1)).files == 2
    assert (folder / ".somebody's").exists()
    assert table.snapshot.version == 0


def test_nothing_is_vacuumed_where_there_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "part-1.parquet").write_bytes(b"precious")
    assert vacuum(Vacuum(LocalStorage(tmp_path), 0, time.time() + 1)).files == 0
    assert (tmp_path / "part-1.parquet").exists()


class FailingTasks:
    """A cluster that is gone."""

    elsewhere = False
    parallel = 1

    def run(self, items: Sequence[Any], function: Any, *, description: str) -> list[Any]:
        raise TasksFailed("executors were lost")

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_the_schedule_does_what_is_due_for_all_tables_in_one_job_each(tmp_path: Path) -> None:
    tables = {name: LakeTable(LocalStorage(tmp_path / name)) for name in ("a", "b")}
    for table in tables.values():
        table.create(range(100))
        grow(table, 8)
    tasks = LocalTasks()
    settings = MaintenanceSettings(checkpoint_commits=5)
    maintenance = Maintenance(lambda: {name: each.storage for name, each in tables.items()}, tasks, settings)
    expected = {name: table.ids() for name, table in tables.items()}
    maintenance.run_once(clean_up=True)
    assert tasks.jobs == [
        "compact a and 1 more",
        "write checkpoints of a and 1 more",
        "clean up the logs of a and 1 more",
        "vacuum a and 1 more",
    ]
    assert (maintenance.counts.compactions, maintenance.counts.checkpoints, maintenance.counts.failures) == (2, 2, 0)
    assert {name: table.ids() for name, table in tables.items()} == expected
    maintenance.run_once(clean_up=False)
    assert len(tasks.jobs) == 4


def test_a_stop_waits_for_one_table_and_not_for_all(tmp_path: Path) -> None:
    class Slow(LocalStorage):
        def list(self, *arguments: Any, **options: Any) -> Any:
            read.append(self.url)
            maintenance._stopping.set()
            return super().list(*arguments, **options)

    read: list[str] = []
    tables: dict[str, Storage] = {}
    for number in range(20):
        table = LakeTable(LocalStorage(tmp_path / str(number)))
        table.create(range(5))
        tables[str(number)] = Slow(tmp_path / str(number))
    maintenance = Maintenance(lambda: tables, LocalTasks(), MaintenanceSettings())
    maintenance.run_once(clean_up=True)
    assert set(read) == {tables["0"].url}


def test_tables_with_the_same_name_are_both_maintained(lake: Path) -> None:
    """One was renamed, and has no changes since; the other one has its name now."""
    destination = DeltaDestination(lake, maintenance=False)
    destination.startup(make_context())
    renamed = replace(ITEMS, name=ORDERS.name, namespace=ORDERS.namespace)
    for schema, folder_of in ((ORDERS, ORDERS), (renamed, ITEMS)):
        destination.drop_table_for_copy(folder_of, "attempt-1")
        destination._tables[schema.table_id].name = str(schema)
    assert len(destination._written()) == 2


def test_one_broken_table_does_not_stop_the_maintenance_of_others(tmp_path: Path) -> None:
    good, bad = (LakeTable(LocalStorage(tmp_path / name)) for name in ("good", "bad"))
    for table in (good, bad):
        table.create(range(10))
        grow(table, 8)
    (tmp_path / "bad/_delta_log" / f"{3:020d}.json").write_text("{")
    maintenance = Maintenance(lambda: {"bad": bad.storage, "good": good.storage}, LocalTasks())
    maintenance.run_once(clean_up=True)
    assert maintenance.counts.compactions == 1
    assert maintenance.counts.failures >= 1
    broken = Maintenance(lambda: {"good": good.storage}, FailingTasks(), MaintenanceSettings(checkpoint_commits=1))
    broken.run_once(clean_up=True)
    assert broken.counts.failures == 3


def test_while_the_destination_is_away_maintenance_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tables = {name: LakeTable(LocalStorage(tmp_path / name)) for name in ("a", "b")}
    for table in tables.values():
        table.create(range(10))
    is_away = True

    class AwaySometimes(Maintenance):
        def _plan(self, storage: Any) -> Any:
            if is_away:
                raise DestinationUnavailable("the store is away")
            return super()._plan(storage)

    maintenance = AwaySometimes(lambda: {name: each.storage for name, each in tables.items()}, LocalTasks())

    def warnings() -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            maintenance.run_once(clean_up=False)
        return len(caplog.records)

    assert [warnings(), warnings()] == [1, 0]
    is_away = False
    assert warnings() == 0
    is_away = True
    assert warnings() == 1


class KilledBy(LocalTasks):
    """A cluster on which the tasks of one table kill their worker, and with it their job."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(self, items: Sequence[Any], function: Any, *, description: str) -> list[Any]:
        if any(item is not None and item[0] == self.folder for item in items):
            raise TasksFailed("a Python worker was killed")
        return super().run(items, function, description=description)


def test_a_table_that_kills_its_worker_does_not_stop_the_maintenance_of_others(tmp_path: Path) -> None:
    tables = {name: LakeTable(LocalStorage(tmp_path / name)) for name in ("a", "bad", "z")}
    for table in tables.values():
        table.create(range(10))
        grow(table, 8)
    maintenance = Maintenance(
        lambda: {name: each.storage for name, each in tables.items()},
        KilledBy("bad"),
        MaintenanceSettings(checkpoint_commits=1),
    )
    maintenance.run_once(clean_up=True)
    counts = maintenance.counts
    assert (counts.compactions, counts.checkpoints, counts.failures) == (2, 2, 4), "each kind of work of one table"


def test_the_schedule_runs_by_itself_until_it_is_stopped(table: LakeTable) -> None:
    grow(table, 8)
    looked = threading.Event()

    def tables() -> dict[str, Storage]:
        looked.set()
        return {"items": table.storage}

    before = set(threading.enumerate())
    maintenance = Maintenance(tables, LocalTasks(), MaintenanceSettings(interval_seconds=0.01))
    maintenance.start()
    assert looked.wait(30)
    maintenance.stop()
    # Its own: other tests of this process may have theirs.
    assert not any(thread.name == "delta-maintenance" for thread in set(threading.enumerate()) - before)


def test_a_retention_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="file_retention_hours"):
        MaintenanceSettings(file_retention_hours=0)
