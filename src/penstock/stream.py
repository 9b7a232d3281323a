"""A stream: one publication, one slot, one capture process and one spool, shared by the outputs that read it.

Each output is registered in the spool by name before anything is read, and stays registered while it is stopped: the
slot follows the slowest output. Opening a stream needs the leases of all outputs, because a new or lost slot affects
all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import psycopg

from penstock import failpoints
from penstock.capture import CaptureProcess, CaptureSettings, CaptureStatus
from penstock.capture.assembler import AssemblerSettings
from penstock.errors import (
    LineageChanged,
    NotIdentified,
    PenstockError,
    PermissionDenied,
    PositionAhead,
    SlotDiscarded,
    SlotLost,
    SlotMissing,
    SlotUndecodable,
)
from penstock.guard import Guard
from penstock.headroom import Headroom
from penstock.lsn import Lsn, earliest, reaches
from penstock.retry import Backoff
from penstock.source.connections import CATALOG_LIMITS, Role, SourceSettings, connect, connect_replication
from penstock.source.ddl_trigger import DdlTrigger
from penstock.source.faults import is_lock_timeout
from penstock.source.lineage import Lineage, SystemIdentity, identify_system, read_timeline, refuse_former
from penstock.source.membership import Membership, load_membership
from penstock.source.publications import (
    EnsuredPublication,
    drop_publication,
    ensure_publication,
    find_left_out,
    inspect_publication,
)
from penstock.source.shapes import TableShape, load_shapes
from penstock.source.slots import (
    Slot,
    alter_slot,
    can_fail_over,
    create_slot,
    drop_slot,
    inspect_slot,
    require_usable,
    wait_until_created,
)
from penstock.spool import Holds, Readers, SpoolReader, SpoolSettings
from penstock.spool.folder import SpoolFolder
from penstock.spool.lineage import load_ancestry
from penstock.spool.partitions import load_mentioned_leaves
from penstock.state import Store, StoredProgress
from penstock.state.positions import start_position
from penstock.values import TypeSettings

logger = logging.getLogger(__name__)


class OnLostSlot(StrEnum):
    """What to do when the slot is lost, and with it the changes since."""

    ERROR = "error"
    RECREATE = "recreate"
    """Create a new slot and copy every table again."""


class OnRetainedWal(StrEnum):
    """What to do when the server retains more WAL for the slot than `max_retained_wal`."""

    WARN = "warn"
    RELEASE = "release"
    """Drop the slot, so that the server can delete the WAL; then `on_lost_slot` decides."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a stream reads, from where, and where its spool is."""

    id: str
    source: SourceSettings
    publication: str
    slot: str
    spool: SpoolSettings
    tables: tuple[str, ...] = ("*.*",)
    exclude: tuple[str, ...] = ()
    manage_publication: bool = True
    generated_columns: bool | None = None
    """Publish stored generated columns; None leaves the publication as it is."""
    unidentified: frozenset[str] = frozenset()
    """Names of tables that are published although the server then rejects their updates and deletes."""
    on_lost_slot: OnLostSlot = OnLostSlot.ERROR
    failover_slot: bool | None = None
    """Standbys keep a copy of the slot (PostgreSQL 17). None: a new slot has it where the server supports it, and an
    existing slot stays as it is."""
    max_retained_wal: int = 50 << 30
    """How much WAL the server may retain for the slot, in bytes."""
    on_retained_wal: OnRetainedWal = OnRetainedWal.WARN
    types: TypeSettings = field(default_factory=TypeSettings)
    ddl_trigger: bool = False
    """Record DDL in the stream with an event trigger on the source (`penstock.source.ddl_trigger`). The server then
    sends large transactions when they commit, and does not stream them while they run."""

    @property
    def trigger(self) -> DdlTrigger:
        """The trigger that `ddl_trigger` creates on the source."""
        return DdlTrigger(self.slot, self.publication)


@dataclass(frozen=True, slots=True)
class Published:
    """The publication at one moment."""

    membership: Membership
    tables: Mapping[int, str]
    """Names by table id, of tables that have columns."""
    unpublished: Mapping[str, PenstockError]
    """Tables that should be published and cannot be, by name."""
    shapes: Mapping[int, TableShape] = field(default_factory=dict[int, TableShape])
    """By table id: whether rows changed although the stream does not say so."""
    leaves: Mapping[int, Mapping[int, Lsn]] = field(default_factory=dict[int, Mapping[int, Lsn]])
    """By table id: the leaves that the stream has described, with their positions (`penstock.spool.partitions`)."""


