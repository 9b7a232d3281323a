"""Compare writing to a DuckDB file with `pg_recvlogical`, with COPY, and with a plain client that does the same.

    python benchmarks/to_duckdb.py [--changes N] [--rows N] [--rounds 3] [--copy-rows N] [--master local|none] …

The plain client copies a table as people do by hand: COPY to a file of CSV, then `create table as` from it. Rows and
sums are compared with the source. docs/reference/benchmarks.md says what is timed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
from draining import SERVER_SETTINGS, create_slot, drain_by_recvlogical, drop_slot, run_load
from harness import BenchmarkFailed, load_average, median, print_result, say
from stages import CORES, open_stage, spark_session
from to_postgres import all_ready, drain, psql, slot_name, to_nowhere, wait_until
from workloads import PUBLICATION, create_orders, prepare_mixed_into

from penstock.coordinator import Coordinator
from penstock.destinations.registry import create_destination
from penstock.output import RunningOutput
from penstock.source.connections import SourceSettings
from penstock.spark.tasks import SparkTasks
from penstock.spool import SpoolSettings
from penstock.state import open_store
from penstock.tables import TablesOutput, TablesSettings
from penstock.testing.postgres import PostgresServer
from penstock.workers.process_tasks import ProcessTasks

PSQL, PLAIN, PIPELINE = "psql", "plain client", "pipeline"
_SUMS = "select count(*), sum(id)::int8 from {}"


@dataclass(frozen=True, slots=True)
class DuckBench:
    """Where pipelines run: each has a file of its own."""

    source: PostgresServer
    database: str
    folder: Path
    tasks: Any

    def file(self, name: str) -> str:
        return str(self.folder / name / "lake.db")

    @contextmanager
    def pipeline(self, name: str) -> Iterator[RunningOutput]:
        """See `to_postgres.Piping`."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        settings = TablesSettings(
            id=name,
            source=SourceSettings(self.source.dsn(self.database)),
            publication=PUBLICATION,
            slot=name,
            spool=SpoolSettings(folder / "spool"),
            manage_publication=False,
        )
        destination = create_destination("duckdb", {"path": self.file(name)})
        with (
            open_store(f"sqlite:///{folder / 'state.db'}", name) as store,
            Coordinator([TablesOutput(settings, store, destination, self.tasks)]) as coordinator,
        ):
            [pipeline] = coordinator
            yield pipeline

    def copy(self, name: str) -> None:
        """Let a pipeline copy all tables."""
        query = "select from pg_catalog.pg_publication_tables"
        with self.source.connect(self.database) as connection:
            count = len(connection.execute(query).fetchall())
        with self.pipeline(name) as pipeline:
            wait_until(lambda: all_ready(pipeline, count), "the copy")

    def require_equal(self, path: str, name: str, table: str) -> None:
        """Raise if a table of a file has other rows than the source."""
        with self.source.connect(self.database) as connection:
            expected = connection.execute(_SUMS.format(table).encode()).fetchall()
        with duckdb.connect(path, read_only=True) as connection:
            found = connection.execute(_SUMS.format(f'"{name}".{table}').replace("int8", "bigint")).fetchall()
        if found != expected:
            raise BenchmarkFailed(f"{table} has (rows, sum) {expected} at the source and {found} in the file")


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        stage = stack.enter_context(open_stage(arguments.server, SERVER_SETTINGS))
        tasks: Any = ProcessTasks()
        if arguments.master != "none":
            tasks = SparkTasks(stack.enter_context(spark_session("bench-to-duckdb")), copy_tasks=CORES)
        bench = DuckBench(stage.server, stage.server.create_database(), stage.folder / "changes", tasks)
        results["mixed"] = run_changes(bench, arguments)
        if arguments.copy_rows:
            bench = DuckBench(stage.server, stage.server.create_database(), stage.folder / "copies", tasks)
            results["copy"] = run_copies(bench, arguments)
    print_result(results)


