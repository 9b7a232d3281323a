"""Every process of a pipeline stays below the memory that docs/guides/sizing.md names: with a transaction of millions
of rows, a gigabyte in a batch, three hundred tables, and a spool that is full for minutes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta import split
from tests.e2e.support import Background, wait_for
from tests.support.processes import Part, PeakWatch

ROWS = int(os.environ.get("PENSTOCK_SOAK_HUGE_ROWS", "10000000"))
BATCH_MEGABYTES = int(os.environ.get("PENSTOCK_SOAK_BATCH_MEGABYTES", "1024"))
TABLES = 300
TABLES_SECONDS = float(os.environ.get("PENSTOCK_SOAK_TABLES_SECONDS", "300"))
FULL_SECONDS = float(os.environ.get("PENSTOCK_SOAK_FULL_SECONDS", "300"))
SPOOL_MEGABYTES = 32
CATCH_UP_SECONDS = 1800.0
"""A guard, not a measure."""
SIZING = Path(__file__).parents[2] / "docs" / "guides" / "sizing.md"
NAMES = {
    Part.DRIVER: "driver",
    Part.CAPTURE: "capture",
    Part.JVM: "Spark's JVM",
    Part.WORKER: "Spark's Python worker",
}
WITHOUT_SPARK = "driver without Spark"
CONFIG = """
[pipeline]
id = "large"
{pipeline}

[source]
url = "{dsn}"

[destination]
type = "delta"
path = "lake"
mode = "{mode}"

[spark]
master = "{master}"
"""

with_and_without_spark = pytest.mark.parametrize("master", ["none", "local[2]"])


def documented_limits() -> dict[str, int]:
    """The limits of processes in bytes, by their names in the guide."""
    rows = re.findall(r"^\| ([^|]+?) \| (\d+) MiB \|", SIZING.read_text(), re.MULTILINE)
    return {name: int(limit) << 20 for name, limit in rows}


class Pipeline:
    """Commands of one pipeline, with the peak memory of each process."""

    def __init__(
        self, database: Any, folder: Path, *, master: str = "none", mode: str = "mirror", more: str = ""
    ) -> None:
        self._folder = folder
        self._has_spark = master != "none"
        self._peaks: dict[str, int] = {}
        config = CONFIG.format(dsn=database.dsn, master=master, mode=mode, pipeline=more)
        (folder / "penstock.toml").write_text(config)

    def run(self, *arguments: str) -> None:
        """Run a command to its end."""
        with self.running(*arguments) as process:
            process.wait()
        assert process.returncode == 0, arguments

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command inside the block, and stop it afterwards."""
        process = subprocess.Popen([sys.executable, "-m", "penstock", *arguments], cwd=self._folder)
        try:
            with PeakWatch(process.pid) as watch:
                yield process
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(CATCH_UP_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
        for part, peak in watch.peaks.items():
            name = WITHOUT_SPARK if part is Part.DRIVER and not self._has_spark else NAMES[part]
            self._peaks[name] = max(peak, self._peaks.get(name, 0))

    def check(self, record_property: Callable[[str, object], None]) -> None:
        """Compare the peaks with the limits."""
        limits = documented_limits()
        expected = {*NAMES.values()} if self._has_spark else {WITHOUT_SPARK, NAMES[Part.CAPTURE]}
        assert self._peaks.keys() == expected, "every process was measured"
        record_property("peaks in MiB", ", ".join(f"{name} {peak >> 20}" for name, peak in self._peaks.items()))
        over = {name: peak >> 20 for name, peak in self._peaks.items() if peak > limits[name]}
        assert not over, f"MiB, over the limits of {SIZING.name}"


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("mode", "master"),
    # One core is left for other tables; so on four, the transaction is split over three tasks. In mode soft_delete, the
    # last of them needs rows of the others.
    [("mirror", "none"), ("soft_delete", "none"), ("mirror", "local[4]"), ("soft_delete", "local[4]")],
)
def test_a_huge_transaction(mode: str, master: str, database: Any, tmp_path: Path, record_property: Any) -> None:
    """Rows are inserted, updated, moved to other keys and deleted, all in one transaction."""
    database.execute("create table huge (id int8 primary key, n int, note text, at timestamptz)")
    pipeline = Pipeline(database, tmp_path, master=master, mode=mode)
    pipeline.run("run", "--once")
    third = ROWS // 3
    database.execute(f"""
        begin;
        insert into huge select i, i % 100, 'note ' || i, now() from generate_series(1, {third}) i;
        update huge set n = n + 1, note = note || '!';
        update huge set id = id + {ROWS} where id > {third // 2};
        delete from huge where id < {third // 4};
        commit;
    """)
    pipeline.run("run", "--once")
    notes = tmp_path / "lake" / "public" / "huge" / split.NOTES_FOLDER
    assert notes.exists() == (master == "local[4]"), "it was split over tasks"
    pipeline.run("verify")
    pipeline.check(record_property)


