"""The folder of a spool: where things lie, how small files are replaced, and how writing waits while the disk is full.

spool/
  lineage.json          which server, timeline and slot the positions belong to
  lock                  held by the one writer
  log/00000001.jsonl    entries in order, in parts
  segments/00000042/    the files of entry 42
  schemas/16384/…json   versions of a table's schema
  readers/<name>.json   up to where each reader needs nothing more
  released.json         up to where entries may be gone
  holds/16384.json      tables that are being copied: their changes are kept longer
  open/                 streamed transactions that have not ended
  status.json           how the process that runs saw itself last, for `penstock status`
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.durable import sync_folder

logger = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT}
_Result = TypeVar("_Result")


def append(path: Path, *parts: bytes) -> None:
    """Append bytes to a file, all of them or none without an exception.

    A disk that fills up takes the first part of a write and says only how much that was.
    """
    with open(path, "ab", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed for want of room."""
    return error.errno in _FULL


class Stopping(Exception):
    """Somebody asked to stop while we waited; not an error."""


class DiskGuard:
    """Runs writes, and runs them again once there is room."""

    def __init__(self, path: Path, *, min_free_bytes: int, stop: threading.Event, poll_seconds: float = 0.5) -> None:
        self._path = path
        self._min_free_bytes = min_free_bytes
        self._stop = stop
        self._poll_seconds = poll_seconds
        self.full = False
        """Whether a write waits for room now."""

    def run(self, write: Callable[[], _Result], undo: Callable[[], object]) -> _Result:
        """Write; where the disk is full undo what was half done, wait, and write again."""
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
                logger.warning("the disk has room again, going on path=%s", self._path)
            return result

    def _has_room(self) -> bool:
        status = os.statvfs(self._path)
        return status.f_bavail * status.f_frsize >= self._min_free_bytes

    def _wait(self) -> None:
        if not self.full:
            self.full = True
            logger.error("the spool's disk is full, waiting for room path=%s", self._path)
        while True:
            if self._stop.wait(self._poll_seconds):
                raise Stopping
            if self._has_room():
                return


@dataclass(frozen=True, slots=True)
class SpoolFolder:
    """Paths inside a spool."""

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
        """What tasks of `penstock verify` write down."""
        return self.root / "verify"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    def entry(self, number: int) -> Path:
        return self.segments / f"{number:012d}"

    def log_parts(self) -> list[Path]:
        """The log's files, oldest first."""
        return sorted(self.log.glob("*.jsonl"))

    def create(self) -> None:
        for folder in (self.log, self.segments, self.schemas, self.readers, self.holds):
            folder.mkdir(parents=True, exist_ok=True)

    def discard(self) -> None:
        """Forget everything: what is here belongs to a slot that is gone. Nobody reads or writes it now."""
        # The log first: without it nothing else counts.
        for folder in (self.log, self.readers, self.holds, self.open, self.schemas, self.segments):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.lineage, self.released):
            file.unlink(missing_ok=True)


def replace_file(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write JSON so that readers see the old content or the new one; `durable` outlives a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        json.dump(value, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if durable:
        sync_folder(path.parent)


def read_file(path: Path) -> Any | None:
    """JSON, or None if there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def remove_damaged(paths: Iterable[Path]) -> None:
    """Remove files of JSON that a power cut has left empty or half written."""
    for path in paths:
        try:
            read_file(path)
        except ValueError:
            path.unlink(missing_ok=True)
