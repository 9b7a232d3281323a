"""Checks of the slot, if one is named."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ConfigError, SlotMissing, SourceError
from penstock.lsn import Lsn, distance
from penstock.source.preflight.context import Context
from penstock.source.preflight.report import Check, Severity, failed, passed
from penstock.source.preflight.server import LARGE_RETENTION_BYTES
from penstock.source.slots import check_slot_name, require_usable


def check_slot(context: Context) -> Iterator[Check]:
    """Can the slot be read from?"""
    name = context.request.slot
    if name is None:
        return
    try:
        check_slot_name(name)
        slot = require_usable(context.slot, name, database=context.connection.info.dbname)
    except SlotMissing:
        yield passed("slot", f"slot {name!r} does not exist; it is created at the first start")
        return
    except (SourceError, ConfigError) as error:
        yield failed("slot", Severity.CRITICAL, str(error), error.hint)
        return
    if slot.active:
        yield failed(
            "slot",
            Severity.WARNING,
            f"slot {name!r} is being read by pid {slot.active_pid}",
            "A slot has one reader: stop the other before you start.",
        )
    elif slot.wal_status == "unreserved":
        yield failed(
            "slot",
            Severity.CRITICAL,
            f"slot {name!r} is about to be lost: the next checkpoint removes WAL that it needs",
            "Start reading from it at once, or raise max_slot_wal_keep_size.",
        )
    else:
        yield passed("slot", f"slot {name!r} is ready, at {slot.confirmed_flush_lsn}")


def check_retention(context: Context) -> Iterator[Check]:
    """How much WAL does the slot keep on the server?"""
    slot = context.slot
    if slot is None or slot.restart_lsn is None:
        return
    function = "pg_last_wal_replay_lsn" if context.in_recovery else "pg_current_wal_lsn"
    position = Lsn.parse(str(context.value(f"select pg_catalog.{function}()")))
    kept = distance(slot.restart_lsn, position)
    what = f"slot {slot.name!r} keeps {kept / (1 << 20):.0f} MiB of WAL on the server"
    if kept > LARGE_RETENTION_BYTES:
        remedy = "Start reading from it, or drop it if nobody needs it: WAL can fill the server's disk."
        yield failed("slot_retention", Severity.WARNING, what, remedy)
    else:
        yield passed("slot_retention", what)


CHECKS = {"slot": check_slot, "slot_retention": check_retention}
