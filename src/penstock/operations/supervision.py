"""`penstock run --supervise`: the pipeline runs in a child process, which is started again if time can heal its end.

The child is an ordinary `penstock run` whose standard input is a socket. It reports on it that the pipeline has
started, and the error that ended it. The socket is also a sign of life: when the supervisor ends, even by SIGKILL, the
child reads end-of-file and stops as after SIGTERM.

A child that hangs is left alone: every wait in it has a limit of its own, and killing one that is only slow would make
a slow pipeline one that never gets anywhere. A child that is suspended (SIGSTOP) is alive, too, so no second one is
started next to it. If another machine takes the pipeline over meanwhile, the lease fences the suspended child off: it
ends with `LeaseLost` when it continues, and its successor waits as a standby.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, Retry
from penstock.operations.progress import StatusFile
from penstock.operations.signals import Ending
from penstock.private import private_folder
from penstock.retry import Backoff
from penstock.spool.folder import SpoolFolder, read_file, replace_file
from penstock.state.lease import Holder, is_gone, this_process
from penstock.stream import OnLostSlot

logger = logging.getLogger(__name__)

START_AGAIN = 75
"""Exit status of `penstock run` after an error that time or a new start heals (`EX_TEMPFAIL` of sysexits.h)."""
NEEDS_A_PERSON = (1, 2)
"""Exit statuses after which a new start would fail in the same way: an error, and wrong usage."""
HEALTHY_SECONDS = 60.0
"""A run that has worked for this long starts the delays over."""
_POLL_SECONDS = 0.1
_ORPHAN_SECONDS = 60.0
"""A child that has not stopped this long after its supervisor ended is killed; the next run resumes anyway."""


def exit_status(error: PenstockError, on_lost_slot: OnLostSlot) -> int:
    """Return the exit status of a run that ended with this error."""
    helps = {Retry.TIMED, Retry.RESTART} | ({Retry.RECREATE} if on_lost_slot is OnLostSlot.RECREATE else set())
    return START_AGAIN if error.retry in helps else NEEDS_A_PERSON[0]


@dataclass(frozen=True, slots=True)
class Supervised:
    """A supervisor and its restarts, as `penstock status` shows them."""

    holder: Holder
    """The supervisor's process."""
    restarts: int = 0
    """Since the supervisor was started."""
    last_end: str | None = None
    """Why the last run ended; None before the first restart."""
    last_end_at: float | None = None
    """Unix time."""
    next_start: float | None = None
    """When the pipeline starts again, as Unix time; None while it runs."""


