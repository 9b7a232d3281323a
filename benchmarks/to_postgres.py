"""Compare writing to another Postgres with `pg_recvlogical`, with a native subscription, and with COPY.

    python benchmarks/to_postgres.py [--workload mixed many] [--changes N] [--rows N] [--rounds 3] [--copy-rows N] …

A second server on the same machine, with the same settings, receives the rows: those of the pipeline, and those of
`create subscription`, each into databases of its own. docs/reference/benchmarks.md says what is timed. Afterwards rows
and sums of every database are compared with the source.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psycopg
from draining import (
    RECVLOGICAL,
    SERVER_SETTINGS,
    Load,
    create_slot,
    drain_by_recvlogical,
    drop_slot,
    run_load,
    wait_for_start,
)
from harness import BenchmarkFailed, format_table, load_average, median, print_result, say, spread
from processes import TreeWatch
from stages import CORES, open_stage, spark_session
from workloads import PUBLICATION, create_orders, prepare_many, prepare_mixed_into

from penstock.coordinator import Coordinator
from penstock.copy import prepare_copy
from penstock.destinations.base import DestinationContext
from penstock.destinations.registry import create_destination
from penstock.lsn import reaches
from penstock.output import RunningOutput
from penstock.source.connections import SourceSettings
from penstock.source.lineage import Ancestry, Lineage
from penstock.source.snapshots import take_snapshot
from penstock.spark.tasks import SparkTasks
from penstock.spool import SpoolSettings
from penstock.state import Errored, MemoryStore, Ready, open_store
from penstock.tables import TablesOutput, TablesSettings
from penstock.testing.postgres import PostgresServer
from penstock.workers.process_tasks import ProcessTasks

PIPELINE, SUBSCRIPTION, PSQL, PIPED = "pipeline", "subscription", "psql", "psql into psql"
MANY_TABLES = 100
WAIT_SECONDS = 900.0
MARKER = "bench_marker"
"""A table whose only row is the last change of the load."""
_SUMS = {
    "mixed": "select count(*), sum(id), sum(quantity), sum(amount) from {table}",
    "many": "select count(*), sum(id), sum(account), sum(amount) from {table}",
}
_TABLES = "select tablename from pg_catalog.pg_publication_tables where tablename <> %s order by 1"


@dataclass(frozen=True, slots=True)
class Drained:
    """One slot, read to the end."""

    seconds: float
    cpu_seconds: float


class Piping(Protocol):
    """Makes pipelines."""

    def pipeline(self, name: str) -> AbstractContextManager[RunningOutput]:
        """A pipeline with a slot, spool and state of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Bench:
    """Where one workload runs."""

    source: PostgresServer
    target: PostgresServer
    database: str
    folder: Path
    tasks: Any
    options: Mapping[str, Any]

    @contextmanager
    def pipeline(self, name: str) -> Iterator[RunningOutput]:
        """A pipeline into the database `name` of the target, with a slot, spool and state of its own."""
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
        destination = create_destination("postgres", {"url": self.target.dsn(name), **self.options})
        with (
            open_store(f"sqlite:///{folder / 'state.db'}", name) as store,
            Coordinator([TablesOutput(settings, store, destination, self.tasks)]) as coordinator,
        ):
            [pipeline] = coordinator
            yield pipeline


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        stage = stack.enter_context(open_stage(arguments.server, SERVER_SETTINGS))
        target = stack.enter_context(PostgresServer(major=arguments.server, settings=SERVER_SETTINGS))
        tasks: Any = ProcessTasks()
        if arguments.master != "none":
            tasks = SparkTasks(stack.enter_context(spark_session("bench-to-postgres")), copy_tasks=CORES)
        for name in arguments.workload:
            options = {"transactional": arguments.transactional}
            bench = Bench(stage.server, target, stage.server.create_database(), stage.folder / name, tasks, options)
            load, drains = run(bench, name, arguments)
            results[name] = _result(load, drains)
            print(f"\n{_describe(name, load, drains)}\n", flush=True)
            stage.server.drop_database(bench.database)
        if arguments.copy_rows:
            results["copy"] = run_copies(stage.server, target, tasks, arguments)
    print_result(results)


