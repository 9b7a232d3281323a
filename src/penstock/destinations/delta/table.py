"""One table that this process writes: its log, owner and position, and the consequences of a lost race.

Positions are recorded in the log, in the same commit as the rows. Their name contains pipeline, table, lineage and
attempt of the copy, so that a higher position of another server or of an earlier copy hides no changes.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from penstock.destinations.base import DestinationContext
from penstock.destinations.delta.actions import Action, Add, CommitInfo, Metadata, Remove, Txn
from penstock.destinations.delta.files import now_milliseconds
from penstock.destinations.delta.layout import TableState, from_metadata, to_metadata
from penstock.destinations.delta.log import Committed, DeltaLog, Lost
from penstock.destinations.delta.schema import merge_protocols, protocol_for
from penstock.destinations.delta.snapshot import Application, Snapshot, Verdict
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.write import WrittenFiles
from penstock.destinations.refusals import fenced_copy, foreign_table, not_copied, other_lineage, rejected
from penstock.lsn import Lsn

_FOLDER = "_penstock/tables"
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

    def __init__(self, log: DeltaLog, name: str, table_id: int, context: DestinationContext, vectors: bool) -> None:
        self.log = log
        self.name = name
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
        """Return the boundary recorded with the rows; None if it is of another lineage."""
        found = self._recorded(version)
        for lineage in (self._context.lineage, self._context.continues):
            if lineage is not None and lineage in found:
                return Lsn(found[lineage])
        return None

    def require_position(self, version: Version) -> Lsn:
        """Return the recorded boundary; raise if there is none."""
        position = self.position(version)
        if position is None:
            recorded = ", ".join(sorted(self._recorded(version))) or "an unknown lineage"
            raise other_lineage(self.name, recorded, self._context.lineage)
        return position

    def application(self, attempt: str) -> Application:
        """Return the name under which positions are recorded."""
        return Application(self._context.pipeline_id, str(self._table_id), self._context.lineage, attempt)

    def fence(self, state: TableState, snapshot: Snapshot | None, configuration: dict[str, str]) -> bool:
        """Fence off earlier attempts; return False if another writer committed first."""
        wanted = protocol_for(state.layout.schema, deletion_vectors=self._vectors)
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
        self, version: Version, state: TableState, position: Lsn, added: Sequence[Add], configuration: dict[str, str]
    ) -> None:
        """Replace all rows by those of a copy."""
        for _ in range(_RACES):
            snapshot, now = version.snapshot, now_milliseconds()
            actions = self._head("COPY", state.begun, position, now)
            actions += self._protocol(snapshot, state)
            actions.append(self._metadata(snapshot, state, configuration))
            actions += [add.removed(now) for add in snapshot.files.values()]
            answer = self.log.commit(snapshot, [*actions, *added])
            if isinstance(answer, Committed):
                return
            self._judge(answer, state.begun)
            version = self._version(answer.snapshot)
            if version.state.begun != state.begun:
                raise fenced_copy(self.name, state.begun)
        raise rejected(self.name, "other writers commit so often that the copy cannot be committed")

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
            actions += _file_actions(snapshot, batch, now)
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
                hint="Stop the other writer, then copy the table again: a table has one writer.",
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
        wanted = protocol_for(state.layout.schema, deletion_vectors=self._vectors)
        merged = merge_protocols(snapshot.protocol, wanted)
        return [] if merged is None else [merged]

    def _metadata(self, snapshot: Snapshot, state: TableState, configuration: dict[str, str]) -> Action:
        before = snapshot.metadata
        kept = {**before.configuration, **configuration}
        return to_metadata(state, before.id, before.created_time or now_milliseconds(), kept)


@dataclass(slots=True)
class Catalog:
    """The folders of one pipeline's tables."""

    storage: Storage
    """The storage of the lake."""
    pipeline_id: str
    _known: dict[int, str] = field(default_factory=dict[int, str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def folder(self, table_id: int) -> str | None:
        """Return the folder of a table; None if this pipeline has not copied it here."""
        with self._lock:
            known = self._known.get(table_id)
        if known is None:
            content = self.storage.get(self._path(table_id))
            if content is None:
                return None
            known = str(json.loads(content)["folder"])
            with self._lock:
                self._known[table_id] = known
        return known

    def note(self, table_id: int, folder: str) -> None:
        """Record the folder of a table."""
        if self.folder(table_id) != folder:
            self.storage.put(self._path(table_id), json.dumps({"folder": folder}).encode())
            with self._lock:
                self._known[table_id] = folder

    def _path(self, table_id: int) -> str:
        return f"{_FOLDER}/{quote(self.pipeline_id, safe='')}/{table_id}.json"


def noted_folders(storage: Storage) -> list[str]:
    """Return the folders of all tables of a lake, of all pipelines."""
    notes = [storage.get(file.path) for file in storage.list(_FOLDER) if file.path.endswith(".json")]
    return sorted({str(json.loads(note)["folder"]) for note in notes if note is not None})


def _file_actions(snapshot: Snapshot, batch: Batch, now: int) -> list[Action]:
    new = {add.path: add for add in batch.exchanged.values() if add is not None}
    actions: list[Action] = [snapshot.files[path].removed(now) for path in batch.exchanged]
    for path, vector in batch.written.vectors:
        if path in new:
            new[path] = new[path].with_vector(vector)
        else:
            before = snapshot.files[path]
            actions += [before.removed(now), before.with_vector(vector)]
    for path in batch.written.removed:
        if new.pop(path, None) is None:
            actions.append(snapshot.files[path].removed(now))
    return [*actions, *new.values(), *batch.written.added]


def _removed(lost: Lost) -> Iterable[str]:
    return (action.path for commit in lost.between for action in commit.actions if isinstance(action, Remove))
