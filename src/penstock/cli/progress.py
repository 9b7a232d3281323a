"""What `penstock run` tells while it runs: a line when a table's copy begins and ends, and one line of status.

In a terminal the status line is written over and over; elsewhere it comes every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.cli.lag import Behind
from penstock.copy.progress import CopyProgress
from penstock.state import DataSync, Errored, Init, Ready, TableReplicationPhase
from penstock.workers import ApplyStatus, CopyStatus

_UNITS = ("B", "kB", "MB", "GB", "TB")
_WINDOW_SECONDS = 5.0


class Watched(Protocol):
    """What is looked at: a `Pipeline`."""

    @property
    def phases(self) -> Mapping[str, TableReplicationPhase]: ...
    @property
    def copies(self) -> Mapping[str, CopyStatus]: ...
    @property
    def status(self) -> ApplyStatus | None: ...
    @property
    def paused(self) -> bool: ...


class Progress:
    """Compares a pipeline with how it was when it was last looked at."""

    def __init__(
        self,
        pipeline: Watched,
        behind: Callable[[ApplyStatus], Behind | None],
        notice: Callable[[str], None],
        *,
        seconds: float,
        overwrite: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`overwrite` shows the status line in place; without it, it is a notice every `seconds` (0: never)."""
        self._pipeline = pipeline
        self._behind = behind
        self._notice = notice
        self._overwrite = overwrite
        self._seconds = seconds
        self._clock = clock
        self._told = clock()
        self._phases: dict[str, TableReplicationPhase] = {}
        self._told_copies: dict[str, CopyStatus] = {}
        self._samples: list[tuple[float, int]] = []

    def update(self) -> None:
        """Look, and tell what is new."""
        now = self._clock()
        self._tell_tables()
        status = self._pipeline.status
        if status is None:
            return
        self._samples = [sample for sample in self._samples if now - sample[0] < _WINDOW_SECONDS]
        self._samples.append((now, status.changes))
        if self._overwrite is not None:
            self._overwrite(self._line(status))
        elif self._seconds and now - self._told >= self._seconds:
            self._told = now
            self._notice(self._line(status))

    def _tell_tables(self) -> None:
        phases = dict(self._pipeline.phases)
        for table, copy in self._pipeline.copies.items():
            if copy.seconds is not None and self._told_copies.get(table) != copy:
                self._notice(f"copied {table}: {_describe(copy.progress)}, in {copy.seconds:.1f} s")
            elif table not in self._told_copies or self._told_copies[table].attempt != copy.attempt:
                self._notice(f"copying {table}: {_describe(copy.progress)}")
            self._told_copies[table] = copy
        for table, phase in phases.items():
            if isinstance(phase, Errored) and self._phases.get(table) != phase:
                self._notice(f"stopped {table}: {phase.reason}")
        for table in self._phases.keys() - phases.keys():
            self._notice(f"{table} left the publication; its data stays at the destination")
        self._phases = phases

    def _line(self, status: ApplyStatus) -> str:
        (first, count), (last, changes) = self._samples[0], self._samples[-1]
        rate = (changes - count) / (last - first) if last > first else 0.0
        behind = self._behind(status)
        lag = "unknown" if behind is None else f"{format_bytes(behind.bytes)}, {behind.seconds:.1f} s"
        state = "paused" if self._pipeline.paused else "streaming"
        return f"{state}: {self._counts()}; {rate:,.0f} changes/s; lag {lag}"

    def _counts(self) -> str:
        kinds = Counter(_kind(phase) for phase in self._phases.values())
        ready = kinds.pop("ready", 0)
        others = "".join(f", {count} {kind}" for kind, count in sorted(kinds.items()))
        return f"{ready} of {len(self._phases)} tables ready{others}"


class StatusLine:
    """A line at the bottom of a terminal, which other lines push down."""

    def __init__(self, notice: Callable[[str], None], columns: Callable[[], int]) -> None:
        self._notice = notice
        self._columns = columns
        self._shown = False

    def show(self, text: str) -> None:
        """Write over the line."""
        sys.stderr.write(f"\r\x1b[K{text[: self._columns() - 1]}")
        sys.stderr.flush()
        self._shown = True

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        self._notice(text)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = False


class AboveLine:
    """Standard error for log lines: they stand above the status line, not behind it."""

    def __init__(self, line: StatusLine) -> None:
        self._line = line

    def write(self, text: str) -> int:
        """Take the status line away first; it comes back by itself."""
        self._line.clear()
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def format_bytes(size: float) -> str:
    """`1.5 GB`; 1 kB is 1024 bytes, as in Postgres."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _describe(plan: CopyProgress) -> str:
    rows = "" if plan.estimated_rows is None else f", about {plan.estimated_rows:,} rows"
    return f"{format_bytes(plan.bytes)}{rows}"


def _kind(phase: TableReplicationPhase) -> str:
    match phase:
        case Init():
            return "waiting"
        case DataSync():
            return "copying"
        case Ready():
            return "ready"
        case Errored():
            return "errored"
        case _:
            return "catching up"
