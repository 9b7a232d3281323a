"""Turns that the copies of all tables share: a few at a time, small tables first.

A large table asks for one turn after the other. Served in the order of asking, or in no order at all, each of them
would stand between a small table and its few seconds of work; so of those who wait the smallest goes next, and a large
one waits no longer than all smaller ones take.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TurnsClosed(Exception):
    """No further turn is given."""


class Turns:
    """May be used from any thread."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit` says how many there are at the same time; asked anew each time, as clusters grow and shrink."""
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
        """How many wait now."""
        with self._changed:
            return len(self._waiting)

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Wait for a turn and have it inside; `size` is that of the whole copy. Raises `TurnsClosed`."""
        with self._changed:
            ticket = (size, next(self._numbers))
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self._closed or self._is_next(ticket))
            self._waiting.remove(ticket)
            heapq.heapify(self._waiting)
            if self._closed:
                raise TurnsClosed
            self._taken += 1
            # There may be another one free, for whom this one has barred the way.
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Send all away who wait, and all who come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _is_next(self, ticket: tuple[int, int]) -> bool:
        return self._waiting[0] == ticket and self._taken < self._limit()
