"""A pipeline that is killed between any two steps of its coordination, started again, and has every change once."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import psycopg
import pytest

from penstock import failpoints
from penstock.destinations.parquet.reader import ParquetReader
from penstock.lsn import Lsn
from penstock.state import CommandKind, open_store
from tests.e2e.support import wait_for
from tests.e2e.test_pipeline import Driver, current_position

TABLES = ("public.counts", "public.moving", "public.quiet")

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


class Writer:
    """Counts up, moves and deletes rows, a transaction every few milliseconds."""

    def __init__(self, database) -> None:
        self._database = database
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        chance = random.Random(1)
        with self._database.connect() as connection:
            while not self._stop.wait(0.005):
                key = chance.randrange(40)
                try:
                    with connection.transaction():
                        connection.execute("update counts set version = version + 1 where id between %s and %s",
                                           [key, key + chance.choice([0, 0, 5])])  # fmt: skip
                        connection.execute("insert into moving values (%s, 0) on conflict do nothing", [key])
                        connection.execute("update moving set id = id + 50 where id = %s", [chance.randrange(40)])
                        connection.execute("delete from moving where id = %s", [chance.randrange(90)])
                except (psycopg.errors.UniqueViolation, psycopg.errors.UndefinedTable):
                    continue


class Killed:
    """A database with changes, and the pipelines that follow it one after the other."""

    def __init__(self, database, folder: Path) -> None:
        self.database = database
        self._folder = folder
        self._drivers: list[Driver] = []
        self._settings = {"dsn": database.dsn, "folder": str(folder), "slot": f"e2e_{database.name[-12:]}"}
        for name in ("counts", "moving", "quiet"):
            database.execute(f"create table {name} (id int primary key, version int, note text default repeat('n', 9))")
        database.execute("insert into counts select i, 0 from generate_series(0, 40) i")
        database.execute("insert into quiet values (1, 0)")

    def start(self, armed: str = "", **settings: object) -> Driver:
        path = self._folder / "settings.json"
        path.write_text(json.dumps(self._settings | settings))
        before = os.environ.pop(failpoints.VARIABLE, None)
        try:
            if armed:
                os.environ[failpoints.VARIABLE] = armed
            self._drivers.append(Driver(path))
            return self._drivers[-1]
        finally:
            os.environ.pop(failpoints.VARIABLE, None)
            if before is not None:
                os.environ[failpoints.VARIABLE] = before

    def close(self) -> None:
        for driver in self._drivers:
            if driver.process.poll() is None:
                driver.close(kill=True)

    def kill_at(self, point: str, **settings: object) -> None:
        driver = self.start(f"{point}=kill", **settings)
        self.wait_killed(driver)

    def wait_killed(self, driver: Driver) -> None:
        assert driver.process.wait(60) == -9
        driver.close(kill=True)

    def run_until_ready(self) -> Driver:
        driver = self.start()
        self.wait_phases(driver, "ready")
        return driver

    def wait_phases(self, driver: Driver, name: str, tables=TABLES) -> None:
        def look() -> bool:
            assert driver.process.poll() is None, f"the pipeline ended: {driver.last}"
            phases = driver.last.get("phases", {})
            return len(phases) == len(TABLES) and all(phases[table] == name for table in tables)

        wait_for(look, f"{name}: {tables}", 60)

    def finish(self, driver: Driver) -> None:
        """Let it come to the end, stop it, and compare."""
        end = current_position(self.database)
        wait_for(lambda: Lsn.parse(driver.last["applied"]) >= end, "apply to reach the end", 60)
        # A table that was behind may still be: the last round before the end is for those too.
        self.wait_phases(driver, "ready")
        driver.close(kill=False)
        assert driver.process.returncode == 0
        reader = ParquetReader(self._folder / "lake")
        for table in TABLES:
            rows = [tuple(row.values()) for row in reader.read_table(table).select(["id", "version"]).to_pylist()]
            assert sorted(rows) == sorted(self.database.execute(f"select id, version from {table}")), table
            changes = reader.read_changes(table)
            if changes.num_rows:
                keys = zip(changes["_commit_lsn"].to_pylist(), changes["_ordinal"].to_pylist(), strict=True)
                keys = [key for key in keys if key[1] >= 0]  # rows of the copy have no ordinal
                assert len(keys) == len(set(keys)), f"a change of {table} is there twice"
        check_counts(reader.read_changes("public.counts").to_pylist())

    def command(self, kind: CommandKind, *tables: str) -> None:
        store = open_store(f"sqlite:///{self._folder / 'state.db'}", "e2e")
        store.add_command(kind, tables)
        store.close()


def check_counts(changes: list[dict]) -> None:
    """Each row's versions follow one another without a gap, from the copied one on."""
    versions: dict[int, list[int]] = {}
    for change in sorted(changes, key=lambda change: (change["_commit_lsn"], change["_ordinal"])):
        versions.setdefault(change["id"], []).append(change["version"])
    for key, found in versions.items():
        assert found == list(range(found[0], found[0] + len(found))), f"row {key}"


