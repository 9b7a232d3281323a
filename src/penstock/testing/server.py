"""A server that a test starts as a process: its temporary folder, its port, its log, and its end.

Servers refuse to run as root. When root starts one, it runs as an unprivileged user, in a folder which that user owns.

The server does not outlive the process that started it. Normally `close()` or the interpreter's exit ends it; if the
process is killed, a waiting shell sees its pipe end, kills the server and removes the folder.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.errors import ServerUnavailable

UNPRIVILEGED_USER = "nobody"
STOP_SECONDS = 60.0

_SOCKET_PATH_LIMIT = 90
"""A Unix socket's path has at most 107 bytes; a server adds its file name to the folder."""
_WATCHER = """
read -r _
pid=$(head -n 1 "$1/$2" 2>/dev/null)
if [ -n "$pid" ]; then
    kill "-$3" "$pid" 2>/dev/null
    for _ in 1 2 3 4 5 6 7 8 9 10; do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
    kill -KILL "$pid" 2>/dev/null
fi
rm -rf "$1"
"""
"""Waits for the end of its input, which comes when the process that holds the pipe ends, however it ends."""


_PORTS_TRIED = 5
_PORT_TAKEN = ("BindException", "Address already in use")


class OwnServer:
    """What servers that we start have in common; a context manager that starts and closes one."""

    def __init__(self, prefix: str, *, pid_file: str, end_signal: str) -> None:
        """`pid_file` in the folder names the process that gets `end_signal` when this one was killed."""
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._account = pwd.getpwnam(UNPRIVILEGED_USER) if os.geteuid() == 0 else None
        self.folder = self._make_folder(prefix)
        self.log_path = self.folder / "server.log"
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "penstock-server-watcher", str(self.folder), pid_file, end_signal],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        atexit.register(self.close)

    def start(self) -> Self:
        """Start it and wait until it can be used."""
        raise NotImplementedError

    def stop(self, *, timeout: float = STOP_SECONDS) -> None:
        """Stop it cleanly; do nothing if it is not running."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """End it with SIGKILL, as if the machine had failed; `start()` then recovers what was acknowledged."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait(STOP_SECONDS)
        self._process = None

    @property
    def pid(self) -> int:
        """The id of its process."""
        if self._process is None:
            raise ServerUnavailable("the server is not running", hint="")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self, line_count: int = 30) -> str:
        """The end of the server's log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-line_count:])
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        """End it at once and remove all of its files."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._end()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._watcher.stdin is not None:
            self._watcher.stdin.close()
        self._watcher.wait(STOP_SECONDS)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> None:
        self.kill()

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], *, session: bool = True
    ) -> subprocess.Popen[bytes]:
        """Start a program as the server's user, with its output in the log."""
        account = self._account
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
                start_new_session=session,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
                umask=0o077,
            )

    def _launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a server that is one process, and note its id for the watcher."""
        self._process = self._spawn(command, environment)
        (self.folder / "pid").write_text(str(self._process.pid))

    def _start_on_a_free_port(
        self, launch: Callable[[], None], is_ready: Callable[[], bool], *, timeout: float, settled: bool
    ) -> None:
        """Launch until it is ready. Unless its port is settled, try another if somebody takes it meanwhile."""
        for _ in range(_PORTS_TRIED):
            if not self.running:
                launch()
            deadline = time.monotonic() + timeout
            while self.running and time.monotonic() < deadline:
                if is_ready():
                    return
                time.sleep(0.2)
            said = self.log_tail(200)
            self.kill()
            if settled or not any(sign in said for sign in _PORT_TAKEN):
                break
            self.log_path.unlink(missing_ok=True)
            self.port = free_port()
        raise ServerUnavailable(f"the server did not start; its log ends with:\n{self.log_tail()}", hint="")

    def _reachable(self, folder: Path, name: str) -> Path:
        """Return a folder that the server's user can read: a copy if it cannot reach the original."""
        if self._account is None or is_open_to_all(folder):
            return folder
        return shutil.copytree(folder, self.folder / name, symlinks=True)

    def _give(self, path: Path) -> None:
        """Let the server's user own a file or folder."""
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _make_folder(self, prefix: str) -> Path:
        """A temporary folder that the server's user can reach, with a path short enough for sockets."""
        for parent in (Path(tempfile.gettempdir()).resolve(), Path("/tmp"), Path("/var/tmp")):
            too_long = len(f"{parent}/{prefix}12345678/.s.PGSQL.12345") > _SOCKET_PATH_LIMIT
            if not too_long and (self._account is None or is_open_to_all(parent)):
                folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
                self._give(folder)
                return folder
        raise ServerUnavailable(
            f"no temporary folder that user {UNPRIVILEGED_USER} can reach", hint="Set TMPDIR to a folder open to all."
        )


def java_environment() -> dict[str, str]:
    """The environment without options for Java, which are meant for other programs."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "JDK_JAVA"))}


def is_open_to_all(folder: Path) -> bool:
    """True if every user can reach files in a folder."""
    return folder.is_dir() and all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parents() -> Iterator[tuple[int, int]]:
    """The id of every process of the machine, each with its parent's."""
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None:
            yield int(entry.name), int(fields[1])


def is_alive(pid: int) -> bool:
    """True if a process runs; a zombie does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def wait_until_gone(pids: Iterable[int], *, timeout: float) -> bool:
    """Wait until none of the processes runs; false if some still do after the time-out."""
    deadline = time.monotonic() + timeout
    for pid in pids:
        while is_alive(pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    return True


def _stat(pid: int) -> list[str] | None:
    """State, parent and what follows; the name before them stands in parentheses and may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
