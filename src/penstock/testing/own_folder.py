"""Where a server of a test lives: a temporary folder that its user owns, and a port that is free.

Servers refuse to run as root. For root they run as an unprivileged user, who needs a folder that can be reached.
"""

from __future__ import annotations

import os
import pwd
import socket
import tempfile
from pathlib import Path

from penstock.errors import ServerUnavailable

UNPRIVILEGED_USER = "nobody"

_SOCKET_PATH_LIMIT = 90
"""A Unix socket's path has at most 107 bytes; a server adds its file name to the folder."""


def unprivileged_account() -> pwd.struct_passwd | None:
    """The account for a server's processes; none unless we are root."""
    return pwd.getpwnam(UNPRIVILEGED_USER) if os.geteuid() == 0 else None


def make_folder(prefix: str, account: pwd.struct_passwd | None) -> Path:
    """A new temporary folder that the server's user owns and can reach, with a path short enough for sockets."""
    for parent in (Path(tempfile.gettempdir()).resolve(), Path("/tmp"), Path("/var/tmp")):
        too_long = len(f"{parent}/{prefix}12345678/.s.PGSQL.12345") > _SOCKET_PATH_LIMIT
        if too_long or (account is not None and not is_open_to_all(parent)):
            continue
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        give(folder, account)
        return folder
    raise ServerUnavailable(
        f"no temporary folder that user {UNPRIVILEGED_USER} can reach", hint="Set TMPDIR to a folder open to all."
    )


def give(path: Path, account: pwd.struct_passwd | None) -> None:
    """Let the server's user own a file or folder."""
    if account is not None:
        os.chown(path, account.pw_uid, account.pw_gid)


def is_open_to_all(folder: Path) -> bool:
    """Whether anybody can reach what lies in a folder."""
    return folder.is_dir() and all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
