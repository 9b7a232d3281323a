"""The server's positions, and their lineage: the system, timeline and slot that stored positions belong to.

A position means nothing on another server. After a failover the promoted standby has the same system identifier and
continues on a new timeline: a position of an earlier timeline is valid up to where the server left that timeline, and
lost beyond it. Started from a position that it never reached, a server sends nothing and reports no error. So positions
are stored with their lineage, and an `Ancestry` decides about them before they are used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from penstock.errors import LineageChanged, LostInFailover, PositionAhead, QueryFailed, ServerUnavailable
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
# The name of a file of WAL begins with the timeline, in hexadecimal.
_TIMELINE = (
    "select case when not pg_catalog.pg_is_in_recovery()"
    " then left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8) end"
)
_FLUSH_SECONDS = 1.0
UNDEFINED_FILE = "58P01"
"""SQLSTATE: a file of WAL, or of a timeline's history, does not exist."""

logger = logging.getLogger(__name__)


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


def is_in_recovery(connection: psycopg.Connection[Any]) -> bool:
    """True if the server is a standby now."""
    with translated(connection, "ask whether the server is a standby"):
        return connection.execute("select pg_catalog.pg_is_in_recovery()").fetchone() == (True,)


def read_timeline(connection: psycopg.Connection[Any]) -> int | None:
    """The timeline that the server writes; None for a standby, which may follow another one at any time."""
    with translated(connection, "read the server's timeline"), connection.cursor(row_factory=tuple_row) as cursor:
        found = cursor.execute(_TIMELINE.encode()).fetchone()
    return None if found is None or found[0] is None else int(found[0], 16)


def refuse_former(timeline: int | None, known: Lineage) -> None:
    """Raise `ServerUnavailable` if the server's timeline is earlier than a known one: another server took over from it.

    Numbers of timelines only grow. Such a server did not lose changes in a failover; a copy of it would be stale.
    """
    if timeline is not None and timeline < known.timeline:
        raise ServerUnavailable(
            f"the server is on timeline {timeline}, but another one took over and is on {known.timeline}",
            hint="Stop the former primary, or start it as a standby of the new one. If this server was restored from a "
            "backup, and there is no other one, run penstock teardown, then penstock run, to copy everything again.",
        )


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

    @property
    def name(self) -> str:
        """The lineage as destinations record it."""
        return "/".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True, slots=True)
class TimelineSwitch:
    """A timeline in a server's history, and the position where the server left it."""

    timeline: int
    left_at: Lsn


@dataclass(frozen=True, slots=True)
class Ancestry:
    """The lineage of a server now, and the timelines that led to it: which stored positions are part of its history."""

    current: Lineage
    switches: tuple[TimelineSwitch, ...] = ()
    """Oldest first; empty on the first timeline."""

    def require(self, stored: Lineage, position: Lsn) -> None:
        """Raise `LineageChanged` if a stored position is not part of this server's history."""
        current = self.current
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
                hint=f'Set slot = "{stored.slot}" in [source] again and run: penstock run. To give the slot another '
                "name, tear the pipeline down first, under the old one.",
                stored=stored.slot,
                current=current.slot,
            )
        if stored.timeline != current.timeline:
            self._require_left_after(stored.timeline, position)

    def includes(self, stored: Lineage, position: Lsn) -> bool:
        """Return True if a stored position is part of this server's history."""
        try:
            self.require(stored, position)
        except LineageChanged:
            return False
        return True

    def is_other_timeline(self, stored: Lineage) -> bool:
        """Return True for another timeline of the same server, database and slot."""
        return stored != self.current and replace(stored, timeline=self.current.timeline) == self.current

    def refuse_former(self, known: Lineage) -> None:
        """Raise `ServerUnavailable` if another server took over from this one and is on a known lineage."""
        if self.is_other_timeline(known):
            refuse_former(self.current.timeline, known)

    def follows(self, earlier: Ancestry) -> bool:
        """Return True if this server took over from the one with the other ancestry."""
        return self.is_other_timeline(earlier.current) and any(
            switch.timeline == earlier.current.timeline for switch in self.switches
        )

    @property
    def ends(self) -> Mapping[str, Lsn]:
        """The names of the lineages that led to this one, each with its end."""
        return {replace(self.current, timeline=each.timeline).name: each.left_at for each in self.switches}

    def _require_left_after(self, timeline: int, position: Lsn) -> None:
        current = self.current.timeline
        left = next((switch for switch in self.switches if switch.timeline == timeline), None)
        if left is None:
            raise LostInFailover(
                f"the server is on timeline {current}, which does not descend from {timeline}, "
                "that of the stored position",
                stored=timeline,
                current=current,
            )
        if not reaches(left.left_at, position):
            raise LostInFailover(
                f"the server left timeline {timeline} at {left.left_at}, before the stored position {position}: "
                "changes in between were lost in a failover or a restore",
                stored=timeline,
                current=current,
                left_at=left.left_at,
            )


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """The server's answers to IDENTIFY_SYSTEM and TIMELINE_HISTORY."""

    system_identifier: str
    timeline: int
    position: Lsn
    """The end of its flushed WAL; replication sends nothing beyond it."""
    database: str
    switches: tuple[TimelineSwitch, ...] = ()
    is_standby: bool = False

    def ancestry(self, slot: str) -> Ancestry:
        """Return what decides about positions that were read from a slot."""
        return Ancestry(Lineage(self.system_identifier, self.timeline, self.database, slot), self.switches)

    def require_reached(self, position: Lsn) -> None:
        """Raise `PositionAhead` for a position beyond the server's WAL: from there it would send nothing.

        A standby may reach it later, at the latest when it is promoted: `ServerUnavailable`.
        """
        if not reaches(self.position, position):
            if self.is_standby:
                raise ServerUnavailable(
                    f"the server is a standby that has replayed its WAL up to {self.position}, "
                    f"and not yet to the stored position {position}",
                    hint="Penstock continues when the standby has replayed it. If it never does, the server is not one "
                    "that took over from the source: check the address.",
                )
            raise PositionAhead(
                f"the stored position {position} is ahead of the server, which is at {self.position}",
                stored=position,
                current=self.position,
            )


def identify_system(connection: pq.abc.PGconn) -> SystemIdentity:
    """Identify the server at the other end of a replication connection."""
    # First: the position of a server that is not a standby is its last word.
    is_standby = run_command(connection, "select pg_catalog.pg_is_in_recovery()", "identify the server") == [("t",)]
    rows = run_command(connection, "IDENTIFY_SYSTEM", "identify the server")
    identifier, timeline, position, database = rows[0]
    number = int(timeline or 0)
    switches = read_timeline_history(connection, number)
    return SystemIdentity(str(identifier), number, Lsn.parse(position or "0/0"), database or "", switches, is_standby)


def read_timeline_history(connection: pq.abc.PGconn, timeline: int) -> tuple[TimelineSwitch, ...]:
    """The timelines that led to `timeline`, oldest first; empty for the first one, and if the server lost the file."""
    if timeline <= 1:
        return ()
    try:
        rows = run_command(connection, f"TIMELINE_HISTORY {int(timeline)}", "read the timeline history")
    except QueryFailed as error:
        if error.facts.get("sqlstate") != UNDEFINED_FILE:
            raise
        # Positions of this timeline need no history, and those of earlier ones are refused without it.
        logger.warning("the server has no history of its timeline timeline=%d", timeline)
        return ()
    return parse_timeline_history(rows[0][1] or "")


def parse_timeline_history(content: str) -> tuple[TimelineSwitch, ...]:
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
    return tuple(switches)