def run(bench: Bench, name: str, arguments: argparse.Namespace) -> tuple[Load, dict[str, list[Drained]]]:
    """Make the changes, and drain them `rounds` times each way, in turns."""
    prepare: Mapping[str, Callable[[psycopg.Connection[Any], int], None]] = {
        "mixed": partial(prepare_mixed_into, rows=arguments.rows),
        "many": partial(prepare_many, tables=MANY_TABLES),
    }
    wanted = arguments.changes // 100 * 100
    readers = (RECVLOGICAL, PIPELINE, SUBSCRIPTION)
    turns = [each for number in range(arguments.rounds) for each in (readers if number % 2 == 0 else readers[::-1])]
    drains: dict[str, list[Drained]] = {reader: [] for reader in readers}
    with bench.source.connect(bench.database) as connection:
        say(f"{name}: making the tables")
        prepare[name](connection, wanted)
        connection.execute(f"create table {MARKER} (id int primary key)".encode())
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        connection.execute("vacuum (freeze, analyze)")
        for number, reader in enumerate(turns):
            if reader == RECVLOGICAL:
                create_slot(connection, number)
                continue
            bench.target.create_database(slot_name(number))
            (_copy if reader == PIPELINE else _subscribe)(bench, connection, slot_name(number))
        connection.execute("checkpoint")
        bench.target.execute("checkpoint")
        load = run_load(connection, wanted)
        connection.execute(f"insert into {MARKER} values (1)".encode())
        say(f"{name}: {load.changes:,} changes written in {load.seconds:.1f} s")
        for number, reader in enumerate(turns):
            slot = slot_name(number)
            if reader == PIPELINE:
                drained = drain(bench, connection, slot, load)
            elif reader == SUBSCRIPTION:
                drained = _apply(bench, connection, slot)
            else:
                found = drain_by_recvlogical(bench.source, connection, bench.database, slot, load.end)
                drained = Drained(found.seconds, found.cpu_seconds)
            if reader != RECVLOGICAL:
                _require_equal(bench, connection, slot, _SUMS[name])
            if reader == SUBSCRIPTION:
                bench.target.execute(f"drop subscription {slot}", database=slot)
            else:
                drop_slot(connection, slot)
            if reader != RECVLOGICAL:
                bench.target.drop_database(slot)
            drains[reader].append(drained)
            say(
                f"{name}: {reader} {load.changes / drained.seconds:,.0f} changes/s in {drained.seconds:.2f} s, "
                f"load average {load_average():.1f}"
            )
    return load, drains


def slot_name(number: int) -> str:
    return f"bench_{number}"


def _copy(bench: Bench, connection: psycopg.Connection[Any], name: str) -> None:
    count = len(connection.execute("select from pg_catalog.pg_publication_tables").fetchall())
    began = time.monotonic()
    with bench.pipeline(name) as pipeline:
        wait_until(lambda: all_ready(pipeline, count), "the copy")
    bench.target.execute("vacuum (freeze, analyze)", database=name)
    say(f"{name}: copied in {time.monotonic() - began:.1f} s")


def _subscribe(bench: Bench, connection: psycopg.Connection[Any], name: str) -> None:
    """Subscribe with a copy of all tables, then wait for the load."""
    tables = connection.execute("select schemaname, tablename from pg_catalog.pg_publication_tables").fetchall()
    dump = [str(bench.source.binaries.program("pg_dump")), "--schema-only", "--no-publications", bench.database]
    environment = os.environ | {"PGPASSWORD": bench.source.password}
    at_source = ["-h", "127.0.0.1", "-p", str(bench.source.port), "-U", bench.source.user]
    schema = subprocess.run([*dump, *at_source], env=environment, capture_output=True, text=True, check=True).stdout
    statements = "\n".join(line for line in schema.splitlines() if not line.startswith("\\"))
    with bench.target.connect(name) as target:
        target.execute(statements.encode())
        target.execute("set search_path = public")
        target.execute(
            f"create subscription {name} connection '{bench.source.dsn(bench.database)}' publication {PUBLICATION} "
            f"with (slot_name = '{name}')".encode()
        )

        def synced() -> bool:
            row = target.execute("select count(*) from pg_subscription_rel where srsubstate = 'r'").fetchone()
            return row is not None and row[0] == len(tables)

        wait_until(synced, "the copy of the subscription")
        target.execute(f"alter subscription {name} disable".encode())
        target.execute("vacuum (freeze, analyze)")
    wait_until(lambda: _is_idle(connection, name), "the subscription to pause")


