"""Compare verifying a table against its source with copying the same table.

    python benchmarks/verify.py [--destination delta …] [--rows N] [--rounds 3] [--tasks 2] [--server 18]

docs/reference/benchmarks.md describes what is timed. The copy is that of `benchmarks/table_copy.py`, the comparison
that of `penstock.comparison`. Every comparison must find all rows equal. At the end the benchmark plants three faults
in the last copy; the comparison must find exactly those, and its time, which includes reading the differing buckets
twice, is printed separately.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from processes import PYTHON_WORKER, TreeWatch, merge_peaks
from stages import CORES, open_stage, spark_session
from table_copy import (
    SERVER_SETTINGS,
    SMALL_RANGE_BYTES,
    SMALL_ROWS,
    SMALL_TABLE,
    TABLE,
    Copied,
    copy_by_tasks,
    look_at,
    make_tables,
)
from workloads import PUBLICATION

from penstock.changes.events import Unchanged
from penstock.comparison.compare import compare_table
from penstock.comparison.report import Counts, Kind, TableReport
from penstock.copy import CopyRows, CopySettings, prepare_copy
from penstock.destinations.base import DestinationContext
from penstock.destinations.registry import create_destination
from penstock.lsn import Lsn
from penstock.source.connections import SourceSettings
from penstock.source.snapshots import take_snapshot
from penstock.spark.tasks import SparkTasks
from penstock.state.memory import MemoryStore
from penstock.testing.destinations.script import ScriptedSource

COPY, VERIFY = "copy", "verify"
DESTINATIONS = ("delta", "parquet")


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with a copy of the table, by a destination."""

    source: SourceSettings
    destination: str
    folder: Path

    def open(self) -> Any:
        options: dict[str, Any] = {"path": str(self.folder)}
        if self.destination == "delta":
            options["maintenance"] = False
        return create_destination(self.destination, options)

    def prepare(self, snapshot: Any, settings: CopySettings | None = None, table: str = TABLE) -> CopyRows:
        table_id, _ = look_at(self.source, table)
        return prepare_copy(snapshot, self.source, PUBLICATION, table_id, settings=settings)


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        database = stage.server.create_database()
        size = make_tables(stage.server, database, arguments.rows)
        with spark_session("bench-verify") as session:
            tasks = SparkTasks(session, copy_tasks=arguments.tasks)
            for name in arguments.destination:
                timed = run(SourceSettings(stage.server.dsn(database)), tasks, name, arguments, stage.folder)
                results[name] = _result(arguments.rows, timed)
                print(f"\n{_describe(name, arguments, size, timed)}\n", flush=True)
    print_result(results)


def run(
    source: SourceSettings, tasks: SparkTasks, name: str, arguments: argparse.Namespace, folder: Path
) -> dict[str, list[Copied]]:
    """Copy and compare `rounds` times."""
    began = time.monotonic()
    small = CopySettings(range_bytes=SMALL_RANGE_BYTES)
    place = Place(source, name, folder / f"{name}-first")
    copy_by_tasks(source, tasks, name, place.folder, SMALL_TABLE, SMALL_ROWS, small)
    _compare(place, tasks, Counts(equal=SMALL_ROWS), table=SMALL_TABLE, settings=small)
    say(f"{name}: Python workers started in {time.monotonic() - began:.1f} s")
    timed: dict[str, list[Copied]] = {COPY: [], VERIFY: []}
    place = Place(source, name, folder / f"{name}-0")
    copy_by_tasks(source, tasks, name, place.folder, TABLE, arguments.rows)
    for number, who in enumerate(take_turns(COPY, VERIFY, arguments.rounds), 1):
        if who == COPY:
            place = Place(source, name, folder / f"{name}-{number}")
            done = copy_by_tasks(source, tasks, name, place.folder, TABLE, arguments.rows)
        else:
            done = _compare(place, tasks, Counts(equal=arguments.rows))
        timed[who].append(done)
        say(f"{who}: {done.seconds:.2f} s, {done.cpu_seconds:.1f} CPU s, load average {load_average():.1f}")
    _find_faults(place, tasks, arguments.rows)
    return timed


