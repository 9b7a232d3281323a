"""The order of the tasks that copy tables, for all tables that share a Spark session.

- There are fewer turns than cores, so copies leave room for changes.
- The smallest waiting table goes next. A large table needs many turns: in order of arrival, or in no order, a small
  table with a few seconds of work would wait for them. A large table waits at most as long as all smaller ones take.
- Small tables that wait share a task. Starting a job costs a tenth of a second or more, copying a small table a few
  milliseconds: with hundreds of them nearly all time would go into starting jobs.

How many tables are copied at once is decided before that, in `penstock.workers.copies`. Sizes are those that the items
of a copy state (`penstock.copy.plan.SizedItem`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.copy.plan import RANGE_BYTES, bytes_of

MAX_TOGETHER = 16
"""Copies in one task, at most: each opens a connection and syncs files."""


_LOOK_SECONDS = 1.0


class TurnsClosed(Exception):
    """No more turns: the copies are being stopped."""


class Turns:
    """A limited number of turns. Thread-safe."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit` returns how many turns can be taken at once. It is called every time: clusters grow and shrink."""
        self._limit = limit
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._taken = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """How many callers are waiting."""
        with self._changed:
            return len(self._waiting)

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Wait for a turn and hold it inside the block; `size` is that of the whole copy. Raises `TurnsClosed`."""
        with self._changed:
            ticket = (size, next(self._numbers))
            heapq.heappush(self._waiting, ticket)
            try:
                # The limit may grow without notice.
                while not self._changed.wait_for(lambda: self._closed or self._is_next(ticket), _LOOK_SECONDS):
                    pass
                if self._closed:
                    raise TurnsClosed
                self._taken += 1
            finally:
                # Also if the limit cannot be told: others must not wait behind this caller.
                self._waiting.remove(ticket)
                heapq.heapify(self._waiting)
                # Another turn may be free for the next caller, which had to wait behind this one.
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Raise `TurnsClosed` in all callers, waiting and new."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_returned(self, timeout: float) -> bool:
        """Wait until no turn is taken; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._taken == 0, timeout)

    def _is_next(self, ticket: tuple[int, int]) -> bool:
        return self._waiting[0] == ticket and self._taken < self._limit()


@dataclass(frozen=True, slots=True, eq=False)
class CopyGroup:
    """Items of one copy that run in the same task, possibly together with other groups."""

    items: Sequence[Any]
    function: Callable[[Any], Any]
    description: str
    outcomes: Future[list[Any]] = field(default_factory=Future[list[Any]])

    @property
    def bytes(self) -> int:
        """Size on the source's disk."""
        return bytes_of(self.items)


class LightCopies:
    """The waiting groups. Thread-safe."""

    def __init__(self, *, max_bytes: int = RANGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: list[CopyGroup] = []

    def offer(self, group: CopyGroup) -> None:
        """Let other copies run this group in their task, if it is small."""
        if group.bytes < self._max_bytes:
            with self._lock:
                self._waiting.append(group)

    def withdraw(self, group: CopyGroup) -> None:
        """Remove a group, so that no other copy runs it."""
        with self._lock:
            if group in self._waiting:
                self._waiting.remove(group)

    def take(self, group: CopyGroup) -> list[CopyGroup]:
        """Return this group and waiting ones that fit into the same task; empty if another copy has taken it."""
        with self._lock:
            if group.outcomes.running() or group.outcomes.done():
                return []
            taken, size = [group], group.bytes
            for other in self._waiting:
                if other is not group and len(taken) < MAX_TOGETHER and size + other.bytes <= self._max_bytes:
                    taken.append(other)
                    size += other.bytes
            self._waiting = [each for each in self._waiting if each not in taken]
            for each in taken:
                each.outcomes.set_running_or_notify_cancel()
            return taken
