"""Compare copying a table through Spark tasks with `psql … COPY (format binary) > /dev/null` on one connection.

    python benchmarks/table_copy.py [--destination parquet delta] [--rows N] [--rounds 3] [--tasks 2] [--server 18]

docs/reference/benchmarks.md describes what is timed. The copy is the pipeline's own: `penstock.copy` for the snapshot
and the ranges, `Destination.write_table_rows` for tasks, durable files and one commit. A pipeline leaves one core for
the changes of other tables; this benchmark uses all cores unless `--tasks` says otherwise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from harness import (
    BenchmarkFailed,
    format_table,
    load_average,
    median,
    print_result,
    say,
    spread,
    take_turns,
)
from lakes import KEYS
from processes import PYTHON_WORKER, TreeWatch, merge_peaks
from stages import CORES, open_stage, spark_session
from workloads import PUBLICATION, create_orders

from penstock.copy import CopySettings, prepare_copy
from penstock.destinations.base import Destination, DestinationContext
from penstock.destinations.registry import create_destination
from penstock.source.connections import SourceSettings
from penstock.source.snapshots import take_snapshot
from penstock.spark.tasks import SparkTasks
from penstock.state.memory import MemoryStore
from penstock.testing.postgres import PostgresServer

PSQL = "psql"
TABLE, SMALL_TABLE = "orders", "few_orders"
SMALL_ROWS = 50_000
SMALL_RANGE_BYTES = 512 << 10
"""Enough ranges of the small table for a task on every core."""
SERVER_SETTINGS: Mapping[str, str] = {
    # The table stays in memory, and nothing happens beside the copy.
    "shared_buffers": "1GB",
    "max_wal_size": "64GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
}


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy of the table."""

    seconds: float
    cpu_seconds: float
    watch: TreeWatch


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        database = stage.server.create_database()
        size = make_tables(stage.server, database, arguments.rows)
        began = time.monotonic()
        with spark_session("bench-copy") as session:
            say(f"Spark started in {time.monotonic() - began:.1f} s")
            tasks = SparkTasks(session, copy_tasks=arguments.tasks)
            for name in arguments.destination:
                copies = run(stage.server, database, tasks, name, arguments, stage.folder)
                results[name] = _result(arguments.rows, copies, name)
                print(f"\n{_describe(name, arguments, size, copies)}\n", flush=True)
    print_result(results)


def run(
    server: PostgresServer, database: str, tasks: SparkTasks, name: str, arguments: argparse.Namespace, folder: Path
) -> dict[str, list[Copied]]:
    """Copy the table `rounds` times each way."""
    source = SourceSettings(server.dsn(database))
    began = time.monotonic()
    settings = CopySettings(range_bytes=SMALL_RANGE_BYTES)
    copy_by_tasks(source, tasks, name, folder / f"{name}-first", SMALL_TABLE, SMALL_ROWS, settings)
    say(f"{name}: Python workers started in {time.monotonic() - began:.1f} s")
    # The first one also brings the table into the server's memory.
    _copy_by_psql(server, database)
    copies: dict[str, list[Copied]] = {PSQL: [], name: []}
    for number, who in enumerate(take_turns(PSQL, name, arguments.rounds)):
        if who == PSQL:
            copied = _copy_by_psql(server, database)
        else:
            copied = copy_by_tasks(source, tasks, name, folder / f"{name}-{number}", TABLE, arguments.rows)
        copies[who].append(copied)
        say(
            f"{who}: {arguments.rows / copied.seconds:,.0f} rows/s in {copied.seconds:.2f} s, "
            f"{copied.cpu_seconds:.1f} CPU s, load average {load_average():.1f}"
        )
    return copies


def make_tables(server: PostgresServer, database: str, rows: int) -> int:
    """The table, and a small one like it; gives its size in bytes."""
    say(f"making a table of {rows:,} rows")
    with server.connect(database) as connection:
        create_orders(connection, TABLE, rows)
        create_orders(connection, SMALL_TABLE, SMALL_ROWS)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        # So that no reader has to mark rows as committed.
        connection.execute("vacuum (freeze, analyze)")
        connection.execute("checkpoint")
        return _fetch(connection, f"select pg_catalog.pg_table_size('{TABLE}')")


