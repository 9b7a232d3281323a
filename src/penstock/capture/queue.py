"""Between the thread that reads and the thread that decodes: parcels and keepalives in order, bounded by bytes."""

from __future__ import annotations

import threading
from collections import deque

from penstock.capture.scan import Parcel
from penstock.lsn import Lsn, furthest


class ParcelQueue:
    """One thread puts, another gets. Putting never blocks: the reader asks for room first, and answers meanwhile."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: deque[Parcel | Lsn] = deque()
        self._bytes = 0
        self._changed = threading.Condition()

    @property
    def is_empty(self) -> bool:
        return not self._items

    @property
    def has_room(self) -> bool:
        return self._bytes < self._max_bytes

    def put(self, item: Parcel | Lsn) -> None:
        """Add messages, or the position of a keepalive; of several in a row the highest says it all."""
        with self._changed:
            last = self._items[-1] if self._items else None
            if isinstance(item, Lsn) and isinstance(last, Lsn):
                item = furthest(item, last)
                self._items.pop()
            self._items.append(item)
            self._bytes += _size(item)
            self._changed.notify_all()

    def get(self, timeout: float) -> Parcel | Lsn | None:
        """The oldest item; None when there is none in time."""
        with self._changed:
            if not self._items:
                self._changed.wait(timeout)
            if not self._items:
                return None
            item = self._items.popleft()
            self._bytes -= _size(item)
            self._changed.notify_all()
            return item

    def wait_for_room(self, timeout: float) -> bool:
        """Wait until something was taken; whether there is room now."""
        with self._changed:
            if not self.has_room:
                self._changed.wait(timeout)
            return self.has_room


def _size(item: Parcel | Lsn) -> int:
    return len(item.raw) if isinstance(item, Parcel) else 0
