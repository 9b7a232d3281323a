"""Writing to a disk that may be full: nothing fails, it waits, says so, and goes on."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
