"""The log of a table: reads its current state and takes the next version.

Penstock has its own implementation because delta-rs does not expose deletion vectors and adds features that lock
readers out. A log is read once, from its newest checkpoint; after that a refresh asks for the next version until there
is none.

A writer takes a version by creating its file, which succeeds for one writer only. A writer that loses gets the commits
in between, and decides by `Verdict`. If the answer to a commit was lost, the commit is recognised by its id. A log is
never deleted, and no version number is used twice: a writer that was suspended while the log was cleaned up notices it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.destinations.delta.actions import (
    Action,
    Add,
    CommitInfo,
    Metadata,
    Protocol,
    Remove,
    parse_commit,
    serialize_commit,
)
from penstock.destinations.delta.checkpoint import (
    LOG_FOLDER,
    Checkpoint,
    find_checkpoints,
    last_checkpoint_hint,
    read_checkpoint,
)
from penstock.destinations.delta.schema import refuse_unknown
from penstock.destinations.delta.snapshot import (
    Application,
    Commit,
    Snapshot,
    Verdict,
    record_removals,
)
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import vector_file
from penstock.errors import DestinationUnavailable, PenstockError, TableRejected

_COMMIT = re.compile(rf"{LOG_FOLDER}/(\d{{20}})\.json")
_STALE_SECONDS = 60.0
"""After this long without reading the log, commits that this process has not seen may have been cleaned up."""
_READ_ATTEMPTS = 5
_LOOK_ONE_BY_ONE = 64
"""Up to this many files are checked one by one; more by listing the folder."""


@dataclass(frozen=True, slots=True)
class Committed:
    """This writer took the version."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Lost:
    """Another writer came first; nothing was written."""

    between: tuple[Commit, ...]
    """The other writers' commits, oldest first; empty if they are so old that the log was cleaned up meanwhile."""
    snapshot: Snapshot
    """The table after those commits."""
    before: Metadata | None = None
    """The table's metadata before them; None if there was no table."""

    def verdict(self, application: Application) -> Verdict:
        """Return the most severe verdict of all commits."""
        before = self.before
        others = (commit for commit in self.between if before is None or not commit.describes(before))
        verdicts = {commit.verdict(application) for commit in others}
        for verdict in (Verdict.FOREIGN, Verdict.SUPERSEDED, Verdict.OWN_POSITION):
            if verdict in verdicts:
                return verdict
        return Verdict.MAINTENANCE if self.between else Verdict.SUPERSEDED


