"""Measure how fast a pipeline stops after SIGTERM under load, and how fast it streams again, after kills as well.

    python benchmarks/shutdown.py [--mode spark none] [--rounds 5] [--rate 200] [--changes 1400] [--rows 2000000]
        [--server 18]

docs/reference/benchmarks.md describes the rounds and the figures. Between the stop and the restart, nothing is cleaned
up and no command is run. At the end the writer stops, and every table in the lake is compared with the source, row by
row.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from harness import (
    BenchmarkFailed,
    format_table,
    load_average,
    median,
    print_result,
    say,
)
from processes import merge_peaks
from runs import Run, Site, Writer
from stages import open_stage
from workloads import PUBLICATION, create_orders

from penstock.destinations.parquet import ParquetReader
from penstock.state import DataSync
from tests.support.processes import Part, descendants_of, part_of

MASTERS = {"spark": "local[2]", "none": "none"}
LARGE = "large"
TABLES = 5
SMALL_ROWS = 2000
PARTS = {"spark": (Part.DRIVER, Part.CAPTURE, Part.JVM, Part.WORKER), "none": (Part.DRIVER, Part.CAPTURE)}
"""The processes of a pipeline that are killed."""
FLOW_SECONDS = 2.0
"""Under load before each signal."""
SERVER_SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "64GB", "checkpoint_timeout": "1h", "autovacuum": "off"}


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, in one mode."""

    terminated: list[float]
    terminated_copying: float
    restarted: list[float]
    restarted_after_kill: list[float]
    recovered: dict[Part, list[float]]
    """From the kill of a process until everything that was committed then is durable."""


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    rows: list[Sequence[str]] = []
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        for mode in arguments.mode:
            database = stage.server.create_database()
            site = Site(stage.server, database, stage.folder / mode, MASTERS[mode])
            site.configure()
            measured = measure(site, mode, arguments)
            stage.server.drop_database(database)
            results[mode] = _result(measured)
            rows.append([mode, *(f"{value:.2f}" for value in results[mode].values())])
    print(f"\n{arguments.changes:,} changes/s into {TABLES} tables; load average {load_average():.1f}")
    header = [
        *("seconds", "SIGTERM → exit", "at most", "while copying", "restart → durable", "after SIGKILL"),
        *("any process killed → durable", "p99"),
    ]
    print(format_table(header, rows), flush=True)
    print_result(results)


def measure(site: Site, mode: str, arguments: argparse.Namespace) -> Measured:
    """All rounds of one mode, then the comparison."""
    _make_tables(site, arguments.rows)
    run = site.start()
    terminated: list[float] = []
    restarted: dict[str, list[float]] = {"SIGTERM": [], "SIGKILL": []}
    watches = [run.watch]
    with run:
        run.wait_for(site.all_ready, "the tables to be Ready")
        run.terminate()
    transact = _transaction(max(1, round(arguments.changes / arguments.rate) - 2))
    with Writer(site, arguments.rate, transact) as writer:
        run, _ = _restart(site)
        for name in ("SIGTERM", "SIGKILL"):
            for _ in range(arguments.rounds):
                with run:
                    time.sleep(FLOW_SECONDS)
                    if name == "SIGTERM":
                        terminated.append(run.terminate())
                        say(f"{mode}: ended {terminated[-1]:.2f} s after SIGTERM")
                    else:
                        run.kill()
                run, seconds = _restart(site)
                watches.append(run.watch)
                restarted[name].append(seconds)
                say(f"{mode}: durable {seconds:.2f} s after the start that followed {name}")
        run, recovered = _kill_each(site, run, mode, arguments.rounds)
        with run:
            copying = _terminate_while_copying(site, run)
            say(f"{mode}: ended {copying:.2f} s after SIGTERM in the middle of a copy")
    say(f"{mode}: comparing, after {writer.transactions:,} transactions")
    run, _ = _restart(site)
    watches.append(run.watch)
    with run:
        run.wait_for(site.all_ready, "the copy that was begun anew", seconds=0.5)
        run.wait_confirmed()
        run.terminate()
    _require_equal(site, arguments.rows)
    print(f"\n{mode}: everything equal after {writer.transactions:,} transactions\n{merge_peaks(watches[-1:])}")
    return Measured(terminated, copying, restarted["SIGTERM"], restarted["SIGKILL"], recovered)


def _restart(site: Site) -> tuple[Run, float]:
    """Start it; seconds until everything that was committed then is durable."""
    # Something that the process before cannot have acknowledged.
    site.server.execute("select pg_catalog.pg_logical_emit_message(true, 'bench', '')", database=site.database)
    position = site.current_position()
    began = time.monotonic()
    run = site.start()
    run.wait_for(lambda: site.has_confirmed(position), "changes to flow again", seconds=0.02)
    return run, time.monotonic() - began


