"""What a stream reads from: publication, slot, capture and spool, owned by the process in which Spark plans batches.

Spark keeps one such process for each run of a query. Capture starts in it at the first call, and ends with it: its
standard input closes, however the process ends. What a process does not survive is kept elsewhere: the slot retains
every change after the last commit, the folder of the spool has what was captured already, and the checkpoint has the
position. The folder can be lost; capture then reads the slot again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from penstock.capture import CaptureProcess, CaptureSettings, Reading
from penstock.capture.assembler import AssemblerSettings
from penstock.errors import (
    CaptureStopped,
    ConfigError,
    NotIdentified,
    PenstockError,
    PublicationChanged,
    PublicationMissing,
    SlotLost,
    SlotMissing,
    SourceError,
    SpoolCorrupt,
    SpoolInUse,
)
from penstock.lsn import Lsn, OrderKey, furthest, reaches
from penstock.private import cache_folder
from penstock.schema import TableSchema
from penstock.source.connections import CATALOG_LIMITS, Role, SourceSettings, connect, connect_replication
from penstock.source.lineage import Ancestry, Lineage, identify_system
from penstock.source.membership import Membership, load_membership
from penstock.source.patterns import TablePattern
from penstock.source.publications import (
    drop_publication,
    ensure_publication,
    inspect_publication,
)
from penstock.source.slots import (
    Slot,
    can_fail_over,
    create_slot,
    drop_slot,
    inspect_slot,
    require_usable,
    wait_until_created,
)
from penstock.spool import Readers, SpoolReader, SpoolSettings
from penstock.spool.folder import SpoolFolder, read_file, replace_file
from penstock.spool.lineage import load_ancestry
from penstock.spool.schemas import SchemaVersions
from penstock.values import TypeSettings

READER = "spark"
_SPOOL_SECONDS = 30.0
"""How long to wait for the capture of an earlier run of the query, which ends with its process."""
_BUSY_SECONDS = 600.0
"""How long capture may take to connect if it reports no problem."""
_LOCK_SECONDS = 0.05
_PARENT_SECONDS = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Position:
    """An offset in Spark's checkpoint: a boundary, and the server that it belongs to."""

    lsn: Lsn
    system: str = ""
    timeline: int = 0
    publication: str = ""
    """What identifies the publication, and the table's place in it: both change if they are created again."""
    is_copy: bool = False
    """Before the copy of `startingPosition = snapshot`; the boundary means nothing."""
    copies: int = 0
    """The number of a copy, for the end of the batch that has it."""

    def to_offset(self) -> dict[str, Any]:
        if self.is_copy:
            return {"copy": True}
        offset = {
            "position": str(self.lsn),
            "system": self.system,
            "timeline": self.timeline,
            "publication": self.publication,
        }
        return offset | {"copies": self.copies} if self.copies else offset

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Position:
        if offset.get("copy"):
            return cls(Lsn(0), is_copy=True)
        try:
            lsn, timeline = Lsn.parse(offset["position"]), int(offset["timeline"])
            copies = int(offset.get("copies", 0))
            return cls(lsn, str(offset["system"]), timeline, str(offset["publication"]), copies=copies)
        except (KeyError, ValueError, TypeError, AttributeError):
            raise ConfigError(
                'the checkpoint has an offset that is not one of format("penstock")',
                hint="Use a checkpoint of its own for each query.",
            ) from None


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """What to read, and where to keep it. Pickles."""

    source: SourceSettings
    patterns: tuple[str, ...]
    slot: str
    publication: str
    types: TypeSettings
    location: str | None = None
    """Of the spool; None for a folder of this user and slot among temporary files."""

    def matches(self, membership: Membership) -> list[int]:
        """Return the tables of a publication that are wanted, by oid."""
        patterns = [TablePattern(text) for text in self.patterns]
        names = membership.table_names()
        return [oid for oid, name in names.items() if any(pattern.matches(name) for pattern in patterns)]

    @property
    def folder(self) -> Path:
        if self.location is not None:
            return Path(self.location).absolute()
        server = hashlib.sha256(f"{self.source.location}".encode()).hexdigest()[:12]
        return cache_folder() / f"stream-{self.slot}-{server}"


