"""Measure the time from commit to visible for single transactions into Delta tables, at a steady rate.

    python benchmarks/latency.py [--rows 10000 200000 2000000] [--rate 200] [--seconds 60] [--server 18]

`penstock run` with Spark (`local[2]`) and default settings, including maintenance. A writer runs single-row
transactions (60% updates, 30% inserts, 10% deletes, across the table) into tables of three sizes, one after the other.

Every row contains the server's time (`updated_at = clock_timestamp()`). The benchmark finds it in the data file that a
version of the table's log added; the file time of that version is when readers could see it. So measuring costs the
pipeline nothing, and the commit itself, a few tenths of a millisecond, is part of the lag. Deletes leave no row and
count only in the final comparison of rows and sums.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psycopg
from harness import (
    BenchmarkFailed,
    format_table,
    load_average,
    print_result,
    say,
)
from lakes import query_delta, read_versions
from processes import TreeWatch, merge_peaks
from runs import Run, Site, Writer
from stages import CORES, open_stage
from workloads import PUBLICATION, create_orders

WARM_UP_SECONDS = 5.0
"""Of the writer, for each table, before anything counts."""
SERVER_SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "64GB", "checkpoint_timeout": "1h", "autovacuum": "off"}
_SUMS = "select count(*) as a, sum(id) as b, sum(quantity) as c from {table}"


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    table: list[Sequence[str]] = []
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        options = {} if arguments.maintenance else {"maintenance": "false"}
        database = stage.server.create_database()
        site = Site(stage.server, database, stage.folder / "site", f"local[{CORES}]", "delta", options)
        site.configure()
        _make_tables(site, arguments.rows)
        with site.start() as run:
            run.wait_for(site.all_ready, "the copies", seconds=0.5)
            for rows in arguments.rows:
                result = measure(site, run, rows, arguments)
                results[f"rows_{rows}"] = result
                table.append([f"{rows:,}", *(f"{value:,.2f}" for value in result.values())])
            run.terminate()
        _require_equal(site, arguments.rows)
    print(
        f"\n{arguments.rate:g} transactions/s of one row for {arguments.seconds:g} s into Delta on local[{CORES}]; "
        f"load average {load_average():.1f}"
    )
    header = ["rows", "p50 s", "p95 s", "p99 s", "max s", "commits/s", "CPU s/million", "peak RSS MiB"]
    print(f"{format_table(header, table)}\n\n{merge_peaks([run.watch])}\n", flush=True)
    print_result(results)


def measure(site: Site, run: Run, rows: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Write into one table, and look at what became of it."""
    with TreeWatch(run.pid) as watch:
        with Writer(site, arguments.rate, transaction_into(rows)) as writer:
            time.sleep(WARM_UP_SECONDS)
            began = time.time()
            time.sleep(arguments.seconds)
            ended = time.time()
        run.wait_confirmed()
    if writer.late_seconds > 1:
        say(f"the writer was late by up to {writer.late_seconds:.1f} s: the machine is too busy for its rate")
    versions = [version for version in read_versions(site.lake / "public" / _name(rows)) if len(version[1])]
    written = np.concatenate([moments for _, moments in versions])
    lag = np.concatenate([visible - moments for visible, moments in versions])
    counts = (written >= began) & (written < ended)
    # All but the deletes; a row that was written twice within one version is there once.
    expected = writer.transactions * 0.9
    if not 0.98 * expected < len(written) <= writer.transactions:
        raise BenchmarkFailed(f"{len(written):,} rows were found in the lake, of {expected:,.0f} that were written")
    p50, p95, p99, longest = (float(np.percentile(lag[counts], percent)) for percent in (50, 95, 99, 100))
    visible = np.array([moment for moment, _ in versions])
    result = {
        "p50_s": p50,
        "p95_s": p95,
        "p99_s": p99,
        "max_s": longest,
        "commits_per_second": float(((visible >= began) & (visible < ended)).sum() / arguments.seconds),
        "cpu_s_per_million": watch.cpu_seconds * 1e6 / writer.changes,
        "peak_rss_mib": watch.peak_rss_mib(),
    }
    say(f"{rows:,} rows: p50 {p50:.2f} s, p95 {p95:.2f} s, p99 {p99:.2f} s, load average {load_average():.1f}")
    return {name: round(value, 3) for name, value in result.items()}


def _name(rows: int) -> str:
    return f"orders_{rows}"


def _make_tables(site: Site, sizes: Sequence[int]) -> None:
    say(f"making tables of {', '.join(f'{rows:,}' for rows in sizes)} rows")
    with site.server.connect(site.database) as connection:
        for rows in sizes:
            create_orders(connection, _name(rows), rows)
        tables = ", ".join(map(_name, sizes))
        connection.execute(f"create publication {PUBLICATION} for table {tables}".encode())
        connection.execute("vacuum (freeze, analyze)")


def transaction_into(rows: int, before: int = 0) -> Callable[[psycopg.Connection[Any], int], int]:
    """Return the transactions into a table of so many rows, for a `Writer`; `before` is how many there were before."""
    table = _name(rows)

    def transact(connection: psycopg.Connection[Any], number: int) -> int:
        number += before
        # The last tenth of the rows is deleted, one by one; the others are updated, all over the table.
        if number % 10 < 6:
            return connection.execute(
                f"update {table} set quantity = quantity + 1, updated_at = clock_timestamp() where id = %s".encode(),
                [1 + number * 7919 % (rows * 9 // 10)],
            ).rowcount
        if number % 10 < 9:
            return connection.execute(
                f"insert into {table} (id, quantity, updated_at) values (%s, 0, clock_timestamp())".encode(),
                [rows + 1 + number],
            ).rowcount
        return connection.execute(f"delete from {table} where id = %s".encode(), [rows - number // 10]).rowcount

    return transact


def _require_equal(site: Site, sizes: Sequence[int]) -> None:
    with site.server.connect(site.database) as connection:
        for name in map(_name, sizes):
            source = connection.execute(_SUMS.format(table=name).encode()).fetchone()
            found = tuple(query_delta(site.lake, name, _SUMS.format(table="t"))[0].values())
            if source is None or tuple(map(int, source)) != found:
                raise BenchmarkFailed(f"{name} has (rows, sums) {source} at the source and {found} in the lake")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the time from commit to visible in Delta, at a steady rate.")
    parser.add_argument("--rows", nargs="+", type=int, default=[10_000, 200_000, 2_000_000], help="rows of each table")
    parser.add_argument("--rate", type=float, default=200.0, help="transactions per second")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds per table")
    parser.add_argument("--maintenance", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(*arguments.rows, arguments.rate, arguments.seconds) <= 0:
        parser.error("--rows, --rate and --seconds must be above 0")
    return arguments


if __name__ == "__main__":
    main()
