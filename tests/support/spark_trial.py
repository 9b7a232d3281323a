"""A trial of a streaming query: random writes, the query upserts them into Delta, and its processes are killed.

    python -m tests.support.spark_trial --seed 7 --kills 3

In the end the table equals the source. The query is `examples/spark/upsert.py`, in a process of its own (`--drive`)
that starts it again when it fails, as a supervisor would do.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from penstock.testing.postgres import PostgresServer
from tests.support.delta_jars import delta_spark_options
from tests.support.processes import command_of, descendants_of
from tests.support.waiting import pause

HANG_SECONDS = 600.0
"""A guard: everything here waits for events."""
TABLE = "public.customers"
ROOT = Path(__file__).parents[2]
_EXAMPLE = ROOT / "examples" / "spark" / "upsert.py"
_PLANNER, _CAPTURE, _DRIVER = "planner", "capture", "driver"


def load_example(path: Path = _EXAMPLE) -> Any:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(f"examples_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_trial(server: PostgresServer, folder: Path, *, seed: int, kills: int) -> Counter[str]:
    """Run a trial; return how often each kind of process was killed. Raises if the tables differ in the end."""
    choose = Random(seed)
    database = server.create_database()
    with server.connect(database) as connection:
        connection.execute(f"create table {TABLE} (id int primary key, name text, email text, notes text)".encode())
        connection.execute(f"insert into {TABLE} select i, 'n', 'e', {_LARGE} from generate_series(1, 300) i".encode())
        if seed % 2 == 0:
            connection.execute(f"alter table {TABLE} replica identity full".encode())
    killed: Counter[str] = Counter()
    with _driving(server.dsn(database), folder) as driver, server.connect(database) as connection:
        with _Writer(server, database, Random(choose.random())) as writer:
            while killed.total() < kills:
                driver.wait_batch()
                # Anywhere in a batch.
                writer.wait_transactions(choose.randrange(60))
                victim = choose.choice((_PLANNER, _CAPTURE, _DRIVER))
                killed[victim] += driver.kill(victim)
        rows = connection.execute(f"select * from {TABLE} order by id".encode()).fetchall()
        begun = time.monotonic()
        while (found := _read_table(folder)) != rows:
            driver.start_if_ended()
            if time.monotonic() > begun + HANG_SECONDS:
                raise AssertionError(_compare(rows, found, seed))
            pause(begun, longest=0.5)
    # Slots belong to the whole server: the next trial has one of the same name.
    server.drop_database(database)
    return killed


_LARGE = "(select string_agg(md5((i * j)::text), '') from generate_series(1, 200) j)"

_NEW = "(select string_agg(md5(%(text)s || j), '') from generate_series(1, 200) j)"
_FREE = "from generate_series(%(id)s::int, %(id)s + 5) i on conflict do nothing"
_MOVABLE = f"(notes is null or (select relreplident = 'f' from pg_class where oid = '{TABLE}'::regclass))"
_ABSENT = f"not exists (select from {TABLE} where id = 400 + %(other)s)"


def _write(connection: Any, choose: Random) -> None:
    """Change some rows in one transaction."""
    with connection.transaction():
        for _ in range(choose.randint(1, 5)):
            ids = {"id": choose.randint(1, 400), "other": choose.randint(1, 400), "text": str(choose.random())}
            statement = choose.choice(
                (
                    f"update {TABLE} set name = %(text)s where id = %(id)s",
                    f"update {TABLE} set email = null, name = %(text)s where id between %(id)s and %(id)s + 20",
                    f"update {TABLE} set notes = {_NEW} where id = %(id)s and id % 3 > 0",
                    f"delete from {TABLE} where id between %(id)s and %(id)s + 3",
                    f"insert into {TABLE} select i, %(text)s, 'e', case when i % 3 > 0 then {_LARGE} end {_FREE}",
                    # Without the whole old row, only rows without a large value: the server omits it.
                    f"update {TABLE} set id = 400 + %(other)s where id = %(id)s and {_MOVABLE} and {_ABSENT}",
                )
            )
            connection.execute(statement.replace("% 3", "%% 3").encode(), ids)
    if choose.random() < 0.001:
        connection.execute(f"truncate {TABLE}".encode())


class _Writer:
    """Writes in a thread until the end of the block."""

    def __init__(self, server: PostgresServer, database: str, choose: Random) -> None:
        self._server, self._database, self._choose = server, database, choose
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._transactions = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write)

    def wait_transactions(self, count: int) -> None:
        """Wait until so many more transactions are written."""
        with self._changed:
            wanted = self._transactions + count
            reached = self._changed.wait_for(lambda: self._error or self._transactions >= wanted, HANG_SECONDS)
        if self._error is not None:
            raise self._error
        assert reached, "no transactions"

    def _write(self) -> None:
        try:
            with self._server.connect(self._database) as connection:
                while not self._ended.wait(0.02):
                    _write(connection, self._choose)
                    with self._changed:
                        self._transactions += 1
                        self._changed.notify_all()
        except Exception as error:
            self._error = error

    def __enter__(self) -> _Writer:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error


class _Driver:
    def __init__(self, dsn: str, folder: Path) -> None:
        self._dsn = dsn
        self._folder = folder
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.support.spark_trial", "--drive", self._dsn, str(self._folder)]
        output = open(self._folder / "driver.log", "ab")  # noqa: SIM115 (inherited)
        # Its own group: Spark's JVM and its workers are killed with it.
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        output.close()
        return process

    def start_if_ended(self) -> None:
        if self._process.poll() is not None:
            self._process = self._start()

    def wait_batch(self) -> None:
        """Wait until a batch is begun that was not there before."""
        offsets = self._folder / "checkpoint" / "offsets"
        before = {path.name for path in offsets.glob("[0-9]*")}
        begun = time.monotonic()
        while {path.name for path in offsets.glob("[0-9]*")} <= before:
            self.start_if_ended()
            assert time.monotonic() < begun + HANG_SECONDS, "no batch"
            pause(begun)

    def kill(self, victim: str) -> int:
        """Kill a process of the query; return how many there were."""
        pids = descendants_of(self._process.pid)
        if victim == _DRIVER:
            self.stop()
            self.start_if_ended()
            return 1
        module = "penstock.capture" if victim == _CAPTURE else "pyspark.sql.streaming.python_streaming_source_runner"
        found = [pid for pid in pids if module in command_of(pid)]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def stop(self) -> None:
        pids = [self._process.pid, *descendants_of(self._process.pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def _driving(dsn: str, folder: Path) -> Iterator[_Driver]:
    driver = _Driver(dsn, folder)
    try:
        yield driver
    finally:
        driver.stop()


def _drive(dsn: str, folder: Path) -> None:
    import penstock
    from penstock.spark.session import SparkSettings, build_session

    options = delta_spark_options()
    session = build_session(SparkSettings(master="local[2]", app_name="spark-trial", options=options))
    penstock.register(session)
    example = load_example()
    while True:
        query = example.start(session, dsn, str(folder), TABLE, spoolLocation=str(folder / "spool"))
        with suppress(Exception):
            query.awaitTermination()
        print("the query ended", query.exception(), flush=True)


def _read_table(folder: Path) -> list[tuple[Any, ...]]:
    from deltalake import DeltaTable

    with suppress(Exception):  # It does not exist yet, or a file was replaced meanwhile.
        rows = DeltaTable(str(folder / "table")).to_pyarrow_table().sort_by("id")
        return [tuple(row.values()) for row in rows.to_pylist()]
    return []


def _compare(rows: list[tuple[Any, ...]], found: list[tuple[Any, ...]], seed: int) -> str:
    keys, others = {row[0] for row in rows}, {row[0] for row in found}
    differing = sorted({row[0] for row in set(rows) ^ set(found)} & keys & others)
    return (
        f"seed {seed}: {len(keys - others)} rows are missing, {len(others - keys)} should not be there, "
        f"{len(differing)} differ; keys: {sorted(keys ^ others)[:5]} {differing[:5]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a streaming query under random writes.")
    parser.add_argument("--drive", nargs=2, metavar=("DSN", "FOLDER"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3)
    given = parser.parse_args()
    if given.drive:
        _drive(given.drive[0], Path(given.drive[1]))
        return
    with tempfile.TemporaryDirectory() as folder, PostgresServer() as server:
        print(run_trial(server, Path(folder), seed=given.seed, kills=given.kills))


if __name__ == "__main__":
    main()