def _is_idle(connection: psycopg.Connection[Any], slot: str) -> bool:
    return not connection.execute(
        "select from pg_catalog.pg_replication_slots where slot_name = %s and active", [slot]
    ).fetchall()


def drain(bench: Piping, connection: psycopg.Connection[Any], slot: str, load: Load) -> Drained:
    """Let a pipeline drain the load, until its changes are durable and acknowledged."""
    with bench.pipeline(slot) as pipeline:
        with TreeWatch(os.getpid()) as watch:
            started = wait_for_start(connection, slot, lambda: True)
            wait_until(lambda: failed(pipeline) or reaches(pipeline.status.acknowledged, load.end), "the load's end")
            ended = time.time()
        return Drained(ended - started.at, watch.cpu_seconds)


def _apply(bench: Bench, connection: psycopg.Connection[Any], slot: str) -> Drained:
    """Let the subscription apply the load; its marker is the last row."""
    with bench.target.connect(slot) as target:
        target.execute(f"alter subscription {slot} enable".encode())
        started = wait_for_start(connection, slot, lambda: True)
        wait_until(lambda: bool(target.execute(f"select from {MARKER}".encode()).fetchall()), "the subscription")
        return Drained(time.time() - started.at, 0.0)


def failed(pipeline: RunningOutput) -> bool:
    for name, phase in pipeline.phases.items():
        if isinstance(phase, Errored):
            raise BenchmarkFailed(f"{name} stopped: {phase.reason}")
    if pipeline.wait(0):
        raise BenchmarkFailed("the pipeline ended")
    return False


def all_ready(pipeline: RunningOutput, count: int) -> bool:
    failed(pipeline)
    return len(pipeline.phases) == count and all(isinstance(each, Ready) for each in pipeline.phases.values())


def wait_until(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not look():
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"waited {WAIT_SECONDS:.0f} s for {what}")
        time.sleep(0.02)


def _require_equal(bench: Bench, connection: psycopg.Connection[Any], name: str, sums: str) -> None:
    for (table,) in connection.execute(_TABLES, [MARKER]).fetchall():
        source = connection.execute(sums.format(table=table).encode()).fetchall()
        found = bench.target.execute(sums.format(table=table), database=name)
        if found != source:
            raise BenchmarkFailed(f"{table} has (rows, sums) {source} at the source and {found} at the target")


