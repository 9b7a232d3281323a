"""Compare streaming changes from a slot into Delta tables, durably, with `pg_recvlogical` to /dev/null.

    python benchmarks/stream.py [--workload mixed many] [--large] [--changes N] [--rows 2000000] [--rounds 3] …

docs/reference/benchmarks.md describes the workloads and what is timed. CPU time is that of the driver, Spark's JVM and
Python workers, and capture, from START_REPLICATION on. Afterwards delta-rs compares rows and sums of every lake with
the source.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from draining import (
    RECVLOGICAL,
    SERVER_SETTINGS,
    Load,
    create_slot,
    current_position,
    drain_by_recvlogical,
    drop_slot,
    run_load,
    wait_for_start,
)
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
from lakes import query_delta
from processes import TreeWatch, merge_peaks
from stages import CORES, open_stage, spark_session
from workloads import PUBLICATION, create_orders, prepare_many, prepare_mixed_into

from penstock.coordinator import Coordinator
from penstock.destinations.registry import create_destination
from penstock.lsn import Lsn, reaches
from penstock.output import RunningOutput
from penstock.source.connections import SourceSettings
from penstock.spark.tasks import SparkTasks
from penstock.spool import SpoolSettings
from penstock.state import Errored, Ready, open_store
from penstock.tables import TablesOutput, TablesSettings
from penstock.testing.postgres import PostgresServer

PIPELINE = "pipeline"
MANY_TABLES = 100
BATCH_CHANGES = 10_000
LARGE_ROWS = (200_000, 2_000_000, 20_000_000)
DRAIN_SECONDS = 900.0
_WARM_UPS = 2
"""Batches that are not counted: each Python worker maps the indexes when it first needs them."""
_SUMS = {
    "mixed": "select count(*) as a, sum(id) as b, sum(quantity) as c, sum(amount) as d from {table}",
    "many": "select count(*) as a, sum(id) as b, sum(account) as c, sum(amount) as d from {table}",
}


@dataclass(frozen=True, slots=True)
class Drained:
    """One slot, read to the end."""

    seconds: float
    cpu_seconds: float
    watch: TreeWatch | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """Where all pipelines of a run work."""

    server: PostgresServer
    database: str
    folder: Path
    session: Any
    options: Mapping[str, Any]
    """Of the destination."""

    def lake(self, name: str) -> Path:
        return self.folder / name / "lake"

    @contextmanager
    def pipeline(self, name: str) -> Iterator[RunningOutput]:
        """A pipeline with a slot, a spool, a state and a lake of its own; runs inside."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        settings = TablesSettings(
            id=name,
            source=SourceSettings(self.server.dsn(self.database)),
            publication=PUBLICATION,
            slot=name,
            spool=SpoolSettings(folder / "spool"),
            manage_publication=False,
        )
        destination = create_destination("delta", {"path": str(self.lake(name)), **self.options})
        tasks = SparkTasks(self.session)
        with open_store(f"sqlite:///{folder / 'state.db'}", name) as store:
            output = TablesOutput(settings, store, destination, tasks, self.session)
            with Coordinator([output]) as coordinator:
                [pipeline] = coordinator
                yield pipeline


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    with open_stage(arguments.server, SERVER_SETTINGS) as stage, spark_session("bench-stream") as session:
        for name in arguments.workload:
            bench = _bench(stage.server, stage.folder / name, session, arguments)
            load, drains = run(bench, name, arguments)
            results[name] = _result(load, drains)
            print(f"\n{_describe(name, load, drains)}\n", flush=True)
            stage.server.drop_database(bench.database)
        if arguments.large:
            bench = _bench(stage.server, stage.folder / "large", session, arguments)
            results |= run_large(bench, arguments.large_rows, arguments.rounds)
    if {"mixed", "many"} <= results.keys():
        share = results["many"]["per_second"] / results["mixed"]["per_second"]
        print(f"{MANY_TABLES} tables at once: {share:.2f} of the throughput of one")
    print_result(results)


def _bench(server: PostgresServer, folder: Path, session: Any, arguments: argparse.Namespace) -> Bench:
    options = {} if arguments.maintenance else {"maintenance": False}
    return Bench(server, server.create_database(), folder, session, options)


