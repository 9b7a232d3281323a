"""The capture engine: writes a slot's changes to the spool until it is stopped.

Three threads. One reads from the server and answers it. One decodes and writes. One does the housekeeping, even without
a connection: it deletes what all readers have finished, confirms holds for copies, and computes what to acknowledge.
After a broken connection, capture reconnects and continues from the end of the spool. Changes that were read but not
published are discarded, because the server sends them again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import psycopg

from penstock.capture.assembler import Assembler, AssemblerSettings
from penstock.capture.parcels import Parcel, ParcelQueue
from penstock.capture.relations import CatalogResolver
from penstock.capture.session import ReplicationSession, StartOptions
from penstock.capture.streams import OpenStreams
from penstock.errors import PenstockError, Retry, ServerUnavailable, SlotInUse, SlotLost
from penstock.lsn import Lsn, earliest, furthest, reaches
from penstock.retry import Backoff
from penstock.schema import quote_identifier
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect, connect_replication, run_command
from penstock.source.faults import WAL_REMOVED, translated
from penstock.source.lineage import Ancestry, Lineage, identify_system, is_in_recovery
from penstock.source.publications import require_publication
from penstock.source.slots import inspect_slot, require_usable
from penstock.spool import SpoolSettings, SpoolWriter, Stopping

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What to capture, and how."""

    source: SourceSettings
    slot: str
    publication: str
    spool: SpoolSettings
    temporary: bool = False
    """The slot is created on this connection, and ends with it."""
    start: Lsn | None = None
    """Where a new spool begins; None for the slot's position."""
    lineage: Lineage | None = None
    """Where the positions of readers come from that registered in a new spool."""
    acknowledge: bool = True
    """Acknowledge what the readers of the spool have finished. If False, the slot stays where it is."""
    streaming: bool = True
    queue_bytes: int = 32 << 20
    """Limit of bytes that are read but not decoded yet."""
    publish_seconds: float = 0.1
    """How long a committed transaction waits to be published if no other transaction arrives."""
    longest_publish_seconds: float = 1.0
    """How long it waits while more changes arrive, unless a block is full; longer if publishing takes long."""
    assembler: AssemblerSettings = field(default_factory=AssemblerSettings)


class Reading(StrEnum):
    """What capture is doing."""

    CONNECTING = "connecting"
    STREAMING = "streaming"
    SPOOL_FULL = "spool full"
    DISK_FULL = "disk full"
    RETRYING = "retrying"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """The state of capture as reported to its supervisor."""

    reading: Reading
    captured: Lsn | None = None
    acknowledged: Lsn | None = None
    unreleased_bytes: int = 0
    error: PenstockError | None = None
    """Why it is retrying."""