def run_copies(
    source: PostgresServer, target: PostgresServer, tasks: Any, arguments: argparse.Namespace
) -> dict[str, float]:
    """Copy a table three ways, in turns: to /dev/null, from psql to psql, and as a pipeline does."""
    database, rows = source.create_database(), arguments.copy_rows
    say(f"making a table of {rows:,} rows")
    with source.connect(database) as connection:
        create_orders(connection, "orders", rows)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        connection.execute("vacuum (freeze, analyze)")
        expected = connection.execute("select count(*), sum(id) from orders").fetchall()
    ways: Mapping[str, Callable[[str], None]] = {
        PSQL: lambda _: to_nowhere(source, database),
        PIPED: lambda name: _piped(source, database, target, name),
        PIPELINE: lambda name: _by_tasks(source, database, target, name, tasks),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(arguments.rounds + 1):
        for way, copy in ways.items():
            name = target.create_database()
            began = time.monotonic()
            copy(name)
            taken = time.monotonic() - began
            if way != PSQL and target.execute("select count(*), sum(id) from orders", database=name) != expected:
                raise BenchmarkFailed(f"{way} copied other rows")
            target.drop_database(name)
            if number:  # the first round warms up
                seconds[way].append(taken)
                say(f"{way}: {rows / taken:,.0f} rows/s in {taken:.2f} s, load average {load_average():.1f}")
    found = {way: median(each) for way, each in seconds.items()}
    table = [[way, f"{rows / found[way]:,.0f}", f"{spread(each):.0%}"] for way, each in seconds.items()]
    print(f"\ncopy of {rows:,} rows of 10 columns; load average {load_average():.1f}")
    print(format_table(["", "rows/s", "spread"], table), flush=True)
    return {
        "ratio_copy": round(found[PSQL] / found[PIPELINE], 3),
        "ratio_piped": round(found[PIPED] / found[PIPELINE], 3),
        "per_second": round(rows / found[PIPELINE]),
    }


def psql(server: PostgresServer, database: str, command: str) -> list[str]:
    program = [str(server.binaries.program("psql")), "-X", "-q", "-h", "127.0.0.1", "-p", str(server.port)]
    return [*program, "-U", server.user, "-d", database, "-v", "ON_ERROR_STOP=1", "-c", command]


def to_nowhere(source: PostgresServer, database: str) -> None:
    command = psql(source, database, "copy orders to stdout (format binary)")
    environment = os.environ | {"PGPASSWORD": source.password}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def _piped(source: PostgresServer, database: str, target: PostgresServer, name: str) -> None:
    """Copy on one connection each, then create the key."""
    with target.connect(name) as connection:
        create_orders(connection, "orders", 0)
        connection.execute("alter table orders drop constraint orders_pkey")
        out = psql(source, database, "copy orders to stdout (format binary)")
        into = psql(target, name, "copy orders from stdin (format binary)")
        with subprocess.Popen(out, env=os.environ | {"PGPASSWORD": source.password}, stdout=subprocess.PIPE) as first:
            environment = os.environ | {"PGPASSWORD": target.password}
            subprocess.run(into, env=environment, stdin=first.stdout, check=True)
        connection.execute("alter table orders add primary key (id)")


def _by_tasks(source: PostgresServer, database: str, target: PostgresServer, name: str, tasks: Any) -> None:
    """As `penstock.workers.table_sync` does it."""
    settings = SourceSettings(source.dsn(database))
    destination = create_destination("postgres", {"url": target.dsn(name)})
    store = MemoryStore("bench")
    store.use_lineage(Ancestry(Lineage("bench", 1, database, "bench")))
    destination.startup(DestinationContext("bench", store, tasks))
    try:
        with take_snapshot(settings) as snapshot:
            row = source.execute("select 'orders'::regclass::oid::int8", database=database)
            rows = prepare_copy(snapshot, settings, PUBLICATION, row[0][0])
            destination.drop_table_for_copy(rows.schema, rows.attempt)
            with tasks.copying():
                destination.write_table_rows(rows.schema, rows)
    finally:
        destination.shutdown()


def _result(load: Load, drains: Mapping[str, Sequence[Drained]]) -> dict[str, float]:
    seconds = {reader: median([drained.seconds for drained in each]) for reader, each in drains.items()}
    cpu = median([drained.cpu_seconds for drained in drains[PIPELINE]])
    return {
        "ratio": round(seconds[RECVLOGICAL] / seconds[PIPELINE], 3),
        "ratio_subscription": round(seconds[SUBSCRIPTION] / seconds[PIPELINE], 3),
        "per_second": round(load.changes / seconds[PIPELINE]),
        "subscription_per_second": round(load.changes / seconds[SUBSCRIPTION]),
        "cpu_s_per_million": round(cpu * 1e6 / load.changes, 3),
    }


def _describe(name: str, load: Load, drains: Mapping[str, Sequence[Drained]]) -> str:
    rows: list[list[str]] = []
    for reader, each in drains.items():
        rates = [load.changes / drained.seconds for drained in each]
        rows.append([reader, f"{median(rates):,.0f}", f"{spread(rates):.0%}"])
    title = (
        f"{name}: {load.changes:,} changes in {load.transactions:,} transactions, "
        f"{load.wal_bytes / (1 << 20):,.0f} MiB of WAL, into another server; load average {load_average():.1f}"
    )
    result = _result(load, drains)
    return (
        f"{title}\n{format_table(['', 'changes/s', 'spread'], rows)}\n"
        f"ratio to pg_recvlogical {result['ratio']:.2f}, to the subscription {result['ratio_subscription']:.2f}"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare writing to Postgres with pg_recvlogical and a subscription.")
    parser.add_argument(
        "--workload", nargs="*", choices=list(_SUMS), default=list(_SUMS), help="workloads to run; may be empty"
    )
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=2_000_000, help="initial rows of the table of `mixed`")
    parser.add_argument("--rounds", type=int, default=3, help="drains and copies each way")
    parser.add_argument("--copy-rows", type=int, default=2_000_000, help="rows of the table that is copied; 0 for none")
    parser.add_argument("--transactional", choices=["table", "batch"], default="table")
    parser.add_argument("--master", choices=["local", "none"], default="local", help="with or without Spark")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.changes // 100, arguments.rows, arguments.rounds) < 1 or arguments.rows <= arguments.changes // 10:
        parser.error("--changes, --rows and --rounds are too small")
    return arguments


if __name__ == "__main__":
    main()
