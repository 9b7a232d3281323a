"""How far a copy is: ranges, rows and bytes, how long it may take, and who hears of each range.

A range may be read in this thread, or in a task on another machine. There the task listens, and sends what it heard
back with its result. So a task that failed and ran again has reported nothing twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from penstock.copy.rows import CopyRows


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A range of a copy was read to its end."""

    index: int
    rows: int


Listener: TypeAlias = Callable[[RangeRead], None]

_listener: ContextVar[Listener | None] = ContextVar("penstock_copy_listener", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Inside, `listener` hears of every range that this thread reads; None for nobody."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Listener | None:
    """Who listens here: to be told by others who read for this thread."""
    return _listener.get()


def tell(read: RangeRead) -> None:
    """A range was read; nothing happens where nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(read)


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The state of one table's copy; `advance` gives the next one. Bytes are those on the source's disk, by estimate.

    Goes by bytes, since ranges of a partitioned table differ in size and rows are not known before.
    """

    table: str
    ranges: int
    bytes: int
    estimated_rows: int | None = None
    ranges_done: int = 0
    rows_done: int = 0
    bytes_done: int = 0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    since: float = -1.0
    advanced: float = -1.0
    """When the last range was done."""

    @classmethod
    def of(cls, rows: CopyRows, clock: Callable[[], float] = time.monotonic) -> CopyProgress:
        """The beginning."""
        return cls(
            table=str(rows.schema),
            ranges=len(rows.ranges),
            bytes=rows.estimated_bytes,
            estimated_rows=rows.estimated_rows,
            clock=clock,
            since=clock(),
        )

    def advance(self, *, rows: int, bytes: int, ranges: int = 1) -> CopyProgress:  # noqa: A002 (what it is)
        """Some more ranges are done."""
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
    def seconds(self) -> float:
        """Since the beginning."""
        return self.clock() - self.since

    @property
    def seconds_left(self) -> float | None:
        """If it goes on as it went until the last range was done; None before the first is."""
        done = self.fraction
        if not done:
            return None
        return max(0.0, (self.advanced - self.since) * (1 - done) / done - (self.clock() - self.advanced))


class CopyCounter:
    """Counts the ranges of one copy as they are read; `take` may be called from any thread, and twice for a range."""

    def __init__(self, rows: CopyRows, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes = {part.index: part.estimated_bytes for part in rows.ranges}
        self._lock = threading.Lock()
        self._progress = CopyProgress.of(rows, clock)

    @property
    def progress(self) -> CopyProgress:
        """How far it is."""
        return self._progress

    def take(self, read: RangeRead) -> None:
        """A range was read."""
        with self._lock:
            size = self._bytes.pop(read.index, None)
            if size is not None:
                self._progress = self._progress.advance(rows=read.rows, bytes=size)
