"""A pipeline that is killed between any two steps of its coordination, started again, and has every change once."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import failpoints
from penstock.destinations.parquet import ParquetReader
from penstock.destinations.parquet.folder import RootFolder
from penstock.spool.folder import SpoolFolder
from penstock.state import CommandKind, open_store
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Background, current_position, wait_for
from tests.support.drive_pipeline import DriveSettings
from tests.support.pipeline_process import PipelineProcess
from tests.support.readback import check_equal, check_exactly_once

ROUNDS = int(os.environ.get("PENSTOCK_SOAK_FAILPOINT_ROUNDS", "1"))
TABLES = ("counts", "moving", "quiet")

pytestmark = pytest.mark.timeout(900)

# The process that is killed at the second point of a group is the one that was started again after the first.
STARTING = [
    ("before_lease", "after_lease", "before_slot", "after_slot"),
    ("after_drop", "after_data_sync", "before_snapshot"),
    ("after_snapshot", "during_copy", "after_copy"),
    ("before_finished_copy", "after_finished_copy", "in_sync_wait"),
    ("after_hand_over", "in_catchup", "before_sync_done", "after_sync_done", "after_ready"),
]
STREAMING = ("after_write", "before_progress", "after_progress", "after_acknowledge")
FAILING = ("before_errored", "after_errored", "before_rollback", "after_rollback")
OVERDUE = ("before_lose_position", "after_lose_position")
ASKED = ("after_resync", "after_removed")
ALTERED = ("before_recopy", "after_recopy")
SOLO = ("before_solo_write", "after_solo_write", "before_columns")
PARTS = ("before_partitions", "during_partitions", "after_partitions")
"""A destination that keeps every change never gets there: a Delta table does."""
RESUMED = ("after_finished_ranges", "before_reread", "before_give_up_resuming")
"""In `test_resumed_copy.py`."""


def writes(seed: int) -> Callable[[Any], None]:
    """A step for `Background`: a transaction that counts up, moves and deletes rows."""
    chance = random.Random(seed)

    def step(connection: Any) -> None:
        key = chance.randrange(40)
        with suppress(psycopg.errors.UniqueViolation, psycopg.errors.UndefinedTable), connection.transaction():
            connection.execute(
                "update counts set version = version + 1 where id between %s and %s",
                [key, key + chance.choice([0, 0, 5])],
            )
            connection.execute("insert into moving values (%s, 0) on conflict do nothing", [key])
            connection.execute("update moving set id = id + 50 where id = %s", [chance.randrange(40)])
            connection.execute("delete from moving where id = %s", [chance.randrange(90)])

    return step


class Killed:
    """A database with changes, and the pipelines that follow it one after the other."""

    def __init__(self, database, folder: Path) -> None:
        self.database = database
        self.pipeline = PipelineProcess(
            DriveSettings(dsn=database.dsn, folder=str(folder), slot=f"e2e_{database.name[-12:]}")
        )
        for name in ("counts", "moving", "quiet"):
            database.execute(f"create table {name} (id int primary key, version int, note text default repeat('n', 9))")
        database.execute("insert into counts select i, 0 from generate_series(0, 40) i")
        database.execute("insert into quiet values (1, 0)")

    def kill_at(self, point: str, **settings: Any) -> None:
        self.pipeline.start(armed=f"{point}=kill", settings=replace(self.pipeline.settings, **settings))
        self.wait_killed()

    def wait_killed(self) -> None:
        assert self.pipeline.wait_ended() == -signal.SIGKILL

    def run_until_ready(self) -> None:
        self.pipeline.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        self.pipeline.wait_phases("ready", len(TABLES))

    def stop(self) -> None:
        assert self.pipeline.stop() == 0

    def finish(self) -> None:
        """Let it come to the end, stop it, and compare."""
        self.pipeline.wait_applied(current_position(self.database))
        # A table that was behind may still be: the last round before the end is for those too.
        self.wait_ready()
        self.stop()
        reader = ParquetReader(self.pipeline.settings.lake)
        check_equal(self.database.dsn, reader, TABLES)
        check_exactly_once(reader)
        check_counts(reader.read_changes("public.counts").to_pylist())
        self.check_nothing_left()

    def check_nothing_left(self) -> None:
        """Of the processes that were killed: no slot of a copy, no session, no rows of a copy or of a batch."""
        slots = self.database.execute("select slot_name from pg_replication_slots where database = current_database()")
        assert slots == [(self.pipeline.settings.slot,)]
        mine = "datname = current_database() and application_name like 'penstock%'"
        wait_for(lambda: not self.database.execute(f"select 1 from pg_stat_activity where {mine}"), "sessions to end")
        for table in RootFolder(self.pipeline.settings.lake).tables():
            generations = table.generations()
            assert all(each.is_copied() for each in generations[:-1])
            # What an earlier copy has left goes with it, when the next copy is complete.
            named = {file.name for manifest in generations[-1].manifests() for file in manifest.files}
            assert {path.name for path in generations[-1].data.iterdir()} == named
        spool = SpoolFolder(Path(self.pipeline.settings.folder) / "spool")
        assert not list(spool.holds.glob("*.json"))

    def command(self, kind: CommandKind, *tables: str) -> None:
        store = open_store(self.pipeline.settings.state_url, self.pipeline.settings.id)
        store.add_command(kind, tables)
        store.close()


def check_counts(changes: list[dict]) -> None:
    """Each row's versions follow one another without a gap, from the copied one on."""
    versions: dict[int, list[int]] = {}
    for change in sorted(changes, key=lambda change: (change["_commit_lsn"], change["_ordinal"])):
        versions.setdefault(change["id"], []).append(change["version"])
    for key, found in versions.items():
        assert found == list(range(found[0], found[0] + len(found))), f"row {key}"


