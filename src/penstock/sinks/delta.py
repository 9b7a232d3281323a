"""Documents as a Delta table: one row per document, with `id`, `version` and `document` (JSON as text).

    documents/customers/                                        the table that readers see
    documents/_penstock/customers/index.json                    what Penstock knows about the index
    documents/_penstock/customers/5f1c…_20261115161500_3fa9/    of one generation: its log until it serves; its removals

A generation that is being filled has its data files in the folder of the table, but its log elsewhere, so readers do
not see it. To let it serve, one commit removes all files of the table and adds those of the generation.

A flush is one commit: it replaces rows whose version is not higher. The versions of removed documents are in a second
table. A removal commits to that one first, and then always to the first. A writer reads the first, then the second, and
its commit fails if another one came in between, so it cannot miss a removal.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.compaction import keys_of
from penstock.destinations.delta import marker
from penstock.destinations.delta.actions import Action, CommitInfo
from penstock.destinations.delta.checkpoint import LOG_FOLDER
from penstock.destinations.delta.files import LiveFile, iterate_data_file, now_milliseconds, read_rows
from penstock.destinations.delta.index import FileMatch, find_rows, index_folder
from penstock.destinations.delta.layout import Mode, TableState, new_layout, to_metadata
from penstock.destinations.delta.log import Committed, DeltaLog
from penstock.destinations.delta.maintenance.schedule import Maintenance
from penstock.destinations.delta.schema import protocol_for, table_configuration
from penstock.destinations.delta.snapshot import Snapshot
from penstock.destinations.delta.storage import LocalStorage, Storage, StoredFile, open_storage
from penstock.destinations.delta.table import file_actions
from penstock.destinations.delta.write import LostRows, WrittenFiles, bury, write_rows
from penstock.destinations.refusals import busy
from penstock.schema import Column, PostgresType, TableSchema
from penstock.sinks.folders import FolderSink, Generation, IndexState, gone, writing
from penstock.workers.process_tasks import ProcessTasks

_GENERATION = "penstock.generation"
_RACES = 200
"""How often a commit is tried; each time another writer has made progress."""
_UPKEEP_SECONDS = 15.0
_CLEAN_UP_SECONDS = 600.0
_REMOVAL_SECONDS = 86_400.0
"""How long the version of a removed document is kept: no older body arrives that late."""
_TEXT, _INT8 = PostgresType(25, "text"), PostgresType(20, "int8")
_COLUMNS = pa.schema([("id", pa.string()), ("version", pa.int64()), ("document", pa.string())])
_LAYOUT = new_layout(
    TableSchema(
        0,
        "penstock",
        "documents",
        (
            Column("id", 1, _TEXT, identity=True, primary_key_position=1),
            Column("version", 2, _INT8),
            Column("document", 3, _TEXT),
        ),
    ),
    Mode.MIRROR,
    _COLUMNS,
)


class DeltaSink(FolderSink):
    """Writes a Delta table for each index.

    | option | |
    |---|---|
    | `path` | a folder that the driver and all tasks see, or a URL like `s3://bucket/documents` |
    | `storage_options` | of the object store: `{aws_endpoint = "…", aws_region = "…"}` |
    | `deletion_vectors` | `true` (default), or `false` for readers that do not support them: files are rewritten |
    | `log_retention_hours`, `file_retention_hours` | how long old versions (24) and old files (2) are kept |
    """

    def __init__(
        self,
        path: str | Path,
        *,
        storage_options: Mapping[str, str] | None = None,
        deletion_vectors: bool = True,
        log_retention_hours: float = 24.0,
        file_retention_hours: float = 2.0,
    ) -> None:
        super().__init__()
        self._lake = self._root = open_storage(path, storage_options)
        if isinstance(self._lake, LocalStorage):
            self._root = replace(self._lake, marker=self._lake.local_path(marker.MARKER))
        self._vectors = deletion_vectors
        self._retention = {"log_retention_hours": log_retention_hours, "file_retention_hours": file_retention_hours}
        self._begin_process()

    def _begin_process(self) -> None:
        self._logs: dict[str, DeltaLog] = {}
        self._kept_up_at = time.monotonic()
        self._cleaned_at = time.monotonic()
        self._upkeep: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("_states", "_lake", "_root", "_vectors", "_retention")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._waiting = []
        self._begin_process()

    def bodies(self, index: str) -> dict[str, str]:
        """See `WholeReads`."""
        snapshot = DeltaLog(self._table(index)).refresh()
        found: dict[str, str] = {}
        for add in () if snapshot is None else snapshot.files.values():
            for rows in iterate_data_file(self._table(index), add, _LAYOUT.schema):
                found |= zip(rows["id"].to_pylist(), rows["document"].to_pylist(), strict=True)
        return found

    # See `FolderSink`

    def _probe(self) -> None:
        marker.probe(self._lake)

    def _load(self, index: str) -> bytes | None:
        return self._side(index).get("index.json")

    def _store(self, index: str, content: bytes) -> None:
        with writing(index):
            self._side(index).put("index.json", content)

    def _create(self, index: str, generation: Generation, owner: str) -> None:
        with writing(index):
            marker.mark(self._lake)
            side = self._side(index, generation.name)
            for log in (DeltaLog(_Apart(self._table(index), side)), DeltaLog(side.child("removed"))):
                log.commit(None, self._first(generation, owner))

    def _exists(self, index: str, generation: Generation) -> bool:
        log = self._current(index, generation)
        snapshot = log.refresh()
        if snapshot is None or log is self._log(self._table(index)):
            return snapshot is not None
        # Its log is elsewhere, so it may exist without the folder of the table.
        return {each.path for each in self._table(index).list()}.issuperset(snapshot.stored_files())

    def _publish(self, index: str, state: IndexState) -> None:
        serving = state.serving
        assert serving is not None
        log = self._log(self._table(index))
        with writing(index):
            for _ in range(_RACES):
                snapshot = log.refresh()
                if snapshot is not None and _generation_of(snapshot) == serving.name:
                    break
                filled = DeltaLog(_Apart(self._table(index), self._side(index, serving.name))).refresh()
                if filled is None:
                    raise gone(index)
                now = now_milliseconds()
                old = [] if snapshot is None else [add.removed(now) for add in snapshot.files.values()]
                head = [] if snapshot is not None else [filled.protocol]
                named = filled.metadata if snapshot is None else replace(filled.metadata, id=snapshot.metadata.id)
                actions: list[Action] = [CommitInfo(now, "REPLACE TABLE"), *head, named]
                log.commit(snapshot, [*actions, *old, *filled.files.values()])
            # The log of the swap is outdated by the next change: it must not serve if the table is deleted.
            side = self._side(index, serving.name)
            side.delete([each.path for each in side.list(LOG_FOLDER)])
            self._forget(index, {each.name for each in state.generations})

    def _forget(self, index: str, kept: set[str]) -> None:
        side = self._side(index)
        paths = [file.path for file in side.list() if "/" in file.path and file.path.partition("/")[0] not in kept]
        side.delete(paths)
        for name in {path.partition("/")[0] for path in paths}:
            if (folder := side.local_path(name)) is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _append(self, index: str, generation: Generation, rows: pa.Table) -> None:
        rows = pa.table([rows["id"], rows["version"], rows["body"]], _COLUMNS.names).cast(_COLUMNS).combine_chunks()
        with writing(index):
            removed = self._removed(index, generation)
            dead = rows.filter(pc.is_null(rows["document"]))
            if dead.num_rows:
                self._merge(index, removed, None, dead, mark=False)
            self._merge(index, self._current(index, generation), removed, rows, mark=bool(dead.num_rows))

    def _merge(self, index: str, log: DeltaLog, removed: DeltaLog | None, rows: pa.Table, *, mark: bool) -> None:
        """Replace rows by those with a version that is not lower, in one commit; `mark` commits even if none is."""
        keys = keys_of(rows, {}, _LAYOUT.key)
        versions = rows["version"].to_numpy()
        for _ in range(_RACES):
            snapshot = log.refresh()
            if snapshot is None:
                raise gone(index)
            matches, known = _find(log.storage, snapshot, keys)
            if removed is not None and (buried := removed.refresh()) is not None:
                known = np.maximum(known, _find(removed.storage, buried, keys)[1])
            fresh = known <= versions
            if not (fresh.any() or mark):
                return
            added = rows.filter(pa.array(fresh))
            if removed is not None:
                added = added.filter(pc.is_valid(added["document"]))
            lost = [LostRows.of(each) for match in matches if (each := _only(match, fresh)) is not None]
            written = bury(log.storage, _LAYOUT, lost, deletion_vectors=self._vectors)
            if added.num_rows:
                written = WrittenFiles.all_of([written, WrittenFiles((write_rows(log.storage, _LAYOUT, added),))])
            now = now_milliseconds()
            actions = [CommitInfo(now, "MERGE"), *file_actions(snapshot, written, now)]
            if isinstance(log.commit(snapshot, actions), Committed):
                return
        raise busy(index)

    def _count(self, index: str, generation: Generation) -> int:
        snapshot = self._current(index, generation).refresh()
        return 0 if snapshot is None else snapshot.row_count or 0

    # Upkeep

    def _tidy(self, index: str) -> None:
        is_due = time.monotonic() - self._kept_up_at > _UPKEEP_SECONDS
        if is_due and (self._upkeep is None or not self._upkeep.is_alive()):
            self._kept_up_at = time.monotonic()
            self._upkeep = threading.Thread(target=self.keep_up, name="delta-documents", daemon=True)
            self._upkeep.start()

    def keep_up(self) -> None:
        """Merge small files, write checkpoints, and delete what is past its retention."""
        tables: dict[str, Storage] = {}
        settled: dict[str, Storage] = {}
        for index, state in list(self._states.items()):
            for each in state.generations:
                tables[f"{index}/{each.name}"] = self._current(index, each).storage
                tables[f"{index}/{each.name}/removed"] = self._expire(index, each)
            if state.filling is None:
                settled[index] = self._table(index)
        maintenance = Maintenance(lambda: tables, ProcessTasks())
        maintenance.compact(tables)
        maintenance.write_checkpoints(tables)
        if time.monotonic() - self._cleaned_at > _CLEAN_UP_SECONDS:
            self._cleaned_at = time.monotonic()
            # Files of a generation that is being filled would look as if nobody needed them.
            maintenance.clean_up(settled)

    def _expire(self, index: str, generation: Generation) -> Storage:
        """Forget old removals; a lost race leaves them for the next time."""
        log = self._removed(index, generation)
        snapshot, now = log.refresh(), now_milliseconds()
        old = [] if snapshot is None else list(snapshot.files.values())
        old = [add.removed(now) for add in old if add.modification_time < now - 1000 * _REMOVAL_SECONDS]
        if old:
            log.commit(snapshot, [CommitInfo(now, "DELETE"), *old])
        return log.storage

    # Places

    def _table(self, index: str) -> Storage:
        return self._root.child(index)

    def _side(self, index: str, generation: str = "") -> Storage:
        return self._root.child("/".join(filter(None, ("_penstock", index, generation))))

    def _current(self, index: str, generation: Generation) -> DeltaLog:
        """Return the log of a generation: the one that readers see, once it serves."""
        snapshot = self._log(self._table(index)).refresh()
        if snapshot is not None and _generation_of(snapshot) == generation.name:
            return self._log(self._table(index))
        return self._log(_Apart(self._table(index), self._side(index, generation.name)))

    def _removed(self, index: str, generation: Generation) -> DeltaLog:
        return self._log(self._side(index, generation.name).child("removed"))

    def _log(self, storage: Storage) -> DeltaLog:
        key = storage.log.url if isinstance(storage, _Apart) else storage.url
        return self._logs.setdefault(key, DeltaLog(storage))

    def _first(self, generation: Generation, owner: str) -> Sequence[Action]:
        now = now_milliseconds()
        properties = table_configuration(owner, deletion_vectors=self._vectors, **self._retention)
        state = TableState(owner, 0, generation.name, generation.name, _LAYOUT)
        metadata = to_metadata(state, str(uuid.uuid4()), now, properties | {_GENERATION: generation.name})
        protocol = protocol_for(_LAYOUT.schema, deletion_vectors=self._vectors)
        return [CommitInfo(now, "CREATE TABLE"), protocol, metadata]


@dataclass(frozen=True)
class _Apart:
    """The storage of a table whose log is in another folder."""

    data: Storage
    log: Storage

    @property
    def url(self) -> str:
        return self.data.url

    @property
    def options(self) -> Mapping[str, str]:
        return self.data.options

    def child(self, path: str) -> Storage:
        return self._of(path).child(path)

    def get(self, path: str) -> bytes | None:
        return self._of(path).get(path)

    def get_range(self, path: str, offset: int, length: int) -> bytes | None:
        return self._of(path).get_range(path, offset, length)

    def put(self, path: str, content: bytes) -> None:
        self._of(path).put(path, content)

    def put_if_absent(self, path: str, content: bytes) -> bool:
        return self._of(path).put_if_absent(path, content)

    def create(self, path: str) -> Any:
        return self._of(path).create(path)

    def open(self, path: str) -> Any:
        return self._of(path).open(path)

    def list(self, folder: str = "", *, after: str = "") -> Iterator[StoredFile]:
        return self._of(folder).list(folder, after=after)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self._of(path).delete([path])

    def local_path(self, path: str) -> Path | None:
        return self._of(path).local_path(path)

    def _of(self, path: str) -> Storage:
        return self.log if path.startswith(LOG_FOLDER) else self.data


def _find(storage: Storage, snapshot: Snapshot, keys: pa.Array) -> tuple[list[FileMatch], NDArray[np.int64]]:
    """Return the rows that have these keys, and the version of each; -1 if there is no row."""
    known = np.full(len(keys), -1, np.int64)
    files = [LiveFile.of(add) for add in snapshot.files.values()]
    index_folder(storage, _LAYOUT).tidy([file.file for file in files])
    matches = find_rows(storage, _LAYOUT, files, keys)
    for match in matches:
        order = np.argsort(match.rows)
        found = read_rows(storage, match.file.file, _LAYOUT.schema, ["version"], match.rows[order])
        known[match.keys[order]] = found["version"].to_numpy()
    return matches, known


def _only(match: FileMatch, fresh: NDArray[np.bool_]) -> FileMatch | None:
    """Return the rows of a match whose keys are written; None if there are none."""
    chosen = fresh[match.keys]
    return replace(match, keys=match.keys[chosen], rows=match.rows[chosen]) if chosen.any() else None


def _generation_of(snapshot: Snapshot) -> str | None:
    return snapshot.metadata.configuration.get(_GENERATION)
