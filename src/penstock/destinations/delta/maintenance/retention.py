"""The log's retention: commits and checkpoints that are older than somebody may want to look back are removed.

A log stays readable at every moment: it begins with a checkpoint at which, or before which, everything that is kept
begins. Files go oldest first, so that a clean-up that dies half-way leaves no gap either.
"""

from __future__ import annotations

import re
import time

from penstock.destinations.delta.checkpoint import LOG_FOLDER, checkpoint_version, find_checkpoints
from penstock.destinations.delta.maintenance.pins import read_pins
from penstock.destinations.delta.storage import Storage, StoredFile

_COMMIT = re.compile(rf"{LOG_FOLDER}/(\d{{20}})\.(?:json|crc)")


def clean_log(storage: Storage, *, older_than_seconds: float) -> int | None:
    """Remove what is older; gives the version with which the log begins now, or None if nothing could be removed."""
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