def _kill_each(site: Site, run: Run, mode: str, rounds: int) -> tuple[Run, dict[Part, list[float]]]:
    """Kill every kind of process in turn, and restart the pipeline whenever it has ended, as a supervisor does."""
    recovered: dict[Part, list[float]] = {part: [] for part in PARTS[mode]}
    with ExitStack() as stack:
        stack.enter_context(run)
        for part in [part for _ in range(rounds) for part in recovered]:
            time.sleep(FLOW_SECONDS)
            pids = [run.pid, *(pid for pid in descendants_of(run.pid) if part_of(pid) is part)]
            began = time.monotonic()
            os.kill(pids[-1 if part is not Part.DRIVER else 0], signal.SIGKILL)
            position = site.current_position()
            while not site.has_confirmed(position):
                if run.ended:
                    run = stack.enter_context(site.start())
                time.sleep(0.02)
            recovered[part].append(time.monotonic() - began)
            say(f"{mode}: durable {recovered[part][-1]:.2f} s after the kill of {part.value}")
        # Closing a run kills it; the last one goes on.
        run.terminate()
    return site.start(), recovered


def _terminate_while_copying(site: Site, run: Run) -> float:
    site.server.execute(f"alter publication {PUBLICATION} add table {LARGE}", database=site.database)
    table_id = site.tables()[LARGE]
    run.wait_for(lambda: isinstance(site.phases().get(table_id), DataSync), "a copy", seconds=0.02)
    # Somewhere in the middle: the snapshot is taken, tasks read.
    time.sleep(1.0)
    seconds = run.terminate()
    if not isinstance(site.phases()[table_id], DataSync):
        raise BenchmarkFailed("the copy was done before the signal: copy more rows")
    return seconds


def _make_tables(site: Site, large_rows: int) -> None:
    small = [f"small_{number}" for number in range(TABLES)]
    say(f"making a table of {large_rows:,} rows, and {TABLES} small ones")
    with site.server.connect(site.database) as connection:
        create_orders(connection, LARGE, large_rows)
        for name in small:
            create_orders(connection, name, SMALL_ROWS)
        connection.execute(f"create publication {PUBLICATION} for table {', '.join(small)}".encode())
        connection.execute("vacuum (freeze, analyze)")


def _transaction(updated: int) -> Callable[[psycopg.Connection[Any], int], int]:
    """Return a transaction that updates some rows, and replaces one by a new one."""

    def transact(connection: psycopg.Connection[Any], number: int) -> int:
        table = f"small_{number % TABLES}"
        turn = number // TABLES
        first = turn * updated % (SMALL_ROWS - updated) + 1
        with connection.transaction():
            changed = connection.execute(
                f"update {table} set quantity = quantity + 1 where id between %s and %s".encode(),
                [first, first + updated - 1],
            ).rowcount
            changed += connection.execute(
                f"insert into {table} (id, quantity) values (%s, 0)".encode(), [SMALL_ROWS + 1 + turn]
            ).rowcount
            changed += connection.execute(
                f"delete from {table} where id = %s".encode(), [SMALL_ROWS - turn if turn % 2 else SMALL_ROWS + turn]
            ).rowcount
        return changed

    return transact


def _require_equal(site: Site, large_rows: int) -> None:
    reader = ParquetReader(site.lake)
    with site.server.connect(site.database) as connection:
        for number in range(TABLES):
            table = f"small_{number}"
            source = connection.execute(f"select id, quantity from {table} order by id".encode()).fetchall()
            found = reader.read_table(f"public.{table}").select(["id", "quantity"]).sort_by("id")
            if list(zip(*(column.to_pylist() for column in found.columns), strict=True)) != source:
                raise BenchmarkFailed(f"{table} differs: {found.num_rows:,} rows in the lake, {len(source):,} at home")
    copied = reader.read_changes(f"public.{LARGE}").num_rows
    if copied != large_rows:
        raise BenchmarkFailed(f"{LARGE} has {copied:,} rows in the lake, and {large_rows:,} at home")


def _result(measured: Measured) -> dict[str, float]:
    recovered = [seconds for each in measured.recovered.values() for seconds in each]
    return {
        "sigterm_s": round(median(measured.terminated), 2),
        "sigterm_max_s": round(max(measured.terminated), 2),
        "sigterm_copying_s": round(measured.terminated_copying, 2),
        "restart_s": round(median(measured.restarted), 2),
        "restart_after_kill_s": round(median(measured.restarted_after_kill), 2),
        "recovery_s": round(median(recovered), 2),
        "recovery_p99_s": round(float(np.percentile(recovered, 99)), 2),
    }


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how fast a pipeline stops under load and starts again.")
    parser.add_argument("--mode", nargs="+", choices=list(MASTERS), default=list(MASTERS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds per signal")
    parser.add_argument("--rate", type=float, default=200.0, help="transactions per second")
    parser.add_argument("--changes", type=int, default=1400, help="changes per second, in these transactions")
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the table whose copy is interrupted")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.rate, arguments.changes, arguments.rows) <= 0:
        parser.error("--rounds, --rate, --changes and --rows must be above 0")
    if arguments.changes / arguments.rate > SMALL_ROWS / 2:
        parser.error("too many changes in a transaction: raise --rate")
    return arguments


if __name__ == "__main__":
    main()