class DeltaLog:
    """The log of one table. Thread-safe; does not pickle, so tasks create one from the storage."""

    def __init__(self, storage: Storage, table: str | None = None) -> None:
        self.storage = storage
        self._table = table or storage.url
        self._lock = threading.RLock()
        self._snapshot: Snapshot | None = None
        self._looked_at = 0.0

    @property
    def snapshot(self) -> Snapshot | None:
        """The result of the last refresh or commit."""
        return self._snapshot

    def refresh(self) -> Snapshot | None:
        """Return the newest version; None if there is no table. Raise `TableRejected` for a table that Penstock cannot
        use."""
        with self._lock:
            if self._snapshot is None:
                return self._load()
            self._advance(self._snapshot)
            return self._snapshot

    def read_at(self, version: int) -> Snapshot:
        """Return the table at a version; raise `TableRejected` if its log has been cleaned up."""
        snapshot = self._snapshot
        if snapshot is not None and snapshot.version == version:
            return snapshot
        found = self._read(until=version)
        if found is None or found[0].version != version:
            raise TableRejected(
                f"{self._table} has no version {version}: it was cleaned up or never existed",
                hint="Raise the retention of its log, or read a newer version.",
            )
        return found[0]

    def commits_since(self, version: int) -> list[Commit]:
        """Return the commits after a version, oldest first, up to the first gap."""
        found: list[Commit] = []
        while (commit := self._get(version + 1 + len(found))) is not None:
            found.append(commit)
        return found

    def commit(self, snapshot: Snapshot | None, actions: Sequence[Action]) -> Committed | Lost:
        """Take the version after `snapshot` (None: the first) with these actions, one of which is a CommitInfo.

        All files that the actions name must be durable before. After an error the commit may or may not have been made;
        the position in a refreshed snapshot shows which.
        """
        info = next((action for action in actions if isinstance(action, CommitInfo)), None)
        if info is None:
            raise ValueError("a commit needs a CommitInfo, whose id identifies it")
        commit = Commit(0 if snapshot is None else snapshot.version + 1, tuple(actions))
        with self._lock:
            overslept = _now() - self._looked_at >= _STALE_SECONDS
            self._refuse_missing(snapshot, actions, overslept)
            current = self.refresh() if overslept else self._snapshot
            if current is not None and current.version >= commit.version:
                return self._lost(snapshot, info)
            looked_at = self._looked_at
        try:
            created = self.storage.put_if_absent(_path(commit.version), serialize_commit(actions))
        except DestinationUnavailable:
            created = self._is_there(commit.version, info)
            if not created:
                raise
        with self._lock:
            if created and _now() - looked_at >= _STALE_SECONDS:
                created = not self._was_overtaken(commit.version)
            return Committed(self._accept(snapshot, commit)) if created else self._lost(snapshot, info)

    def read_removals(self) -> tuple[Snapshot, dict[str, Remove]] | None:
        """Return the newest version, and the newest removal of each stored file that it does not need, as far back as
        the log goes; None if there is no table.

        Reads the log again, because writers do not need removals and would have to keep them in memory.
        """
        found = self._read(removals=True)
        if found is not None:
            for path in found[0].stored_files():
                found[1].pop(path, None)
        return found

    def _refuse_missing(self, snapshot: Snapshot | None, actions: Sequence[Action], overslept: bool) -> None:
        """Raise if files of this commit were deleted: while this process was suspended, maintenance may have taken them
        for orphans."""
        known = {} if snapshot is None else snapshot.files
        long_ago = (time.time() - _STALE_SECONDS) * 1000
        named = [action for action in actions if isinstance(action, Add)]
        added = [add for add in named if add.path not in known and (overslept or add.modification_time < long_ago)]
        suspects = {add.file for add in added}
        vectors = (vector_file(add.vector) for add in named if overslept and add.vector is not None)
        suspects.update(path for path in vectors if path is not None)
        missing = self._missing(suspects)
        if missing:
            raise DestinationUnavailable(
                f"{self._table}: {len(missing)} files written for a commit no longer exist",
                hint="Maintenance deleted them because they were old and not committed; Penstock writes them again.",
            )

    def _missing(self, paths: set[str]) -> set[str]:
        if len(paths) > _LOOK_ONE_BY_ONE:
            return paths - {file.path for file in self.storage.list()}
        return {path for path in paths if self.storage.get_range(path, 0, 1) is None}

    def _accept(self, snapshot: Snapshot | None, commit: Commit) -> Snapshot:
        base = snapshot or _first(self._table, commit)
        after = base.followed_by(commit)
        if self._snapshot is None or self._snapshot.version < after.version:
            self._snapshot = after
            self._looked_at = _now()
        return after

    def _lost(self, snapshot: Snapshot | None, info: CommitInfo) -> Committed | Lost:
        before = -1 if snapshot is None else snapshot.version
        between = tuple(self.commits_since(before))
        current = self.refresh()
        if current is None:
            raise self._incomplete()
        # The put was retried, and the answer to the first attempt was lost.
        if any(commit.info is not None and commit.info.commit_id == info.commit_id for commit in between):
            return Committed(current)
        return Lost(between, current, None if snapshot is None else snapshot.metadata)

    def _is_there(self, version: int, info: CommitInfo) -> bool:
        """Return True if the put took effect even though it reported an error."""
        commit = self._get(version)
        return commit is not None and commit.info is not None and commit.info.commit_id == info.commit_id

    def _was_overtaken(self, version: int) -> bool:
        """Return True if the version was used long ago and cleaned up since, so that readers ignore this commit.

        In that case a checkpoint after it is older than the commit's file; a checkpoint that includes the commit is
        newer.
        """
        files = {file.path: file.modified for file in self.storage.list(LOG_FOLDER)}
        ours = files.get(_path(version))
        older = [path for path, modified in files.items() if ours is not None and modified < ours]
        if not any(checkpoint.version >= version for checkpoint in find_checkpoints(older)):
            return False
        self.storage.delete([_path(version)])
        self._snapshot = None
        return True

    def _advance(self, snapshot: Snapshot) -> None:
        """Apply the commits after a snapshot."""
        start = snapshot.version
        while (commit := self._get(snapshot.version + 1)) is not None:
            snapshot = snapshot.followed_by(commit)
        if snapshot.version == start and _now() - self._looked_at >= _STALE_SECONDS:
            hint = last_checkpoint_hint(self.storage)
            if hint is not None and hint > start:
                self._load()
                return
        if snapshot.version != start:
            refuse_unknown(self._table, snapshot.protocol, snapshot.metadata)
        self._snapshot = snapshot
        self._looked_at = _now()

    def _load(self) -> Snapshot | None:
        found = self._read()
        self._looked_at = _now()
        self._snapshot = None if found is None else found[0]
        return self._snapshot

    def _read(self, until: int | None = None, *, removals: bool = False) -> tuple[Snapshot, dict[str, Remove]] | None:
        """Read from the newest usable checkpoint; start over if the log is cleaned up meanwhile."""
        for _ in range(_READ_ATTEMPTS):
            try:
                return self._read_once(until, removals)
            except FileNotFoundError:
                continue
        raise self._incomplete()

    def _read_once(self, until: int | None, removals: bool) -> tuple[Snapshot, dict[str, Remove]] | None:
        checkpoint, versions = self._find(until)
        if checkpoint is None and not versions:
            return None
        first = 0 if checkpoint is None else checkpoint.version + 1
        if versions and versions != list(range(first, first + len(versions))):
            raise self._incomplete()
        removed: dict[str, Remove] = {}
        snapshot = None
        if checkpoint is not None:
            actions = list(read_checkpoint(self.storage, checkpoint, tombstones=removals))
            record_removals(removed, actions)
            commit = Commit(checkpoint.version, tuple(each for each in actions if not isinstance(each, Remove)))
            snapshot = _first(self._table, commit).followed_by(commit)
        for version in versions:
            commit = self._get(version)
            if commit is None:
                raise FileNotFoundError(_path(version))
            snapshot = (snapshot or _first(self._table, commit)).followed_by(commit)
            if removals:
                record_removals(removed, commit.actions)
        assert snapshot is not None
        refuse_unknown(self._table, snapshot.protocol, snapshot.metadata)
        return snapshot, removed

    def _find(self, until: int | None) -> tuple[Checkpoint | None, list[int]]:
        """Return the newest checkpoint, and the versions of the commits after it."""
        hint = last_checkpoint_hint(self.storage)
        starts = [""] if hint is None or (until is not None and hint > until) else [f"{LOG_FOLDER}/{hint:020d}", ""]
        checkpoint: Checkpoint | None = None
        versions: list[int] = []
        for after in starts:
            paths = [file.path for file in self.storage.list(LOG_FOLDER, after=after)]
            usable = [each for each in find_checkpoints(paths) if until is None or each.version <= until]
            checkpoint = usable[-1] if usable else None
            matches = (_COMMIT.fullmatch(path) for path in paths)
            numbers = sorted(int(match[1]) for match in matches if match is not None)
            floor = -1 if checkpoint is None else checkpoint.version
            versions = [each for each in numbers if each > floor and (until is None or each <= until)]
            if checkpoint is not None:
                break
        return checkpoint, versions

    def _get(self, version: int) -> Commit | None:
        content = self.storage.get(_path(version))
        if content is None:
            return None
        try:
            return Commit(version, tuple(parse_commit(content)))
        except (ValueError, KeyError, TypeError) as error:
            raise TableRejected(
                f"{self._table}: version {version} of its log cannot be read",
                hint="Another program may still be writing it, or it is damaged: check the file.",
            ) from error

    def _incomplete(self) -> PenstockError:
        return TableRejected(
            f"{self._table}: its log has gaps or missing files",
            hint="Another program deleted files of the log: move the table elsewhere and copy it again.",
        )


def _path(version: int) -> str:
    return f"{LOG_FOLDER}/{version:020d}.json"


def _first(table: str, commit: Commit) -> Snapshot:
    """Return the state before the first commit of a log, or of its remaining part."""
    protocol = next((action for action in commit.actions if isinstance(action, Protocol)), None)
    metadata = next((action for action in commit.actions if isinstance(action, Metadata)), None)
    if protocol is None or metadata is None:
        raise TableRejected(
            f"{table}: its log does not start with a protocol and metadata",
            hint="Another program deleted files of the log: move the table elsewhere and copy it again.",
        )
    return Snapshot(commit.version - 1, protocol, metadata)


def _now() -> float:
    # This clock continues while the machine sleeps.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
