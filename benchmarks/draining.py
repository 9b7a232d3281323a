"""Drain a slot: run the load, run `pg_recvlogical` as the baseline, and find out when a drain started.

The start is the server's time of START_REPLICATION (`query_start` of the walsender), so it depends neither on how often
the benchmark polls nor on how long a program takes to start.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from harness import BenchmarkFailed, Watch
from workloads import PUBLICATION

from penstock.lsn import Lsn
from penstock.testing.postgres import PostgresServer

RECVLOGICAL = "pg_recvlogical"
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


def run_load(connection: psycopg.Connection[Any], wanted: int) -> Load:
    """Make the changes, as fast as the server can."""
    before = current_position(connection)
    began = time.monotonic()
    row = connection.execute("call load(%s, 0, 0)", [wanted]).fetchone()
    seconds = time.monotonic() - began
    assert row is not None
    changes, transactions = row
    if changes != wanted:
        raise BenchmarkFailed(f"the load was to make {wanted:,} changes, and made {changes:,}")
    end = current_position(connection)
    return Load(changes, transactions, end, end - before, seconds)


def drain_by_recvlogical(
    server: PostgresServer, connection: psycopg.Connection[Any], database: str, slot: str, end: Lsn
) -> Drain:
    """Read a slot to the end, into /dev/null."""
    command = [
        str(server.binaries.program("pg_recvlogical")),
        *("-h", "127.0.0.1", "-p", str(server.port), "-U", server.user, "-d", database),
        *("--start", "--slot", slot, "--endpos", str(end), "--no-loop", "--file", os.devnull, "--fsync-interval", "0"),
        *("-o", "proto_version=2", "-o", "streaming=on", "-o", f'publication_names="{PUBLICATION}"'),
    ]
    launched = time.time()
    with subprocess.Popen(command, env=os.environ | {"PGPASSWORD": server.password}) as process:
        try:
            started = wait_for_start(connection, slot, lambda: process.poll() is None)
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


def wait_for_start(connection: psycopg.Connection[Any], slot: str, is_alive: Callable[[], bool]) -> Started:
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


def require_equal_options(drains: Sequence[Drain]) -> None:
    """Fail unless all readers have asked the plugin for the same."""
    different = {tuple(sorted(drain.options.items())) for drain in drains}
    if len(different) != 1 or not drains[0].options:
        raise BenchmarkFailed(f"the readers asked the server for different things: {sorted(different)}")


def create_slot(connection: psycopg.Connection[Any], number: int) -> tuple[str, Lsn]:
    """A slot by its number; its name, and where it begins."""
    name = f"bench_{number}"
    row = connection.execute(
        "select lsn from pg_catalog.pg_create_logical_replication_slot(%s, 'pgoutput')", [name]
    ).fetchone()
    assert row is not None
    return name, Lsn.parse(row[0])


def drop_slot(connection: psycopg.Connection[Any], slot: str) -> None:
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


def current_position(connection: psycopg.Connection[Any]) -> Lsn:
    """The end of the WAL so far."""
    row = connection.execute("select pg_catalog.pg_current_wal_flush_lsn()").fetchone()
    assert row is not None
    return Lsn.parse(row[0])
