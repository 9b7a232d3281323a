"""Makes files survive a power failure: their bytes, and their names; and tries whether a folder can be written."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def restored_folders(path: Path) -> Iterator[None]:
    """Remove, after the block, the folders that the block created on the way to a path, if they are empty."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


def probe_folder(path: Path) -> None:
    """Write a file into a folder and remove it, with the folders that do not exist yet; raise `OSError` if it fails."""
    with restored_folders(path):
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(b"probe")
        finally:
            probe.unlink(missing_ok=True)
