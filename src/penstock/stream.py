"""A stream: one publication, one slot, one capture process and one spool, shared by the outputs that read it.

Outputs are known by their names. Each is registered in the spool before anything is read, and stays registered while it
is down: the slot follows the slowest. Opening needs the leases of all outputs, because what happens to the slot (it is
new, it was lost) happens to all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import psycopg

from penstock import failpoints
from penstock.capture import CaptureProcess, CaptureSettings
from penstock.capture.assembler import AssemblerSettings
from penstock.errors import PenstockError, PermissionDenied, SlotLost, SlotMissing, SlotUndecodable
from penstock.lsn import Lsn, earliest, reaches
from penstock.retry import Backoff
from penstock.source.connections import CATALOG_LIMITS, Role, SourceSettings, connect, connect_replication
from penstock.source.ddl_trigger import DdlTrigger
from penstock.source.lineage import Lineage, identify_system, verify_lineage
from penstock.source.publications import (
    EnsuredPublication,
    Membership,
    ensure_publication,
    load_membership,
    without_identity,
)
from penstock.source.slots import Slot, create_slot, drop_slot, inspect_slot, require_usable
from penstock.spool import Holds, Readers, SpoolSettings
from penstock.spool.folder import SpoolFolder
from penstock.state import Errored, IndexStatus, Ready, Store, SyncDone
from penstock.state.positions import start_position
from penstock.values import TypeSettings

logger = logging.getLogger(__name__)


class OnLostSlot(StrEnum):
    """What happens when the slot is gone, and with it the changes since."""

    ERROR = "error"
    RECREATE = "recreate"
    """A new slot, and every table is copied again."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What is read, from where, and where it waits."""

    id: str
    source: SourceSettings
    publication: str
    slot: str
    spool: SpoolSettings
    tables: tuple[str, ...] = ("*.*",)
    exclude: tuple[str, ...] = ()
    manage_publication: bool = True
    on_lost_slot: OnLostSlot = OnLostSlot.ERROR
    types: TypeSettings = field(default_factory=TypeSettings)
    ddl_trigger: bool = False
    """An event trigger on the source records DDL in the stream: `penstock.source.ddl_trigger`. Large transactions then
    arrive as a whole when they commit, and are not streamed while they run."""

    @property
    def trigger(self) -> DdlTrigger:
        """What `ddl_trigger` makes on the source."""
        return DdlTrigger(self.slot, self.publication)


@dataclass(frozen=True, slots=True)
class Start:
    """From where on an output reads, and whose positions these are."""

    position: Lsn
    lineage: Lineage
    continues: Lineage | None
    """After a failover: the lineage that the server was shown to continue."""


@dataclass(frozen=True, slots=True)
class Published:
    """The publication at one moment."""

    membership: Membership
    tables: Mapping[int, str]
    """Names by table id."""
    unpublished: Mapping[str, PenstockError]
    """Tables that should be published and cannot be, by name."""


