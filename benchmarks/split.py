"""Measure how much faster one hot table is written with two executors than with one.

    python benchmarks/split.py [--workload stream transaction] [--changes 1000000] [--rounds 3] [--cluster]

Capture writes all changes to a spool beforehand, so that applying them is the bottleneck: each run applies the same
spool to a new copy of the same lake, in batches as the apply worker takes them. Rows have about 400 bytes. `stream` is
transactions of 60 updates, 30 inserts and 10 deletes; `transaction` is one update of every row. By default executors
are threads of one JVM (`local[n]`); with `--cluster` they are processes of a standalone cluster, with one core each.

Besides the time, a run has the processor seconds of the longest task of each job, which a busy machine changes less:
the time that a cluster takes whose cores have nothing else to do is about that, and a tenth of a second for each job.
Afterwards delta-rs compares rows and sums of every lake with the source.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from draining import SERVER_SETTINGS, Load, create_slot, current_position, drop_slot, run_load
from harness import BenchmarkFailed, format_table, load_average, median, print_result, say
from lakes import query_delta
from processes import PYTHON_WORKER, TreeWatch
from stages import open_stage, spark_session
from workloads import PUBLICATION, prepare_wide_into

from penstock.capture.engine import CaptureSettings
from penstock.capture.process import CaptureProcess
from penstock.copy import prepare_copy
from penstock.destinations.delta.destination import DeltaDestination
from penstock.lsn import Lsn, OrderKey
from penstock.source import SourceSettings
from penstock.source.snapshots import take_snapshot
from penstock.spark.java import find_java
from penstock.spark.tasks import SparkTasks
from penstock.spool import SpoolSettings
from penstock.state import TableSchemaVersion
from penstock.testing.destinations import make_context
from penstock.testing.postgres import PostgresServer
from penstock.workers.batches import BatchSettings, BatchWriter
from penstock.workers.process_tasks import ProcessTasks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.spark_cluster import Cluster

CAPTURE_SECONDS = 900.0
_SUMS = "select count(*) as a, sum(id) as b, sum(quantity) as c, sum(amount) as d from {table}"


@dataclass(frozen=True, slots=True)
class Captured:
    """The changes of a workload in a spool, and the lake from before them."""

    folder: Path
    load: Load
    begin: Lsn
    table_id: int
    schema: TableSchemaVersion
    sums: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Applied:
    """One run over the spool."""

    seconds: float
    cpu_seconds: float
    longest_seconds: float
    """Processor seconds of the longest task of each job."""
    batches: int
    worker_mib: float


@dataclass(slots=True)
class ClockedTasks:
    """Spark's tasks, with the processor seconds of the longest task of each job."""

    tasks: SparkTasks
    elsewhere: bool = False
    seconds: float = 0.0

    @property
    def parallel(self) -> int:
        return self.tasks.parallel

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        outcomes = self.tasks.run(items, partial(_clocked, function), description=description)
        self.seconds += max(seconds for _, seconds in outcomes)
        return [outcome for outcome, _ in outcomes]

    def copying(self) -> AbstractContextManager[None]:
        return self.tasks.copying()


def _clocked(function: Callable[[Any], Any], item: Any) -> tuple[Any, float]:
    began = time.process_time()
    return function(item), time.process_time() - began


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, float] = {}
    settings = BatchSettings(max_rows=arguments.batch_rows, max_bytes=arguments.batch_bytes)
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        for name in arguments.workload:
            captured = _capture(stage.server, stage.folder / name, name, arguments.changes)
            runs: dict[int, list[Applied]] = {cores: [] for cores in arguments.cores}
            for number in range(arguments.rounds):
                for cores in arguments.cores if number % 2 == 0 else arguments.cores[::-1]:
                    with _spark(cores, stage.folder, cluster=arguments.cluster) as session:
                        runs[cores].append(_apply(captured, session, settings))
                    _say(name, cores, captured.load, runs[cores][-1])
            results |= _result(name, captured.load, runs)
            print(f"\n{_describe(name, captured.load, runs)}\n", flush=True)
    print_result(results)


def _capture(server: PostgresServer, folder: Path, name: str, changes: int) -> Captured:
    """Make a table, copy it, change it, and capture the changes."""
    wanted = changes // 100 * 100
    folder.mkdir()
    database = server.create_database()
    source = SourceSettings(server.dsn(database))
    with server.connect(database) as connection:
        say(f"{name}: making the table")
        prepare_wide_into(connection, wanted, wanted)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        connection.execute("vacuum (freeze, analyze)")
        slot, _ = create_slot(connection, 0)
        (table_id,) = _row(connection, "select 'wide'::regclass::oid::int8")
        with take_snapshot(source) as snapshot:
            rows = prepare_copy(snapshot, source, PUBLICATION, table_id)
            destination = DeltaDestination(folder / "before", maintenance=False)
            destination.startup(make_context(tasks=ProcessTasks()))
            destination.drop_table_for_copy(rows.schema, rows.attempt)
            destination.write_table_rows(rows.schema, rows)
            destination.shutdown()
        connection.execute("checkpoint")
        load = run_load(connection, wanted) if name == "stream" else _update_all(connection)
        settings = CaptureSettings(source, slot, PUBLICATION, SpoolSettings(folder / "spool", max_bytes=1 << 50))
        with CaptureProcess(settings) as capture:
            if not capture.wait_captured(load.end, CAPTURE_SECONDS):
                raise BenchmarkFailed(f"capture did not reach {load.end}: it is at {capture.status.captured}")
        drop_slot(connection, slot)
        sums = _row(connection, _SUMS.format(table="wide"))
    say(f"{name}: {load.changes:,} changes captured, load average {load_average():.1f}")
    version = TableSchemaVersion(OrderKey(rows.position, 0), rows.schema)
    return Captured(folder, load, rows.position, table_id, version, sums)


