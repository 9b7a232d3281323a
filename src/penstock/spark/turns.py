"""Turns that the copies of all tables share: a few at a time, small tables first.

A large table needs many turns. In order of arrival, or in no order, a small table with a few seconds of work would wait
for them; so the smallest waiting table goes next. A large table waits at most as long as all smaller ones take.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
            self._changed.wait_for(lambda: self._closed or self._is_next(ticket))
            self._waiting.remove(ticket)
            heapq.heapify(self._waiting)
            if self._closed:
                raise TurnsClosed
            self._taken += 1
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

    def _is_next(self, ticket: tuple[int, int]) -> bool:
        return self._waiting[0] == ticket and self._taken < self._limit()