@pytest.mark.soak
@pytest.mark.timeout(0)
@with_and_without_spark
@pytest.mark.parametrize(
    ("tables", "kilobytes"), [(1, 1024), (1, 4), (100, 64)], ids=["large rows", "one table", "100 tables"]
)
def test_a_gigabyte_in_a_batch(
    tables: int, kilobytes: int, master: str, database: Any, tmp_path: Path, record_property: Any
) -> None:
    """One transaction inserts it, and another one updates all rows and omits the large values."""
    rows = BATCH_MEGABYTES * 1024 // kilobytes // tables
    names = [f"t{number}" for number in range(tables)]
    for name in names:
        database.execute(f"create table {name} (id int primary key, n int, note text)")
        database.execute(f"alter table {name} alter note set storage external")
    pipeline = Pipeline(database, tmp_path, master=master)
    pipeline.run("run", "--once")
    for statement in (
        f"insert into {{}} select i, 0, repeat(md5(i::text), {32 * kilobytes}) from generate_series(1, {rows}) i",
        "update {} set n = n + 1",
    ):
        with database.connect() as connection, connection.transaction():
            for name in names:
                connection.execute(statement.format(name))
        pipeline.run("run", "--once")
    pipeline.run("verify")
    pipeline.check(record_property)


@pytest.mark.soak
@pytest.mark.timeout(0)
@with_and_without_spark
def test_300_tables_that_change_every_second(master: str, database: Any, tmp_path: Path, record_property: Any) -> None:
    with database.connect() as connection:
        for table in range(TABLES):
            connection.execute(f"create table t{table} (id int primary key, version int, note text)")
            connection.execute(f"insert into t{table} select i, 0, 'note ' || i from generate_series(0, 99) i")
    pipeline = Pipeline(database, tmp_path, master=master)
    pipeline.run("run", "--once")
    rounds = 0

    def change(connection: Any) -> None:
        nonlocal rounds
        begun = time.monotonic()
        for table in range(TABLES):
            connection.execute(f"update t{table} set version = version + 1 where id = %s", [rounds % 100])
        rounds += 1
        # The load is one change per second; nothing is waited for here.
        threading.Event().wait(max(0.0, 1.0 - (time.monotonic() - begun)))

    end = time.monotonic() + TABLES_SECONDS
    with pipeline.running("run"):
        with Background(database, change):
            wait_for(lambda: time.monotonic() > end, "the end of the changes", 2 * TABLES_SECONDS + 60)
        wait_until_applied(database)
    record_property("changes per table", rounds)
    pipeline.run("verify")
    pipeline.check(record_property)


@pytest.mark.soak
@pytest.mark.timeout(0)
@with_and_without_spark
def test_a_spool_that_is_full_for_minutes(master: str, database: Any, tmp_path: Path, record_property: Any) -> None:
    """The disk of the lake is not mounted for that long, while rows are written."""
    database.execute("create table busy (id int8 generated always as identity primary key, n int, note text)")
    pipeline = Pipeline(database, tmp_path, master=master, more=f'spool = {{max_bytes = "{SPOOL_MEGABYTES}MB"}}')
    pipeline.run("run", "--once")
    lake, elsewhere = tmp_path / "lake", tmp_path / "elsewhere"

    def write(connection: Any) -> None:
        connection.execute(
            "insert into busy (n, note) select i, (select string_agg(md5(random()::text || i || j), '') from"
            " generate_series(1, 30) j) from generate_series(1, 200) i"
        )

    def spool_is_full() -> bool:
        segments = (tmp_path / ".penstock" / "large" / "spool" / "segments").rglob("*.parquet")
        return sum(file.stat().st_size for file in segments) >= SPOOL_MEGABYTES << 20

    def is_connected() -> bool:
        return database.execute("select active from pg_replication_slots where database = current_database()") == [
            (True,)
        ]

    with pipeline.running("run") as process:
        wait_for(is_connected, "capture")
        # A start is refused while the lake is away: it has begun when a row has arrived.
        database.execute("insert into busy (n) values (0)")
        wait_until_applied(database)
        lake.rename(elsewhere)
        with Background(database, write, pause=0.1) as writer:
            is_over = lambda: writer.has_ended or process.poll() is not None  # noqa: E731
            wait_for(lambda: spool_is_full() or is_over(), "a full spool", CATCH_UP_SECONDS)
            assert not is_over()
            end = time.monotonic() + FULL_SECONDS
            wait_for(lambda: time.monotonic() > end, "the end of the outage", 2 * FULL_SECONDS)
            assert spool_is_full()
            assert is_connected()
        elsewhere.rename(lake)
        wait_until_applied(database)
    record_property("rows", database.execute("select count(*) from busy")[0][0])
    pipeline.run("verify")
    pipeline.check(record_property)


def wait_until_applied(database: Any) -> None:
    """Wait until the slot has passed everything that was written."""
    [(position,)] = database.execute("select pg_current_wal_flush_lsn()::text")
    wait_for(
        lambda: database.execute(
            "select 1 from pg_replication_slots"
            " where database = current_database() and confirmed_flush_lsn >= %s::pg_lsn",
            [position],
        ),
        "the slot to follow",
        CATCH_UP_SECONDS,
    )