class Stream:
    """A stream that is open. May be used from any thread."""

    def __init__(self, settings: StreamSettings, starts: Mapping[str, Start], capture: CaptureProcess) -> None:
        self._settings = settings
        self._starts = starts
        self._capture = capture
        self._publication = _PublicationKeeper(settings)
        self.is_decodable = True
        """False when the server has said that it cannot decode its log from this slot."""

    def start_of(self, output: str) -> Start:
        """Where an output begins."""
        return self._starts[output]

    @property
    def unpublished(self) -> Mapping[str, PenstockError]:
        """Tables that should be published and cannot be, as of the last refresh, with the server's reason."""
        return self._publication.refused

    def wait_until_streaming(self) -> None:
        """Wait until capture reads the slot; raise what prevents it."""
        with self._noticing():
            self._capture.wait_until_streaming()

    def check(self) -> None:
        """Raise what ended capture for good, if anything did."""
        with self._noticing():
            self._capture.check()

    def refresh(self) -> Published:
        """Bring the publication up to date, if Penstock manages it, and load it.

        Waits for no lock longer than `CATALOG_LIMITS` say. A table that cannot be published is left for later.
        """
        with connect(self._settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
            if self._settings.manage_publication:
                self._publication.ensure(connection)
            membership = load_membership(connection, self._settings.publication)
        return Published(membership, membership.names, self.unpublished)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except SlotUndecodable:
            self.is_decodable = False
            raise


@contextmanager
def open_stream(settings: StreamSettings, outputs: Mapping[str, Store]) -> Iterator[Stream]:
    """Changes flow into the spool inside. The leases of these stores are held.

    On the way out capture publishes what is whole, answers the server and ends.
    """
    starts = _Opening(settings, outputs).prepare()
    with CaptureProcess(
        CaptureSettings(
            source=settings.source,
            slot=settings.slot,
            publication=settings.publication,
            spool=settings.spool,
            assembler=AssemblerSettings(
                types=settings.types, ddl_prefix=settings.trigger.prefix if settings.ddl_trigger else None
            ),
        )
    ) as capture:
        stream = Stream(settings, starts, capture)
        try:
            stream.wait_until_streaming()
            yield stream
        finally:
            capture.stop()
            if not stream.is_decodable and not any(_has_tables(store) for store in outputs.values()):
                # Nothing depends on it, so the next start creates another one, and nothing is lost.
                with connect(settings.source, Role.CATALOG) as connection:
                    drop_slot(connection, settings.slot)
                logger.warning("dropped a slot that cannot be decoded: run again slot=%s", settings.slot)


class _PublicationKeeper:
    """Keeps a managed publication up to date, and remembers which tables the server refuses to publish."""

    def __init__(self, settings: StreamSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._refused: dict[str, _Refused] = {}

    @property
    def refused(self) -> Mapping[str, PenstockError]:
        with self._lock:
            return {name: each.error for name, each in self._refused.items()}

    def ensure(self, connection: psycopg.Connection[Any]) -> None:
        """Publish what the patterns name; log each refusal once, and try it again after a while."""
        with self._lock:
            now = time.monotonic()
            waiting = {name for name, each in self._refused.items() if now < each.next_at}
            ensured = _ensure_publication(connection, self._settings, waiting)
            for name in self._refused.keys() - ensured.refused.keys() - waiting:
                logger.info("table can be published now, or is no longer wanted table=%s", name)
                del self._refused[name]
            for name, error in ensured.refused.items():
                known = self._refused.get(name)
                if known is None or known.error.message != error.message:
                    logger.warning("table cannot be published, trying again later table=%s error=%s", name, error)
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
        later=later,
    )
    unidentified = without_identity(connection, ensured.added) if ensured.added else []
    if unidentified:
        logger.warning(
            "published without replica identity: the server refuses updates and deletes of %s until there is one",
            ", ".join(unidentified),
        )
    if ensured.created and not ensured.added:
        logger.warning("no table matches %s: nothing is copied until one does", ", ".join(settings.tables))
    return ensured


class _Opening:
    """What comes before capture: publication, lineage, slot, and the outputs' places in the spool."""

    def __init__(self, settings: StreamSettings, outputs: Mapping[str, Store]) -> None:
        self._settings = settings
        self._outputs = outputs

    def prepare(self) -> dict[str, Start]:
        """Where each output starts to read."""
        settings, outputs = self._settings, self._outputs
        with connect(settings.source, Role.CATALOG) as connection:
            ensured = _ensure_publication(connection, settings)
            if ensured.refused and not ensured.members:
                raise next(iter(ensured.refused.values()))
            self._ensure_trigger(connection)
            lineages = {name: self._identify(store) for name, store in outputs.items()}
            slot = self._prepare_slot(connection, outputs)
            if settings.ddl_trigger:
                # Behind the slot: from here on every change of a table is in the stream.
                settings.trigger.announce(connection)
            confirmed = slot.confirmed_flush_lsn or Lsn(0)
            for name, store in outputs.items():
                self._refuse_gap(name, store, confirmed)
        folder = SpoolFolder(settings.spool.path)
        Holds(folder).release_all()
        positions = self._register(Readers(folder), outputs, confirmed)
        return {name: Start(position, *lineages[name]) for name, position in positions.items()}

    def _ensure_trigger(self, connection: psycopg.Connection[Any]) -> None:
        """Make the DDL trigger if it is wanted, and remove one of earlier days if it is not."""
        trigger = self._settings.trigger
        if self._settings.ddl_trigger:
            trigger.create(connection)
        elif trigger.exists(connection):
            try:
                trigger.drop(connection)
            except PermissionDenied:
                logger.warning("a ddl trigger that nobody needs cannot be removed by this role name=%s", trigger.name)

    def _identify(self, store: Store) -> tuple[Lineage, Lineage | None]:
        """Whose positions these are now, and whose they were if the server continues another timeline."""
        slot = self._settings.slot
        replication = connect_replication(self._settings.source, Role.SLOT)
        try:
            stored = store.get_stored_progress()
            if stored is None:
                current, continues = identify_system(replication).lineage(slot), None
            else:
                current = verify_lineage(replication, stored.lineage, slot, stored.position).lineage(slot)
                continues = stored.lineage if stored.lineage != current else None
        finally:
            replication.finish()
        if continues is not None:
            _distrust_indexes(store)
        store.use_lineage(current, continues=continues)
        return current, continues

    def _prepare_slot(self, connection: psycopg.Connection[Any], outputs: Mapping[str, Store]) -> Slot:
        """The slot, made if this is the first start; a lost one is an error, or the start of everything anew."""
        settings = self._settings
        slot = inspect_slot(connection, settings.slot)
        if slot is not None and not slot.lost:
            return require_usable(slot, settings.slot, database=connection.info.dbname)
        if slot is not None or any(_has_tables(store) for store in outputs.values()):
            if settings.on_lost_slot is OnLostSlot.ERROR:
                kind = SlotMissing if slot is None else SlotLost
                raise kind(
                    f"slot {settings.slot!r} is gone, and with it changes of tables that were copied already",
                    slot=settings.slot,
                )
            logger.error("slot is lost, every table is copied again slot=%s", settings.slot)
            if slot is not None:
                drop_slot(connection, settings.slot)
        # Before the new slot is there: positions of the old one mean nothing in it.
        for store in outputs.values():
            store.reset_replication()
        SpoolFolder(settings.spool.path).discard()
        failpoints.reach("before_slot")
        slot = create_slot(connection, settings.slot)
        failpoints.reach("after_slot")
        return slot

    def _refuse_gap(self, name: str, store: Store, confirmed: Lsn) -> None:
        """An output that the slot did not wait for: it ran without this one, or somebody has moved it."""
        stored = store.get_replication_progress()
        if stored is None or reaches(stored, confirmed) or not _has_tables(store):
            return
        if self._settings.on_lost_slot is OnLostSlot.ERROR:
            raise SlotLost(
                f"slot {self._settings.slot!r} is at {confirmed}, but {name!r} has changes only up to {stored}: "
                "those in between are gone",
                slot=self._settings.slot,
            )
        logger.error("changes are gone, every table is copied again output=%s slot=%s", name, self._settings.slot)
        store.reset_replication()

    def _register(self, readers: Readers, outputs: Mapping[str, Store], confirmed: Lsn) -> dict[str, Lsn]:
        """Make all outputs known to the spool; from where each of them reads."""
        known = readers.positions()
        for name in known.keys() - outputs.keys():
            logger.warning("an output that does not run holds back the slot output=%s position=%s", name, known[name])
        # What lies before the slowest reader is not there any more, and a new output needs none of it.
        begin = earliest(*known.values()) if known else confirmed
        starts: dict[str, Lsn] = {}
        for name, store in outputs.items():
            stored = store.get_replication_progress()
            starts[name] = start_position(confirmed, known.get(name, begin) if stored is None else stored)
            readers.register(name, starts[name])
            readers.advance(name, starts[name])
        return starts


def _distrust_indexes(store: Store) -> None:
    """Let search indexes be built anew: a server that took over may give numbers of transactions that were seen before
    to others, and those are the versions of documents.

    Called before the new lineage is stored: whoever starts after a crash does not know of the failover any more. They
    still count as indexes that need every change, so that a lost slot is said.
    """
    for build in store.get_index_builds().values():
        store.store_index_build(replace(build, fingerprint=""))


def _has_tables(store: Store) -> bool:
    """Whether there are tables, or search indexes, that need every change from where they are."""
    return any(
        isinstance(phase, SyncDone | Ready) or (isinstance(phase, Errored) and phase.holds)
        for phase in store.get_table_replication_states().values()
    ) or any(build.status is not IndexStatus.WANTED for build in store.get_index_builds().values())