def run_changes(bench: DuckBench, arguments: argparse.Namespace) -> dict[str, float]:
    """Drain the same changes by `pg_recvlogical` and by a pipeline, in turns."""
    wanted, seconds, cpu = arguments.changes // 100 * 100, {PSQL: [0.0], PIPELINE: [0.0]}, [0.0]
    with bench.source.connect(bench.database) as connection:
        prepare_mixed_into(connection, wanted, rows=arguments.rows)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        connection.execute("vacuum (freeze, analyze)")
        query = "select tablename from pg_catalog.pg_publication_tables"
        tables = [name for (name,) in connection.execute(query).fetchall()]
        for number in range(arguments.rounds):
            create_slot(connection, 2 * number)
            bench.copy(slot_name(2 * number + 1))
        load = run_load(connection, wanted)
        say(f"{load.changes:,} changes written in {load.seconds:.1f} s")
        for number in range(arguments.rounds):
            plain, own = slot_name(2 * number), slot_name(2 * number + 1)
            found = drain_by_recvlogical(bench.source, connection, bench.database, plain, load.end)
            seconds[PSQL].append(found.seconds)
            drained = drain(bench, connection, own, load)
            seconds[PIPELINE].append(drained.seconds)
            cpu.append(drained.cpu_seconds)
            for table in tables:
                bench.require_equal(bench.file(own), "public", table)
            drop_slot(connection, plain)
            drop_slot(connection, own)
            rates = [f"{name} {load.changes / each[-1]:,.0f}/s" for name, each in seconds.items()]
            say(f"{', '.join(rates)}, load average {load_average():.1f}")
    recvlogical, pipeline = median(seconds[PSQL][1:]), median(seconds[PIPELINE][1:])
    return {
        "ratio": round(recvlogical / pipeline, 3),
        "per_second": round(load.changes / pipeline),
        "cpu_s_per_million": round(median(cpu[1:]) / load.changes * 1e6, 2),
    }


def run_copies(bench: DuckBench, arguments: argparse.Namespace) -> dict[str, float]:
    """Copy a table three ways, in turns: to /dev/null, by hand, and by a pipeline."""
    rows = arguments.copy_rows
    with bench.source.connect(bench.database) as connection:
        create_orders(connection, "orders", rows)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        connection.execute("vacuum (freeze, analyze)")
    ways: Mapping[str, Callable[[str], None]] = {
        PSQL: lambda _: to_nowhere(bench.source, bench.database),
        PLAIN: lambda name: _by_hand(bench, name),
        PIPELINE: bench.copy,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way, copy in ways.items():
            name = f"{way.replace(' ', '_')}_{number}"
            began = time.monotonic()
            copy(name)
            seconds[way].append(time.monotonic() - began)
            if way != PSQL:
                bench.require_equal(bench.file(name), "main" if way == PLAIN else "public", "orders")
            say(f"{way}: {rows / seconds[way][-1]:,.0f} rows/s, load average {load_average():.1f}")
    found = {way: median(each) for way, each in seconds.items()}
    return {
        "ratio_copy": round(found[PSQL] / found[PIPELINE], 3),
        "ratio_plain": round(found[PLAIN] / found[PIPELINE], 3),
        "per_second": round(rows / found[PIPELINE]),
    }


def _by_hand(bench: DuckBench, name: str) -> None:
    path = Path(bench.file(name))
    path.parent.mkdir(parents=True)
    text = path.with_name("orders.csv")
    command = psql(bench.source, bench.database, "copy orders to stdout (format csv, header)")
    with text.open("wb") as file:
        subprocess.run(command, env=os.environ | {"PGPASSWORD": bench.source.password}, stdout=file, check=True)
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"create table orders as from read_csv('{text}')")
    text.unlink()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table that is changed")
    parser.add_argument("--copy-rows", type=int, default=2_000_000, help="rows of the table that is copied; 0 for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--master", choices=["local", "none"], default="local", help="none: without Spark")
    parser.add_argument("--server", type=int, default=18, help="major version of PostgreSQL")
    return parser.parse_args()


if __name__ == "__main__":
    main()
