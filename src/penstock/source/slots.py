"""Replication slots: the durable queue between the server and us.

A slot has one reader and retains WAL until it is acknowledged. It can be lost: the server removes WAL beyond
`max_slot_wal_keep_size`, invalidates idle slots, and invalidates slots on a standby that conflict with recovery. A lost
slot looks usable until it is read, so inspect it before use (`require_usable`).
"""

from __future__ import annotations

import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from penstock.errors import ConfigError, SlotInUse, SlotLost, SlotMissing, SlotUnusable, SourceError, UnsupportedServer
from penstock.lsn import Lsn
from penstock.retry import Backoff
from penstock.schema import quote_identifier
from penstock.source.connections import run_command
from penstock.source.faults import Place, from_exception, translated
from penstock.source.lineage import is_in_recovery

PLUGIN = "pgoutput"

_NAME = re.compile(r"[a-z0-9_]{1,63}")
_QUERY_CANCELLED = "57014"
FAILOVER_SINCE = 170000
_CREATION_SECONDS = 0.1
"""How often a slot is inspected that another session creates."""
_REPORT_SECONDS = (2.0, 10.0)
"""When transactions that block the creation of a slot are first reported, and how often after that."""

# Newer versions have more columns; JSON simply lacks the others.
_SLOT = """
    select pg_catalog.to_jsonb(s) || pg_catalog.jsonb_build_object('wait_event', a.wait_event)
    from pg_catalog.pg_replication_slots s
    left join pg_catalog.pg_stat_activity a on a.pid = s.active_pid
    where s.slot_name = %s
"""

# Decoding starts after all transactions have ended that were running when the slot was created, in any database.
_BLOCKERS = """
    select 'session', a.pid::text, coalesce(a.datname, ''), coalesce(a.usename, ''), a.application_name,
           extract(epoch from pg_catalog.clock_timestamp() - a.xact_start)::float8
    from pg_catalog.pg_stat_activity a
    where a.backend_xid is not null and a.pid <> pg_catalog.pg_backend_pid()
    union all
    select 'prepared transaction', x.gid, x.database, x.owner, '',
           extract(epoch from pg_catalog.clock_timestamp() - x.prepared)::float8
    from pg_catalog.pg_prepared_xacts x
    order by 6 desc nulls last
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of `pg_replication_slots`; columns that the server's version lacks have their defaults."""

    name: str
    plugin: str | None
    """None for a physical slot."""
    database: str | None
    active: bool
    active_pid: int | None
    restart_lsn: Lsn | None
    confirmed_flush_lsn: Lsn | None
    wal_status: str | None
    """`reserved`, `extended`, `unreserved` (about to be lost) or `lost`."""
    invalidation_reason: str | None = None
    conflicting: bool = False
    temporary: bool = False
    two_phase: bool = False
    failover: bool = False
    safe_wal_size: int | None = None
    """Bytes that the server can write before it invalidates the slot; None without `max_slot_wal_keep_size`."""
    waits_for_standby: bool = False
    """The server sends nothing until a standby in `synchronized_standby_slots` has it (17 and newer)."""

    @property
    def lost(self) -> bool:
        """True if its changes can no longer be read."""
        return self.wal_status == "lost" or self.invalidation_reason is not None or self.conflicting


@dataclass(frozen=True, slots=True)
class Blocker:
    """An open transaction for which a new slot or snapshot has to wait."""

    kind: str
    identity: str
    """The process id of a session, or the name of a prepared transaction."""
    database: str
    user: str
    application: str
    seconds: float | None

    def __str__(self) -> str:
        who = f"pid {self.identity}" if self.kind == "session" else f"{self.kind} {self.identity!r}"
        age = "" if self.seconds is None else f", open for {self.seconds:.0f} s"
        return f"{who} ({self.user}@{self.database}{f', {self.application}' if self.application else ''}{age})"


def inspect_slot(connection: psycopg.Connection[Any], name: str) -> Slot | None:
    """The slot of this name; None if it does not exist."""
    with (
        translated(connection, f"inspect slot {name!r}", slot=name),
        connection.cursor(row_factory=tuple_row) as cursor,
    ):
        row = cursor.execute(_SLOT, [name]).fetchone()
    return None if row is None else _slot_from(row[0])


def find_blockers(connection: psycopg.Connection[Any]) -> list[Blocker]:
    """Open transactions that write, longest first; details that the role cannot see are empty."""
    with translated(connection, "list open transactions"), connection.cursor(row_factory=tuple_row) as cursor:
        return [Blocker(*row) for row in cursor.execute(_BLOCKERS).fetchall()]


