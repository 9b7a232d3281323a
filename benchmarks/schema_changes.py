"""Measure how far other tables fall behind while a large table goes through DDL: `penstock run`, Spark, Delta.

    python benchmarks/schema_changes.py [--rows 2000000] [--rate 50] [--server 18]

docs/reference/benchmarks.md describes the stages. A writer changes a small table. One DDL statement after the other
runs on a large table, or on a large table with ten partitions, followed by a row that has the new columns. A statement
counts as followed when the table in the lake has what the source has: its columns, its number of rows and a sum. The
lag of the small table meanwhile comes from its log, as in `latency.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from deltalake import DeltaTable
from harness import BenchmarkFailed, format_table, load_average, print_result, say
from lakes import query_delta, read_versions
from processes import merge_peaks
from runs import Run, Site, Writer
from stages import CORES, open_stage
from workloads import PUBLICATION, create_orders

SMALL, LARGE, PARTED = "small", "large", "parted"
SMALL_ROWS = 10_000
PARTITIONS = 10
LOOK_SECONDS = 6.0
QUIET_SECONDS = 10.0
"""Before the first statement, for comparison."""
SERVER_SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "64GB", "checkpoint_timeout": "1h", "autovacuum": "off"}


@dataclass(frozen=True, slots=True)
class Change:
    """A statement on a large table."""

    name: str
    table: str
    statement: str
    sum: str
    """An expression over the table that the statement changes, in both SQL dialects."""


CHANGES = (
    Change("add column", LARGE, "alter table large add extra int default 7", "sum(extra)"),
    Change("drop column", LARGE, "alter table large drop column extra", "sum(id)"),
    Change("add it again", LARGE, "alter table large add extra int", "count(extra)"),
    Change("rename column", LARGE, "alter table large rename column quantity to pieces", "sum(pieces)"),
    Change("wider numeric", LARGE, "alter table large alter amount type numeric(18, 2)", "count(amount)"),
    Change("other type (copy)", LARGE, "alter table large alter pieces type bigint", "sum(pieces)"),
    Change("USING (copy)", LARGE, "alter table large alter pieces type bigint using pieces + 1", "sum(pieces)"),
    Change("drop partition", PARTED, "drop table parted_3", "sum(id)"),
    Change("truncate partition", PARTED, "truncate parted_4", "sum(id)"),
    Change("attach partition", PARTED, "alter table parted attach partition spare for values {spare}", "sum(id)"),
)


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    table: list[Sequence[str]] = []
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        database = stage.server.create_database()
        site = Site(stage.server, database, stage.folder / "site", f"local[{CORES}]", "delta", {})
        site.configure()
        _make_tables(site, arguments.rows)
        with site.start() as run:
            run.wait_for(site.all_ready, "the copies", seconds=0.5)
            spans = measure(site, run, arguments)
            run.terminate()
        versions = [version for version in read_versions(site.lake / "public" / SMALL) if len(version[1])]
        size = sum(file.stat().st_size for file in (site.lake / "public" / LARGE).glob("*.parquet"))
    written = np.concatenate([moments for _, moments in versions])
    lag = np.concatenate([visible - moments for visible, moments in versions])
    for name, began, ended in spans:
        # Also what was written just before: it waits, too.
        inside = lag[(written >= began - 1) & (written < max(ended, began + 1))]
        result = {
            "followed_s": ended - began,
            **{f"p{percent}_s": float(np.percentile(inside, percent)) for percent in (50, 99)},
            "max_s": float(inside.max()),
        }
        results[name.replace(" ", "_")] = {key: round(value, 2) for key, value in result.items()}
        table.append([name, *(f"{value:,.1f}" for value in result.values())])
    say(f"files of the large table, all versions: {size / 1e6:,.0f} MB")
    print(f"\n{arguments.rows:,} rows, {arguments.rate:g} transactions/s, load average {load_average():.1f}")
    header = ["", "followed after s", "lag of others: p50 s", "p99 s", "max s"]
    print(f"{format_table(header, table)}\n\n{merge_peaks([run.watch])}\n", flush=True)
    print_result(results)


def measure(site: Site, run: Run, arguments: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Run the statements; return when each began and when it was followed."""
    spans: list[tuple[str, float, float]] = []
    with Writer(site, arguments.rate, _transact) as writer:
        time.sleep(QUIET_SECONDS / 2)
        began = time.time()
        time.sleep(QUIET_SECONDS)
        spans.append(("nothing", began, time.time()))
        for change in CHANGES:
            began = time.time()
            spare = f"from ({arguments.rows + 1}) to ({2 * arguments.rows})"
            site.server.execute(change.statement.format(spare=spare), database=site.database)
            key = 3 * arguments.rows + len(spans) if change.table == LARGE else arguments.rows
            with site.server.connect(site.database) as connection:
                connection.execute(
                    f"insert into {change.table} (id) values (%s) on conflict (id) do nothing".encode(), [key]
                )
                connection.execute(f"update {change.table} set updated_at = now() where id = %s".encode(), [key])
            run.wait_for(lambda change=change: _is_followed(site, change), change.name, seconds=0.3)
            followed = time.time()
            spans.append((change.name, began, followed))
            say(f"{change.name}: followed after {followed - began:.1f} s, load average {load_average():.1f}")
            # Until the next look at the catalog has passed, so that two statements are not taken for one.
            time.sleep(LOOK_SECONDS)
    run.wait_confirmed()
    if writer.late_seconds > 1:
        say(f"the writer was late by up to {writer.late_seconds:.1f} s: the machine is too busy for its rate")
    return spans