class SupervisorFile:
    """A small file in the spool, next to the status file. Failing to write it is not an error."""

    def __init__(self, spool: Path) -> None:
        self._path = SpoolFolder(spool).supervisor

    def write(self, supervised: Supervised) -> None:
        """Replace the file, unless it is that of another supervisor that runs: this one is a standby then."""
        if self._is_of_another(supervised.holder):
            return
        try:
            private_folder(self._path.parent)
            replace_file(self._path, asdict(supervised))
        except (OSError, PenstockError) as error:
            logger.debug("supervisor file not written error=%s", error)

    def remove(self, holder: Holder) -> None:
        """Remove the file, when the supervisor ends, unless it is that of another."""
        if self._is_of_another(holder):
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            logger.debug("supervisor file not removed error=%s", error)

    def read(self) -> Supervised | None:
        """Return the supervisor that runs; None if there is none, or if it was killed."""
        try:
            values = read_file(self._path)
            if values is None:
                return None
            found = Supervised(Holder(**values.pop("holder")), **values)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.debug("supervisor file not read error=%s", error)
            return None
        return None if is_gone(found.holder) else found

    def _is_of_another(self, holder: Holder) -> bool:
        """Return True if another supervisor wrote it that certainly runs; on another machine, nobody knows."""
        found = self.read()
        return found is not None and found.holder != holder and found.holder.machine == holder.machine


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a child ended."""

    status: int
    """Its exit status; negative for a signal."""
    error: PenstockError | None
    """What it reported."""
    healthy_seconds: float
    """How long it ran after the start of its pipeline."""

    @property
    def can_heal(self) -> bool:
        """True if the pipeline is to be started again."""
        return self.status < 0 or self.status == START_AGAIN

    @property
    def kind(self) -> str:
        """What delays are counted for: the class of the error, or the signal."""
        return self.reason if self.error is None else type(self.error).__name__

    @property
    def reason(self) -> str:
        """Why it ended, for people."""
        if self.error is not None:
            return self.error.message
        return f"killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"exit status {self.status}"


class Supervisor:
    """Starts a command, and starts it again until it ends for good."""

    def __init__(
        self,
        start: Callable[[], Child],
        spool: Path,
        ending: Ending,
        *,
        backoff: Callable[[bool], Backoff] | None = None,
    ) -> None:
        """`backoff` makes the delays for one kind of end; its argument is True for a crash."""
        self._start = start
        self._ending = ending
        self._backoff = backoff or _delays
        self._delays: dict[str, Backoff] = {}
        self._file = SupervisorFile(spool)
        self._status_file = StatusFile(spool)
        self._supervised = Supervised(this_process())
        self._told: str | None = None

    def run(self) -> RunEnd:
        """Return how the last child ended: cleanly, because of a signal to the supervisor, or needing a person."""
        try:
            while True:
                self._note(next_start=None)
                end = self._run_child()
                if not end.can_heal:
                    return end
                if end.status < 0:
                    # It could not say so itself.
                    self._status_file.end(end.reason)
                delay = self._delay(end)
                if not self._ending.stop.is_set():
                    self._tell(end, delay)
                now = time.time()
                self._note(
                    restarts=self._supervised.restarts + 1,
                    last_end=end.reason,
                    last_end_at=now,
                    next_start=now + delay,
                )
                if self._ending.stop.wait(delay):
                    # What the next run would have healed needs nobody now.
                    return replace(end, status=0, error=None)
        finally:
            self._file.remove(self._supervised.holder)

    def _run_child(self) -> RunEnd:
        try:
            started = self._start()
        except OSError as error:
            # No process or no memory: the machine may have it at the next attempt.
            reason = f"the run could not be started: {error.strerror or type(error).__name__}"
            cause = PenstockError(reason, hint="Check the memory and the processes of the machine.")
            return RunEnd(START_AGAIN, cause, 0.0)
        with started as child:
            while child.poll() is None:
                if self._ending.stop.wait(_POLL_SECONDS):
                    child.stop()
                    break
            return child.end()

    def _delay(self, end: RunEnd) -> float:
        if end.healthy_seconds >= HEALTHY_SECONDS:
            self._delays.clear()
        return self._delays.setdefault(end.kind, self._backoff(end.error is None)).next_delay()

    def _tell(self, end: RunEnd, delay: float) -> None:
        """Report each reason once, not at each of the attempts that it fails."""
        is_new = self._told != end.reason or end.healthy_seconds >= HEALTHY_SECONDS
        self._told = end.reason
        hint = "" if end.error is None else f" hint={end.error.hint}"
        logger.log(
            logging.WARNING if is_new else logging.DEBUG,
            "the run ended, starting it again in=%.1fs reason=%s%s",
            delay,
            end.reason,
            hint,
        )

    def _note(self, **changed: Any) -> None:
        self._supervised = replace(self._supervised, **changed)
        self._file.write(self._supervised)


def _delays(is_crash: bool) -> Backoff:
    # An outage of a server is over at any moment; a process that crashes again and again only costs its starts.
    return Backoff(first=0.5, longest=300.0 if is_crash else 30.0)


class Child:
    """A running child; a context manager."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # In its own process group: Ctrl-C in a terminal goes to the supervisor, which then stops the child cleanly.
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), process_group=0)
        self._error: PenstockError | None = None
        self._started_at: float | None = None
        self._reader = threading.Thread(target=self._read, name="supervised", daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        # The child ends when it reads this.
        self._socket.close()

    def poll(self) -> int | None:
        """Return its exit status, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to finish its batch and end."""
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> RunEnd:
        """Wait for its end."""
        status = self._process.wait()
        # All that it wrote is in the socket. Processes that it left behind may still hold the other end.
        self._socket.shutdown(socket.SHUT_RD)
        self._reader.join()
        if status < 0 and sys.stderr.isatty():
            # It left its progress there: the cursor is hidden, at the end of a line.
            sys.stderr.write("\x1b[?25h\n")
            sys.stderr.flush()
        healthy = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return RunEnd(status, self._error, healthy)

    def _read(self) -> None:
        with self._socket.makefile("rb") as reports:
            for line in reports:
                report = json.loads(line)
                if "error" in report:
                    self._error = pickle.loads(base64.b64decode(report["error"]))
                else:
                    self._started_at = time.monotonic()


def child_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of a child that runs `penstock` with these arguments."""
    return [sys.executable, "-m", "penstock", *arguments]


class Link:
    """The child's end of the socket, on standard input."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=os.dup(0))
        threading.Thread(target=self._stop_with_supervisor, name="supervisor", daemon=True).start()

    def started(self) -> None:
        """Report that the pipeline has started."""
        self._report({"started": True})

    def failed(self, error: PenstockError) -> None:
        """Report the error that ends the run; the supervisor shows it."""
        self._report({"error": base64.b64encode(pickle.dumps(error)).decode()})

    def _report(self, report: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(report).encode() + b"\n")
        except OSError as error:
            logger.debug("the supervisor has ended error=%s", error)

    def _stop_with_supervisor(self) -> None:
        # Reset instead of end-of-file, if the supervisor has not read all reports.
        with suppress(ConnectionResetError):
            while self._socket.recv(4096):
                pass
        main = threading.main_thread().ident
        assert main is not None
        # To that thread, which may be waiting in a call that only a signal to it ends.
        signal.pthread_kill(main, signal.SIGTERM)
        time.sleep(_ORPHAN_SECONDS)
        os._exit(START_AGAIN)