def load_left_out(connection: psycopg.Connection[Any], settings: StreamSettings) -> Mapping[str, NotIdentified]:
    """Return the tables that match and are not published, so that their updates and deletes are not rejected."""
    if not settings.manage_publication:
        return {}
    return find_left_out(
        connection,
        inspect_publication(connection, settings.publication),
        settings.tables,
        settings.exclude,
        generated_columns=settings.generated_columns,
        unidentified=settings.unidentified,
    )


class Stream:
    """An open stream. Thread-safe."""

    def __init__(
        self,
        settings: StreamSettings,
        outputs: Mapping[str, Store],
        starts: Mapping[str, Lsn],
        capture: CaptureProcess,
    ) -> None:
        self._settings = settings
        self._outputs = outputs
        self._starts = starts
        self._capture = capture
        self._publication = _PublicationKeeper(settings)
        self._without_columns: set[str] = set()
        self._guard = Guard(settings.slot, settings.spool, settings.max_retained_wal)
        self._released: SlotLost | None = None
        self._is_discarded = False

    def start_of(self, output: str) -> Lsn:
        """Return where an output starts to read."""
        return self._starts[output]

    @property
    def capture(self) -> CaptureStatus:
        """The last report of capture."""
        return self._capture.last_status

    @property
    def headroom(self) -> Headroom:
        """What was left at the last refresh."""
        return self._guard.headroom

    @property
    def unpublished(self) -> Mapping[str, PenstockError]:
        """Tables that should be published and cannot be, as of the last refresh, with the server's reason."""
        return self._publication.refused

    def wait_until_streaming(self) -> None:
        """Wait until capture reads the slot; raise what prevents it."""
        with self._noticing():
            self._capture.wait_until_streaming()

    def check(self) -> None:
        """Raise the error that ended capture for good, if there is one."""
        if self._released is not None:
            raise self._released
        with self._noticing():
            self._capture.check()

    def refresh(self) -> Published:
        """Bring the publication up to date, if Penstock manages it, and load it.

        Waits for locks at most as long as `CATALOG_LIMITS` allows. A table that cannot be published is retried later.
        """
        with connect(self._settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
            if (captured := load_ancestry(SpoolFolder(self._settings.spool.path))) is not None:
                refuse_former(read_timeline(connection), captured.current)  # before anything is created there
            if self._settings.manage_publication:
                self._publication.ensure(connection)
            membership = load_membership(connection, self._settings.publication)
            # Before the catalog, so that a leaf that is mentioned and not there any more has gone.
            leaves = load_mentioned_leaves(SpoolFolder(self._settings.spool.path))
            shapes = load_shapes(connection, membership.names)
            self._look(connection)
        tables = {oid: name for oid, name in membership.names.items() if oid in shapes and shapes[oid].columns}
        self._report_without_columns({name for oid, name in membership.names.items() if oid not in tables})
        return Published(membership, tables, self.unpublished, shapes, leaves)

    def _report_without_columns(self, names: set[str]) -> None:
        for name in sorted(names - self._without_columns):
            logger.info("table is skipped until it has columns table=%s", name)
        self._without_columns = names

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        """Look at what is left for the spool and for WAL on the server; let go of the slot if the settings say so."""
        self._guard.look(connection, self._capture.last_status.unreleased_bytes)
        if self._guard.excess is not None and self._settings.on_retained_wal is OnRetainedWal.RELEASE:
            self._release(connection, self._guard.excess)

    def _release(self, connection: psycopg.Connection[Any], retained: int) -> None:
        name = self._settings.slot
        self._capture.stop()
        drop_slot(connection, name)
        self._released = SlotLost(
            f"Penstock dropped slot {name!r}, because the server retained {retained:,} bytes of WAL for it, more than "
            "max_retained_wal",
            slot=name,
        )

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except SlotUndecodable as error:
            if not self._is_dispensable():
                raise
            self._is_discarded = True
            raise SlotDiscarded(error.message, slot=self._settings.slot) from None

    def _is_dispensable(self) -> bool:
        """True if nothing depends on the slot, or everything may be copied again: the next start creates another."""
        return self._settings.on_lost_slot is OnLostSlot.RECREATE or not any(
            store.needs_every_change for store in self._outputs.values()
        )

    def drop_discarded(self) -> None:
        """Drop a slot that cannot be decoded, unless something depends on it by now."""
        if self._is_discarded and self._is_dispensable():
            with connect(self._settings.source, Role.CATALOG) as connection:
                drop_slot(connection, self._settings.slot)
            logger.warning("dropped a slot that cannot be decoded slot=%s", self._settings.slot)


@contextmanager
def open_stream(settings: StreamSettings, outputs: Mapping[str, Store]) -> Iterator[Stream]:
    """Run capture inside, so that changes flow into the spool. The caller holds the leases of these stores.

    On exit, capture publishes complete transactions, answers the server and ends. If the block raises, the start has
    failed: what it has created on the server is removed.
    """
    opening = _Opening(settings, outputs)
    with opening.undone_on_error(), _capturing(settings, outputs, opening) as stream:
        yield stream


@contextmanager
def _capturing(settings: StreamSettings, outputs: Mapping[str, Store], opening: _Opening) -> Iterator[Stream]:
    starts = opening.prepare()
    with CaptureProcess(
        CaptureSettings(
            source=settings.source,
            slot=settings.slot,
            publication=settings.publication,
            spool=settings.spool,
            lineage=opening.lineage,
            assembler=AssemblerSettings(
                types=settings.types.keeping(),
                ddl_trigger=settings.trigger if settings.ddl_trigger else None,
            ),
        )
    ) as capture:
        stream = Stream(settings, outputs, starts, capture)
        try:
            stream.wait_until_streaming()
            yield stream
        finally:
            capture.stop()
            stream.drop_discarded()


class _PublicationKeeper:
    """Keeps a managed publication up to date, and remembers which tables are not published, and why."""

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._refused: dict[str, _Refused] = {}
        self._left_out: Mapping[str, PenstockError] = {}

    @property
    def refused(self) -> Mapping[str, PenstockError]:
        with self._lock:
            return {name: each.error for name, each in self._refused.items()} | dict(self._left_out)

    def ensure(self, connection: psycopg.Connection[Any]) -> None:
        """Publish what the patterns name; log each refusal once, and try it again after a while."""
        with self._lock:
            now = time.monotonic()
            waiting = {name for name, each in self._refused.items() if now < each.next_at}
            ensured = _ensure_publication(connection, self._settings, waiting)
            for name in ensured.left_out.keys() - self._left_out.keys():
                error = ensured.left_out[name]
                logger.warning("%s. %s", error, error.hint)
            for name in self._left_out.keys() - ensured.left_out.keys():
                logger.info("table is no longer left out table=%s", name)
            self._left_out = ensured.left_out
            for name in self._refused.keys() - ensured.refused.keys() - waiting:
                logger.info("table is no longer refused by the server table=%s", name)
                del self._refused[name]
            for name, error in ensured.refused.items():
                known = self._refused.get(name)
                if known is None or known.error.message != error.message:
                    logger.warning("table cannot be published, Penstock retries later table=%s error=%s", name, error)
                backoff = known.backoff if known is not None else Backoff(first=5.0, longest=300.0)
                self._refused[name] = _Refused(error, backoff, now + backoff.next_delay())


@dataclass(frozen=True, slots=True)
class _Refused:
    error: PenstockError
    backoff: Backoff
    next_at: float


def _ensure_publication(
    connection: psycopg.Connection[Any], settings: StreamSettings, later: Collection[str] = ()
) -> EnsuredPublication:
    """`later` names tables that are not tried now."""
    ensured = ensure_publication(
        connection,
        settings.publication,
        settings.tables,
        settings.exclude,
        manage=settings.manage_publication,
        generated_columns=settings.generated_columns,
        later=later,
        unidentified=settings.unidentified,
    )
    if ensured.created and not ensured.added and not ensured.left_out:
        logger.warning("no table matches %s: nothing is copied until one matches", ", ".join(settings.tables))
    return ensured


class _Opening:
    """Prepares what capture needs: publication, lineage, slot, and the outputs' places in the spool."""

    def __init__(self, settings: StreamSettings, outputs: Mapping[str, Store]) -> None:
        self._settings = settings
        self._outputs = outputs
        self.lineage: Lineage | None = None
        """The server's, once it is known."""
        self._created: dict[str, Callable[[psycopg.Connection[Any]], object]] = {}
        """What this start has created on the server, and how to remove it."""

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Remove what was created on the server if the block raises, in reverse order."""
        try:
            yield
        except BaseException:
            for what, remove in reversed(self._created.items()):
                try:
                    with connect(self._settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
                        remove(connection)
                except PenstockError as error:
                    text = (
                        "the start failed and left something behind; remove it with penstock teardown what=%s error=%s"
                    )
                    logger.warning(text, what, error)
            raise

    def prepare(self) -> dict[str, Lsn]:
        """Return where each output starts to read."""
        settings, outputs = self._settings, self._outputs
        self._refuse_former()
        # Not on the connection that creates the slot, which waits for open transactions without a limit.
        with connect(settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
            ensured = _ensure_publication(connection, settings)
        if ensured.created:
            self._created["publication"] = lambda connection: drop_publication(connection, settings.publication)
        final = [error for error in ensured.refused.values() if not is_lock_timeout(error)]
        if final and not ensured.members:
            raise final[0]
        with connect(settings.source, Role.CATALOG) as connection:
            self._ensure_trigger(connection)
            self._use_server()
            slot = self._prepare_slot(connection, outputs)
            if settings.ddl_trigger:
                # After the slot is created: from here on every DDL change of a table is in the stream.
                settings.trigger.announce(connection)
            confirmed = slot.confirmed_flush_lsn or Lsn(0)
            for name, store in outputs.items():
                self._refuse_gap(name, store, confirmed)
        folder = SpoolFolder(settings.spool.path)
        captured = SpoolReader(settings.spool.path).captured
        if captured is not None and not reaches(captured, confirmed):
            # No output needs it any more: the pipeline has run on another machine since, or the outputs were reset.
            logger.warning("discarding captured changes that the slot has passed captured=%s", captured)
            folder.discard()
        Holds(folder).release_all()
        return self._register(Readers(folder), outputs, confirmed)

    def _ensure_trigger(self, connection: psycopg.Connection[Any]) -> None:
        """Create the DDL trigger if it is wanted; remove an existing one if it is not."""
        trigger = self._settings.trigger
        if self._settings.ddl_trigger:
            if not trigger.exists(connection):
                self._created["ddl trigger"] = trigger.drop
            trigger.create(connection)
        elif trigger.exists(connection):
            try:
                trigger.drop(connection)
            except PermissionDenied:
                logger.warning("this role cannot remove a ddl trigger that is no longer needed name=%s", trigger.name)

    def _identify(self) -> SystemIdentity:
        replication = connect_replication(self._settings.source, Role.SLOT)
        try:
            return identify_system(replication)
        finally:
            replication.finish()

    def _refuse_former(self) -> None:
        """Raise `ServerUnavailable` if another server took over from this one, before anything is created here."""
        spool = load_ancestry(SpoolFolder(self._settings.spool.path))
        known = [] if spool is None else [spool.current]
        for store in self._outputs.values():
            known += [each.lineage for each in store.get_stored_positions()]
        if known:
            ancestry = self._identify().ancestry(self._settings.slot)
            for each in known:
                ancestry.refuse_former(each)

    def _use_server(self) -> None:
        """Identify the server, and refuse or reset outputs whose positions are not part of its history."""
        settings = self._settings
        system = self._identify()
        ancestry = system.ancestry(settings.slot)
        folder = SpoolFolder(settings.spool.path)
        spool = _end_of(folder)
        is_branch = spool is not None and ancestry.is_other_timeline(spool.lineage)
        shared = [] if spool is None or is_branch else [spool]
        was_reset = [
            self._refuse_lost(name, store, [*store.get_stored_positions(), *shared], system)
            for name, store in self._outputs.items()
        ]
        if any(was_reset):
            folder.discard()
        elif spool is not None and is_branch and not ancestry.includes(spool.lineage, spool.position):
            # No output has applied them, and the slot continues where the outputs are.
            logger.warning("discarding captured changes that the server lost in a failover")
            folder.discard()
        for store in self._outputs.values():
            if any(each.lineage != ancestry.current for each in store.get_stored_positions()):
                _distrust_indexes(store)
            store.use_lineage(ancestry)
        self.lineage = ancestry.current

    def _refuse_lost(
        self, name: str, store: Store, positions: Sequence[StoredProgress], system: SystemIdentity
    ) -> bool:
        """Refuse an output with changes that this server does not have: they were lost in a failover or a restore.

        With `on_lost_slot = "recreate"` reset it instead and return True; never for another server or database.
        """
        ancestry = system.ancestry(self._settings.slot)
        try:
            for each in positions:
                ancestry.require(each.lineage, each.position)
                system.require_reached(each.position)
        except (LineageChanged, PositionAhead) as error:
            others = {each.lineage for each in positions} - {ancestry.current}
            is_same = all(ancestry.is_other_timeline(each) for each in others)
            if self._settings.on_lost_slot is OnLostSlot.ERROR or not is_same:
                raise
            logger.error("%s; copying every table again output=%s", error.message, name)
            store.reset_replication()
            return True
        return False

    def _prepare_slot(self, connection: psycopg.Connection[Any], outputs: Mapping[str, Store]) -> Slot:
        """Return the slot, created at the first start; a lost slot is an error, or everything is copied again."""
        settings = self._settings
        slot = wait_until_created(connection, settings.slot)
        if slot is not None and not slot.lost:
            require_usable(slot, settings.slot, database=connection.info.dbname)
            return self._with_failover(connection, slot)
        if slot is not None or any(store.needs_every_change for store in outputs.values()):
            if settings.on_lost_slot is OnLostSlot.ERROR:
                kind = SlotMissing if slot is None else SlotLost
                raise kind(
                    f"slot {settings.slot!r} is gone, and with it changes of tables that were already copied",
                    slot=settings.slot,
                )
            logger.error("slot is lost, every table is copied again slot=%s", settings.slot)
            if slot is not None:
                drop_slot(connection, settings.slot)
        # Before the new slot exists: positions of the old one mean nothing in it.
        for store in outputs.values():
            store.reset_replication()
        SpoolFolder(settings.spool.path).discard()
        failpoints.reach("before_slot")
        failover = can_fail_over(connection) if settings.failover_slot is None else settings.failover_slot
        slot = create_slot(connection, settings.slot, failover=failover)
        self._created["slot"] = lambda connection: drop_slot(connection, settings.slot)
        failpoints.reach("after_slot")
        return slot

    def _with_failover(self, connection: psycopg.Connection[Any], slot: Slot) -> Slot:
        """Change whether standbys keep a copy of the slot, if the settings say so."""
        wanted = self._settings.failover_slot
        if wanted is None or wanted == slot.failover:
            return slot
        replication = connect_replication(self._settings.source, Role.SLOT)
        try:
            alter_slot(replication, slot.name, failover=wanted)
        finally:
            replication.finish()
        return require_usable(inspect_slot(connection, slot.name), slot.name)

    def _refuse_gap(self, name: str, store: Store, confirmed: Lsn) -> None:
        """Refuse an output that is behind the slot: the stream ran without it, or the slot was moved by hand.

        With `on_lost_slot = "recreate"` reset it instead.
        """
        stored = store.get_replication_progress()
        if stored is None or reaches(stored, confirmed) or not store.needs_every_change:
            return
        if self._settings.on_lost_slot is OnLostSlot.ERROR:
            raise SlotLost(
                f"slot {self._settings.slot!r} is at {confirmed}, but {name!r} has changes only up to {stored}: "
                "the changes in between are lost",
                slot=self._settings.slot,
            )
        logger.error("changes were lost; copying every table again output=%s slot=%s", name, self._settings.slot)
        store.reset_replication()

    def _register(self, readers: Readers, outputs: Mapping[str, Store], confirmed: Lsn) -> dict[str, Lsn]:
        """Register all outputs in the spool; return where each of them starts to read."""
        known = readers.positions()
        for name in known.keys() - outputs.keys():
            logger.warning("an output that does not run holds back the slot output=%s position=%s", name, known[name])
        # The spool has nothing before its slowest reader, and a new output needs none of it.
        begin = earliest(*known.values()) if known else confirmed
        starts: dict[str, Lsn] = {}
        for name, store in outputs.items():
            stored = store.get_replication_progress()
            starts[name] = start_position(confirmed, known.get(name, begin) if stored is None else stored)
            readers.register(name, starts[name])
            readers.advance(name, starts[name])
        return starts


def _end_of(folder: SpoolFolder) -> StoredProgress | None:
    """Return where a spool ends; None if it is empty."""
    known, captured = load_ancestry(folder), SpoolReader(folder.root).captured
    return None if known is None or captured is None else StoredProgress(captured, known.current)


def _distrust_indexes(store: Store) -> None:
    """Have all search indexes rebuilt: after a failover the server may reuse transaction numbers, which are the
    versions of documents.

    Called before the new lineage is stored: after a crash, the next start no longer knows of the failover. The indexes
    still count as needing every change, so that a lost slot is reported.
    """
    for build in store.get_index_builds().values():
        store.store_index_build(replace(build, fingerprint=""))