def name_blockers(blockers: Sequence[Blocker]) -> str:
    """The longest ones, for messages."""
    return ", ".join(str(blocker) for blocker in blockers[:5]) or "none that this role can see"


def warn_of_blockers(
    blockers: Sequence[Blocker], *, what: str = "a snapshot", extra: Mapping[str, object] | None = None
) -> None:
    """Log a warning about the transactions that delay something."""
    text = "%s waits for open transactions count=%d: %s"
    logger.warning(text, what, len(blockers), name_blockers(blockers), extra=extra)


def create_slot(
    connection: psycopg.Connection[Any],
    name: str,
    *,
    temporary: bool = False,
    failover: bool = False,
    timeout: float | None = None,
) -> Slot:
    """Create a logical slot for pgoutput. Create its publication first: pgoutput fails on older WAL.

    Waits for all open transactions of the server, at most `timeout` seconds, and logs them regularly; then raises
    `SlotUnusable`, which names them. A temporary slot ends with this connection. With `failover` (17 and newer),
    standbys keep a copy of the slot.
    """
    check_slot_name(name)
    version = connection.info.server_version
    arguments = [name, PLUGIN, temporary]
    if failover and version < FAILOVER_SINCE:
        raise _no_failover()
    if failover:
        arguments += [False, True]
    doing = f"create slot {name!r}"
    place = Place.of(connection)
    statement = f"select from pg_catalog.pg_create_logical_replication_slot({', '.join(['%s'] * len(arguments))})"
    try:
        with _watching(connection, name), connection.transaction(), connection.cursor() as cursor:
            # The server requires a transaction that has not written.
            if timeout is not None:
                milliseconds = str(max(1, round(timeout * 1000)))
                cursor.execute("select pg_catalog.set_config('statement_timeout', %s, true)", [milliseconds])
            cursor.execute(statement.encode(), arguments)
    except psycopg.Error as error:
        if error.sqlstate == _QUERY_CANCELLED and timeout is not None:
            raise _blocked(connection, name, place, timeout) from None
        raise from_exception(error, place, doing, slot=name) from None
    slot = inspect_slot(connection, name)
    if slot is None:
        raise SlotMissing(f"slot {name!r} disappeared right after it was created ({place.where})", slot=name)
    logger.info("slot created slot=%s temporary=%s position=%s", name, temporary, slot.confirmed_flush_lsn)
    return slot


def can_fail_over(connection: psycopg.Connection[Any]) -> bool:
    """True if a new slot can have `failover`: on a primary, from PostgreSQL 17 on."""
    return connection.info.server_version >= FAILOVER_SINCE and not is_in_recovery(connection)


def alter_slot(replication: pq.abc.PGconn, name: str, *, failover: bool) -> None:
    """Change whether standbys keep a copy of a slot that is not in use; over a replication connection."""
    if replication.server_version < FAILOVER_SINCE:
        raise _no_failover()
    check_slot_name(name)
    command = f"ALTER_REPLICATION_SLOT {quote_identifier(name)} (FAILOVER {'true' if failover else 'false'})"
    run_command(replication, command, f"alter slot {name!r}", slot=name)
    logger.info("slot altered slot=%s failover=%s", name, failover)


