"""Watches a stream's slot and spool while it runs, and warns before something runs out."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from typing import Any

import psycopg

from penstock.headroom import Headroom, Overrun, Room, RoomWatch
from penstock.lsn import distance
from penstock.source.lineage import flushed_position
from penstock.source.slots import inspect_slot
from penstock.spool import SpoolSettings

logger = logging.getLogger(__name__)


class Guard:
    """The watch of one stream; `look` is called every few seconds."""

    def __init__(self, slot: str, spool: SpoolSettings, max_retained_wal: int) -> None:
        self.headroom = Headroom()
        """What was left at the last look."""
        self.excess: int | None = None
        """WAL that the server retains for the slot, if that has been more than the limit for long."""
        self._slot = slot
        self._spool = spool
        self._max_retained_wal = max_retained_wal
        self._spool_room = RoomWatch(self._warn_of_spool)
        self._wal_room = RoomWatch(self._warn_of_wal)
        self._overrun = Overrun()
        self._waits_for_standby = False

    def look(self, connection: psycopg.Connection[Any], captured: int) -> None:
        """Look at what is left; `captured` is the size of what waits in the spool."""
        now = time.monotonic()
        in_spool = {"spool.max_bytes": self._spool.max_bytes - captured}
        # A disk that is not there is capture's error.
        with suppress(OSError):
            disk = os.statvfs(self._spool.path)
            in_spool["spool.min_free_bytes"] = disk.f_bavail * disk.f_frsize - self._spool.min_free_bytes
        spool = self._spool_room.look(now, captured, in_spool)
        slot = inspect_slot(connection, self._slot)
        if slot is None or slot.restart_lsn is None:
            self.headroom = Headroom(spool)
            return
        retained = distance(slot.restart_lsn, flushed_position(connection))
        left = {"max_retained_wal": self._max_retained_wal - retained}
        if slot.safe_wal_size is not None:
            left["max_slot_wal_keep_size"] = slot.safe_wal_size
        self.headroom = Headroom(spool, self._wal_room.look(now, retained, left))
        self.excess = retained if self._overrun.lasts(now, retained, self._max_retained_wal) else None
        self._report_standby(waits=slot.waits_for_standby)

    def _report_standby(self, *, waits: bool) -> None:
        if waits and not self._waits_for_standby:
            text = "the server waits for a standby in synchronized_standby_slots before it sends changes slot=%s"
            logger.warning(text, self._slot)
        self._waits_for_standby = waits

    def _warn_of_spool(self, room: Room) -> None:
        text = "the spool is nearly full; then capture pauses, and the server retains WAL path=%s left=%d%s limit=%s"
        logger.warning(text, self._spool.path, room.left, _lasting(room), room.limit)

    def _warn_of_wal(self, room: Room) -> None:
        text = "the server retains much WAL for the slot slot=%s retained=%d left=%d%s limit=%s"
        logger.warning(text, self._slot, room.used, room.left, _lasting(room), room.limit)


def _lasting(room: Room) -> str:
    return "" if room.seconds_left is None else f" for={room.seconds_left / 60:.0f}min"
