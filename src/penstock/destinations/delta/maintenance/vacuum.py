"""Vacuum and sweep: data files, vectors and indexes that no version names any more, after the retention.

Our own, because delta-rs' does not know vectors and would delete live ones. What the log has removed goes when its
retention is over. What the log has never named was left by a task that ran twice or a process that died: it goes when
it is older than everything that is being written. Files whose names are not of our kind are left alone.

The folder is listed before the log is read: a file that is committed in between is live then, not an orphan. And before
files go that no commit names, a commit without actions takes the next version: a process that slept since it wrote them
finds its version taken, looks at the log again, and notices that its files are gone (`DeltaLog.commit`).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from penstock.destinations.delta.actions import CommitInfo
from penstock.destinations.delta.checkpoint import LOG_FOLDER
from penstock.destinations.delta.files import now_milliseconds
from penstock.destinations.delta.log import Committed, DeltaLog
from penstock.destinations.delta.maintenance.pins import PENSTOCK_FOLDER, PINS_FOLDER, read_pins
from penstock.destinations.delta.snapshot import Snapshot
from penstock.destinations.delta.storage import Storage, StoredFile

OPERATION = "VACUUM"
_NAMED_BY_COMMITS = re.compile(r"[^/]+\.parquet|deletion_vector_[0-9a-f-]{36}\.bin")
_LEFTOVER = re.compile(rf"(?:{LOG_FOLDER}/)?\.[^/]+\.[0-9a-f]{{32}}")
_COMMIT_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Vacuum:
    """One table's; pickles."""

    storage: Storage
    removed_seconds: float
    """How long files stay that the log has removed: the time that readers of an old version have."""
    written_before: float
    """Seconds since the epoch: files before this that no commit names will never be named."""


@dataclass(frozen=True, slots=True)
class Vacuumed:
    """What went."""

    files: int
    bytes: int


def vacuum(item: Vacuum) -> Vacuumed:
    """Delete what nobody needs; runs in a task."""
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
    """Files that are over their retention: those that the log, or a cache, has given up, and those of no commit."""
    removed_at = log.removed()
    needed = set(snapshot.stored_files())
    for pin in read_pins(item.storage):
        needed.update(log.read_at(pin.version).stored_files())
    deadline = (time.time() - item.removed_seconds) * 1000
    removed: list[StoredFile] = []
    orphans: list[StoredFile] = []
    for file in listing:
        if file.path in needed:
            continue
        is_old = file.modified < item.written_before
        if file.path.startswith(f"{PENSTOCK_FOLDER}/"):
            removed += [file] * (is_old and _is_stale_index(file, snapshot))
        elif file.path in removed_at:
            removed += [file] * (removed_at[file.path] < deadline)
        elif is_old and _LEFTOVER.fullmatch(file.path):
            removed.append(file)
        elif is_old and _NAMED_BY_COMMITS.fullmatch(file.path):
            orphans.append(file)
    return removed, orphans


def _is_stale_index(file: StoredFile, snapshot: Snapshot) -> bool:
    """An index is named after its data file, with more behind it."""
    if file.path.startswith(f"{PINS_FOLDER}/"):
        return False
    name = file.path.rsplit("/", 1)[-1]
    data_file = name[: name.find(".parquet") + len(".parquet")] if ".parquet" in name else name
    return data_file not in snapshot.files