def _update_all(connection: psycopg.Connection[Any]) -> Load:
    before, began = current_position(connection), time.monotonic()
    changes = connection.execute(
        "update wide set status = 'all', amount = amount + 1.5, updated_at = clock_timestamp()"
    ).rowcount
    end = current_position(connection)
    return Load(changes, 1, end, end - before, time.monotonic() - began)


@contextmanager
def _spark(cores: int, folder: Path, *, cluster: bool) -> Iterator[Any]:
    if not cluster:
        with spark_session("bench-split", cores) as session:
            yield session
        return
    with tempfile.TemporaryDirectory(dir=folder) as files:
        made = Cluster(Path(files), find_java().home)
        made.start(cores)
        try:
            with spark_session("bench-split", master=made.url, options=dict(made.options)) as session:
                yield session
        finally:
            made.close()


def _apply(captured: Captured, session: Any, settings: BatchSettings) -> Applied:
    """Apply the spool twice in one session; return the second run, in which workers and JVM are warm."""
    tasks = ClockedTasks(SparkTasks(session))
    _apply_once(captured, tasks, settings)
    return _apply_once(captured, tasks, settings)


def _apply_once(captured: Captured, tasks: ClockedTasks, settings: BatchSettings) -> Applied:
    """Apply the spool to a copy of the lake, and compare it with the source."""
    with tempfile.TemporaryDirectory(dir=captured.folder) as folder:
        lake = Path(shutil.copytree(captured.folder / "before", Path(folder) / "lake"))
        context = make_context(tasks=tasks)
        context.store.acquire_lease()
        context.store.store_table_schema(captured.schema)
        destination = DeltaDestination(lake, maintenance=False)
        destination.startup(context)
        writer = BatchWriter(captured.folder / "spool", context.store, destination, settings)
        position, batches, tasks.seconds = captured.begin, 0, 0.0
        began = time.monotonic()
        with TreeWatch(os.getpid()) as watch:
            while entries := writer.take(position, captured.load.end):
                end = entries[-1].end
                written = writer.write(entries, position, end, {captured.table_id: position})
                if written.failed:
                    raise BenchmarkFailed(f"the table failed: {written.failed}")
                position, batches = end, batches + 1
            seconds = time.monotonic() - began
        destination.shutdown()
        found = tuple(query_delta(lake, "wide", _SUMS.format(table="t"))[0].values())
    if found != captured.sums:
        raise BenchmarkFailed(f"(rows, sums) are {captured.sums} at the source and {found} in the lake")
    return Applied(seconds, watch.cpu_seconds, tasks.seconds, batches, watch.peak_rss_mib(PYTHON_WORKER))


def _row(connection: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row


def _say(name: str, cores: int, load: Load, run: Applied) -> None:
    say(
        f"{name}: {cores} cores, {load.changes / run.seconds:,.0f} changes/s in {run.seconds:.2f} s and "
        f"{run.batches} batches, {run.cpu_seconds:.1f} CPU s, longest tasks {run.longest_seconds:.2f} CPU s, "
        f"worker {run.worker_mib:.0f} MiB, "
        f"load average {load_average():.1f}"
    )


def _result(name: str, load: Load, runs: Mapping[int, Sequence[Applied]]) -> dict[str, float]:
    seconds = {cores: median([run.seconds for run in each]) for cores, each in runs.items()}
    longest = {cores: median([run.longest_seconds for run in each]) for cores, each in runs.items()}
    first, last = min(seconds), max(seconds)
    return {
        f"{name}_ratio": round(seconds[first] / seconds[last], 3),
        f"{name}_cpu_ratio": round(longest[first] / longest[last], 3),
        **{f"{name}_per_second_{cores}": round(load.changes / each) for cores, each in seconds.items()},
    }


def _describe(name: str, load: Load, runs: Mapping[int, Sequence[Applied]]) -> str:
    rows = [
        [
            str(cores),
            f"{load.changes / median([run.seconds for run in each]):,.0f}",
            f"{median([run.cpu_seconds for run in each]):.1f}",
            f"{median([run.longest_seconds for run in each]):.2f}",
            f"{max(run.worker_mib for run in each):.0f}",
        ]
        for cores, each in runs.items()
    ]
    title = f"{name}: {load.changes:,} changes in {load.transactions:,} transactions; load {load_average():.1f}"
    table = format_table(["cores", "changes/s", "CPU s", "longest tasks CPU s", "worker MiB"], rows)
    result = _result(name, load, runs)
    ratios = f"ratio {result[f'{name}_ratio']:.2f}, of the longest tasks {result[f'{name}_cpu_ratio']:.2f}"
    return f"{title}\n{table}\n{ratios}"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare one hot table on two executors with one.")
    known = ["stream", "transaction"]
    parser.add_argument("--workload", nargs="+", choices=known, default=known)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="runs with each number of cores")
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cluster", action="store_true", help="executors of a standalone cluster, with a core each")
    parser.add_argument("--batch-rows", type=int, default=BatchSettings().max_rows, help="batch.max_rows")
    parser.add_argument("--batch-bytes", type=int, default=BatchSettings().max_bytes, help="batch.max_bytes")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
