"""Measure how far other tables fall behind while a large table is copied: `penstock run`, Spark, Parquet.

    python benchmarks/handover.py [--rows 5000000] [--tables 20] [--joining 10] [--rate 100] [--seconds 30]

docs/reference/benchmarks.md describes the stages. All times come from data that the pipeline leaves behind:
`_commit_time` of every change (the server's clock, on the same machine), the file time of the manifest that made it
visible, and the history of phases in the state store. Afterwards the number of changes in the lake is compared with the
writer's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow.parquet as pq
from harness import (
    BenchmarkFailed,
    format_table,
    load_average,
    print_result,
    say,
)
from numpy.typing import NDArray
from processes import PYTHON_WORKER, merge_peaks
from runs import Run, Site, Writer
from stages import CORES, open_stage
from workloads import PUBLICATION, create_orders

from penstock.destinations.parquet.folder import Generation, ManifestKind, RootFolder

LARGE = "large"
SMALL_ROWS = 1000
ROWS_PER_TRANSACTION = 5
LARGE_EVERY = 10
"""One transaction in so many changes a row of the large table too."""
SETTLE_SECONDS = 5.0
"""After the small tables are Ready, before anything counts."""
SERVER_SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "64GB", "checkpoint_timeout": "1h", "autovacuum": "off"}

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lags:
    """Of many changes."""

    committed: Numbers
    """Unix time."""
    seconds: Numbers

    def between(self, first: float, end: float) -> Lags:
        """Those that were committed in a span of time."""
        inside = (self.committed >= first) & (self.committed < end)
        return Lags(self.committed[inside], self.seconds[inside])

    def percentile(self, percent: float) -> float:
        """Of the lags; nothing can be said of none."""
        if not len(self.seconds):
            raise BenchmarkFailed("no change was committed in one of the spans: make them longer")
        return float(np.percentile(self.seconds, percent))

    @property
    def growth(self) -> float:
        """Seconds of lag that are added in a minute, by least squares."""
        return float(np.polyfit(self.committed - self.committed[0], self.seconds, 1)[0] * 60)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    lags: dict[str, Lags]
    copy_seconds: float
    """From DataSync to FinishedCopy of the large table."""
    large_ready_seconds: float
    """From joining."""
    small_ready_seconds: list[float]


def main() -> None:
    arguments = _parse_arguments()
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        site = Site(stage.server, stage.server.create_database(), stage.folder / "site", f"local[{CORES}]")
        site.configure()
        _make_tables(site, arguments)
        with site.start() as run:
            measured = measure(site, run, arguments)
            run.terminate()
        print(f"\n{_describe(arguments, measured)}\n\n{merge_peaks([run.watch])}\n", flush=True)
    print_result({"handover": _result(measured, run)})


def measure(site: Site, run: Run, arguments: argparse.Namespace) -> Measured:
    """Let the tables join, and gather what that did to the others."""
    run.wait_for(site.all_ready, "the small tables to be Ready")
    say("the small tables are Ready")
    before = set(site.tables().values())
    with Writer(site, arguments.rate, _transaction(arguments.tables, arguments.rows)) as writer:
        time.sleep(SETTLE_SECONDS)
        began = time.time()
        time.sleep(arguments.seconds)
        say("the large table joins")
        joined = time.time()
        names = ", ".join((LARGE, *_joining(arguments)))
        site.server.execute(f"alter publication {PUBLICATION} add table {names}", database=site.database)
        run.wait_for(site.all_ready, "the large table to be Ready", seconds=0.5)
        ready = time.time()
        say(f"all tables are Ready after {ready - joined:.1f} s, load average {load_average():.1f}")
        time.sleep(arguments.seconds)
    ended = time.time()
    run.wait_confirmed()
    if writer.late_seconds > 1:
        say(f"the writer was late by up to {writer.late_seconds:.1f} s: the machine is too busy for its rate")
    tables = site.tables()
    large = site.phase_times(tables[LARGE])
    lags = _all_lags(site.lake, before)
    small_changes = writer.transactions * ROWS_PER_TRANSACTION
    if len(lags.seconds) != small_changes:
        raise BenchmarkFailed(f"{small_changes:,} changes were made, and {len(lags.seconds):,} are in the lake")
    start, end = large["data_sync"], large["finished_copy"]
    middle = (start + end) / 2
    return Measured(
        {
            "before": lags.between(began, joined),
            "copy, first half": lags.between(start, middle),
            "copy, second half": lags.between(middle, end),
            "after": lags.between(ready, ended),
            "copy": lags.between(start, end),
        },
        end - start,
        large["ready"] - joined,
        [site.phase_times(tables[name])["ready"] - joined for name in _joining(arguments)],
    )


def _joining(arguments: argparse.Namespace) -> list[str]:
    return [f"joining_{number}" for number in range(arguments.joining)]


def _make_tables(site: Site, arguments: argparse.Namespace) -> None:
    say(f"making a table of {arguments.rows:,} rows, and {arguments.tables + arguments.joining} small ones")
    small = [f"small_{number}" for number in range(arguments.tables)]
    with site.server.connect(site.database) as connection:
        create_orders(connection, LARGE, arguments.rows)
        for name in (*small, *_joining(arguments)):
            create_orders(connection, name, SMALL_ROWS)
        connection.execute(f"create publication {PUBLICATION} for table {', '.join(small)}".encode())
        connection.execute("vacuum (freeze, analyze)")


def _transaction(tables: int, large_rows: int) -> Any:
    def transact(connection: psycopg.Connection[Any], number: int) -> int:
        first = number // tables * ROWS_PER_TRANSACTION % (SMALL_ROWS - ROWS_PER_TRANSACTION) + 1
        with connection.transaction():
            changed = connection.execute(
                f"update small_{number % tables} set quantity = quantity + 1 where id between %s and %s".encode(),
                [first, first + ROWS_PER_TRANSACTION - 1],
            ).rowcount
            if number % LARGE_EVERY == 0:
                row = number * 7919 % large_rows + 1
                connection.execute(f"update {LARGE} set quantity = quantity + 1 where id = %s".encode(), [row])
        return changed

    return transact


def _all_lags(lake: Path, table_ids: set[int]) -> Lags:
    """From the files of all generations of these tables."""
    found = [
        pair
        for folder in RootFolder(lake).tables()
        for generation in folder.generations()
        if generation.origin().table_id in table_ids
        for pair in _lags(generation)
    ]
    return Lags(np.concatenate([committed for committed, _ in found]), np.concatenate([lag for _, lag in found]))


def _lags(generation: Generation) -> Iterator[tuple[Numbers, Numbers]]:
    for number in generation.numbers():
        manifest = generation.manifest(number)
        if manifest.kind is not ManifestKind.CHANGES:
            continue
        # The manifest is linked to its name when it is on disk; that is what changes its inode last.
        durable = (generation.log / f"{number:012d}.json").stat().st_ctime
        for file in manifest.files:
            column = pq.read_table(generation.data / file.name, columns=["_commit_time"])["_commit_time"]
            committed = column.cast("int64").to_numpy() / 1e6
            yield committed, durable - committed


def _result(measured: Measured, run: Run) -> dict[str, float]:
    lags = measured.lags
    result = {
        f"{span}_{name}_s": lags[span].percentile(percent)
        for span in ("before", "copy", "after")
        for name, percent in (("p50", 50), ("p95", 95), ("max", 100))
    }
    result |= {
        "growth_s_per_minute": lags["copy"].growth,
        "copy_s": measured.copy_seconds,
        "large_ready_s": measured.large_ready_seconds,
        "small_ready_s": max(measured.small_ready_seconds, default=0.0),
        "peak_rss_mib": run.watch.peak_rss_mib(PYTHON_WORKER),
    }
    return {name: round(value, 3) for name, value in result.items()}


def _describe(arguments: argparse.Namespace, measured: Measured) -> str:
    rows: list[Sequence[str]] = []
    for span, lags in measured.lags.items():
        if span == "copy":
            continue
        length = lags.committed.max() - lags.committed.min()
        percentiles = [f"{lags.percentile(percent):.2f}" for percent in (50, 95, 99, 100)]
        rows.append([span, f"{length:.1f}", f"{len(lags.seconds):,}", *percentiles])
    title = (
        f"{arguments.tables} tables, {arguments.rate:g} transactions/s of {ROWS_PER_TRANSACTION} rows, "
        f"while {arguments.rows:,} rows are copied in {measured.copy_seconds:.1f} s on local[{CORES}]; "
        f"load average {load_average():.1f}"
    )
    header = ["lag, s", "seconds", "changes", "p50", "p95", "p99", "max"]
    text = f"{title}\n{format_table(header, rows)}\n"
    text += f"while the copy runs the lag grows by {measured.lags['copy'].growth:+.2f} s per minute\n"
    text += f"Ready after joining: the large table in {measured.large_ready_seconds:.1f} s"
    if measured.small_ready_seconds:
        soonest, last = min(measured.small_ready_seconds), max(measured.small_ready_seconds)
        text += f", {len(measured.small_ready_seconds)} small ones in {soonest:.1f} to {last:.1f} s"
    return text


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the lag of small tables while a large one is copied.")
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the large table")
    parser.add_argument("--tables", type=int, default=20, help="small tables with changes")
    parser.add_argument("--joining", type=int, default=10, help="small tables that join with the large one")
    parser.add_argument("--rate", type=float, default=100.0, help="transactions per second")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds before and after the copy")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.tables, arguments.rate, arguments.seconds) <= 0 or arguments.joining < 0:
        parser.error("sizes, rate and seconds must be above 0")
    return arguments


if __name__ == "__main__":
    main()
