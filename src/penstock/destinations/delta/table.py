"""One table that this process writes: its log, owner and position, and the consequences of a lost race.

Positions are recorded in the log, in the same commit as the rows. Their name contains pipeline, table, lineage and
attempt of the copy, so that a higher position of another server or of an earlier copy hides no changes.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from urllib.parse import quote

from penstock.changes.segment import COMMIT_LSN
from penstock.destinations.base import DestinationContext
from penstock.destinations.delta.actions import Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from penstock.destinations.delta.checkpoint import LOG_FOLDER
from penstock.destinations.delta.files import now_milliseconds
from penstock.destinations.delta.layout import TableState, from_metadata, to_metadata
from penstock.destinations.delta.log import Committed, DeltaLog, Lost
from penstock.destinations.delta.schema import merge_protocols, protocol_for
from penstock.destinations.delta.snapshot import Application, Snapshot, Verdict
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.write import WrittenFiles
from penstock.destinations.refusals import busy, fenced_copy, foreign_table, not_copied, other_lineage, rejected
from penstock.errors import RESYNC
from penstock.lsn import Lsn, furthest, reaches

_FOLDER = "_penstock/tables"
_READ_THREADS = 8
_NOTHING: Mapping[str, Add | None] = {}
_RACES = 100
"""How many races in a row may be lost; each time another writer has made progress."""


@dataclass(frozen=True, slots=True)
class Version:
    """A table at one moment."""

    snapshot: Snapshot
    state: TableState


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of a batch that is about to be committed."""

    version: Version
    """The version that it is based on."""
    state: TableState
    """After it."""
    end: Lsn
    written: WrittenFiles
    exchanged: Mapping[str, Add | None] = field(default_factory=dict[str, Add | None])
    """Files that a backfill replaced before the batch was written; the batch is based on the new ones."""