class Capture:
    """Runs in a process of its own (`penstock.capture.process`), or in the threads of a test."""

    def __init__(
        self,
        settings: CaptureSettings,
        stop: threading.Event,
        report: Callable[[CaptureStatus], None] = lambda status: None,
    ) -> None:
        self._settings = settings
        self._stop = stop
        self._report = report
        self._backoff = Backoff(first=0.2, longest=15.0)
        self._acknowledged = Lsn(0)
        self._reporting = threading.Lock()
        self._connected = False
        self._house_error: BaseException | None = None
        self._missed_from: Lsn | None = None
        """Where the slot began when the server missed WAL that it was reading."""

    def run(self) -> None:
        """Capture until stopped; raise errors that a retry cannot fix."""
        self._report(CaptureStatus(Reading.CONNECTING))
        writer = SpoolWriter(self._settings.spool, self._stop)
        ended = threading.Event()
        house = threading.Thread(target=self._keep_house, args=(writer, ended), name="keep-house")
        house.start()
        try:
            while not self._stop.is_set():
                self._check_house()
                try:
                    self._run_once(writer)
                except Stopping:
                    break
                except PenstockError as error:
                    if error.retry is not Retry.TIMED or self._settings.temporary:
                        raise
                    level, delay = self._backoff.log_level, self._backoff.next_delay()
                    logger.log(level, "capture failed, retrying in=%.1fs error=%s", delay, error)
                    self._report(CaptureStatus(Reading.RETRYING, writer.end, self._acknowledged, error=error))
                    self._stop.wait(delay)
        finally:
            # Last, because the decoding thread may be waiting for the room that housekeeping makes.
            ended.set()
            house.join()
            writer.close()
            self._report(CaptureStatus(Reading.STOPPED, writer.end, self._acknowledged))

    def _run_once(self, writer: SpoolWriter) -> None:
        """Run one connection until it breaks or capture is stopped."""
        settings = self._settings
        writer.discard_unpublished()
        with ExitStack() as stack:
            catalog = stack.enter_context(connect(settings.source, Role.CATALOG, parameters=NO_TIMEOUTS))
            require_publication(catalog, settings.publication)
            messages = bool(settings.assembler.message_prefixes or settings.assembler.ddl_trigger)
            options = StartOptions(
                slot=settings.slot,
                publications=(settings.publication,),
                # When streamed, logical messages of rolled-back savepoints have the xid of the whole transaction.
                streaming=settings.streaming and not messages,
                messages=messages,
            )
            if not settings.temporary:
                require_usable(inspect_slot(catalog, settings.slot), settings.slot, database=catalog.info.dbname)
            session = ReplicationSession(settings.source, options)
            try:
                self._start(session, writer, catalog, stack)
                resolver = CatalogResolver(catalog, writer.schemas, settings.assembler.ddl_trigger)
                streams = OpenStreams(writer.open_folder, writer.disk)
                assembler = Assembler(writer, resolver, streams, settings.assembler)
                self._run_threads(session, writer, assembler, _sender_timeout(catalog))
            except SlotLost as error:
                self._require_lost(error, catalog)
                raise
            finally:
                session.close()

    def _require_lost(self, error: SlotLost, catalog: psycopg.Connection[Any]) -> None:
        """Raise an error that time heals if the server removed WAL that it was reading, but the slot is not lost.

        What an earlier reader prepared and did not confirm can move the beginning of the slot past the place where this
        one reads. From that beginning on, all WAL is there.
        """
        if error.facts.get("sqlstate") not in WAL_REMOVED:
            return
        slot = inspect_slot(catalog, self._settings.slot)
        if slot is not None and not slot.lost and slot.restart_lsn not in (None, self._missed_from):
            self._missed_from = slot.restart_lsn
            raise ServerUnavailable(error.message, hint="Penstock reads the slot again from where it begins now.")

    def _start(
        self, session: ReplicationSession, writer: SpoolWriter, catalog: psycopg.Connection[Any], stack: ExitStack
    ) -> None:
        """Determine the start position, raise if the server does not have it, and start there."""
        settings = self._settings
        reader: int | None = None
        known = writer.ancestry
        if known is not None:
            # Before the slot: that of a former primary may be lost.
            identify_system(session.connection).ancestry(settings.slot).refuse_former(known.current)
        if settings.temporary:
            confirmed = _create_temporary_slot(session, settings.slot)
        else:
            slot = require_usable(inspect_slot(catalog, settings.slot), settings.slot)
            confirmed = slot.confirmed_flush_lsn or Lsn(0)
            reader = slot.active_pid
        # After the slot: creating one writes WAL, and its position may be after that.
        system = identify_system(session.connection)
        ancestry = system.ancestry(settings.slot)
        needed = writer.needed_from()
        lineage = known.current if known is not None else settings.lineage
        if needed is None:
            needed = settings.start if settings.start is not None else confirmed
        elif lineage is not None:
            # Also after each reconnect: another server may have taken over.
            ancestry.require(lineage, needed)
        if not reaches(needed, confirmed):
            if reader is not None:
                # First of all somebody has to end that: it would move the next slot, too.
                raise SlotInUse(
                    f"slot {settings.slot!r} is read by server process {reader}", slot=settings.slot, pid=reader
                )
            raise SlotLost(
                f"slot {settings.slot!r} is at {confirmed}, after the position {needed} at which capture must resume: "
                "another program has read from it, and the changes in between are lost",
                slot=settings.slot,
            )
        # Started from a position that it has not reached, the server would send nothing and report no error.
        system.require_reached(needed)
        session.start(needed)
        if known is not None and ancestry.follows(known):
            logger.warning("another server took over timeline=%d position=%s", ancestry.current.timeline, needed)
        writer.begin_at(needed, ancestry, self._asking(stack) if is_in_recovery(catalog) else None)
        self._acknowledged = furthest(self._acknowledged, confirmed)

    def _asking(self, stack: ExitStack) -> Callable[[], Ancestry]:
        """Return what asks a standby for its ancestry: its connections survive if it or its primary is promoted."""
        settings = self._settings
        connection = connect_replication(settings.source, Role.SLOT)
        stack.callback(connection.finish)
        return lambda: identify_system(connection).ancestry(settings.slot)

    def _run_threads(
        self, session: ReplicationSession, writer: SpoolWriter, assembler: Assembler, sender_timeout: float
    ) -> None:
        """Read in this thread and decode in another; the first error ends both."""
        ended = threading.Event()
        errors: list[BaseException] = []
        queue = ParcelQueue(self._settings.queue_bytes)

        def guarded(work: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                try:
                    work()
                except BaseException as error:
                    errors.append(error)
                finally:
                    ended.set()

            return run

        decoder = threading.Thread(target=guarded(lambda: self._decode(queue, writer, assembler, ended)), name="decode")
        decoder.start()
        self._connected = True
        stopper = threading.Thread(target=lambda: (self._wait_for_either(ended), ended.set()), name="stop")
        stopper.start()
        try:
            guarded(
                lambda: session.read(
                    queue,
                    lambda: self._acknowledged,
                    ended,
                    # Answer well within the server's timeout; our own timeout is at least as long.
                    answer_seconds=min(10.0, sender_timeout / 4),
                    silence_seconds=max(10.0, sender_timeout),
                )
            )()
        finally:
            for thread in (decoder, stopper):
                thread.join()
            with self._reporting:
                self._connected = False
        self._check_house()
        real = [error for error in errors if not isinstance(error, Stopping)]
        if real:
            raise real[0]
        session.finish(self._acknowledged)

    def _wait_for_either(self, ended: threading.Event) -> None:
        while not ended.is_set() and self._house_error is None and not self._stop.wait(0.05):
            pass

    def _decode(self, queue: ParcelQueue, writer: SpoolWriter, assembler: Assembler, ended: threading.Event) -> None:
        """Feed the assembler, and publish when a transaction has waited long enough."""
        settings = self._settings
        waiting_since: float | None = None
        publishing_took = 0.0
        while not ended.is_set():
            item = queue.get(settings.publish_seconds / 2)
            if isinstance(item, Parcel):
                writer.wait_for_room(ended)
                assembler.feed(item)
            elif item is not None:
                assembler.keepalive(item)
            if item is not None:
                # Progress: rare errors must not add up. A message that cannot be decoded is no progress.
                self._backoff.reset()
            now = time.monotonic()
            if not assembler.has_committed:
                waiting_since = None
                writer.flush_position()
                continue
            waiting_since = waiting_since or now
            patience = settings.publish_seconds
            if not queue.is_empty:
                # With hundreds of tables publishing is expensive: while behind, it takes at most a quarter of the time.
                patience = max(settings.longest_publish_seconds, 3 * publishing_took)
            if now - waiting_since >= patience:
                assembler.publish()
                waiting_since = None
                publishing_took = time.monotonic() - now
        if self._stop.is_set():
            assembler.publish()

    def _keep_house(self, writer: SpoolWriter, ended: threading.Event) -> None:
        reported = 0.0
        try:
            while not ended.wait(0.05):
                floor = writer.tick()
                if self._settings.acknowledge and floor is not None and writer.end is not None:
                    self._acknowledged = furthest(self._acknowledged, earliest(floor, writer.end))
                with self._reporting:
                    if self._connected and time.monotonic() - reported >= 0.2:
                        reported = time.monotonic()
                        self._report(
                            CaptureStatus(_reading(writer), writer.end, self._acknowledged, writer.unreleased_bytes)
                        )
        except BaseException as error:
            self._house_error = error

    def _check_house(self) -> None:
        if self._house_error is not None:
            raise self._house_error


def _reading(writer: SpoolWriter) -> Reading:
    if writer.disk.full:
        return Reading.DISK_FULL
    return Reading.SPOOL_FULL if writer.is_full else Reading.STREAMING


def _sender_timeout(catalog: psycopg.Connection[Any]) -> float:
    """Seconds after which the server disconnects a silent reader; five minutes if it never does."""
    with translated(catalog, "read wal_sender_timeout"):
        row = catalog.execute(
            "select setting::int8 from pg_catalog.pg_settings where name = 'wal_sender_timeout'"
        ).fetchone()
    return (int(row[0]) if row else 60_000) / 1000 or 300.0


def _create_temporary_slot(session: ReplicationSession, slot: str) -> Lsn:
    command = f"CREATE_REPLICATION_SLOT {quote_identifier(slot)} TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT"
    rows = run_command(session.connection, command, f"create the temporary slot {slot!r}", timeout=None, slot=slot)
    return Lsn.parse(rows[0][1] or "0/0")
