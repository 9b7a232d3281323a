"""A pipeline in a process that tests can watch, kill and restart.

    driven = PipelineProcess(DriveSettings(dsn=…, folder=…, slot=…))
    driven.start()
    driven.wait_phases("ready", count=6)
    driven.kill(Part.CAPTURE)
    driven.stop()

A killed driver leaves its folder behind; the next `start` resumes from it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import failpoints
from penstock.lsn import Lsn, reaches
from penstock.retry import Backoff
from penstock.testing.server import wait_until_gone
from tests.program import DRIVER, Piped
from tests.support.drive_pipeline import DriveSettings
from tests.support.processes import Part, descendants_of, part_of
from tests.support.waiting import pause

HANG_SECONDS = 240.0
"""A guard against hangs, far longer than anything here takes."""
_LOOK_SECONDS = 0.05


class PipelineEnded(AssertionError):
    """The process ended unexpectedly."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The last status a pipeline reported."""

    applied: Lsn | None = None
    """The apply worker's position; single tables may be behind it."""
    batches: int = 0
    phases: Mapping[str, str] = field(default_factory=dict[str, str])
    executors: int = 0
    durable: Lsn | None = None
    """Up to here every table has everything."""
    looks: int = 0
    """How often it has looked at the source's catalog since it started."""

    @classmethod
    def parse(cls, line: str) -> Seen:
        """Parse a line of `tests.support.drive_pipeline`."""
        record: dict[str, Any] = json.loads(line)
        return cls(
            Lsn.parse(record["applied"]),
            record["batches"],
            record["phases"],
            record.get("executors", 0),
            Lsn.parse(record["durable"]),
            record["looks"],
        )


class PipelineProcess:
    """Runs one process after another over the same folder; not thread-safe."""

    def __init__(self, settings: DriveSettings) -> None:
        self.settings = settings
        self.starts = 0
        self._process: Piped | None = None
        self._reader: threading.Thread | None = None
        self._seen = Seen()
        self._changed = threading.Condition()

    @property
    def seen(self) -> Seen:
        """Its last status; empty before the first line."""
        return self._seen

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the driver."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, armed: str = "", settings: DriveSettings | None = None) -> None:
        """Start it with failpoints armed as in `PENSTOCK_FAILPOINTS`; `settings` replace the usual ones this time."""
        assert not self.running
        self._close()
        path = Path(self.settings.folder) / "drive.json"
        (settings or self.settings).write(path)
        environment = {name: value for name, value in os.environ.items() if name != failpoints.VARIABLE}
        if armed:
            environment[failpoints.VARIABLE] = armed
        self._seen = Seen()
        self._process = Piped(DRIVER, str(path), environment=environment)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        self.starts += 1

    def processes(self) -> dict[Part, list[int]]:
        """Return the running processes by kind."""
        found: dict[Part, list[int]] = {Part.DRIVER: [self.pid]} if self.running else {}
        for pid in descendants_of(self.pid) if self.running else ():
            part = part_of(pid)
            if part is not None:
                found.setdefault(part, []).append(pid)
        return found

    def kill(self, part: Part = Part.DRIVER) -> bool:
        """Send SIGKILL to one of its processes; return False if none of this kind is running.

        A killed driver takes the others with it; all of them have ended when this returns.
        """
        found = self.processes().get(part)
        if not found:
            return False
        children = descendants_of(self.pid) if part is Part.DRIVER else []
        with suppress(ProcessLookupError):
            os.kill(found[-1], signal.SIGKILL)
        if part is Part.DRIVER:
            self.wait_ended()
            if not wait_until_gone(children, timeout=HANG_SECONDS):
                raise PipelineEnded("processes of a killed driver did not end")
        return True

    def order(self, order: str, argument: object) -> None:
        """Order a fault of the destination, or its end (`tests.support.drive_pipeline`); ignored if it has ended."""
        if self._process is not None and self.running:
            # Unbuffered: data left in a buffer when the process is gone would fail again on close.
            with suppress(BrokenPipeError):
                os.write(self._process.stdin.fileno(), json.dumps([order, argument]).encode() + b"\n")

    def wait_ended(self, timeout: float = HANG_SECONDS) -> int:
        """Wait until the driver ends and return its exit code, negative for a signal."""
        assert self._process is not None
        code = self._process.wait(timeout)
        self._close()
        return code

    def stop(self) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self.wait_ended()

    def close(self) -> None:
        """Kill it if it is running; for tests that failed."""
        if self.running:
            self.kill()
        self._close()

    def wait_for(self, what: str, look: Callable[[Seen], object], timeout: float = HANG_SECONDS) -> None:
        """Wait until its status satisfies a condition; raise `PipelineEnded` if it ends first."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not look(self._seen):
                if not self.running:
                    raise PipelineEnded(f"the pipeline ended while waiting for {what}; it was at {self._seen}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {timeout:g} s for {what}; it is at {self._seen}")
                # Its end closes the pipe, unless another process has it, too.
                self._changed.wait(_LOOK_SECONDS)

    def keep_running(self, is_done: Callable[[], bool], timeout: float = 2 * HANG_SECONDS) -> None:
        """Restart it whenever it has ended, as a supervisor does, until something is done."""
        begun, backoff = time.monotonic(), Backoff(first=0.1, longest=2.0)
        while not is_done():
            if time.monotonic() > begun + timeout:
                raise TimeoutError(f"waited {timeout:g} s for a pipeline that recovers; it is at {self._seen}")
            if not self.running:
                time.sleep(backoff.next_delay())
                self.start()
            pause(begun)

    def wait_until(self, look: Callable[[Seen], object], timeout: float = HANG_SECONDS) -> None:
        """Wait until its status satisfies a condition, or until it ends."""
        with suppress(PipelineEnded):
            self.wait_for("this or its end", look, timeout)

    def wait_phases(self, name: str, count: int, timeout: float = HANG_SECONDS) -> None:
        """Wait until `count` tables exist and all are in one phase."""
        wanted = [name] * count
        self.wait_for(f"{count} tables {name}", lambda seen: list(seen.phases.values()) == wanted, timeout)

    def wait_applied(self, position: Lsn, timeout: float = HANG_SECONDS) -> None:
        """Wait until all changes before a boundary are applied."""
        self.wait_for(
            f"apply to reach {position}",
            lambda seen: seen.applied is not None and reaches(seen.applied, position),
            timeout,
        )

    def _read(self, process: Piped) -> None:
        for line in process.stdout:
            seen = Seen.parse(line.decode())
            with self._changed:
                self._seen = seen
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def _close(self) -> None:
        if self._process is not None:
            if self._reader is not None:
                self._reader.join(HANG_SECONDS)
            self._process.close_pipes()