class LakeTable:
    """A table of the lake. Calls for one table never overlap."""

    def __init__(
        self,
        log: DeltaLog,
        name: str,
        table_id: int,
        context: DestinationContext,
        vectors: bool,
        folder: str = "",
    ) -> None:
        self.log = log
        self.name = name
        self.folder = folder
        self._table_id = table_id
        self._context = context
        self._vectors = vectors
        self._parsed: tuple[Metadata, TableState | None] | None = None

    def look(self) -> Version | None:
        """Return the newest version; None if there is no table. Raise if it belongs to another pipeline."""
        snapshot = self.log.refresh()
        return None if snapshot is None else self._version(snapshot)

    def require(self) -> Version:
        """Return the newest version; raise if changes cannot be added to it."""
        version = self.look()
        if version is None or version.state.table_id != self._table_id or not version.state.is_copied:
            raise not_copied(self.name)
        return version

    def position(self, version: Version) -> Lsn | None:
        """Return the boundary recorded with the rows; None if one of them is of another lineage."""
        found = self._recorded(version)
        if not found or not all(self._context.knows(lineage, Lsn(each)) for lineage, each in found.items()):
            return None
        return furthest(*map(Lsn, found.values()))

    def require_position(self, version: Version) -> Lsn:
        """Return the recorded boundary; raise if there is none."""
        position = self.position(version)
        if position is None:
            found = sorted(self._recorded(version).items())
            recorded = ", ".join(f"{lineage} at {Lsn(each)}" for lineage, each in found) or "an unknown lineage"
            raise other_lineage(self.name, recorded, self._context.lineage)
        return position

    def precedes(self, version: Version, position: Lsn) -> bool:
        """Return True if all rows of a version are of this server, and from before a position."""
        system = self._context.lineage.partition("/")[0]
        recorded = self._recorded(version).items()
        return bool(recorded) and all(
            lineage.partition("/")[0] == system and reaches(position, Lsn(found)) for lineage, found in recorded
        )

    def application(self, attempt: str) -> Application:
        """Return the name under which positions are recorded."""
        return Application(self._context.pipeline_id, str(self._table_id), self._context.lineage, attempt)

    def fence(self, state: TableState, snapshot: Snapshot | None, configuration: dict[str, str]) -> bool:
        """Fence off earlier attempts; return False if another writer committed first."""
        wanted = self._wanted(state)
        created = now_milliseconds()
        actions: list[Action] = [
            CommitInfo(created, "CREATE TABLE" if snapshot is None else "SET TBLPROPERTIES"),
            Txn(self.application(state.begun).id, 0, created),
        ]
        if snapshot is None:
            actions += [wanted, to_metadata(state, str(uuid.uuid4()), created, configuration)]
        else:
            actions.append(self._metadata(snapshot, state, configuration))
        return isinstance(self.log.commit(snapshot, actions), Committed)

    def commit_copy(
        self,
        version: Version,
        state: TableState,
        position: Lsn,
        added: Sequence[Add],
        configuration: dict[str, str],
        *,
        keep: bool = False,
    ) -> None:
        """Replace all rows by those of a copy; with `keep`, add them to the changes before."""
        for _ in range(_RACES):
            snapshot, now = version.snapshot, now_milliseconds()
            actions = self._head("COPY", state.begun, position, now)
            actions += self._protocol(snapshot, state)
            actions.append(self._metadata(snapshot, state, configuration))
            files = snapshot.files.values()
            actions += [add.removed(now) for add in (self._copied_at(position, files) if keep else files)]
            answer = self.log.commit(snapshot, [*actions, *added])
            if isinstance(answer, Committed):
                return
            self._judge(answer, state.begun)
            version = self._version(answer.snapshot)
            if version.state.begun != state.begun:
                raise fenced_copy(self.name, state.begun)
        raise rejected(self.name, "other writers commit so often that the copy cannot be committed")

    def _copied_at(self, position: Lsn, files: Iterable[Add]) -> Iterator[Add]:
        """Yield the files of an earlier copy at the same position: their order keys are those of the new one."""
        for add in files:
            limits = json.loads(add.stats or "{}")
            lowest, highest = (limits.get(name, {}).get(COMMIT_LSN) for name in ("minValues", "maxValues"))
            if highest == int(position):
                if lowest != highest:
                    # Compacted with earlier changes. The next snapshot has another position.
                    raise busy(self.name)
                yield add

    def delete_files(self) -> None:
        """Delete all files; those of the log last, newest first: what a kill leaves still names its owner."""
        storage = self.log.storage
        paths = sorted((file.path for file in storage.list()), reverse=True)
        storage.delete([path for path in paths if not path.startswith(f"{LOG_FOLDER}/")])
        storage.delete([path for path in paths if path.startswith(f"{LOG_FOLDER}/")])

    def commit(self, batch: Batch) -> bool:
        """Commit a batch; return False if it has to be written again because rows or positions have changed."""
        version, written = batch.version, batch.written
        touched = {*batch.exchanged, *written.removed, *(path for path, _ in written.vectors)}
        for _ in range(_RACES):
            snapshot, now = version.snapshot, now_milliseconds()
            actions = self._head("MERGE", batch.state.copied, batch.end, now)
            if batch.state != batch.version.state:
                actions += self._protocol(snapshot, batch.state)
                actions.append(self._metadata(snapshot, batch.state, {}))
            elif written.vectors:
                actions += self._protocol(snapshot, batch.state)
            actions += file_actions(snapshot, written, now, batch.exchanged)
            answer = self.log.commit(snapshot, actions)
            if isinstance(answer, Committed):
                return True
            verdict = self._judge(answer, batch.state.copied)
            if verdict is Verdict.OWN_POSITION or not touched.isdisjoint(_removed(answer)):
                return False
            version = self._version(answer.snapshot)
        return False

    def _judge(self, lost: Lost, attempt: str) -> Verdict:
        """Return what the commits of other writers mean for this one; raise if it must stop."""
        verdict = lost.verdict(self.application(attempt))
        if verdict is Verdict.SUPERSEDED:
            raise fenced_copy(self.name, attempt)
        if verdict is Verdict.FOREIGN:
            raise rejected(
                self.name,
                "another program has written to the table",
                hint=f"A table has one writer: stop the other one, then copy the table again: {RESYNC}.",
            )
        return verdict

    def _version(self, snapshot: Snapshot) -> Version:
        state = self._state(snapshot.metadata)
        if state is None:
            raise foreign_table(self.name, snapshot.owner or "of another program", self._context.pipeline_id)
        if state.owner != self._context.pipeline_id:
            raise foreign_table(self.name, state.owner, self._context.pipeline_id)
        return Version(snapshot, state)

    def _state(self, metadata: Metadata) -> TableState | None:
        """Parse the metadata, unless it is the same object as last time."""
        if self._parsed is None or self._parsed[0] is not metadata:
            self._parsed = metadata, from_metadata(metadata)
        return self._parsed[1]

    def _recorded(self, version: Version) -> dict[str, int]:
        """Return the positions of the current copy, by lineage."""
        found: dict[str, int] = {}
        for app_id, position in version.snapshot.transactions.items():
            application = Application.parse(app_id)
            if application is not None and application == Application(
                self._context.pipeline_id, str(self._table_id), application.lineage, version.state.copied
            ):
                found[application.lineage] = position
        return found

    def _head(self, operation: str, attempt: str, position: Lsn, now: int) -> list[Action]:
        return [CommitInfo(now, operation), Txn(self.application(attempt).id, int(position), now)]

    def _protocol(self, snapshot: Snapshot, state: TableState) -> list[Action]:
        merged = merge_protocols(snapshot.protocol, self._wanted(state))
        return [] if merged is None else [merged]

    def _wanted(self, state: TableState) -> Protocol:
        layout = state.layout
        return protocol_for(layout.schema, deletion_vectors=self._vectors, column_mapping=layout.shown is not None)

    def _metadata(self, snapshot: Snapshot, state: TableState, configuration: dict[str, str]) -> Action:
        before = snapshot.metadata
        kept = {**before.configuration, **configuration}
        metadata = to_metadata(state, before.id, before.created_time or now_milliseconds(), kept)
        return replace(metadata, name=before.name, description=before.description)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table is."""

    folder: str
    table: str = ""
    """Its current name in the source."""
    system: str = ""
    """The server whose table it is: another server may give its number to another table."""


@dataclass(slots=True)
class Catalog:
    """The places of one pipeline's tables, recorded in the lake."""

    storage: Storage
    """The storage of the lake."""
    pipeline_id: str
    _known: dict[int, Place] = field(default_factory=dict[int, Place])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, table_id: int) -> Place | None:
        """Return where the rows of a table are; None if it was never copied here."""
        with self._lock:
            known = self._known.get(table_id)
        if known is None:
            content = self.storage.get(f"{self._path}/{table_id}.json")
            if content is None:
                return None
            known = Place(**json.loads(content))
            with self._lock:
                self._known[table_id] = known
        return known

    def record(self, table_id: int, place: Place) -> None:
        """Record where the rows of a table are."""
        if self.place(table_id) != place:
            self.storage.put(f"{self._path}/{table_id}.json", json.dumps(asdict(place)).encode())
            with self._lock:
                self._known[table_id] = place

    def forget(self, table_id: int) -> None:
        """Delete the record of a table."""
        self.storage.delete([f"{self._path}/{table_id}.json"])
        with self._lock:
            self._known.pop(table_id, None)

    def places(self) -> dict[int, Place]:
        """Read all places."""
        return {table_id: place for _, table_id, place in _read_places(self.storage, self._path)}

    @property
    def _path(self) -> str:
        return f"{_FOLDER}/{quote(self.pipeline_id, safe='')}"