@pytest.fixture
def killed(database, tmp_path):
    made = Killed(database, tmp_path)
    with Writer(database) as writer:
        made.writer = writer
        yield made
        made.close()


def test_every_point_is_tried_here() -> None:
    assert sorted(sum(STARTING, ()) + STREAMING + FAILING + OVERDUE + ASKED) == sorted(failpoints.POINTS)


@pytest.mark.trap(3, 4, 9, 19, 20, 23, 28)
@pytest.mark.parametrize("points", STARTING, ids=lambda points: points[0])
def test_killed_on_the_way_to_ready(killed, points):
    for point in points:
        killed.kill_at(point)
    driver = killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish(driver)


@pytest.mark.trap(3, 4, 28)
def test_killed_between_write_progress_and_acknowledgement(killed):
    killed.run_until_ready().close(kill=False)
    for point in STREAMING:
        killed.kill_at(point)
    driver = killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish(driver)


@pytest.mark.trap(33)
def test_killed_around_an_error_and_its_retry(killed):
    killed.run_until_ready().close(kill=False)
    for point in FAILING:
        killed.kill_at(point, reject="public.counts", times=1)
    driver = killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish(driver)


@pytest.mark.trap(33)
def test_killed_around_the_loss_of_a_position(killed):
    killed.run_until_ready().close(kill=False)
    for point in OVERDUE:
        killed.kill_at(point, reject="public.counts", error_hold=0.2)
    driver = killed.start()
    killed.wait_phases(driver, "errored", ["public.counts"])
    # What was lost does not come back by itself.
    killed.command(CommandKind.ROLLBACK, "public.counts")
    killed.command(CommandKind.RESYNC, "public.counts")
    killed.wait_phases(driver, "ready")
    killed.writer.__exit__()
    killed.finish(driver)


@pytest.mark.trap(18, 19)
def test_killed_while_a_table_is_reset_or_removed(killed):
    killed.run_until_ready().close(kill=False)
    killed.command(CommandKind.RESYNC, "public.counts")
    killed.kill_at("after_resync")
    killed.run_until_ready().close(kill=False)
    driver = killed.start("after_removed=kill")
    killed.wait_phases(driver, "ready")
    killed.database.execute("create schema away; alter table moving set schema away")
    killed.wait_killed(driver)
    killed.database.execute("alter table away.moving set schema public")
    driver = killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish(driver)


@pytest.mark.trap(18)
def test_a_table_that_was_away_while_nothing_ran_is_copied_anew(killed):
    killed.run_until_ready().close(kill=False)
    killed.database.execute("alter publication e2e drop table counts")
    killed.database.execute("update counts set version = version + 1")
    killed.database.execute("alter publication e2e add table counts")
    driver = killed.run_until_ready()
    killed.writer.__exit__()
    killed.finish(driver)
