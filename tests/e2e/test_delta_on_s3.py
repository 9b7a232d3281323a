"""Delta tables in an object store: whole pipelines, drivers that race for one table, and a driver that was stopped
before its commit. An emulator (moto) in `make test`; a real server (versitygw) in `make soak`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid
from datetime import timedelta
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock.destinations.base import Tasks
from penstock.destinations.delta import destination as delta
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.storage import ObjectStorage, open_storage
from penstock.destinations.naming import FOLDERS
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import ORDERS
from penstock.workers.apply import ErrorHold
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import wait_for
from tests.e2e.test_delta import pipeline_into, wait_applied, wait_ready
from tests.support.planned_tables import Size, plan_tables
from tests.support.proxy import Proxy
from tests.support.readback import check_equal
from tests.support.s3 import S3Server
from tests.support.samples import available_samples
from tests.support.writers import Writers

SIZE = Size(tables=3, columns=8, sessions=2, initial_rows=40)
DRIVERS, TRANSACTIONS = 3, 24

ZOMBIE = """
import os, pickle, signal, sys
from penstock.destinations.delta.destination import DeltaDestination
from penstock.testing.destinations import LocalTasks, make_context

class Stopping(LocalTasks):
    def run(self, items, function, *, description):
        results = LocalTasks.run(self, items, function, description=description)
        if not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        return results
    stopped = False

