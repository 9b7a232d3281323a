"""The progress of a copy: ranges, rows and bytes, the remaining time, and the listeners for each range.

A range is read either in this thread or in a task, which reports it (`penstock.observe.reports`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.copy.rows import CopyRows


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A range was read completely."""

    index: int
    rows: int
    changed_cells: int = 0
    """Cells that `out_of_range` changed."""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of one table's copy; `advance` returns the next state.

    Measured in estimated bytes on the source's disk: ranges of a partitioned table differ in size, and the number of
    rows is not known in advance.
    """

    table: str
    ranges: int
    bytes: int
    estimated_rows: int | None = None
    ranges_done: int = 0
    rows_done: int = 0
    bytes_done: int = 0
    bytes_resumed: int = 0
    """What earlier attempts have read; part of `bytes_done`."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    since: float = -1.0
    advanced: float = -1.0
    """When the last range was finished."""

    @classmethod
    def of(cls, rows: CopyRows, clock: Callable[[], float] = time.monotonic) -> CopyProgress:
        """Return the state at the start."""
        finished = () if rows.resumable is None else rows.resumable.finished
        done = [blocks for each in finished for blocks in each.blocks]
        size = sum(blocks.bytes for blocks in done)
        return cls(
            table=str(rows.schema),
            ranges=len(rows.ranges) + len(done),
            bytes=rows.estimated_bytes + size,
            estimated_rows=rows.estimated_rows,
            ranges_done=len(done),
            rows_done=sum(each.rows for each in finished),
            bytes_done=size,
            bytes_resumed=size,
            clock=clock,
            since=clock(),
        )

    def advance(self, *, rows: int, bytes: int, ranges: int = 1) -> CopyProgress:  # noqa: A002 (what it is)
        """Count finished ranges."""
        return replace(
            self,
            ranges_done=self.ranges_done + ranges,
            rows_done=self.rows_done + rows,
            bytes_done=self.bytes_done + bytes,
            advanced=self.clock(),
        )

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        if self.ranges_done >= self.ranges:
            return 1.0
        return min(1.0, self.bytes_done / self.bytes if self.bytes else self.ranges_done / self.ranges)

    @property
    def fraction_resumed(self) -> float:
        """What earlier attempts have read, from 0 to 1."""
        return self.bytes_resumed / self.bytes if self.bytes else 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.since

    @property
    def seconds_left(self) -> float | None:
        """Estimate the remaining time from the average rate until the last finished range; None before the first is
        finished."""
        done = self.fraction - self.fraction_resumed
        if done <= 0 or self.advanced < self.since:
            return None
        left = 1 - self.fraction
        return max(0.0, (self.advanced - self.since) * left / done - (self.clock() - self.advanced))


class CopyCounter:
    """Counts the ranges of one copy. `take` may be called from any thread, and twice for a range."""

    def __init__(self, rows: CopyRows, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes = {part.index: part.estimated_bytes for part in rows.ranges}
        self._lock = threading.Lock()
        self._progress = CopyProgress.of(rows, clock)
        finished = () if rows.resumable is None else rows.resumable.finished
        self.changed_cells = sum(each.changed_cells for each in finished)
        """Cells that `out_of_range` changed so far."""

    @property
    def progress(self) -> CopyProgress:
        """The progress so far."""
        return self._progress

    def take(self, read: object) -> None:
        """Count a range that was read; ignore other reports."""
        if not isinstance(read, RangeRead):
            return
        with self._lock:
            size = self._bytes.pop(read.index, None)
            if size is not None:
                self._progress = self._progress.advance(rows=read.rows, bytes=size)
                self.changed_cells += read.changed_cells
