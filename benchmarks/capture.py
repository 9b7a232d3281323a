"""Compare capture with `pg_recvlogical`: drain the same changes into a spool, and to /dev/null.

    python benchmarks/capture.py [--workload NAME …] [--changes N] [--rounds 3] [--server 18]

docs/reference/benchmarks.md describes the workloads, what is timed, and the columns of the result. CPU time is counted
from START_REPLICATION on. Each slot is dropped after its drain.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
from draining import (
    RECVLOGICAL,
    SERVER_SETTINGS,
    Drain,
    Load,
    create_slot,
    drain_by_recvlogical,
    drop_slot,
    require_equal_options,
    run_load,
    wait_for_start,
)
from harness import (
    BenchmarkFailed,
    Watch,
    format_table,
    load_average,
    median,
    print_result,
    say,
    spread,
    take_turns,
)
from stages import open_stage
from workloads import PUBLICATION, WORKLOADS, Workload

from penstock.capture import CaptureProcess, CaptureSettings
from penstock.lsn import Lsn
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolReader, SpoolSettings
from penstock.spool.folder import SpoolFolder
from penstock.testing.postgres import PostgresServer

CAPTURE = "capture"
DRAIN_SECONDS = 600.0


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    summary: list[list[str]] = []
    with open_stage(arguments.server, SERVER_SETTINGS) as stage:
        for name in arguments.workload or WORKLOADS:
            workload = WORKLOADS[name]
            load, drains = run(stage.server, workload, arguments.changes, arguments.rounds, stage.folder)
            result = _result(load, drains)
            results[name] = result
            print(f"\n{_describe(workload, load, drains)}\n", flush=True)
            summary.append([name, *(f"{result[key]:,.{digits}f}" for key, digits in _SUMMARY.values())])
    print(format_table(["capture", *_SUMMARY], summary))
    print_result(results)


def run(
    server: PostgresServer, workload: Workload, changes: int | None, rounds: int, folder: Path
) -> tuple[Load, dict[str, list[Drain]]]:
    """Make the changes and drain them `rounds` times with each reader, in a database of its own."""
    turns = list(take_turns(RECVLOGICAL, CAPTURE, rounds))
    wanted = max(1, min(changes or workload.changes, workload.changes) // workload.transaction_rows)
    wanted *= workload.transaction_rows
    database = server.create_database()
    try:
        with server.connect(database) as connection:
            say(f"{workload.name}: making the tables")
            workload.prepare(connection, wanted)
            connection.execute(f"create publication {PUBLICATION} for all tables".encode())
            connection.execute("checkpoint")
            slots = [create_slot(connection, number) for number in range(len(turns))]
            load = run_load(connection, wanted)
            say(f"{workload.name}: {load.changes:,} changes written in {load.seconds:.1f} s")
            drains: dict[str, list[Drain]] = {RECVLOGICAL: [], CAPTURE: []}
            for (slot, position), reader in zip(slots, turns, strict=True):
                if reader == RECVLOGICAL:
                    drain = drain_by_recvlogical(server, connection, database, slot, load.end)
                else:
                    drain = _drain_by_capture(server, connection, database, slot, position, load, folder)
                drop_slot(connection, slot)
                drains[reader].append(drain)
                say(
                    f"{workload.name}: {reader} {load.changes / drain.seconds:,.0f} changes/s "
                    f"in {drain.seconds:.2f} s, load average {load_average():.1f}"
                )
    finally:
        server.drop_database(database)
    require_equal_options([*drains[RECVLOGICAL], *drains[CAPTURE]])
    return load, drains


def _drain_by_capture(
    server: PostgresServer,
    connection: psycopg.Connection[Any],
    database: str,
    slot: str,
    position: Lsn,
    load: Load,
    folder: Path,
) -> Drain:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        spool = Path(name)
        settings = CaptureSettings(
            source=SourceSettings(server.dsn(database)),
            slot=slot,
            publication=PUBLICATION,
            # Nobody reads from it, so nothing is ever let go.
            spool=SpoolSettings(spool, max_bytes=1 << 50),
        )
        launched = time.time()
        with CaptureProcess(settings) as capture:
            started = wait_for_start(connection, slot, lambda: _is_in_first_start(capture))
            assert capture.pid is not None
            with Watch(reader=capture.pid, walsender=started.pid) as watch:
                if not capture.wait_captured(load.end, DRAIN_SECONDS):
                    raise BenchmarkFailed(f"capture did not reach {load.end}: it is at {capture.status.captured}")
                watch.sample()
            ended = SpoolFolder(spool).log_parts()[-1].stat().st_mtime
        _is_in_first_start(capture)
        _require_complete(spool, position, load)
        reader = watch.last("reader")
        return Drain(
            seconds=ended - started.at,
            startup_seconds=started.at - launched,
            cpu_seconds=reader.cpu_seconds - watch.first("reader").cpu_seconds,
            server_cpu_seconds=watch.last("walsender").cpu_seconds,
            peak_rss_mib=reader.peak_rss_mib,
            options=started.options,
        )


def _is_in_first_start(capture: CaptureProcess) -> bool:
    capture.check()
    if capture.restarts:
        raise BenchmarkFailed("the capture process died and was started again")
    return True


def _require_complete(spool: Path, position: Lsn, load: Load) -> None:
    entries = SpoolReader(spool).entries(position)
    rows, transactions = sum(entry.rows for entry in entries), sum(entry.transactions for entry in entries)
    if (rows, transactions) != (load.changes, load.transactions):
        raise BenchmarkFailed(
            f"the spool has {rows:,} rows of {transactions:,} transactions; "
            f"the server has written {load.changes:,} of {load.transactions:,}"
        )


_SUMMARY = {
    "ratio": ("ratio", 2),
    "changes/s": ("per_second", 0),
    "CPU s/million": ("cpu_s_per_million", 2),
    "peak RSS MiB": ("peak_rss_mib", 0),
}


def _rates(load: Load, drains: Sequence[Drain]) -> list[float]:
    return [load.changes / drain.seconds for drain in drains]


def _result(load: Load, drains: Mapping[str, Sequence[Drain]]) -> dict[str, float]:
    rate = {reader: median(_rates(load, drains[reader])) for reader in drains}
    return {
        "ratio": round(rate[CAPTURE] / rate[RECVLOGICAL], 3),
        "per_second": round(rate[CAPTURE]),
        "cpu_s_per_million": round(median([drain.cpu_seconds for drain in drains[CAPTURE]]) * 1e6 / load.changes, 3),
        "peak_rss_mib": round(max(drain.peak_rss_mib for drain in drains[CAPTURE]), 1),
    }


def _describe(workload: Workload, load: Load, drains: Mapping[str, Sequence[Drain]]) -> str:
    rows: list[list[str]] = []
    millions = load.changes / 1e6
    for reader, each in drains.items():
        rates = _rates(load, each)
        rows.append(
            [
                reader,
                f"{median(rates):,.0f}",
                f"{spread(rates):.0%}",
                f"{median([drain.cpu_seconds for drain in each]) / millions:.2f}",
                f"{median([drain.server_cpu_seconds for drain in each]) / millions:.2f}",
                f"{max(drain.peak_rss_mib for drain in each):.0f}",
                f"{median([drain.startup_seconds for drain in each]):.2f}",
            ]
        )
    header = ["", "changes/s", "spread", "CPU s/million", "walsender CPU s/million", "peak RSS MiB", "start-up s"]
    title = (
        f"{workload.name}: {workload.about}; {load.changes:,} changes in {load.transactions:,} transactions, "
        f"{load.wal_bytes / (1 << 20):,.0f} MiB of WAL, written in {load.seconds:.1f} s"
    )
    return f"{title}\n{format_table(header, rows)}\nratio {_result(load, drains)['ratio']:.2f}"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare capture with pg_recvlogical, on a private server.")
    parser.add_argument(
        "--workload", nargs="+", action="extend", choices=list(WORKLOADS), help="workloads to run (default: all)"
    )
    parser.add_argument("--changes", type=int, help="maximum number of changes per workload")
    parser.add_argument("--rounds", type=int, default=3, help="drains per reader and workload")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.changes is not None and arguments.changes < 1):
        parser.error("--rounds and --changes must be at least 1")
    return arguments


if __name__ == "__main__":
    main()
