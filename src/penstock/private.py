"""Folders and files that other users of the machine can neither read nor prepare.

The spool, the state and caches contain values of rows, and Penstock trusts what it finds there. New folders and files
are for their owner alone. Existing folders may be opened for reading by a group, for tasks that run as another user;
they may neither belong to another user nor be writable by everyone.
"""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from penstock.errors import ConfigError

_ROOT = 0


def private_folder(path: Path) -> Path:
    """Create a folder if it does not exist; raise `ConfigError` if other users could have put files there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
    found = path.stat()
    # Root may inspect the pipeline of any user, and could prepare anything itself.
    if _ROOT not in (found.st_uid, os.geteuid()) and found.st_uid != os.geteuid():
        raise ConfigError(
            f"the folder {path} belongs to another user (uid {found.st_uid}; this process has uid {os.geteuid()})",
            hint="Use another folder, or run Penstock as the user who owns it.",
        )
    if found.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"every user of this machine can write into the folder {path}",
            hint=f"Use a folder of its own, or check what is in it and run: chmod o-w {shlex.quote(str(path))}",
        )
    return path


def private_file(path: Path) -> Path:
    """Create an empty file if it does not exist, in a private folder; an existing one is left as it is."""
    private_folder(path.parent)
    # An existing file is not even opened: closing it would release the locks of this process on it, as of SQLite.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    return path


@cache
def cache_folder() -> Path:
    """Return a folder for copies that can be lost, the same for all processes of this user.

    If another user has taken its name, or could have put files into it, this process gets a folder of its own.
    """
    path = Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return Path(tempfile.mkdtemp(prefix="penstock-cache-"))
        path.chmod(0o700)
    return path