@pytest.fixture(params=range(ROUNDS) if ROUNDS > 1 else None, ids=lambda number: f"round {number}")
def killed(request, database, tmp_path):
    made = Killed(database, tmp_path)
    with Background(database, writes(getattr(request, "param", 0)), pause=0.02) as writer:
        made.writer = writer
        yield made
        made.pipeline.close()


def test_every_point_is_tried_here() -> None:
    points = STREAMING + FAILING + OVERDUE + ASKED + ALTERED + SOLO + PARTS + RESUMED
    assert sorted(sum(STARTING, ()) + points) == sorted(failpoints.POINTS)


@pytest.mark.trap(3, 4, 9, 19, 20, 23, 28)
@pytest.mark.parametrize("points", STARTING, ids=lambda points: points[0])
def test_killed_on_the_way_to_ready(killed, points):
    for point in points:
        killed.kill_at(point)
    killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish()


@pytest.mark.trap(3, 4, 28, 33)
def test_killed_between_write_progress_and_acknowledgement_and_around_an_error(killed):
    killed.run_until_ready()
    killed.stop()
    for point in STREAMING:
        killed.kill_at(point)
    for point in FAILING:
        killed.kill_at(point, reject="public.counts", times=1)
    killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish()


@pytest.mark.trap(33)
def test_killed_around_the_loss_of_a_position(killed):
    killed.run_until_ready()
    killed.stop()
    for point in OVERDUE:
        killed.kill_at(point, reject="public.counts", error_hold=0.2)
    killed.pipeline.start()
    killed.pipeline.wait_for("the loss", lambda seen: seen.phases.get("public.counts") == "errored")
    # What was lost does not come back by itself.
    killed.command(CommandKind.ROLLBACK, "public.counts")
    killed.command(CommandKind.RESYNC, "public.counts")
    killed.wait_ready()
    killed.writer.__exit__()
    killed.finish()


@pytest.mark.trap(18, 19)
def test_killed_while_a_table_is_reset_or_removed(killed):
    killed.run_until_ready()
    killed.stop()
    killed.command(CommandKind.RESYNC, "public.counts")
    killed.kill_at("after_resync")
    killed.run_until_ready()
    killed.stop()
    killed.pipeline.start(armed="after_removed=kill")
    killed.wait_ready()
    killed.database.execute("create schema away; alter table moving set schema away")
    killed.wait_killed()
    killed.database.execute("alter table away.moving set schema public")
    killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish()


@pytest.mark.trap(15, 17)
def test_killed_while_a_changed_table_is_reset(database, tmp_path):
    database.execute(
        "create table seen (id int primary key, note text); create table silent (id int primary key, n int)"
    )
    for table in ("seen", "silent"):
        database.execute(f"insert into {table} select i, i from generate_series(1, 20) i")
    pipeline = PipelineProcess(
        DriveSettings(dsn=database.dsn, folder=str(tmp_path), slot=f"e2e_{database.name[-12:]}", destination="delta")
    )
    try:
        pipeline.start(armed="before_recopy=kill")
        pipeline.wait_phases("ready", 2)
        database.execute("alter table seen drop constraint seen_pkey, add primary key (note)")
        database.execute("insert into seen values (100, 'after')")
        assert pipeline.wait_ended() == -signal.SIGKILL
        database.execute("alter table silent alter n type int using n + 1")
        pipeline.start(armed="after_recopy=kill")
        assert pipeline.wait_ended() == -signal.SIGKILL
        pipeline.start()
        pipeline.wait_applied(current_position(database))
        pipeline.wait_phases("ready", 2)
        assert pipeline.stop() == 0
    finally:
        pipeline.close()
    check_equal(database.dsn, LakeReadBack(pipeline.settings.lake), ["seen", "silent"])