class Feed:
    """An open feed; use `close`. Not thread-safe: Spark calls one method at a time."""

    def __init__(
        self,
        settings: FeedSettings,
        seen: Position | None,
        *,
        start: Lsn | None = None,
        schema: TableSchema | None = None,
    ) -> None:
        """Open it. `seen` is the last position of the checkpoint, None for a new query: only that creates a slot.

        `start` is where a new query begins, if it says so. `schema` is that of its only table: rows may be decoded
        after later DDL, and are then assigned to these columns.
        """
        needed = start if seen is None or seen.is_copy else seen.lsn
        self.settings = settings
        self._table_id = None if schema is None else schema.table_id
        self._resources = ExitStack()
        self._created: list[Callable[[psycopg.Connection[Any]], object]] = []
        """What removes what this start has created on the server."""
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="parent", daemon=True).start()
        try:
            ancestry = self._identify(seen)
            self.membership = self._publish(is_new=seen is None)
            self._publication = self._identity(self.membership)
            self._require_published(seen)
            slot = self._open_slot(seen)
            with _without_writer(SpoolFolder(settings.folder)):
                self.start = self._prepare_folder(ancestry, slot.confirmed_flush_lsn or Lsn(0), needed, schema)
            self.capture = self._start_capture(ancestry.current)
        except BaseException:
            self._resources.close()
            self._undo()
            raise
        self.reader = SpoolReader(settings.folder)

    def close(self) -> None:
        """Stop capture, which frees the slot."""
        self._resources.close()

    def position(self, lsn: Lsn) -> Position:
        """Return a boundary as an offset."""
        ancestry = self.reader.ancestry
        assert ancestry is not None, "capture names the server before the first entry"
        return Position(lsn, ancestry.current.system_identifier, ancestry.current.timeline, self._publication)

    def captured(self) -> Lsn:
        """Return the boundary up to which everything is in the spool; raise what ended capture."""
        self.capture.check()
        folder = SpoolFolder(self.settings.folder)
        if not self._fits(folder).exists():
            raise SpoolCorrupt(f"the folder {folder.root} was deleted while the query ran")
        return self.reader.captured or self.start

    @property
    def is_stuck(self) -> bool:
        """True while capture waits for room: for Spark to commit, or for an operator to free space."""
        return self.capture.status.reading in (Reading.SPOOL_FULL, Reading.DISK_FULL)

    def advance(self, lsn: Lsn) -> None:
        """Let the slot move: Spark has committed everything before a boundary."""
        self.reader.readers.advance(READER, lsn)
        self.reader.forget(lsn)

    def lacks_copy(self, end: Position) -> bool:
        """Return True if the batch that ends here should have a copy, and has none, or if that is not known."""
        found = read_file(self._copy_file)
        return found == end.to_offset() or (found is None and end.copies > 0)

    def note_copy(self, lacking: Position | None) -> None:
        """Note, before Spark commits it, the end of a batch that lacks its copy; None if it has one."""
        replace_file(self._copy_file, {} if lacking is None else lacking.to_offset(), durable=True)

    @property
    def _copy_file(self) -> Path:
        return SpoolFolder(self.settings.folder).root / "copy.json"

    def require_published(self) -> None:
        """Raise `PublicationChanged` if a table left the publication, also if it came back: changes are missing.

        Also if its name belongs to another table now, which the query would not follow.
        """
        [name, *_] = self.settings.patterns
        with connect(self.settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
            now = load_membership(connection, self.settings.publication)
            found = connection.execute("select pg_catalog.to_regclass(%s)::pg_catalog.oid::int8", [name]).fetchone()
        if not _continues(self._publication, self._identity(now)):
            raise self._left()
        if self._table_id is not None and found not in (None, (None,), (self._table_id,)):
            raise PublicationChanged(
                f"{name} is another table now: the one that the query follows was renamed, and this one took its name",
                tables=[name],
            )

    def _require_published(self, seen: Position | None) -> None:
        if seen is not None and not seen.is_copy and not _continues(seen.publication, self._publication):
            raise self._left()

    def _left(self) -> PublicationChanged:
        return PublicationChanged(
            f"{', '.join(self.settings.patterns)} left the publication {self.settings.publication!r}, if only for a "
            "while, or the publication was altered or created again: the server may have omitted changes",
            tables=list(self.settings.patterns),
        )

    def _identity(self, membership: Membership) -> str:
        """Return what changes if a publication is altered, or if it, or the place of a single table in it, is created
        again; for `_continues`. Several tables may come and go.
        """
        parts = [membership.publication.oid]
        if self._table_id is not None:
            parts += [self._table_id, *sorted(each.oid for each in membership.tables.get(self._table_id, ()))]
            parts += [] if self._table_id in membership.tables else [0]
        options = membership.options
        assert options is not None
        others = hashlib.sha256(repr(options).encode()).hexdigest()[:12]
        return (
            f"{':'.join(map(str, parts))} {membership.publication.xmin} {','.join(options.operations) or '-'} {others}"
        )

    def _undo(self) -> None:
        """Remove what was created: a slot that nobody reads retains WAL."""
        for remove in reversed(self._created):
            try:
                with connect(self.settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
                    remove(connection)
            except PenstockError as error:
                logger.warning("the start failed and left something behind slot=%s error=%s", self.settings.slot, error)

    def _identify(self, seen: Position | None) -> Ancestry:
        """Return the server's lineage; raise if a position of the checkpoint is not part of it."""
        replication = connect_replication(self.settings.source, Role.SLOT)
        try:
            system = identify_system(replication)
        finally:
            replication.finish()
        ancestry = system.ancestry(self.settings.slot)
        if seen is not None and not seen.is_copy:
            stored = Lineage(seen.system, seen.timeline, ancestry.current.database, ancestry.current.slot)
            ancestry.refuse_former(stored)
            ancestry.require(stored, seen.lsn)
            system.require_reached(seen.lsn)
        return ancestry

    def _publish(self, *, is_new: bool) -> Membership:
        """Return the publication; create it before the slot of a new query, because it counts from then on only."""
        settings = self.settings
        with connect(settings.source, Role.CATALOG, parameters=CATALOG_LIMITS) as connection:
            if inspect_publication(connection, settings.publication) is None:
                slot = inspect_slot(connection, settings.slot)
                if slot is not None:
                    require_usable(slot, settings.slot, database=connection.info.dbname)
                if not is_new or slot is not None:
                    raise PublicationMissing(
                        f"publication {settings.publication!r} does not exist, but slot {settings.slot!r} was in use",
                        publication=settings.publication,
                    )
                ensured = ensure_publication(connection, settings.publication, settings.patterns)
                self._created.append(lambda connection: drop_publication(connection, settings.publication))
                problems: list[SourceError | NotIdentified] = [*ensured.left_out.values(), *ensured.refused.values()]
                if problems:
                    raise problems[0]
            membership = load_membership(connection, settings.publication)
        if not settings.matches(membership):
            raise ConfigError(
                f"publication {settings.publication!r} does not contain {', '.join(settings.patterns)}",
                hint="Add the table to the publication, or name another publication, which is created if it does not "
                "exist.",
            )
        return membership

    def _open_slot(self, seen: Position | None) -> Slot:
        """Return the slot, created for a new query; raise if it is past a position of the checkpoint."""
        name = self.settings.slot
        with connect(self.settings.source, Role.CATALOG) as connection:
            slot = wait_until_created(connection, name)
            if slot is None and seen is not None:
                raise SlotMissing(f"slot {name!r} is gone, and with it the changes since {seen.lsn}", slot=name)
            if slot is None:
                slot = create_slot(connection, name, failover=can_fail_over(connection))
                self._created.append(lambda connection: drop_slot(connection, name))
            require_usable(slot, name, database=connection.info.dbname)
        confirmed = slot.confirmed_flush_lsn or Lsn(0)
        if seen is not None and not seen.is_copy and not reaches(seen.lsn, confirmed):
            raise SlotLost(
                f"slot {name!r} is at {confirmed}, after the position {seen.lsn} of the checkpoint: another program "
                "has read from it, or the checkpoint is an old one, and the changes in between are gone",
                slot=name,
            )
        return slot

    def _prepare_folder(
        self, ancestry: Ancestry, confirmed: Lsn, needed: Lsn | None, schema: TableSchema | None
    ) -> Lsn:
        """Keep what is captured if it continues the slot and fits; return where the query may begin."""
        folder = SpoolFolder(self.settings.folder)
        known, captured = load_ancestry(folder), SpoolReader(folder.root).captured
        settings = self.settings
        wanted = {"slot": settings.slot, "publication": settings.publication, "types": repr(settings.types)}
        found = read_file(self._fits(folder))
        # Capture that runs while its folder is deleted creates it again.
        is_own = found is not None or (known is not None and known.current.slot == settings.slot)
        if not is_own and (captured is not None or Readers(folder).positions()):
            raise ConfigError(
                f"the folder {folder.root} is the spool of a pipeline", hint="Choose another 'spoolLocation'."
            )
        floor = Readers(folder).position(READER)
        is_ahead = floor is not None and needed is not None and not reaches(needed, floor)
        if (
            found != wanted
            or (captured is not None and not reaches(captured, confirmed))
            or (known is not None and captured is not None and not ancestry.includes(known.current, captured))
            or is_ahead
        ):
            folder.discard()
            folder.create()
            replace_file(self._fits(folder), wanted)
        readers, versions = Readers(folder), SchemaVersions(folder)
        if schema is not None and not versions.names(schema.table_id):
            versions.version_for(schema, OrderKey(confirmed, 0))
        start = furthest(confirmed, readers.register(READER, confirmed))
        readers.advance(READER, start)
        return start

    @staticmethod
    def _fits(folder: SpoolFolder) -> Path:
        return folder.root / "stream.json"

    def _start_capture(self, lineage: Lineage) -> CaptureProcess:
        settings = self.settings
        capture = CaptureProcess(
            CaptureSettings(
                source=settings.source,
                slot=settings.slot,
                publication=settings.publication,
                spool=SpoolSettings(settings.folder),
                lineage=lineage,
                assembler=AssemblerSettings(types=settings.types.keeping()),
            )
        )
        capture.start()
        self._resources.callback(capture.stop)
        try:
            capture.wait_until_streaming()
        except CaptureStopped:
            # It reports no problem, or has ended: a busy machine must not end the query, which would start it again.
            capture.wait_until_streaming(_BUSY_SECONDS)
        return capture


def _continues(before: str, now: str) -> bool:
    """Return whether the server has sent everything since a publication had an identity.

    See `changes_between`: another owner changes nothing; options that are as before may have been others in between.
    """
    (place, *rest), (place_now, *rest_now) = before.split(), now.split()
    if place != place_now or not rest or rest == rest_now:
        return place == place_now
    (_, operations, options), (_, operations_now, options_now) = rest, rest_now
    return operations == operations_now and options != options_now


@contextmanager
def _without_writer(folder: SpoolFolder) -> Iterator[None]:
    """Wait until the capture of an earlier run has ended, and keep others from starting one."""
    folder.create()
    deadline = time.monotonic() + _SPOOL_SECONDS
    with open(folder.lock, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SpoolInUse(
                        f"the spool {folder.root} is in use",
                        hint="Another query uses it. Give each query a slot and a spoolLocation of its own.",
                    ) from None
                time.sleep(_LOCK_SECONDS)
        yield


def _end_with_parent(parent: int) -> None:
    """End this process when Spark's JVM is gone: it may wait for the server, and would not notice."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(3)
