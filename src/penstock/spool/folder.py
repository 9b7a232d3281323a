"""The folder of a spool: its layout, replacing small files atomically, and waiting while the disk is full.

spool/
  lineage.json          which server, timeline and slot the positions belong to
  lock                  held by the one writer
  log/00000001.jsonl    entries in order, in parts
  segments/00000042/    the files of entry 42
  schemas/16384/…json   versions of a table's schema
  leaves.json           partitions that the stream has mentioned
  readers/<name>.json   the position of each reader
  released.json         the position before which entries may be deleted
  holds/16384.json      tables that are being copied: their changes are kept longer
  open/                 streamed transactions that have not ended
  status.json           the last status that the running process reported, for `penstock status`
  verified.json         what the last comparisons found: counts, and keys of rows
  supervisor.json       the supervisor of that process and its restarts, while there is one
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.durable import aside, sweep_aside, sync_folder, write_synced
from penstock.errors import SpoolDiskFull
from penstock.private import private_folder

logger = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT}
_POLL_SECONDS = 0.5
_COMPARISON_SECONDS = 86400.0
"""A comparison that has created no file for this long has ended."""
_Result = TypeVar("_Result")


def append(path: Path, *parts: bytes) -> None:
    """Append bytes to a file; raise unless all are written.

    A disk that fills up accepts the first part of a write and reports only its length.
    """
    with open(path, "ab", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]


def is_disk_full(error: OSError) -> bool:
    """True if a write failed because the disk is full."""
    return error.errno in _FULL


@contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Raise `SpoolDiskFull` instead of the error of a write for which the disk of a spool has no room."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise SpoolDiskFull(f"no room on the disk of {folder}") from None


class Stopping(Exception):
    """Raised when capture is stopped during a wait; not an error."""


class DiskGuard:
    """Runs writes, and repeats them when there is room again."""

    def __init__(self, path: Path, *, min_free_bytes: int, stop: threading.Event) -> None:
        self._path = path
        self._min_free_bytes = min_free_bytes
        self._stop = stop
        self.full = False
        """True while a write waits for room."""

    def run(self, write: Callable[[], _Result], undo: Callable[[], object]) -> _Result:
        """Write. If the disk is full, undo the partial write, wait for room, and write again."""
        while True:
            if not self._has_room():
                self._wait()
            try:
                result = write()
            except OSError as error:
                undo()
                if not is_disk_full(error):
                    raise
                self._wait()
                continue
            if self.full:
                self.full = False
                logger.warning("the spool's disk has room again path=%s", self._path)
            return result

    def _has_room(self) -> bool:
        status = os.statvfs(self._path)
        return status.f_bavail * status.f_frsize >= self._min_free_bytes

    def _wait(self) -> None:
        if not self.full:
            self.full = True
            logger.error("the spool's disk is full, waiting for room path=%s", self._path)
        while True:
            if self._stop.wait(_POLL_SECONDS):
                raise Stopping
            if self._has_room():
                return


@dataclass(frozen=True, slots=True)
class SpoolFolder:
    """The paths of a spool."""

    root: Path

    @property
    def lineage(self) -> Path:
        return self.root / "lineage.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def schemas(self) -> Path:
        return self.root / "schemas"

    @property
    def leaves(self) -> Path:
        return self.root / "leaves.json"

    @property
    def readers(self) -> Path:
        return self.root / "readers"

    @property
    def released(self) -> Path:
        return self.root / "released.json"

    @property
    def holds(self) -> Path:
        return self.root / "holds"

    @property
    def open(self) -> Path:
        return self.root / "open"

    @property
    def comparisons(self) -> Path:
        """Files that tasks of `penstock verify` write."""
        return self.root / "verify"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def verified(self) -> Path:
        return self.root / "verified.json"

    @property
    def supervisor(self) -> Path:
        return self.root / "supervisor.json"

    def entry(self, number: int) -> Path:
        return self.segments / f"{number:012d}"

    def log_parts(self) -> list[Path]:
        """The log's files, oldest first."""
        return sorted(self.log.glob("*.jsonl"))

    def create(self) -> None:
        """Create the folders that do not exist; raise `ConfigError` if other users can write here."""
        private_folder(self.root)
        for folder in (self.log, self.segments, self.schemas, self.readers, self.holds):
            folder.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove what processes that were killed have left: files that were to replace others, and comparisons."""
        for folder in (self.root, self.readers, self.holds, *self.schemas.glob("*")):
            sweep_aside(folder)
        deadline = time.time() - _COMPARISON_SECONDS
        for folder in self.comparisons.glob("*"):
            with suppress(FileNotFoundError):
                if folder.stat().st_mtime < deadline:
                    shutil.rmtree(folder, ignore_errors=True)

    def discard(self) -> None:
        """Delete everything, because the slot it came from is gone. No process may be reading or writing."""
        # The log first: without it, the other files are ignored.
        for folder in (self.log, self.readers, self.holds, self.open, self.schemas, self.segments):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.lineage, self.released, self.leaves):
            file.unlink(missing_ok=True)


def replace_file(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write JSON so that readers see the old or the new content; `durable` content survives a power failure."""
    content = json.dumps(value).encode()
    with aside(path) as temporary:
        if durable:
            write_synced(temporary, content)
        else:
            temporary.write_bytes(content)
        os.replace(temporary, path)
    if durable:
        sync_folder(path.parent)


def read_file(path: Path) -> Any | None:
    """Read JSON; None if the file does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def remove_damaged(paths: Iterable[Path]) -> None:
    """Remove JSON files that a power failure left empty or half written."""
    for path in paths:
        try:
            read_file(path)
        except ValueError:
            path.unlink(missing_ok=True)
