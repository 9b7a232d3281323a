"""Makes files survive a power failure: their bytes, and their names; and tries whether a folder can be written."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ASIDE = re.compile(r"\..+\.[0-9a-f]{32}")
_ABANDONED_SECONDS = 3600.0


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Create a file and make its bytes durable, but not its name."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def aside(target: Path) -> Iterator[Path]:
    """Yield a path next to a file for its new content, and remove what is left of that after the block.

    So attempts to write to a full disk leave nothing behind. What a kill leaves, `sweep_aside` removes.
    """
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def sweep_aside(folder: Path) -> None:
    """Remove files from `aside` in a folder that nothing writes any more: those that are older than an hour."""
    deadline = time.time() - _ABANDONED_SECONDS
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        for each in found:
            with suppress(FileNotFoundError):
                if _ASIDE.fullmatch(each.name) and each.is_file() and each.stat().st_mtime < deadline:
                    os.unlink(each.path)


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
