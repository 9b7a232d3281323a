"""Checks of the server: its version, role and settings, other slots and transactions, and our slot."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ConfigError, PenstockError, SlotLost, SlotMissing, SourceError
from penstock.lsn import Lsn, distance
from penstock.source.connections import Role, connect_replication
from penstock.source.lineage import identify_system
from penstock.source.preflight.context import Context
from penstock.source.preflight.report import Check, Severity, counted, failed, listed, passed
from penstock.source.slots import FAILOVER_SINCE, check_slot_name, find_blockers, require_usable

OLDEST_VERSION = 130000
STANDBY_SINCE = 160000
SMALL_KEEP_MEGABYTES = 1024
SHORT_SENDER_TIMEOUT_MILLISECONDS = 10_000
LONG_TRANSACTION_SECONDS = 60.0
LARGE_RETENTION_BYTES = 1 << 30


def check_version(context: Context) -> Iterator[Check]:
    """Is the server new enough?"""
    name = f"PostgreSQL {context.setting('server_version')}"
    if context.version < OLDEST_VERSION:
        yield failed(
            "server_version",
            Severity.CRITICAL,
            f"{name} is too old",
            "Upgrade to PostgreSQL 13 or newer; 15 or newer is recommended.",
        )
    else:
        yield passed("server_version", name)


def check_standby(context: Context) -> Iterator[Check]:
    """Is it a primary?"""
    if not context.in_recovery:
        yield passed("server_role", "the server is a primary")
    elif context.version < STANDBY_SINCE:
        yield failed(
            "server_role",
            Severity.CRITICAL,
            "the server is a standby, which supports logical decoding only since PostgreSQL 16",
            "Use the primary as the source, or upgrade.",
        )
    else:
        yield failed(
            "server_role",
            Severity.WARNING,
            "the server is a standby: publications must be created on the primary, and the slot can be invalidated",
            "Use the primary, or set hot_standby_feedback = on and a physical slot for this standby.",
        )


def check_wal_level(context: Context) -> Iterator[Check]:
    """Does the WAL contain what decoding needs?"""
    level = context.setting("wal_level")
    if level == "logical":
        yield passed("wal_level", "wal_level is logical")
    else:
        yield failed(
            "wal_level",
            Severity.CRITICAL,
            f"wal_level is {level}",
            "Run: alter system set wal_level = 'logical'; then restart the server.",
        )


def check_free_slots(context: Context) -> Iterator[Check]:
    """Is there room for our slot, and for the temporary slots of copies?"""
    limit = context.number("max_replication_slots") or 0
    used = int(context.value("select count(*) from pg_catalog.pg_replication_slots"))
    needed = 1 if context.slot is not None else 2
    free = limit - used
    what = f"{used} of {limit} replication slots are in use"
    remedy = "Raise max_replication_slots (needs a restart), or drop unused slots."
    if free >= needed:
        yield passed("replication_slots", what)
    else:
        severity = Severity.WARNING if free or context.slot is not None else Severity.CRITICAL
        yield failed("replication_slots", severity, f"{what}; the slot and the initial copy need {needed}", remedy)


def check_free_senders(context: Context) -> Iterator[Check]:
    """Is there room for another replication connection?"""
    limit = context.number("max_wal_senders") or 0
    # A connection that a check has just closed may still be listed, because the server ends it a moment later.
    used = int(
        context.value(
            "select count(*) from pg_catalog.pg_stat_replication where application_name not like %s", f"%:{Role.CHECK}"
        )
    )
    what = f"{used} of {limit} replication connections are in use"
    remedy = "Raise max_wal_senders (needs a restart), or close unused replication connections."
    if limit - used >= 2:
        yield passed("wal_senders", what)
    else:
        severity = Severity.WARNING if limit - used == 1 else Severity.CRITICAL
        yield failed("wal_senders", severity, what, remedy)


def check_replication_connection(context: Context) -> Iterator[Check]:
    """Can this role open a replication connection from here? Only trying tells, because of pg_hba.conf."""
    try:
        replication = connect_replication(context.settings, Role.CHECK)
        try:
            system = identify_system(replication)
        finally:
            replication.finish()
    except PenstockError as error:
        yield failed("replication_connection", Severity.CRITICAL, str(error), error.hint, error=error)
    else:
        yield passed(
            "replication_connection",
            f"replication connections work (system {system.system_identifier}, timeline {system.timeline})",
        )


def check_wal_retention(context: Context) -> Iterator[Check]:
    """How much WAL may a slot keep?"""
    keep = context.number("max_slot_wal_keep_size")
    if keep is None:
        return
    if keep == -1:
        yield failed(
            "slot_wal_keep_size",
            Severity.WARNING,
            "max_slot_wal_keep_size is unlimited: while Penstock is down, WAL can fill the server's disk",
            "Monitor the slot's lag, or set max_slot_wal_keep_size to what the disk can spare.",
        )
    elif keep == 0:
        yield failed(
            "slot_wal_keep_size",
            Severity.CRITICAL,
            "max_slot_wal_keep_size is 0: a slot that falls behind is lost at the next checkpoint",
            "Run: alter system set max_slot_wal_keep_size = '10GB'; select pg_reload_conf();",
        )
    elif keep < SMALL_KEEP_MEGABYTES:
        yield failed(
            "slot_wal_keep_size",
            Severity.WARNING,
            f"max_slot_wal_keep_size is only {keep} MB: the slot is lost if Penstock falls further behind than that",
            "Raise max_slot_wal_keep_size above the WAL that is written during the longest downtime you expect.",
        )
    else:
        yield passed("slot_wal_keep_size", f"max_slot_wal_keep_size is {keep} MB")


def check_idle_slot_timeout(context: Context) -> Iterator[Check]:
    """Does the server invalidate idle slots (18 and newer)?"""
    seconds = context.number("idle_replication_slot_timeout")
    if seconds is None:
        return
    if seconds == 0:
        yield passed("idle_slot_timeout", "idle slots are not invalidated")
    else:
        yield failed(
            "idle_slot_timeout",
            Severity.WARNING,
            f"idle_replication_slot_timeout is {seconds} s: the slot is lost if Penstock is down for longer than that",
            "Set it above the longest downtime you expect, or to 0 to disable it.",
        )


def check_sender_timeout(context: Context) -> Iterator[Check]:
    """When does the server disconnect a silent reader?"""
    timeout = context.number("wal_sender_timeout") or 0
    if timeout == 0:
        yield failed(
            "wal_sender_timeout",
            Severity.WARNING,
            "wal_sender_timeout is off: if the reader's machine crashes, the slot stays in use until TCP times out",
            "Set wal_sender_timeout to its default, 60s.",
        )
    elif timeout < SHORT_SENDER_TIMEOUT_MILLISECONDS:
        yield failed(
            "wal_sender_timeout",
            Severity.WARNING,
            f"wal_sender_timeout is only {timeout} ms: short network interruptions end the connection",
            "Set wal_sender_timeout to its default, 60s.",
        )
    else:
        yield passed("wal_sender_timeout", f"wal_sender_timeout is {timeout // 1000} s")


def check_encoding(context: Context) -> Iterator[Check]:
    """Is text in a known encoding?"""
    encoding = context.setting("server_encoding")
    if encoding == "SQL_ASCII":
        yield failed(
            "encoding",
            Severity.WARNING,
            "the database has no encoding (SQL_ASCII): Penstock cannot read bytes that are not UTF-8",
            "Make sure that all text is UTF-8, or move the data to a UTF-8 database.",
        )
    else:
        yield passed("encoding", f"the database's encoding is {encoding}")


def check_decoding_memory(context: Context) -> Iterator[Check]:
    """How much does the server buffer before it streams or spills?"""
    kilobytes = context.number("logical_decoding_work_mem")
    if kilobytes is not None:
        yield passed(
            "decoding_memory",
            f"logical_decoding_work_mem is {kilobytes} kB; larger transactions are streamed or spilled to disk",
        )


def check_open_transactions(context: Context) -> Iterator[Check]:
    """Would creating a slot have to wait?"""
    blockers = find_blockers(context.connection)
    long = [blocker for blocker in blockers if blocker.kind != "session" or _is_long(blocker.seconds)]
    if not long:
        yield passed("open_transactions", "no long-running transaction delays new slots and snapshots")
        return
    names = [str(blocker) for blocker in long]
    yield failed(
        "open_transactions",
        Severity.WARNING,
        f"new slots and the initial copy wait for {counted(names, 'open transaction')}: {listed(names, 3)}",
        "Wait until they end, or end them (pg_terminate_backend, rollback prepared).",
        names,
    )


def check_other_slots(context: Context) -> Iterator[Check]:
    """Do inactive slots retain WAL?"""
    position = "pg_catalog.pg_last_wal_replay_lsn()" if context.in_recovery else "pg_catalog.pg_current_wal_lsn()"
    rows = context.rows(
        f"""
        select slot_name, pg_catalog.pg_wal_lsn_diff({position}, restart_lsn)::int8
        from pg_catalog.pg_replication_slots
        where not active and restart_lsn is not null and slot_name <> %s
          and pg_catalog.pg_wal_lsn_diff({position}, restart_lsn) > %s
        order by 2 desc
        """,  # noqa: S608 (one of two constants)
        context.request.slot or "",
        LARGE_RETENTION_BYTES,
    )
    if not rows:
        yield passed("other_slots", "no inactive slot retains much WAL")
        return
    names = [f"{name} ({size / (1 << 30):.1f} GiB)" for name, size in rows]
    yield failed(
        "other_slots",
        Severity.WARNING,
        f"the server's disk retains WAL for {counted(names, 'inactive slot')}: {listed(names)}",
        "Drop unused slots: select pg_drop_replication_slot('<name>');",
        names,
    )


def _is_long(seconds: float | None) -> bool:
    return seconds is not None and seconds >= LONG_TRANSACTION_SECONDS


def check_slot(context: Context) -> Iterator[Check]:
    """Can we read from the slot?"""
    name = context.request.slot
    if name is None:
        return
    try:
        check_slot_name(name)
        slot = require_usable(context.slot, name, database=context.connection.info.dbname)
    except (SlotMissing, SlotLost) as error:
        request = context.request
        is_missing = isinstance(error, SlotMissing)
        what = f"{error}, and with it changes of tables that were already copied are lost" if is_missing else str(error)
        if is_missing and not request.needs_slot:
            yield passed("slot", f"slot {name!r} does not exist; Penstock creates it at the first start")
        elif request.recreates_slot:
            remedy = 'Run: penstock run; with on_lost_slot = "recreate" it copies every table again.'
            yield failed("slot", Severity.WARNING, what, remedy)
        else:
            yield failed("slot", Severity.CRITICAL, what, error.hint)
        return
    except (SourceError, ConfigError) as error:
        yield failed("slot", Severity.CRITICAL, str(error), error.hint)
        return
    if slot.active:
        yield failed(
            "slot",
            Severity.WARNING,
            f"slot {name!r} is in use by pid {slot.active_pid}",
            "A slot has one reader: stop the other one first.",
        )
    elif slot.wal_status == "unreserved":
        yield failed(
            "slot",
            Severity.WARNING,  # critical would keep the pipeline from starting, which is the remedy
            f"slot {name!r} is about to be lost: the next checkpoint removes WAL that the slot needs",
            "Run: penstock run.",
        )
    else:
        yield passed("slot", f"slot {name!r} is ready, at {slot.confirmed_flush_lsn}")


def check_failover(context: Context) -> Iterator[Check]:
    """Would the slot survive a failover to a standby?"""
    if context.in_recovery or context.request.slot is None:
        return
    standbys = context.rows(
        "select slot_name::text from pg_catalog.pg_replication_slots where slot_type = 'physical' and not temporary"
        " union select application_name from pg_catalog.pg_stat_replication r where not exists"
        " (select from pg_catalog.pg_replication_slots s where s.active_pid = r.pid)"
    )
    names = [str(name) for (name,) in standbys]
    what = f"after a failover to a standby ({listed(names, 3)})"
    if not names:
        yield passed("slot_failover", "the server has no standby, so there is no failover to prepare for")
    elif context.version < FAILOVER_SINCE:
        yield failed(
            "slot_failover",
            Severity.WARNING,
            f"{what} every table is copied again: standbys copy logical slots only from PostgreSQL 17 on",
            "Upgrade, or let an extension or your cluster manager copy the slot.",
        )
    elif context.request.failover_slot is False or (
        context.slot is not None and not context.slot.failover and not context.request.failover_slot
    ):
        yield failed(
            "slot_failover",
            Severity.WARNING,
            f"{what} every table is copied again: standbys do not copy the slot",
            "Set failover_slot = true in [source], and on the standby: sync_replication_slots = on, "
            "hot_standby_feedback = on, primary_slot_name, and dbname in primary_conninfo.",
        )
    elif not context.setting("synchronized_standby_slots"):
        yield failed(
            "slot_failover",
            Severity.WARNING,
            f"{what} tables may have to be copied again: Penstock may receive changes before the standby",
            "Run: alter system set synchronized_standby_slots = '<physical slot of the standby>'; "
            "select pg_reload_conf();",
        )
    else:
        yield passed(
            "slot_failover",
            "standbys with sync_replication_slots = on copy the slot, and changes wait for "
            f"{context.setting('synchronized_standby_slots')}",
        )


def check_retention(context: Context) -> Iterator[Check]:
    """How much WAL does the slot retain on the server?"""
    slot = context.slot
    if slot is None or slot.restart_lsn is None:
        return
    function = "pg_last_wal_replay_lsn" if context.in_recovery else "pg_current_wal_lsn"
    position = Lsn.parse(str(context.value(f"select pg_catalog.{function}()")))
    kept = distance(slot.restart_lsn, position)
    what = f"slot {slot.name!r} retains {kept / (1 << 20):.0f} MiB of WAL on the server"
    if kept > LARGE_RETENTION_BYTES:
        remedy = "Start the pipeline, or drop the slot if it is unused: WAL can fill the server's disk."
        yield failed("slot_retention", Severity.WARNING, what, remedy)
    else:
        yield passed("slot_retention", what)


CHECKS = {
    "server_version": check_version,
    "server_role": check_standby,
    "wal_level": check_wal_level,
    "replication_connection": check_replication_connection,
    "replication_slots": check_free_slots,
    "wal_senders": check_free_senders,
    "slot_wal_keep_size": check_wal_retention,
    "idle_slot_timeout": check_idle_slot_timeout,
    "wal_sender_timeout": check_sender_timeout,
    "encoding": check_encoding,
    "decoding_memory": check_decoding_memory,
    "open_transactions": check_open_transactions,
    "other_slots": check_other_slots,
}
SLOT_CHECKS = {"slot": check_slot, "slot_failover": check_failover, "slot_retention": check_retention}
