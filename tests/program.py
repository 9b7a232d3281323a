"""Starts processes of the program that skip the imports: commands, capture processes and drivers.

    result = penstock("tables", "--json", environment={...}, folder=tmp_path)

An interpreter that has imported the program waits for orders and forks for each. Tests start thousands of processes,
and imports dominate the cost of a short one. Commands that need a terminal or another user are started normally.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from penstock import failpoints
from penstock.capture import process as capture_process

PATIENCE = 300.0
"""A guard against hangs."""
DRIVER = "tests.support.drive_pipeline"
_LONGEST_MESSAGE = 1 << 17
_NUMBER = 4
"""The size of a number in bytes."""
_NAME_BYTES = 200
"""The longest command line that a forked process shows."""


class Forked:
    """A process that runs a module as `python -m` does, with the part of `subprocess.Popen` that tests need."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        folder: Path | None = None,
        files: Sequence[int],
    ) -> None:
        """`files` are the descriptors that become its standard input, output and errors."""
        message = json.dumps([module, arguments, dict(environment), str(folder or Path.cwd())]).encode()
        self._told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._told.connect(_address())
        socket.send_fds(self._told, [message], files)
        self._reading = threading.Lock()
        self.returncode: int | None = None
        self.pid = self._number(PATIENCE)

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative for a signal."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            if self._reading.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                try:
                    if self.returncode is None:
                        left = None if deadline is None else max(0.0, deadline - time.monotonic())
                        self.returncode = self._number(left)
                        self._told.close()
                finally:
                    self._reading.release()
            elif deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _number(self, timeout: float | None) -> int:
        if not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        content = self._told.recv(_NUMBER)
        assert content, "the interpreter that forks processes has ended"
        return int.from_bytes(content, signed=True)


class Command(Forked):
    """A started command."""

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        folder: Path | None = None,
        answer: IO[bytes] | None = None,
        output: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        with open(os.devnull, "rb") as nothing:
            files = [each.fileno() for each in (answer or nothing, output, errors)]
            super().__init__("penstock", *arguments, environment=environment, folder=folder, files=files)


class Piped(Forked):
    """A process whose standard input and output are pipes; a context manager, as `subprocess.Popen` is."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str]) -> None:
        theirs, to_it = os.pipe()
        from_it, its = os.pipe()
        self.stdin, self.stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb")
        try:
            super().__init__(module, *arguments, environment=environment, files=[theirs, its, 2])
        finally:
            os.close(theirs)
            os.close(its)

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close_pipes()
        self.wait()

    def close_pipes(self) -> None:
        self.stdout.close()
        self.stdin.close()


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


def start_capture() -> Piped:
    """Start a capture process; tests put it in the place of `penstock.capture.process.start_child`."""
    return Piped("penstock.capture", environment=os.environ)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


_listening: list[bytes] = []
"""Where the interpreter that forks listens; empty until it is started."""
_waiting: list[subprocess.Popen[bytes]] = []
"""The interpreter that forks: its standard input ends when this process does."""
_starting = threading.Lock()


def _address() -> bytes:
    with _starting:
        if not _listening:
            with _listen() as listener:
                command = [sys.executable, "-m", "tests.program", str(listener.fileno()), "-" * _NAME_BYTES]
                _waiting.append(
                    subprocess.Popen(
                        command,
                        cwd=Path(__file__).parents[1],
                        pass_fds=[listener.fileno()],
                        # A thread of its own would not survive a fork.
                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                        stdin=subprocess.PIPE,
                        start_new_session=True,
                    )
                )
                _listening.append(listener.getsockname())
        return _listening[0]


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0penstock-tests-" + secrets.token_hex(8).encode())
    listener.listen(64)
    return listener


def _main(listener: socket.socket) -> None:
    # What commands, captures and drivers import later; Arrow imports pandas when it is first given a NumPy array.
    used = ("penstock.cli.main", "penstock.destinations.delta", "penstock.destinations.parquet", "pandas", DRIVER)
    for module in used:
        importlib.import_module(module)
    # A driver runs it again, as its main module.
    del sys.modules[DRIVER]
    # Frozen objects are not copied for each process.
    gc.collect()
    gc.freeze()
    # A fork has none of the other threads; allocators are prepared for that.
    threads = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    assert len([each for each in threads if each != "jemalloc_bg_thd"]) == 1, threads
    _serve(listener, 0)


def _serve(listener: socket.socket, alive: int) -> None:
    """Fork a process for each order, until the file `alive` ends."""
    running: dict[int, tuple[int, socket.socket]] = {}
    waiting = select.poll()
    waiting.register(alive, select.POLLIN)
    waiting.register(listener, select.POLLIN)
    while True:
        for ready, _ in waiting.poll():
            if ready == alive:
                return
            if ready in running:
                waiting.unregister(ready)
                pid, teller = running.pop(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.close(ready)
                _tell(teller, status)
                teller.close()
                continue
            teller = listener.accept()[0]
            message, files, _, _ = socket.recv_fds(teller, _LONGEST_MESSAGE, 3)
            if not message:
                teller.close()
                continue
            pid = os.fork()
            if pid == 0:
                teller.close()
                for descriptor, (_, other) in running.items():
                    os.close(descriptor)
                    other.close()
                _run(listener, files, *json.loads(message))
            for each in files:
                os.close(each)
            _tell(teller, pid)
            descriptor = os.pidfd_open(pid)
            running[descriptor] = (pid, teller)
            waiting.register(descriptor, select.POLLIN)


def _tell(teller: socket.socket, number: int) -> None:
    try:
        teller.send(number.to_bytes(_NUMBER, signed=True))
    except OSError:
        # The process that asked has ended.
        return


def _run(
    listener: socket.socket,
    files: list[int],
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    """Run the module in this process, which was forked for it, and exit."""
    _show_command([sys.executable, "-m", module, *arguments])
    for number, descriptor in enumerate(files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv = [module, *arguments]
    failpoints.arm(environment.get(failpoints.VARIABLE, ""))
    address = listener.getsockname()
    listener.close()
    if module == "penstock.capture":
        os.setpgid(0, 0)
    else:
        _listening[:] = [_serve_below() if module == DRIVER else address]
        capture_process.start_child = start_capture
    code: object = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    # What the interpreter does at its end, except for freeing what was imported: that would copy it first.
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _serve_below() -> bytes:
    """Fork a process that forks the captures of this one, and return where it listens.

    They belong to this process: who kills it waits for all processes below it.
    """
    listener = _listen()
    alive, ours = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        with open(os.devnull, "r+b") as nothing:
            for number in (0, 1, 2):
                os.dup2(nothing.fileno(), number)
        _serve(listener, alive)
        os._exit(0)
    os.close(alive)
    # `ours` stays open until this process ends.
    with listener:
        return listener.getsockname()


def _show_command(command: list[str]) -> None:
    """Replace the command line that others see in /proc; there is room for it at the end of ours."""
    begin, end = (int(each) for each in Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[45:47])
    shown = "\0".join(command).encode()[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