def _is_followed(site: Site, change: Change) -> bool:
    with site.server.connect(site.database) as connection:
        cursor = connection.execute(f"select count(*), {change.sum} from {change.table}".encode())
        row = cursor.fetchone()
        columns = connection.execute(f"select * from {change.table} limit 0".encode()).description or ()
    folder = str(site.lake / "public" / change.table)
    if {field.name for field in DeltaTable(folder).schema().fields} != {each.name for each in columns}:
        return False
    (found,) = query_delta(site.lake, change.table, f"select count(*) as a, {change.sum} as b from t")
    if row is None:
        raise BenchmarkFailed("the source has no answer")
    return (found["a"], found["b"]) == (row[0], None if row[1] is None else int(row[1]))


def _transact(connection: psycopg.Connection[Any], number: int) -> int:
    return connection.execute(
        f"update {SMALL} set quantity = quantity + 1, updated_at = clock_timestamp() where id = %s".encode(),
        [1 + number * 7919 % SMALL_ROWS],
    ).rowcount


def _make_tables(site: Site, rows: int) -> None:
    say(f"making two tables of {rows:,} rows")
    with site.server.connect(site.database) as connection:
        create_orders(connection, SMALL, SMALL_ROWS)
        create_orders(connection, LARGE, rows)
        connection.execute("alter table large add price numeric(10, 2)")
        connection.execute("update large set price = id % 1000")
        connection.execute(
            "create table parted (like large including defaults, primary key (id)) partition by range (id)"
        )
        step = -(-rows // PARTITIONS)
        for number in range(PARTITIONS):
            bounds = f"from ({number * step}) to ({(number + 1) * step + (number == PARTITIONS - 1)})"
            connection.execute(f"create table parted_{number} partition of parted for values {bounds}".encode())
        connection.execute("insert into parted select * from large")
        connection.execute("create table spare (like parted including all)")
        connection.execute(
            f"insert into spare (id, updated_at) select {rows} + i, now() from generate_series(1, {step}) i".encode()
        )
        connection.execute(
            f"create publication {PUBLICATION} for table {SMALL}, {LARGE}, {PARTED} "
            "with (publish_via_partition_root = true)".encode()
        )
        connection.execute("vacuum (freeze, analyze)")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
