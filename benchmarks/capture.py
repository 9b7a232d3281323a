"""Capture against `pg_recvlogical`: the same changes out of the same server, once to /dev/null and once into a spool.

    python benchmarks/capture.py [--workload NAME …] [--changes N] [--rounds 3] [--server 18]

For each workload: tables and rows are made, then one slot per drain, then the load runs to its end. Only then the
slots are drained, one after the other, the two readers taking turns; so every drain decodes the same WAL, alone. Each
slot is dropped after its drain. There is no warm-up: the WAL has just been written and is in memory, every drain has
a walsender of its own, and the median is of three.

What is timed is the same for both: from START_REPLICATION, by the server's own clock (`query_start` of the walsender),
to the end. The end of `pg_recvlogical` is its exit, at `--endpos`. The end of capture is the moment at which the line
that reaches the same position was written to the spool's log, from which on a reader has everything; the wait of
`cut_seconds` for more transactions, which comes before it, is in. What lies before START_REPLICATION (starting the
program, importing Python modules, connecting) is the start-up, printed beside; processor time is likewise counted
from there on. The options that both gave to the plugin are compared, and so are rows and transactions in the spool
with what the load has counted: a run that is not fair or not complete fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from harness import (
    BenchmarkFailed,
    Watch,
    cleaned_up,
    describe_machine,
    format_table,
    load_average,
    median,
    print_result,
    say,
    spread,
    take_turns,
)
from workloads import PUBLICATION, WORKLOADS, Workload

from penstock.capture import CaptureProcess, CaptureSettings
from penstock.lsn import Lsn
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolReader, SpoolSettings
from penstock.spool.folder import SpoolFolder
from penstock.testing.postgres import PostgresServer

RECVLOGICAL, CAPTURE = "pg_recvlogical", "capture"
DRAIN_SECONDS = 600.0
START_SECONDS = 60.0
SERVER_SETTINGS: Mapping[str, str] = {
    # No checkpoint, no vacuum and no waiting for the disk while something is measured.
    "shared_buffers": "512MB",
    "max_wal_size": "64GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    # All of a workload's slots are there at once.
    "max_replication_slots": "100",
}
_OPTION = re.compile(r"\"?(\w+)\"?\s+'((?:[^']|'')*)'")


@dataclass(frozen=True, slots=True)
class Load:
    """What the server has written, between which positions."""

    changes: int
    transactions: int
    end: Lsn
    wal_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """A walsender at work."""

    pid: int
    at: float
    """Unix time of START_REPLICATION."""
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drain:
    """One slot, read to the end."""

    seconds: float
    startup_seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    peak_rss_mib: float
    options: Mapping[str, str]


def main() -> None:
    arguments = _parse_arguments()
    results: dict[str, dict[str, float]] = {}
    summary: list[list[str]] = []
    try:
        with (
            cleaned_up(),
            PostgresServer(major=arguments.server, settings=SERVER_SETTINGS) as server,
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        ):
            print(f"PostgreSQL {server.version}; {describe_machine()}")
            for name in arguments.workload or WORKLOADS:
                workload = WORKLOADS[name]
                load, drains = run(server, workload, arguments.changes, arguments.rounds, Path(folder))
                result = _result(load, drains)
                results[name] = result
                print(f"\n{_describe(workload, load, drains)}\n", flush=True)
                summary.append([name, *(f"{result[key]:,.{digits}f}" for key, digits in _SUMMARY.values())])
    except BenchmarkFailed as error:
        raise SystemExit(f"benchmark failed: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
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
            slots = [_create_slot(connection, number) for number in range(len(turns))]
            load = _run_load(connection, wanted)
            say(f"{workload.name}: {load.changes:,} changes written in {load.seconds:.1f} s")
            drains: dict[str, list[Drain]] = {RECVLOGICAL: [], CAPTURE: []}
            for (slot, position), reader in zip(slots, turns, strict=True):
                if reader == RECVLOGICAL:
                    drain = _drain_by_recvlogical(server, connection, database, slot, load.end)
                else:
                    drain = _drain_by_capture(server, connection, database, slot, position, load, folder)
                _drop_slot(connection, slot)
                drains[reader].append(drain)
                say(
                    f"{workload.name}: {reader} {load.changes / drain.seconds:,.0f} changes/s "
                    f"in {drain.seconds:.2f} s, load average {load_average():.1f}"
                )
    finally:
        server.drop_database(database)
    _require_equal_options([*drains[RECVLOGICAL], *drains[CAPTURE]])
    return load, drains


def _run_load(connection: psycopg.Connection[Any], wanted: int) -> Load:
    before = _current_position(connection)
    began = time.monotonic()
    row = connection.execute("call load(%s, 0, 0)", [wanted]).fetchone()
    seconds = time.monotonic() - began
    assert row is not None
    changes, transactions = row
    if changes != wanted:
        raise BenchmarkFailed(f"the load was to make {wanted:,} changes, and made {changes:,}")
    end = _current_position(connection)
    return Load(changes, transactions, end, end - before, seconds)


def _drain_by_recvlogical(
    server: PostgresServer, connection: psycopg.Connection[Any], database: str, slot: str, end: Lsn
) -> Drain:
    command = [
        str(server.binaries.program("pg_recvlogical")),
        *("-h", "127.0.0.1", "-p", str(server.port), "-U", server.user, "-d", database),
        *("--start", "--slot", slot, "--endpos", str(end), "--no-loop", "--file", os.devnull, "--fsync-interval", "0"),
        *("-o", "proto_version=2", "-o", "streaming=on", "-o", f'publication_names="{PUBLICATION}"'),
    ]
    launched = time.time()
    with subprocess.Popen(command, env=os.environ | {"PGPASSWORD": server.password}) as process:
        try:
            started = _wait_for_start(connection, slot, lambda: process.poll() is None)
            with Watch(reader=process.pid, walsender=started.pid) as watch:
                _, status, used = os.wait4(process.pid, 0)
                ended = time.time()
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()
    if process.returncode != 0:
        raise BenchmarkFailed(f"pg_recvlogical ended with exit code {process.returncode}")
    return Drain(
        seconds=ended - started.at,
        startup_seconds=started.at - launched,
        cpu_seconds=used.ru_utime + used.ru_stime - watch.first("reader").cpu_seconds,
        server_cpu_seconds=watch.last("walsender").cpu_seconds,
        peak_rss_mib=watch.last("reader").peak_rss_mib,
        options=started.options,
    )


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
            started = _wait_for_start(connection, slot, lambda: _is_in_first_start(capture))
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


def _wait_for_start(connection: psycopg.Connection[Any], slot: str, is_alive: Callable[[], bool]) -> Started:
    """Wait until the slot is in use. The time is the server's, so it does not matter how often we look."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        row = connection.execute(
            """select a.pid, extract(epoch from a.query_start)::float8, a.query
               from pg_catalog.pg_replication_slots s join pg_catalog.pg_stat_activity a on a.pid = s.active_pid
               where s.slot_name = %s and a.query ilike 'start_replication%%'""",
            [slot],
        ).fetchone()
        if row is not None:
            return Started(row[0], row[1], dict(_OPTION.findall(row[2])))
        if not is_alive():
            raise BenchmarkFailed("a reader ended before it was seen at work: measure more changes")
        time.sleep(0.005)
    raise BenchmarkFailed(f"nobody has read from slot {slot} within {START_SECONDS:.0f} s")


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