def all_places(storage: Storage) -> list[tuple[int, Place]]:
    """Read the places of the tables of all pipelines of a lake, by table id, in the order of pipelines and tables."""
    return [
        (table_id, place) for _, table_id, place in sorted(_read_places(storage, _FOLDER), key=lambda each: each[0])
    ]


def _read_places(storage: Storage, folder: str) -> list[tuple[str, int, Place]]:
    paths = [file.path for file in storage.list(folder) if file.path.endswith(".json")]
    # Each read of an object store waits for its answer.
    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="delta-catalog") as pool:
        contents = list(pool.map(storage.get, paths))
    return [
        (path, int(path.rpartition("/")[2].removesuffix(".json")), Place(**json.loads(content)))
        for path, content in zip(paths, contents, strict=True)
        if content is not None
    ]


def file_actions(
    snapshot: Snapshot, written: WrittenFiles, now: int, exchanged: Mapping[str, Add | None] = _NOTHING
) -> list[Action]:
    """Return the actions that commit files; `exchanged` as in `Batch`."""
    new = {add.path: add for add in exchanged.values() if add is not None}
    actions: list[Action] = [snapshot.files[path].removed(now) for path in exchanged]
    for path, vector in written.vectors:
        if path in new:
            new[path] = new[path].with_vector(vector)
        else:
            before = snapshot.files[path]
            actions += [before.removed(now), before.with_vector(vector)]
    for path in written.removed:
        if new.pop(path, None) is None:
            actions.append(snapshot.files[path].removed(now))
    return [*actions, *new.values(), *written.added]


def _removed(lost: Lost) -> Iterable[str]:
    return (action.path for commit in lost.between for action in commit.actions if isinstance(action, Remove))