def run(bench: Bench, name: str, arguments: argparse.Namespace) -> tuple[Load, dict[str, list[Drained]]]:
    """Make the changes and drain them `rounds` times each way."""
    prepare: Mapping[str, Callable[[psycopg.Connection[Any], int], None]] = {
        "mixed": partial(prepare_mixed_into, rows=arguments.rows),
        "many": partial(prepare_many, tables=MANY_TABLES),
    }
    wanted = arguments.changes // 100 * 100
    turns = list(take_turns(RECVLOGICAL, PIPELINE, arguments.rounds))
    drains: dict[str, list[Drained]] = {RECVLOGICAL: [], PIPELINE: []}
    with bench.server.connect(bench.database) as connection:
        say(f"{name}: making the tables")
        prepare[name](connection, wanted)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        connection.execute("vacuum (freeze, analyze)")
        for number, reader in enumerate(turns):
            if reader == PIPELINE:
                _copy(bench, _slot(number))
            else:
                create_slot(connection, number)
        connection.execute("checkpoint")
        load = run_load(connection, wanted)
        say(f"{name}: {load.changes:,} changes written in {load.seconds:.1f} s")
        for number, reader in enumerate(turns):
            if reader == PIPELINE:
                drained = _drain(bench, connection, _slot(number), load)
                _require_equal(bench, connection, _slot(number), _SUMS[name])
            else:
                found = drain_by_recvlogical(bench.server, connection, bench.database, _slot(number), load.end)
                drained = Drained(found.seconds, found.cpu_seconds)
            drop_slot(connection, _slot(number))
            drains[reader].append(drained)
            say(
                f"{name}: {reader} {load.changes / drained.seconds:,.0f} changes/s in {drained.seconds:.2f} s, "
                f"{drained.cpu_seconds:.1f} CPU s, load average {load_average():.1f}"
            )
    return load, drains


