"""Cleans up: writes checkpoints, and deletes old files of the log, and data files, vectors and indexes that no version
names.

**Checkpoints** are Penstock's own, because other writers keep one tombstone for every vector that a file ever had: a
file that changes with each commit fills them. Tombstones exist only for vacuum, which deletes stored files. So one per
stored file is enough, the newest: a checkpoint never has more tombstones than there are files that vacuum has not
deleted yet.

**The log** stays readable at every moment: it starts with a checkpoint that covers everything before the kept commits.
Files are deleted oldest first, so an interrupted clean-up leaves no gap.

**Vacuum** is Penstock's own, because delta-rs does not know deletion vectors and would delete live ones. It deletes a
file that the log has removed when its retention is over. A file that no commit names was left by a task that ran twice
or by a process that died; vacuum deletes it when it is older than everything that is being written. Files with other
names than Penstock's are left alone, and so are those of a copy that may be resumed. Vacuum lists the folder before it
reads the log, so a file committed meanwhile counts as live. Before it deletes files that no commit names, it takes the
next version with a commit without actions: a process that was suspended since it wrote them finds its version taken,
reads the log again, and notices that they no longer exist (`DeltaLog.commit`).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from penstock.destinations.delta.actions import CommitInfo
from penstock.destinations.delta.checkpoint import (
    LOG_FOLDER,
    checkpoint_version,
    find_checkpoints,
    last_checkpoint_hint,
    write_checkpoint_file,
)
from penstock.destinations.delta.files import COPY_PREFIX, now_milliseconds
from penstock.destinations.delta.log import Committed, DeltaLog
from penstock.destinations.delta.maintenance.pins import PENSTOCK_FOLDER, PINS_FOLDER, read_pins
from penstock.destinations.delta.resume import COPIES_FOLDER, recorded_attempts
from penstock.destinations.delta.schema import file_retention_seconds
from penstock.destinations.delta.snapshot import Snapshot
from penstock.destinations.delta.storage import Storage, StoredFile
from penstock.errors import DestinationUnavailable

OPERATION = "VACUUM"
_NAMED_BY_COMMITS = re.compile(r"[^/]+\.parquet|deletion_vector_[0-9a-f-]{36}\.bin")
_LEFTOVER = re.compile(rf"(?:{LOG_FOLDER}/)?\.[^/]+\.[0-9a-f]{{32}}")
_COMMIT = re.compile(rf"{LOG_FOLDER}/(\d{{20}})\.(?:json|crc)")
_COMMIT_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Vacuum:
    """The vacuum of one table; pickles."""

    storage: Storage
    removed_seconds: float
    """How long files stay that the log has removed: the time that readers of an old version have."""
    written_before: float
    """Seconds since the epoch: no commit will ever name an older file that is not named yet."""


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """The files that vacuum deleted."""

    files: int
    bytes: int


def vacuum(item: Vacuum) -> Vacuumed:
    """Delete files that are no longer needed; runs in a task."""
    listing = list(item.storage.list())
    log = DeltaLog(item.storage)
    for _ in range(_COMMIT_ATTEMPTS):
        snapshot = log.refresh()
        if snapshot is None:
            break
        removed, orphans = _expired(item, log, snapshot, listing)
        if orphans and not isinstance(log.commit(snapshot, [CommitInfo(now_milliseconds(), OPERATION)]), Committed):
            continue
        expired = removed + orphans
        item.storage.delete([file.path for file in expired])
        return Vacuumed(len(expired), sum(file.bytes for file in expired))
    return Vacuumed(0, 0)


def _expired(
    item: Vacuum, log: DeltaLog, snapshot: Snapshot, listing: list[StoredFile]
) -> tuple[list[StoredFile], list[StoredFile]]:
    """Return files past their retention: those that the log or a cache no longer uses, and those of no commit."""
    _, removals = log.read_removals() or (None, {})
    needed = set(snapshot.stored_files())
    for pin in read_pins(item.storage):
        needed.update(log.read_at(pin.version).stored_files())
    deadline = (time.time() - item.removed_seconds) * 1000
    removed: list[StoredFile] = []
    orphans: list[StoredFile] = []
    unfinished = tuple(f"{COPY_PREFIX}{attempt}-" for attempt in recorded_attempts(file.path for file in listing))
    for file in listing:
        if file.path in needed or file.path.startswith(f"{COPIES_FOLDER}/"):
            continue
        if unfinished and file.path.rpartition("/")[2].startswith(unfinished) and file.path not in removals:
            continue  # of a copy that may be resumed
        is_old = file.modified < item.written_before
        if file.path.startswith(f"{PENSTOCK_FOLDER}/"):
            removed += [file] * (is_old and _is_stale_index(file, snapshot))
        elif file.path in removals:
            removed += [file] * (removals[file.path].time < deadline)
        elif is_old and _LEFTOVER.fullmatch(file.path):
            removed.append(file)
        elif is_old and _NAMED_BY_COMMITS.fullmatch(file.path):
            orphans.append(file)
    return removed, orphans


def _is_stale_index(file: StoredFile, snapshot: Snapshot) -> bool:
    """Return True for an index without a live data file; an index is named after its data file, with a suffix."""
    if file.path.startswith(f"{PINS_FOLDER}/"):
        return False
    name = file.path.rsplit("/", 1)[-1]
    data_file = name[: name.find(".parquet") + len(".parquet")] if ".parquet" in name else name
    return data_file not in snapshot.files


def clean_log(storage: Storage, *, older_than_seconds: float) -> int | None:
    """Delete old files of the log; return the version that the log now starts with, or None if nothing was deleted."""
    cutoff = time.time() - older_than_seconds
    files = list(storage.list(LOG_FOLDER))
    modified = {_version(file): file.modified for file in files if file.path.endswith(".json") and _is_commit(file)}
    pinned = min((pin.version for pin in read_pins(storage)), default=None)
    usable = [
        checkpoint.version
        for checkpoint in find_checkpoints(file.path for file in files)
        if modified.get(checkpoint.version, cutoff) < cutoff and (pinned is None or checkpoint.version <= pinned)
    ]
    if not usable:
        return None
    first = usable[-1]
    expired = sorted(
        (version, file.path) for file in files if (version := _version(file)) is not None and version < first
    )
    if not expired:
        return None
    storage.delete([path for _, path in expired])
    return first


def _is_commit(file: StoredFile) -> bool:
    return _COMMIT.fullmatch(file.path) is not None


def _version(file: StoredFile) -> int | None:
    match = _COMMIT.fullmatch(file.path)
    return int(match[1]) if match is not None else checkpoint_version(file.path)


def write_checkpoint(storage: Storage) -> int:
    """Write a checkpoint of the newest version, from which readers will start; return its version. Runs in a task."""
    found = DeltaLog(storage).read_removals()
    if found is None:
        raise DestinationUnavailable(
            f"{storage.url}: cannot write a checkpoint because there is no table",
            hint="Penstock retries; if it keeps failing, check that the folder still exists.",
        )
    snapshot, removals = found
    deadline = (time.time() - file_retention_seconds(snapshot.metadata.configuration)) * 1000
    # A file of vectors and a data file may have the same newest removal.
    tombstones = {id(each): each for each in removals.values() if each.time >= deadline}
    write_checkpoint_file(storage, snapshot.version, [*snapshot.actions(), *tombstones.values()])
    return snapshot.version


def commits_since_checkpoint(storage: Storage, version: int) -> int:
    """Return how many commits a reader has to read after the newest checkpoint."""
    hint = last_checkpoint_hint(storage)
    return version + 1 if hint is None else max(0, version - hint)