def _compare(
    place: Place,
    tasks: SparkTasks,
    expected: Counts,
    *,
    table: str = TABLE,
    settings: CopySettings | None = None,
    found: list[TableReport] | None = None,
) -> Copied:
    destination = place.open()
    with TreeWatch(os.getpid()) as watch:
        began = time.monotonic()
        with take_snapshot(place.source) as snapshot:
            rows = place.prepare(snapshot, settings, table)
            pinned = destination.pin(rows.schema)
            report = compare_table(rows, pinned, tasks)
            pinned.close()
        seconds = time.monotonic() - began
    if report.counts != expected:
        raise BenchmarkFailed(f"the comparison found {report.counts}, and should have found {expected}")
    if found is not None:
        found.append(report)
    return Copied(seconds, watch.cpu_seconds, watch)


def _find_faults(place: Place, tasks: SparkTasks, rows: int) -> None:
    """Plant faults in a copy, and look whether exactly they are found."""
    with take_snapshot(place.source) as snapshot:
        schema = place.prepare(snapshot).schema
    destination = place.open()
    destination.startup(DestinationContext("bench", "bench", MemoryStore("bench"), tasks))
    script = ScriptedSource(place.folder / "faults", start=Lsn(destination.position(schema.table_id)))
    pinned = destination.pin(schema)
    first = next(iter(pinned.reader.read(pinned.parts[0]))).slice(0, 1).to_pylist()[0]
    pinned.close()
    whole = {column.name: first[column.name] for column in schema.columns}
    not_sent = dict.fromkeys(whole, Unchanged)
    with script.transaction() as transaction:
        transaction.update(schema, {**not_sent, "id": rows // 3, "note": "another note"})
        transaction.delete(schema, {"id": rows // 2})
        transaction.insert(schema, {**whole, "id": rows + 1})
    result = destination.write_events(script.batch()).result(60)
    destination.shutdown()
    if any(each.error is not None for each in result.tables.values()):
        raise BenchmarkFailed("the faults could not be planted")
    found: list[TableReport] = []
    done = _compare(place, tasks, Counts(rows - 2, 1, 1, 1), found=found)
    named = {(each.kind, each.key["id"], each.columns) for each in found[0].differences}
    expected = {
        (Kind.CHANGED, rows // 3, ("note",)),
        (Kind.MISSING, rows // 2, ()),
        (Kind.EXTRA, rows + 1, ()),
    }
    if named != expected:
        raise BenchmarkFailed(f"the comparison named {named}")
    say(f"{place.destination}: three planted faults found and named in {done.seconds:.2f} s")


def _result(rows: int, timed: Mapping[str, Sequence[Copied]]) -> dict[str, float]:
    seconds = {who: median([each.seconds for each in found]) for who, found in timed.items()}
    cpu = median([each.cpu_seconds for each in timed[VERIFY]])
    return {
        "ratio": round(seconds[VERIFY] / seconds[COPY], 3),
        "per_second": round(rows / seconds[VERIFY]),
        "cpu_s_per_million": round(cpu * 1e6 / rows, 3),
        "peak_rss_mib": round(max(each.watch.peak_rss_mib(PYTHON_WORKER) for each in timed[VERIFY]), 1),
    }


def _describe(name: str, arguments: argparse.Namespace, size: int, timed: Mapping[str, Sequence[Copied]]) -> str:
    table: list[list[str]] = []
    for who, found in timed.items():
        seconds = [each.seconds for each in found]
        cpu = median([each.cpu_seconds for each in found]) * 1e6 / arguments.rows
        table.append([who, f"{median(seconds):.2f}", f"{spread(seconds):.0%}", f"{cpu:.2f}"])
    title = (
        f"{name}: {arguments.rows:,} rows of 10 columns, {size / (1 << 20):,.0f} MiB, "
        f"{arguments.tasks} tasks on local[{CORES}], load average {load_average():.1f}"
    )
    return (
        f"{title}\n{format_table(['', 'seconds', 'spread', 'CPU s/million'], table)}\n"
        f"verify ÷ copy {_result(arguments.rows, timed)['ratio']:.2f}\n\n"
        f"{merge_peaks([each.watch for each in timed[VERIFY]])}"
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare verifying a table with copying it.")
    parser.add_argument("--destination", nargs="+", choices=DESTINATIONS, default=list(DESTINATIONS))
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="copies and comparisons")
    parser.add_argument("--tasks", type=int, default=CORES, help="concurrent tasks")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.rounds, arguments.tasks) < 1:
        parser.error("--rows, --rounds and --tasks must be at least 1")
    return arguments


if __name__ == "__main__":
    main()