@contextmanager
def _watching(connection: psycopg.Connection[Any], name: str) -> Iterator[None]:
    """Log the transactions that the statement inside waits for, from another session because this one is busy."""
    done = threading.Event()

    def watch() -> None:
        delays = itertools.chain((_REPORT_SECONDS[0],), itertools.repeat(_REPORT_SECONDS[1]))
        for delay in delays:
            if done.wait(delay):
                return
            try:
                # The same server and user as the connection has: a URL may name several servers.
                with psycopg.connect(connection.info.dsn, password=connection.info.password) as other:
                    blockers = [blocker for blocker in find_blockers(other) if blocker.identity != waiting]
                    warn_of_blockers(blockers, what=f"slot {name}")
            except (psycopg.Error, SourceError):
                logger.warning("slot is not created yet, and the server did not report a reason slot=%s", name)

    waiting = str(connection.info.backend_pid)
    thread = threading.Thread(target=watch, name="slot-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def drop_slot(
    connection: psycopg.Connection[Any],
    name: str,
    *,
    timeout: float = 30.0,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Drop a slot; return False if it does not exist.

    While the slot is in use, retries until `timeout`, then raises `SlotInUse`. The server notices that a reader died
    only after `wal_sender_timeout`.
    """
    backoff = Backoff(first=0.05, longest=1.0)
    deadline = time.monotonic() + timeout
    while True:
        try:
            with translated(connection, f"drop slot {name!r}", slot=name):
                connection.execute("select pg_catalog.pg_drop_replication_slot(%s)", [name])
            logger.info("slot dropped slot=%s", name)
            return True
        except SlotMissing:
            return False
        except SlotInUse as error:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise
            logger.debug("slot is in use slot=%s pid=%s", name, error.facts.get("pid"))
            sleep(min(backoff.next_delay(), max(0.0, remaining)))


def wait_until_created(connection: psycopg.Connection[Any], name: str) -> Slot | None:
    """Return a slot; None if it does not exist. Waits while another session creates it.

    That session may belong to a process that was killed: it waits for open transactions all the same.
    """
    is_told = False
    while (slot := inspect_slot(connection, name)) is not None and slot.plugin is not None:
        if slot.confirmed_flush_lsn is not None or slot.lost:
            break
        if not is_told:
            is_told = True
            logger.warning("waiting for the session that creates the slot slot=%s pid=%s", name, slot.active_pid)
        time.sleep(_CREATION_SECONDS)
    return slot


def require_usable(slot: Slot | None, name: str, *, database: str | None = None) -> Slot:
    """Return the slot if we can read from it; otherwise raise the error that says why not, and what to do.

    A slot that is in use counts as usable: only starting shows whether it still is.
    """
    if slot is None:
        raise SlotMissing(f"replication slot {name!r} does not exist", slot=name)
    if slot.plugin is None:
        raise SlotUnusable(f"slot {name!r} is a physical slot", slot=name)
    if slot.plugin != PLUGIN:
        raise SlotUnusable(f"slot {name!r} uses the plugin {slot.plugin!r}, not {PLUGIN!r}", slot=name)
    if database is not None and slot.database != database:
        raise SlotUnusable(f"slot {name!r} belongs to database {slot.database!r}, not {database!r}", slot=name)
    if slot.two_phase:
        raise SlotUnusable(
            f"slot {name!r} was created for two-phase commits, which Penstock does not decode",
            hint="Create it without two_phase: prepared transactions then arrive when they commit.",
            slot=name,
        )
    if slot.lost:
        reason = slot.invalidation_reason or ("a conflict with recovery" if slot.conflicting else "WAL was removed")
        raise SlotLost(f"slot {name!r} is lost: {reason.replace('_', ' ')}", slot=name, reason=reason)
    return slot


def check_slot_name(name: str) -> None:
    """Raise for a name that the server would refuse."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"invalid name for a replication slot: {name!r}",
            hint="Use at most 63 lower-case letters, digits and underscores.",
        )


def _slot_from(row: dict[str, Any]) -> Slot:
    def position(key: str) -> Lsn | None:
        return Lsn.parse(row[key]) if row.get(key) else None

    return Slot(
        name=row["slot_name"],
        plugin=row["plugin"],
        database=row["database"],
        active=row["active"],
        active_pid=row["active_pid"],
        restart_lsn=position("restart_lsn"),
        confirmed_flush_lsn=position("confirmed_flush_lsn"),
        wal_status=row["wal_status"],
        invalidation_reason=row.get("invalidation_reason"),
        conflicting=bool(row.get("conflicting")),
        temporary=row["temporary"],
        two_phase=bool(row.get("two_phase")),
        failover=bool(row.get("failover")),
        safe_wal_size=row.get("safe_wal_size"),
        waits_for_standby=row["wait_event"] == "WaitForStandbyConfirmation",
    )


def _no_failover() -> UnsupportedServer:
    return UnsupportedServer(
        "slots that survive a failover need PostgreSQL 17 or newer", hint="Remove failover_slot from [source]."
    )


def _blocked(connection: psycopg.Connection[Any], name: str, place: Place, timeout: float) -> SourceError:
    blockers = find_blockers(connection)
    return SlotUnusable(
        f"cannot create slot {name!r} ({place.where}): open transactions did not end within {timeout:g} s: "
        f"{name_blockers(blockers)}",
        hint="A slot starts after all earlier transactions have ended. Wait for them, or end them.",
        slot=name,
        blockers=[str(blocker) for blocker in blockers],
    )