def _require_equal_options(drains: Sequence[Drain]) -> None:
    different = {tuple(sorted(drain.options.items())) for drain in drains}
    if len(different) != 1 or not drains[0].options:
        raise BenchmarkFailed(f"the readers asked the server for different things: {sorted(different)}")


def _create_slot(connection: psycopg.Connection[Any], number: int) -> tuple[str, Lsn]:
    name = f"bench_{number}"
    row = connection.execute(
        "select lsn from pg_catalog.pg_create_logical_replication_slot(%s, 'pgoutput')", [name]
    ).fetchone()
    assert row is not None
    return name, Lsn.parse(row[0])


def _drop_slot(connection: psycopg.Connection[Any], slot: str) -> None:
    """Drop it once the walsender has noticed that its reader is gone."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            connection.execute("select pg_catalog.pg_drop_replication_slot(%s)", [slot])
            return
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _current_position(connection: psycopg.Connection[Any]) -> Lsn:
    row = connection.execute("select pg_catalog.pg_current_wal_flush_lsn()").fetchone()
    assert row is not None
    return Lsn.parse(row[0])


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
    parser = argparse.ArgumentParser(description="Capture against pg_recvlogical, on a server of its own.")
    parser.add_argument(
        "--workload", nargs="+", action="extend", choices=list(WORKLOADS), help="some of them; all by default"
    )
    parser.add_argument("--changes", type=int, help="at most so many changes in each workload")
    parser.add_argument("--rounds", type=int, default=3, help="drains per reader and workload")
    parser.add_argument("--server", type=int, help="major version; the newest installed one by default")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or (arguments.changes is not None and arguments.changes < 1):
        parser.error("--rounds and --changes must be at least 1")
    return arguments


if __name__ == "__main__":
    main()
