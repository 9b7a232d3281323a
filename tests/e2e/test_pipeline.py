"""Whole pipelines: copied while it changes, streamed, killed, and equal to the source in the end."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest

from penstock.destinations.memory import MemoryDestination
from penstock.destinations.parquet.reader import ParquetReader
from penstock.lsn import Lsn
from penstock.pipeline import Pipeline, PipelineSettings
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from tests.e2e.support import wait_for

TABLES = 6
QUIET, EMPTY = TABLES - 2, TABLES - 1


def create_tables(database) -> None:
    for number in range(TABLES):
        database.execute(f"create table t{number} (id int primary key, version int, note text)")
        if number != EMPTY:
            rows = 300 + 200 * number
            database.execute(
                f"insert into t{number} select i, 0, repeat('x', i % 3000) from generate_series(1, {rows}) i"
            )


class Writers:
    """Threads that change all tables but the quiet one and the empty one, at random, until told to stop."""

    def __init__(self, database, count: int = 2, *, truncates: bool = True) -> None:
        """A truncate makes a copy that runs start over; without them every table goes straight to Ready."""
        self._database = database
        self._truncates = truncates
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(count)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        with self._database.connect() as connection:
            while not self._stop.wait(0.002):
                try:
                    with connection.transaction():
                        for _ in range(chance.choice([1, 1, 2, 5, 40])):
                            self._change(connection, chance)
                        if chance.random() < 0.1:
                            raise psycopg.Rollback
                except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                    continue

    def _change(self, connection, chance: random.Random) -> None:
        table, key = f"t{chance.randrange(QUIET)}", chance.randrange(1, 900)
        match chance.randrange(12):
            case 0 | 1 | 2 | 3:
                update = f"update set version = {table}.version + 1"
                connection.execute(
                    f"insert into {table} values (%s, 1, %s) on conflict (id) do {update}",
                    [key, "n" * chance.choice([3, 3000])],
                )
            case 4 | 5 | 6 | 7:
                # The large text is not touched: it must survive.
                connection.execute(
                    f"update {table} set version = version + 1 where id between %s and %s", [key, key + 4]
                )
            case 8 | 9:
                connection.execute(f"delete from {table} where id = %s", [key])
            case 10:
                connection.execute(f"update {table} set id = id + 1000 where id = %s", [key])
            case _:
                if self._truncates and chance.random() < 0.03:
                    connection.execute(f"truncate {table}")


def source_rows(database, number: int) -> list[tuple]:
    return sorted(database.execute(f"select id, version, note from t{number}"))


def current_position(database) -> Lsn:
    return Lsn.parse(database.execute("select pg_current_wal_insert_lsn()")[0][0])


@pytest.mark.trap(22, 23, 25, 27)
def test_tables_are_copied_while_they_change_and_then_followed(database, tmp_path):
    create_tables(database)
    destination = MemoryDestination()
    settings = PipelineSettings(
        id="e2e",
        source=SourceSettings(database.dsn),
        publication="e2e",
        slot=f"e2e_{database.name[-12:]}",
        spool=SpoolSettings(tmp_path / "spool", min_free_bytes=0),
        tables=("public.*",),
        batches=BatchSettings(interval=0.1, max_rows=1_000),
    )
    store = MemoryStore("e2e")
    with Pipeline(settings, store, destination, LocalTasks()) as pipeline:
        with Writers(database, truncates=False):
            wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"] * TABLES, "ready tables")
        with Writers(database):
            before = pipeline.status.changes
            wait_for(lambda: pipeline.status.changes > before + 500, "changes to flow")
            database.execute("create table late (id int primary key, version int, note text)")
            database.execute("insert into late values (1, 1, 'x')")
            wait_for(lambda: "public.late" in pipeline.phases, "the new table to join")
        end = current_position(database)
        wait_for(lambda: pipeline.phases["public.late"].name == "ready", "the new table to be ready")
        wait_for(lambda: pipeline.status.applied >= end, "apply to reach the end")
        for number in range(TABLES):
            rows = sorted((row["id"], row["version"], row["note"]) for row in destination.rows(f"public.t{number}"))
            assert rows == source_rows(database, number), f"table t{number}"
        assert destination.rows("public.late") == [{"id": 1, "version": 1, "note": "x"}]
        names = {number: [record.phase.name for record in store.get_table_replication_history(number)] for number in
                 store.get_table_replication_states()}  # fmt: skip
        assert all(
            history == ["init", "data_sync", "finished_copy", "sync_done", "ready"] for history in names.values()
        ), names
    # All of it was acknowledged.
    (confirmed,) = database.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [settings.slot]
    )[0]
    assert Lsn.parse(confirmed) >= end


class Driver:
    """A pipeline process."""

    def __init__(self, settings: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.drive_pipeline", str(settings)], stdout=subprocess.PIPE, text=True
        )
        self.last: dict = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.last = json.loads(line)

    def close(self, *, kill: bool) -> None:
        self.process.kill() if kill else self.process.terminate()
        self.process.wait(60)
        self._thread.join(60)
        self.process.stdout.close()


@pytest.mark.trap(3, 4, 19, 20, 28)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_pipeline_loses_and_doubles_nothing(database, tmp_path, seed):
    create_tables(database)
    settings = tmp_path / "settings.json"
    settings.write_text(
        json.dumps({"dsn": database.dsn, "folder": str(tmp_path), "slot": f"e2e_{database.name[-12:]}"})
    )
    chance = random.Random(seed)
    with Writers(database):
        for _ in range(4):
            driver = Driver(settings)
            moment = threading.Event()
            # Anywhere between the first connection and streaming for a while.
            moment.wait(chance.uniform(1.0, 5.0))
            driver.close(kill=True)
        driver = Driver(settings)
        wait_for(lambda: list(driver.last.get("phases", {}).values()) == ["ready"] * TABLES, "ready tables")
    end = current_position(database)
    wait_for(lambda: Lsn.parse(driver.last["applied"]) >= end, "apply to reach the end")
    driver.close(kill=False)
    assert driver.process.returncode == 0
    reader = ParquetReader(tmp_path / "lake")
    for number in range(TABLES):
        rows = [tuple(row.values()) for row in reader.read_table(f"public.t{number}").select(
            ["id", "version", "note"]).to_pylist()]  # fmt: skip
        assert sorted(rows) == source_rows(database, number), f"table t{number}"
        changes = reader.read_changes(f"public.t{number}")
        if not changes.num_rows:
            continue
        keys = list(zip(changes["_commit_lsn"].to_pylist(), changes["_ordinal"].to_pylist(), strict=True))
        # Rows of the copy have no ordinal of their own.
        keys = [key for key in keys if key[1] >= 0]
        assert len(keys) == len(set(keys)), f"a change of t{number} is there twice"