url, options, batch, table_id = pickle.load(open(sys.argv[1], "rb"))
destination = DeltaDestination(url, storage_options=options, maintenance=False)
destination.startup(make_context(tasks=Stopping()))
error = destination.write_events(batch).result().of(table_id).error
print(type(error).__name__)
"""


class Lake:
    """A table of orders in a place of its own, and those who write it."""

    def __init__(self, s3: S3Server, source: ScriptedSource) -> None:
        self.url = f"s3://lake/{uuid.uuid4().hex}"
        self.options = s3.options
        self._source = source

    def driver(self, tasks: Tasks | None = None, **options: Any) -> DeltaDestination:
        destination = DeltaDestination(self.url, storage_options=self.options, maintenance=False, **options)
        destination.startup(make_context(tasks=tasks))
        return destination

    def copy(self, rows: list[dict[str, Any]], *, attempt: str = "attempt-1", **options: Any) -> None:
        destination = self.driver(**options)
        destination.drop_table_for_copy(ORDERS, attempt)
        destination.write_table_rows(ORDERS, self._source.copy(ORDERS, rows, attempt=attempt))

    def rows(self, columns: str = "id, note") -> list[tuple[Any, ...]]:
        """As delta-rs reads them."""
        table = DeltaTable(f"{self.url}/{FOLDERS.table(ORDERS)}", storage_options=self.options)
        found = QueryBuilder().register("t", table).execute(f"select {columns} from t").read_all()
        return sorted(tuple(row.values()) for row in pa.table(found).to_pylist())

    def versions(self) -> int:
        snapshot = DeltaLog(open_storage(self.url, self.options).child(FOLDERS.table(ORDERS))).refresh()
        assert snapshot is not None
        return snapshot.version


@pytest.fixture
def source(tmp_path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


@pytest.fixture
def lake(s3: S3Server, source: ScriptedSource) -> Lake:
    return Lake(s3, source)


def order(number: int, note: str = "copied") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def test_random_tables_are_followed_into_a_bucket(s3, database, tmp_path):
    with database.connect() as connection:
        tables = plan_tables(Random(41), available_samples(connection), SIZE)
    writers = Writers(database.dsn, Random(42), tables, SIZE, truncates=False)
    lake = f"s3://lake/{uuid.uuid4().hex}"
    with pipeline_into(database, tmp_path, lake=lake, storage_options=s3.options) as pipeline:
        with writers:
            wait_ready(pipeline, len(tables))
            writers.begin_truncates()
            before = pipeline.status.changes
            wait_for(lambda: pipeline.status.changes > before + 500, "changes to flow")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    check_equal(database.dsn, LakeReadBack(lake, s3.options), [table.name for table in tables])


def test_a_store_that_is_away_makes_all_tables_wait_and_none_is_lost(s3, database, tmp_path, monkeypatch, caplog):
    """Also when far more is written meanwhile than an errored table may hold back."""
    caplog.set_level("INFO", "penstock")
    monkeypatch.setattr(delta, "open_storage", lambda path, options: ObjectStorage(path, options, retry_seconds=0.5))
    proxy = Proxy(s3.port)
    options = {**s3.options, "aws_endpoint": f"http://127.0.0.1:{proxy.port}"}
    with database.connect() as connection:
        for table in ("one", "two"):
            connection.execute(f"create table {table} (id int primary key, note text)")
            connection.execute(f"insert into {table} select n, 'copied' from generate_series(1, 50) n")
    lake = f"s3://lake/{uuid.uuid4().hex}"
    hold = ErrorHold(timedelta(seconds=1), bytes=1024)
    try:
        with pipeline_into(database, tmp_path, lake=lake, error_hold=hold, storage_options=options) as pipeline:
            wait_ready(pipeline, 2)
            proxy.refuse = True
            proxy.cut()
            with database.connect() as connection:
                connection.execute("update one set note = repeat('x', 200)")
                connection.execute("update two set note = repeat('y', 200)")
                connection.execute("create table three (id int primary key)")
                connection.execute("insert into three values (1)")
            wait_for(lambda: caplog.text.count("apply failed, retrying") > 2, "apply to have waited three times")
            assert {phase.name for phase in pipeline.phases.values()} <= {"ready", "init", "data_sync", "errored"}
            assert sum(phase.name == "ready" for phase in pipeline.phases.values()) == 2
            proxy.refuse = False
            wait_applied(pipeline, database)
            wait_ready(pipeline, 3)
    finally:
        proxy.close()
    check_equal(database.dsn, LakeReadBack(lake, s3.options), ["one", "two", "three"])


@pytest.mark.trap(28, 35)
@pytest.mark.parametrize("mode", ["mirror", "history"])
def test_drivers_that_race_for_a_table_double_nothing_and_lose_nothing(lake: Lake, source: ScriptedSource, mode: str):
    """Each has all changes, in batches of its own size: what is in already, and who was first, is in the table."""
    lake.copy([order(number) for number in range(10)], mode=mode)
    begin = source.position
    ends = []
    for number in range(TRANSACTIONS):
        with source.transaction() as transaction:
            transaction.update(ORDERS, order(number % 10, f"{number}"))
            transaction.insert(ORDERS, order(100 + number, "new"))
        ends.append(source.position)
    source.batch()
    failures: list[str] = []
    start = threading.Barrier(DRIVERS)

    def drive(size: int) -> None:
        destination = lake.driver(mode=mode)
        cuts = [*ends[size - 1 :: size], ends[-1]]
        start.wait()
        for first, last in zip([begin, *cuts], cuts, strict=False):
            if first != last:
                result = destination.write_events(source.batch(first, last)).result()
                failures.extend(str(each.error) for each in result.tables.values() if each.error is not None)

    threads = [threading.Thread(target=drive, args=(size,)) for size in (1, 2, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    if mode == "history":
        changes = lake.rows("_commit_lsn, _ordinal, _op")
        assert len(changes) == len(set(changes[10:])) + 10 == 10 + 2 * TRANSACTIONS
    else:
        last = {number % 10: f"{number}" for number in range(TRANSACTIONS)}
        assert lake.rows() == sorted([*last.items(), *((100 + number, "new") for number in range(TRANSACTIONS))])
    assert lake.driver(mode=mode).position(ORDERS.table_id) == ends[-1]


@pytest.mark.trap(19, 34)
@pytest.mark.parametrize("copied_again", [True, False])
def test_a_driver_stopped_before_its_commit_goes_on_after_others(
    lake: Lake, source: ScriptedSource, tmp_path, copied_again: bool
):
    """A process that is stopped where all its files are written, and continued when its successor has done the work."""
    lake.copy([order(number) for number in range(3)])
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "changed"))
        transaction.insert(ORDERS, order(7, "new"))
    batch = source.batch()
    (tmp_path / "work").write_bytes(pickle.dumps((lake.url, lake.options, batch, ORDERS.table_id)))
    command = [sys.executable, "-c", ZOMBIE, str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as zombie:
        try:
            _, status = os.waitpid(zombie.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            if copied_again:
                lake.copy([order(1, "copied again")], attempt="attempt-2")
                expected, said = [(1, "copied again")], "IllegalTransition"
            else:
                assert lake.driver().write_events(batch).result().tables == {}
                expected, said = [(0, "copied"), (1, "changed"), (2, "copied"), (7, "new")], "NoneType"
            versions = lake.versions()
            zombie.send_signal(signal.SIGCONT)
            answer, _ = zombie.communicate(timeout=60)
        finally:
            zombie.kill()
    assert answer.strip() == said
    assert lake.rows() == expected
    assert lake.versions() == versions, "nothing was committed"
