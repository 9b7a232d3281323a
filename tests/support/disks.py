"""A small disk that tests fill, free, and make read-only: a tmpfs, which only root can mount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_PAGE = bytes(4096)


class CannotMount(Exception):
    """A disk cannot be mounted here."""


class SmallDisk:
    """A disk at a folder, until `close`; a context manager."""

    def __init__(self, folder: Path, megabytes: int = 24) -> None:
        """Mount it; the folder is created if necessary. Raise `CannotMount` where that is not possible."""
        if os.geteuid() != 0:
            raise CannotMount("a small disk needs root to mount it")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            raise CannotMount(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
        self.folder = folder
        self._filler = folder / ".filler"

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def fill(self) -> None:
        """Take all free space away."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(_PAGE):
                    pass
            except OSError:
                return

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    def make_read_only(self) -> bool:
        """Refuse all writes; return False if a file is open for writing, so that the disk stays writable."""
        return self._remount("ro")

    def make_writable(self) -> None:
        """Allow writes again."""
        self._remount("rw")

    def close(self) -> None:
        """Unmount it, with all that is on it."""
        subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def _remount(self, how: str) -> bool:
        return subprocess.run(["mount", "-o", f"remount,{how}", str(self.folder)], capture_output=True).returncode == 0
