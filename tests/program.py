"""Runs `penstock` commands in processes that skip the imports.

    result = penstock("tables", "--json", environment={...}, folder=tmp_path)

An interpreter that has imported the program waits for commands and forks for each. Tests run hundreds of commands, and
imports dominate the cost of a short one. Commands that need a terminal or another user are started normally.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

PATIENCE = 300.0
"""A guard against hangs."""
_LONGEST_MESSAGE = 1 << 17
_NUMBER = 4
"""The size of a number in bytes."""


class Command:
    """A started command, with the part of `subprocess.Popen` that tests need."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        folder: Path | None = None,
        answer: IO[bytes] | None = None,
        output: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        message = json.dumps([arguments, dict(environment), str(folder or Path.cwd())]).encode()
        self._told, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as nothing:
            files = (answer or nothing, output, errors, theirs)
            socket.send_fds(_waiting_interpreter()[0], [message], [each.fileno() for each in files])
        self._told.settimeout(PATIENCE)
        self.pid = self._number()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        try:
            return self.wait(0.0)
        except TimeoutError:
            return None

    def wait(self, timeout: float) -> int:
        """Return its exit status, negative for a signal."""
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                self.returncode = self._number()
            except BlockingIOError:
                raise TimeoutError from None
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        content = self._told.recv(_NUMBER)
        assert content, "the interpreter that waits for commands has ended"
        return int.from_bytes(content, signed=True)


def penstock(
    *arguments: str, environment: Mapping[str, str], folder: Path | None = None, answer: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `answer` as its standard input."""
    with TemporaryFile() as standard_input, TemporaryFile() as output, TemporaryFile() as errors:
        standard_input.write(answer.encode())
        standard_input.seek(0)
        command = Command(
            *arguments, environment=environment, folder=folder, answer=standard_input, output=output, errors=errors
        )
        try:
            status = command.wait(PATIENCE)
        finally:
            command.kill()
        return subprocess.CompletedProcess(arguments, status, _text(output), _text(errors))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@cache
def _waiting_interpreter() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the interpreter; it ends with this process, which closes the connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
    theirs.close()
    return ours, process


def _serve(connection: socket.socket) -> None:
    import penstock.cli.main  # noqa: F401

    # Frozen objects are not copied for each command.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_MESSAGE, 4)
        if not message:
            return
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_and_tell(json.loads(message), descriptors)
        for each in descriptors:
            os.close(each)


def _run_and_tell(command: tuple[list[str], dict[str, str], str], descriptors: list[int]) -> None:
    *standard, teller = descriptors
    pid = os.fork()
    if pid == 0:
        os.close(teller)
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _run(*command)
    os.write(teller, pid.to_bytes(_NUMBER, signed=True))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(teller, status.to_bytes(_NUMBER, signed=True))
    os._exit(0)


def _run(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv = ["penstock", *arguments]
    runpy.run_module("penstock", run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
