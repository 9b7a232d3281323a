"""The processes of a running pipeline, read from /proc: what each is, what it uses, and which belong together."""

from __future__ import annotations

import resource
import threading
from enum import StrEnum
from pathlib import Path

from penstock.spark.session import PYTHON_DAEMON
from penstock.testing.server import parents


class Part(StrEnum):
    """A process of a pipeline."""

    DRIVER = "driver"
    CAPTURE = "capture"
    JVM = "jvm"
    WORKER = "worker"
    """A Python process that runs Spark's tasks, or from which such ones are forked."""


def part_of(pid: int) -> Part | None:
    """What a process below a driver is; None for one that belongs to no pipeline or has ended."""
    program, *arguments = command_of(pid) or [""]
    if "penstock.capture" in arguments:
        return Part.CAPTURE
    # Shells start it, with the same arguments.
    if program.endswith("java") and any(each.startswith("org.apache.spark.deploy") for each in arguments):
        return Part.JVM
    return Part.WORKER if PYTHON_DAEMON in arguments else None


def descendants_of(pid: int) -> list[int]:
    """The children of a process, their children, and so on."""
    found: list[int] = []
    families = list(parents())
    wanted = [pid]
    while wanted:
        above = wanted.pop()
        below = [child for child, parent in families if parent == above]
        found += below
        wanted += below
    return found


def command_of(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def resident_bytes(pid: int) -> int:
    """The memory of a process that is in RAM; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * resource.getpagesize()


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had in RAM; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    peaks = [int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")]
    return peaks[0] if peaks else 0


class PeakWatch:
    """Collects the peak memory of a driver and of all processes that it starts while the block runs."""

    def __init__(self, driver: int) -> None:
        self.peaks: dict[Part, int] = {}
        """Of each kind of process, the largest peak."""
        self._driver = driver
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peaks", daemon=True)

    def __enter__(self) -> PeakWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            for pid, part in [
                (self._driver, Part.DRIVER),
                *((pid, part_of(pid)) for pid in descendants_of(self._driver)),
            ]:
                if part is not None:
                    self.peaks[part] = max(peak_bytes(pid), self.peaks.get(part, 0))