def run_large(bench: Bench, sizes: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Batches of the same size into tables of different sizes."""
    results: dict[str, dict[str, float]] = {}
    with bench.server.connect(bench.database) as connection:
        for rows in sizes:
            say(f"making a table of {rows:,} rows")
            create_orders(connection, f"orders_{rows}", rows)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        connection.execute("vacuum (freeze, analyze)")
        with bench.pipeline("large") as pipeline:
            _wait(pipeline, lambda: _all_ready(pipeline, len(sizes)), "the copies")
            batches: dict[int, list[Drained]] = {rows: [] for rows in sizes}
            for number in range(_WARM_UPS + rounds):
                for rows in sizes:
                    batches[rows].append(_apply_batch(pipeline, connection, rows, number))
            for rows in sizes:
                found = batches[rows][_WARM_UPS:]
                results[f"batch_{rows}"] = {
                    "seconds": round(median([drained.seconds for drained in found]), 3),
                    "cpu_s": round(median([drained.cpu_seconds for drained in found]), 3),
                    "peak_rss_mib": round(max(_peak(drained) for drained in found), 1),
                }
                each = ", ".join(f"{drained.cpu_seconds:.2f}" for drained in found)
                say(f"{rows:,} rows: CPU s of each batch: {each}; load average {load_average():.1f}")
    table = [[f"{rows:,}", *(f"{value:,.2f}" for value in results[f"batch_{rows}"].values())] for rows in sizes]
    print(f"\nbatches of {BATCH_CHANGES:,} changes at random keys; load average {load_average():.1f}")
    print(format_table(["rows", "seconds", "CPU s", "peak RSS MiB"], table), flush=True)
    return results


def _apply_batch(pipeline: RunningOutput, connection: psycopg.Connection[Any], rows: int, number: int) -> Drained:
    """One transaction: 60% updates, 30% inserts, 10% deletes; until it is durable."""
    table = f"orders_{rows}"
    with connection.transaction():
        changed = connection.execute(
            f"""update {table} set amount = amount + 1.5, updated_at = clock_timestamp() where id in (
                    select 1 + (j * 7919 + %s::bigint * 104729) %% %s from generate_series(1, %s) j)""".encode(),
            [number, rows, BATCH_CHANGES * 6 // 10],
        ).rowcount
        changed += connection.execute(
            f"""insert into {table} (id, quantity)
                select %s + %s::bigint * 10000 + j, j from generate_series(1, %s) j""".encode(),
            [rows, number, BATCH_CHANGES * 3 // 10],
        ).rowcount
        changed += connection.execute(
            f"""delete from {table} where id in (
                    select 1 + (j * 15485863::bigint + %s) %% %s from generate_series(1, %s) j)""".encode(),
            [number, rows, BATCH_CHANGES // 10],
        ).rowcount
    if changed < BATCH_CHANGES * 0.95:
        raise BenchmarkFailed(f"a batch was to have {BATCH_CHANGES:,} changes, and has {changed:,}")
    position = current_position(connection)
    began = time.monotonic()
    with TreeWatch(os.getpid()) as watch:
        _wait(pipeline, lambda: _has_acknowledged(pipeline, position), "a batch")
        seconds = time.monotonic() - began
    return Drained(seconds, watch.cpu_seconds, watch)


def _slot(number: int) -> str:
    return f"bench_{number}"


def _copy(bench: Bench, name: str) -> None:
    with bench.server.connect(bench.database) as connection:
        row = connection.execute("select count(*) from pg_catalog.pg_publication_tables").fetchone()
    assert row is not None
    began = time.monotonic()
    with bench.pipeline(name) as pipeline:
        _wait(pipeline, lambda: _all_ready(pipeline, row[0]), "the copy")
    say(f"{name}: copied in {time.monotonic() - began:.1f} s")


def _drain(bench: Bench, connection: psycopg.Connection[Any], slot: str, load: Load) -> Drained:
    with bench.pipeline(slot) as pipeline:
        with TreeWatch(os.getpid()) as watch:
            started = wait_for_start(connection, slot, lambda: True)
            _wait(pipeline, lambda: _has_acknowledged(pipeline, load.end), "the load's end")
            ended = time.time()
        return Drained(ended - started.at, watch.cpu_seconds, watch)


def _wait(pipeline: RunningOutput, look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DRAIN_SECONDS
    while not look():
        if pipeline.wait(0):
            raise BenchmarkFailed(f"the pipeline ended before {what}")
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"waited {DRAIN_SECONDS:.0f} s for {what}: {pipeline.status}")
        time.sleep(0.02)


def _all_ready(pipeline: RunningOutput, count: int) -> bool:
    phases = pipeline.phases
    for name, phase in phases.items():
        if isinstance(phase, Errored):
            raise BenchmarkFailed(f"{name} stopped: {phase.reason}")
    return len(phases) == count and all(isinstance(phase, Ready) for phase in phases.values())


def _has_acknowledged(pipeline: RunningOutput, position: Lsn) -> bool:
    status = pipeline.status
    return reaches(status.acknowledged, position)


def _require_equal(bench: Bench, connection: psycopg.Connection[Any], name: str, sums: str) -> None:
    tables = connection.execute("select tablename from pg_catalog.pg_publication_tables").fetchall()
    for (table,) in tables:
        source = connection.execute(sums.format(table=table).encode()).fetchone()
        found = tuple(query_delta(bench.lake(name), table, sums.format(table="t"))[0].values())
        if found != source:
            raise BenchmarkFailed(f"{table} has (rows, sums) {source} at the source and {found} in the lake")


def _peak(drained: Drained) -> float:
    return 0.0 if drained.watch is None else drained.watch.peak_rss_mib()


def _result(load: Load, drains: Mapping[str, Sequence[Drained]]) -> dict[str, float]:
    seconds = {reader: median([drained.seconds for drained in each]) for reader, each in drains.items()}
    cpu = median([drained.cpu_seconds for drained in drains[PIPELINE]])
    return {
        "ratio": round(seconds[RECVLOGICAL] / seconds[PIPELINE], 3),
        "per_second": round(load.changes / seconds[PIPELINE]),
        "cpu_s_per_million": round(cpu * 1e6 / load.changes, 3),
        "peak_rss_mib": round(max(_peak(drained) for drained in drains[PIPELINE]), 1),
    }


def _describe(name: str, load: Load, drains: Mapping[str, Sequence[Drained]]) -> str:
    rows: list[list[str]] = []
    for reader, each in drains.items():
        rates = [load.changes / drained.seconds for drained in each]
        cpu = median([drained.cpu_seconds for drained in each]) * 1e6 / load.changes
        rows.append([reader, f"{median(rates):,.0f}", f"{spread(rates):.0%}", f"{cpu:.2f}"])
    title = (
        f"{name}: {load.changes:,} changes in {load.transactions:,} transactions, "
        f"{load.wal_bytes / (1 << 20):,.0f} MiB of WAL, into Delta on local[{CORES}]; load average {load_average():.1f}"
    )
    watches = [drained.watch for drained in drains[PIPELINE] if drained.watch is not None]
    return (
        f"{title}\n{format_table(['', 'changes/s', 'spread', 'CPU s/million'], rows)}\n"
        f"ratio {_result(load, drains)['ratio']:.2f}\n\n{merge_peaks(watches)}"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare streaming into Delta tables with pg_recvlogical.")
    parser.add_argument(
        "--workload", nargs="*", choices=list(_SUMS), default=list(_SUMS), help="workloads to run; may be empty"
    )
    parser.add_argument("--large", action="store_true", help="also apply batches to tables of different sizes")
    parser.add_argument("--large-rows", nargs="+", type=int, default=list(LARGE_ROWS), help="sizes of these tables")
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=2_000_000, help="initial rows of the table of `mixed`")
    parser.add_argument("--rounds", type=int, default=3, help="drains per reader")
    parser.add_argument("--maintenance", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.changes // 100, arguments.rows, arguments.rounds) < 1 or arguments.rows <= arguments.changes // 10:
        parser.error("--changes, --rows and --rounds are too small")
    return arguments


if __name__ == "__main__":
    main()