@pytest.mark.trap(15, 28)
def test_killed_while_the_files_of_a_table_are_rewritten(database, tmp_path):
    database.execute("create table seen (id int primary key, note text); create table other (id int primary key)")
    database.execute("insert into seen select i, i from generate_series(1, 20) i")
    pipeline = PipelineProcess(
        DriveSettings(
            dsn=database.dsn,
            folder=str(tmp_path),
            slot=f"e2e_{database.name[-12:]}",
            destination="delta",
            rewrite_bytes=0,
        )
    )
    try:
        pipeline.start(armed="before_solo_write=kill")
        pipeline.wait_phases("ready", 2)
        database.execute("insert into seen values (99, 'before')")
        database.execute("alter table seen rename note to remark")
        database.execute("insert into seen values (100, 'after')")
        assert pipeline.wait_ended() == -signal.SIGKILL
        database.execute("insert into other values (1)")
        database.execute("update seen set remark = 'down' where id = 3")
        pipeline.start(armed="after_solo_write=kill")
        assert pipeline.wait_ended() == -signal.SIGKILL
        # No row follows, so the catalog tells.
        database.execute("alter table seen rename remark to comment")
        pipeline.start(armed="before_columns=kill")
        assert pipeline.wait_ended() == -signal.SIGKILL
        pipeline.start()
        pipeline.wait_applied(current_position(database))
        looks = pipeline.seen.looks
        pipeline.wait_for("looks at the catalog", lambda seen: seen.looks > looks + 2)
        pipeline.wait_phases("ready", 2)
        assert pipeline.stop() == 0
    finally:
        pipeline.close()
    check_equal(database.dsn, LakeReadBack(pipeline.settings.lake), ["seen", "other"])


@pytest.mark.trap(17, 28)
def test_killed_while_partitions_are_copied_again(database, tmp_path):
    database.execute("create table parts (id int primary key, note text) partition by range (id)")
    for number in range(4):
        low = number * 10
        database.execute(f"create table parts_{number} partition of parts for values from ({low}) to ({low + 10})")
    database.execute("insert into parts select i, 'n' from generate_series(0, 39) i")
    pipeline = PipelineProcess(
        DriveSettings(dsn=database.dsn, folder=str(tmp_path), slot=f"e2e_{database.name[-12:]}", destination="delta")
    )
    try:
        pipeline.start(armed=f"{PARTS[0]}=kill")
        pipeline.wait_phases("ready", 1)
        for number, point in enumerate(PARTS):
            # The same bounds have other rows before anyone looks.
            low = number * 10
            with database.connect() as connection:
                connection.execute(f"drop table parts_{number}")
                connection.execute("update parts set note = 'later' where id > 35")
                connection.execute(
                    f"create table parts_{number} partition of parts for values from ({low}) to ({low + 10})"
                )
                connection.execute("insert into parts values (%s, 'new')", [low + 3])
            if number:
                pipeline.start(armed=f"{point}=kill")
            assert pipeline.wait_ended() == -signal.SIGKILL
            database.execute(f"insert into parts values ({low + 4}, 'while it was down')")
        pipeline.start()
        pipeline.wait_phases("ready", 1)
        looks = pipeline.seen.looks
        pipeline.wait_for("looks at the catalog", lambda seen: seen.looks > looks + 2)
        pipeline.wait_applied(current_position(database))
        assert pipeline.stop() == 0
    finally:
        pipeline.close()
    check_equal(database.dsn, LakeReadBack(pipeline.settings.lake), ["parts"])


@pytest.mark.trap(18)
def test_a_table_that_was_away_while_nothing_ran_is_copied_anew(killed):
    killed.run_until_ready()
    killed.stop()
    killed.database.execute("alter publication e2e drop table counts")
    killed.database.execute("update counts set version = version + 1")
    killed.database.execute("alter publication e2e add table counts")
    killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish()
