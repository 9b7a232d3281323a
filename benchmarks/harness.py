"""Shared code of the benchmarks: watching processes, alternating, medians, tables, and the JSON line at the end.

Nothing here depends on what is measured. CPU time and memory come from `/proc`, so any process can be watched, even one
that is not a child, such as a server's backend.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Benchmarks share code with tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SAMPLE_SECONDS = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20


class BenchmarkFailed(Exception):
    """The run proves nothing: what was measured is not what should have been."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used since it started."""

    cpu_seconds: float
    peak_rss_mib: float


def read_usage(pid: int) -> Usage | None:
    """Look at a process; None if it is gone, or about to be."""
    try:
        # The command's name is in parentheses and may hold anything; behind it the fields are plain.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    peak = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    if not peak:
        return None
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return Usage(cpu, int(peak[0].split()[1]) * 1024 / _MIB)


class Watch:
    """Samples processes from a thread, because the last look at one must be taken before it ends."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self._first = {name: read_usage(pid) for name, pid in pids.items()}
        self._last = dict(self._first)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> None:
        """Look now."""
        for name, pid in self._pids.items():
            usage = read_usage(pid)
            if usage is not None:
                self._last[name] = usage

    def first(self, name: str) -> Usage:
        """What it had used when the watch began."""
        return _seen(self._first[name], name)

    def last(self, name: str) -> Usage:
        """What it had used when it was last seen."""
        return _seen(self._last[name], name)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.sample()


def take_turns(first: str, second: str, rounds: int) -> Iterator[str]:
    """Who runs when: first, second, second, first, first, second … so that a drift favours neither."""
    for number in range(rounds):
        yield from (first, second) if number % 2 == 0 else (second, first)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """The distance between the largest and the smallest value, relative to the median; 0.1 is a quiet machine."""
    return (max(values) - min(values)) / median(values)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their content; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join((row[0].ljust(widths[0]), *cells[1:])).rstrip()

    return "\n".join((line(header), "  ".join("-" * width for width in widths), *map(line, rows)))


def print_result(result: Mapping[str, Any]) -> None:
    """The last line of a benchmark: one JSON object."""
    print(json.dumps(result), flush=True)


def say(text: str) -> None:
    """Progress, on standard error: standard output has the tables and the last line only."""
    print(text, file=sys.stderr, flush=True)


def describe_machine() -> str:
    """Where it ran, and how busy that was."""
    return (
        f"{os.cpu_count()} cores, load average {load_average():.1f}, "
        f"Python {platform.python_version()}, Linux {platform.release()}"
    )


def load_average() -> float:
    """Of the last minute; what others do on this machine is in it."""
    return os.getloadavg()[0]


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that servers and folders go away as they do on Ctrl-C."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _seen(usage: Usage | None, name: str) -> Usage:
    if usage is None:
        raise BenchmarkFailed(f"{name} had ended before it was looked at: measure something that takes longer")
    return usage
