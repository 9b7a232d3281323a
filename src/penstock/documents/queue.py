"""Changes between capture and the worker, in memory and bounded: when it is full, capture waits."""

from __future__ import annotations

import threading
import time
from collections import deque

from penstock.documents.base import Change


class ChangeQueue:
    """One producer, one consumer. The bound counts changes; a piece that is larger alone waits for an empty queue."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._items: deque[Change] = deque()
        self._count = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits at this moment."""
        with self._changed:
            return not self._items

    def publish(self, change: Change) -> bool:
        """Wait for room, then put it in; False if nobody takes anything any more."""
        with self._changed:
            while self._items and self._count + change.count > self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(change)
            self._count += change.count
            self._changed.notify_all()
            return True

    def receive(self, timeout: float | None = None) -> Change | None:
        """The next piece; None when there is none in time, or none will ever come. Raises what ended the producer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._items:
                if self._failure is not None:
                    raise self._failure
                remaining = None if deadline is None else deadline - time.monotonic()
                if self._closed or (remaining is not None and remaining <= 0):
                    return None
                self._changed.wait(remaining)
            change = self._items.popleft()
            self._count -= change.count
            self._changed.notify_all()
            return change

    @property
    def is_finished(self) -> bool:
        """Closed, and everything was taken."""
        with self._changed:
            return self._closed and not self._items and self._failure is None

    def close(self, failure: BaseException | None = None) -> None:
        """Nothing more will come, because of `failure` if there is one; whoever waits wakes up."""
        with self._changed:
            self._closed = True
            self._failure = self._failure or failure
            self._changed.notify_all()
