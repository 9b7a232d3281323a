"""The server's positions, and their lineage: the system, timeline and slot that stored positions belong to.

A position means nothing on another server, and little after a failover: the promoted standby has the same system
identifier, but continues from its own position on a new timeline. Started from a position that it never reached, a
server sends nothing and reports no error. So positions are stored with their lineage and checked before use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from penstock.errors import LineageChanged, PositionAhead, QueryFailed
from penstock.lsn import Lsn, reaches
from penstock.source.connections import Role, SourceSettings, connect, run_command
from penstock.source.faults import translated

_FLUSHED = (
    "select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()"
    " else pg_catalog.pg_current_wal_flush_lsn() end::text"
)
_WRITTEN = (
    "select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()"
    " else pg_catalog.pg_current_wal_insert_lsn() end::text"
)
_FLUSH_SECONDS = 1.0


def flushed_position(connection: psycopg.Connection[Any]) -> Lsn:
    """The position up to which the server sends changes."""
    return _ask(connection, _FLUSHED)


def current_position(source: SourceSettings) -> Lsn:
    """A boundary after everything that is committed now and that the server will send.

    WAL that is not flushed after a second belongs to no commit, or to an asynchronous one.
    """
    with connect(source, Role.CATALOG) as connection:
        written = _ask(connection, _WRITTEN)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while not reaches(flushed := flushed_position(connection), written):
            if time.monotonic() > deadline:
                return flushed
            time.sleep(0.05)
        return written


def _ask(connection: psycopg.Connection[Any], query: str) -> Lsn:
    with translated(connection, "read the server's position"), connection.cursor(row_factory=tuple_row) as cursor:
        found = cursor.execute(query.encode()).fetchone()
    assert found is not None
    return Lsn.parse(found[0])


@dataclass(frozen=True, slots=True)
class Lineage:
    """What positions belong to; stored with them."""

    system_identifier: str
    timeline: int
    database: str
    slot: str


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """The server's answer to IDENTIFY_SYSTEM."""

    system_identifier: str
    timeline: int
    position: Lsn
    """The end of its flushed WAL; replication sends nothing beyond it."""
    database: str

    def lineage(self, slot: str) -> Lineage:
        """The lineage of positions read from a slot on this server."""
        return Lineage(self.system_identifier, self.timeline, self.database, slot)


@dataclass(frozen=True, slots=True)
class TimelineSwitch:
    """A timeline in a server's history, and the position where the server left it."""

    timeline: int
    left_at: Lsn


def identify_system(connection: pq.abc.PGconn) -> SystemIdentity:
    """Identify the server at the other end of a replication connection."""
    rows = run_command(connection, "IDENTIFY_SYSTEM", "identify the server")
    identifier, timeline, position, database = rows[0]
    return SystemIdentity(str(identifier), int(timeline or 0), Lsn.parse(position or "0/0"), database or "")


def read_timeline_history(connection: pq.abc.PGconn, timeline: int) -> list[TimelineSwitch]:
    """The timelines that led to `timeline`, oldest first; empty for the first one."""
    if timeline <= 1:
        return []
    rows = run_command(connection, f"TIMELINE_HISTORY {int(timeline)}", "read the timeline history")
    return parse_timeline_history(rows[0][1] or "")


def parse_timeline_history(content: str) -> list[TimelineSwitch]:
    """Parse a `.history` file: one line per former timeline (number, position, reason)."""
    switches: list[TimelineSwitch] = []
    for line in content.splitlines():
        fields = line.split("#", 1)[0].split()
        if not fields:
            continue
        try:
            switches.append(TimelineSwitch(int(fields[0]), Lsn.parse(fields[1])))
        except (IndexError, ValueError):
            raise QueryFailed("the server's timeline history is malformed") from None
    return switches


def check_lineage(
    stored: Lineage,
    current: Lineage,
    stored_position: Lsn,
    server_position: Lsn,
    timeline_history: Sequence[TimelineSwitch] = (),
) -> None:
    """Raise if this server's WAL does not contain a position. `timeline_history` is that of the current timeline."""
    if stored.system_identifier != current.system_identifier:
        raise LineageChanged(
            f"this is another server: its system identifier is {current.system_identifier}, "
            f"but the stored positions belong to {stored.system_identifier}",
            stored=stored.system_identifier,
            current=current.system_identifier,
        )
    if stored.database != current.database:
        raise LineageChanged(
            f"stored positions belong to database {stored.database!r}, not {current.database!r}",
            stored=stored.database,
            current=current.database,
        )
    if stored.slot != current.slot:
        raise LineageChanged(
            f"stored positions belong to slot {stored.slot!r}, not {current.slot!r}",
            hint="Use the old slot name, or copy the tables again.",
            stored=stored.slot,
            current=current.slot,
        )
    if stored.timeline != current.timeline:
        _check_timeline(stored.timeline, current.timeline, stored_position, timeline_history)
    if not reaches(server_position, stored_position):
        raise PositionAhead(
            f"the stored position {stored_position} is ahead of the server, which is at {server_position}",
            stored=stored_position,
            current=server_position,
        )


def verify_lineage(connection: pq.abc.PGconn, stored: Lineage, slot: str, stored_position: Lsn) -> SystemIdentity:
    """Identify the server, and raise if the stored position is not part of its history."""
    system = identify_system(connection)
    current = system.lineage(slot)
    history: list[TimelineSwitch] = []
    if stored.system_identifier == current.system_identifier and stored.timeline != current.timeline:
        history = read_timeline_history(connection, current.timeline)
    check_lineage(stored, current, stored_position, system.position, history)
    return system


def _check_timeline(stored: int, current: int, position: Lsn, history: Sequence[TimelineSwitch]) -> None:
    left = next((switch for switch in history if switch.timeline == stored), None)
    if left is None:
        raise LineageChanged(
            f"the server is on timeline {current}, which does not descend from {stored}, that of the stored position",
            stored=stored,
            current=current,
        )
    if not reaches(left.left_at, position):
        raise LineageChanged(
            f"the server left timeline {stored} at {left.left_at}, before the stored position {position}: "
            "changes in between were lost in a failover or a restore",
            stored=stored,
            current=current,
            left_at=left.left_at,
        )