def _copy_by_psql(server: PostgresServer, database: str) -> Copied:
    command = [
        str(server.binaries.program("psql")),
        *("-X", "-q", "-h", "127.0.0.1", "-p", str(server.port), "-U", server.user, "-d", database),
        *("-c", f"copy {TABLE} to stdout (format binary)"),
    ]
    began = time.monotonic()
    with subprocess.Popen(
        command, env=os.environ | {"PGPASSWORD": server.password}, stdout=subprocess.DEVNULL
    ) as process:
        with TreeWatch(process.pid) as watch:
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise BenchmarkFailed(f"psql ended with exit code {process.returncode}")
    return Copied(seconds, used.ru_utime + used.ru_stime, watch)


def copy_by_tasks(
    source: SourceSettings,
    tasks: SparkTasks,
    name: str,
    folder: Path,
    table: str,
    row_count: int,
    settings: CopySettings | None = None,
) -> Copied:
    destination = create_destination(name, {"path": str(folder)})
    destination.startup(DestinationContext("bench", "bench", MemoryStore("bench"), tasks))
    table_id, key_sum = look_at(source, table)
    try:
        with TreeWatch(os.getpid()) as watch:
            began = time.monotonic()
            _copy(source, destination, tasks, table_id, settings)
            seconds = time.monotonic() - began
    finally:
        destination.shutdown()
    found = KEYS[name](folder, table)
    if found != (row_count, key_sum):
        raise BenchmarkFailed(f"(rows, sum of keys) are {(row_count, key_sum)} at the source and {found} in {name}")
    return Copied(seconds, watch.cpu_seconds, watch)


def _copy(
    source: SourceSettings, destination: Destination, tasks: SparkTasks, table_id: int, settings: CopySettings | None
) -> None:
    """As `penstock.workers.table_sync` does it."""
    with take_snapshot(source) as snapshot:
        rows = prepare_copy(snapshot, source, PUBLICATION, table_id, settings=settings)
        destination.drop_table_for_copy(rows.schema, rows.attempt)
        with tasks.copying():
            destination.write_table_rows(rows.schema, rows)


def look_at(source: SourceSettings, table: str) -> tuple[int, int]:
    with psycopg.connect(source.url) as connection:
        return (
            _fetch(connection, f"select '{table}'::regclass::oid::int8"),
            int(_fetch(connection, f"select sum(id) from {table}")),
        )


def _fetch(connection: psycopg.Connection[Any], query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def _result(rows: int, copies: Mapping[str, Sequence[Copied]], name: str) -> dict[str, float]:
    seconds = {who: median([copied.seconds for copied in each]) for who, each in copies.items()}
    cpu = median([copied.cpu_seconds for copied in copies[name]])
    return {
        "ratio": round(seconds[PSQL] / seconds[name], 3),
        "per_second": round(rows / seconds[name]),
        "cpu_s_per_million": round(cpu * 1e6 / rows, 3),
        "peak_rss_mib": round(max(copied.watch.peak_rss_mib(PYTHON_WORKER) for copied in copies[name]), 1),
    }


def _describe(name: str, arguments: argparse.Namespace, size: int, copies: Mapping[str, Sequence[Copied]]) -> str:
    table: list[list[str]] = []
    for who, each in copies.items():
        rates = [arguments.rows / copied.seconds for copied in each]
        cpu = median([copied.cpu_seconds for copied in each]) * 1e6 / arguments.rows
        table.append([who, f"{median(rates):,.0f}", f"{spread(rates):.0%}", f"{cpu:.2f}"])
    title = (
        f"{name}: {arguments.rows:,} rows of 10 columns, {size / (1 << 20):,.0f} MiB, "
        f"{arguments.tasks} tasks on local[{CORES}], load average {load_average():.1f}"
    )
    result = _result(arguments.rows, copies, name)
    return (
        f"{title}\n{format_table(['', 'rows/s', 'spread', 'CPU s/million'], table)}\nratio {result['ratio']:.2f}\n\n"
        f"{merge_peaks([copied.watch for copied in copies[name]])}"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare copying a table through Spark tasks with COPY in psql.")
    parser.add_argument("--destination", nargs="+", choices=list(KEYS), default=list(KEYS))
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="copies per method")
    parser.add_argument("--tasks", type=int, default=CORES, help="concurrent copy tasks")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.rounds, arguments.tasks) < 1:
        parser.error("--rows, --rounds and --tasks must be at least 1")
    return arguments


if __name__ == "__main__":
    main()
