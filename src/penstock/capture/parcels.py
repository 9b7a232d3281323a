"""Parcels of messages: on their way from the thread that reads to the thread that decodes, and their shape.

Every message stands behind the 25 bytes of a replication message (`w`, three 64-bit numbers). Kinds, tables and
positions are at fixed offsets, so NumPy reads them as columns (`Scan`); only the tuples need waves.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.capture.messages import POSTGRES_EPOCH_MICROSECONDS
from penstock.changes.wire import Buffer
from penstock.errors import DecodeError
from penstock.lsn import Lsn, furthest

HEADER = 25
"""Bytes of the replication message before that of pgoutput."""

BEGIN, COMMIT, INSERT, UPDATE, DELETE = b"BCIUD"
RELATION, TYPE, TRUNCATE, MESSAGE, ORIGIN = b"RYTMO"
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = b"SEcA"

IS_ROW = np.zeros(256, np.bool_)
IS_ROW[[INSERT, UPDATE, DELETE]] = True
IS_SINGLE = np.zeros(256, np.bool_)
"""Kinds that are parsed one at a time."""
IS_SINGLE[[RELATION, TRUNCATE, MESSAGE, STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT]] = True
_IS_KNOWN = IS_ROW | IS_SINGLE
_IS_KNOWN[[BEGIN, COMMIT, TYPE, ORIGIN]] = True

_SHORTEST = np.full(256, HEADER + 1, np.int64)
_SHORTEST[[INSERT, UPDATE, DELETE]] = HEADER + 5 + 3
_SHORTEST[BEGIN] = HEADER + 21
_SHORTEST[COMMIT] = HEADER + 26


@dataclass(frozen=True, slots=True)
class Parcel:
    """Consecutive messages: their bytes, followed by padding, and their lengths."""

    raw: bytes | bytearray
    lengths: NDArray[np.int64]


class Scan:
    """Columns over the messages of a parcel."""

    __slots__ = ("_buffer", "_raw", "count", "end", "kind", "start")

    def __init__(self, parcel: Parcel) -> None:
        self._raw = parcel.raw
        self._buffer = Buffer(parcel.raw)
        self.count = len(parcel.lengths)
        self.end = np.cumsum(parcel.lengths)
        self.start = self.end - parcel.lengths
        short = parcel.lengths <= HEADER
        if short.any():
            raise DecodeError("a replication message is empty", offset=0)
        self.kind = self._buffer.bytes[self.start + HEADER]
        unknown = ~_IS_KNOWN[self.kind]
        if unknown.any():
            kind = chr(self.kind[int(np.argmax(unknown))])
            raise DecodeError(f"a message of unknown kind {kind!r} at offset 0", offset=0)
        short = parcel.lengths < _SHORTEST[self.kind]
        if short.any():
            first = int(np.argmax(short))
            length = int(parcel.lengths[first]) - HEADER
            kind = chr(self.kind[first])
            raise DecodeError(f"a message of kind {kind!r} ends at offset {length}", offset=length)

    def message(self, index: int) -> bytes:
        """One message without its header."""
        return bytes(self._raw[int(self.start[index]) + HEADER : int(self.end[index])])

    def uint32(self, messages: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
        """A 32-bit number at the same offset of several messages."""
        return self._buffer.uint32[self.start[messages] + (HEADER + offset)].astype(np.int64)

    def positions(self, messages: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
        """A position in the log at the same offset of several messages."""
        positions = self._buffer.read(">i8", self.start[messages] + (HEADER + offset))
        if (positions < 0).any():
            raise DecodeError(f"the position at offset {offset} is out of range", offset=offset)
        return positions

    def commit_times(self, messages: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
        """A time at the same offset of several messages, in Unix microseconds."""
        return self._buffer.read(">i8", self.start[messages] + (HEADER + offset)) + POSTGRES_EPOCH_MICROSECONDS


class ParcelQueue:
    """Bounded by bytes. One thread puts, another gets. Putting never blocks: the reader checks `has_room` first."""

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
        """Add messages, or the position of a keepalive; of consecutive positions only the highest is kept."""
        with self._changed:
            last = self._items[-1] if self._items else None
            if isinstance(item, Lsn) and isinstance(last, Lsn):
                item = furthest(item, last)
                self._items.pop()
            self._items.append(item)
            self._bytes += _size(item)
            self._changed.notify_all()

    def get(self, timeout: float) -> Parcel | Lsn | None:
        """Take the oldest item; None after the timeout."""
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
        """Wait until an item is taken; return whether there is room."""
        with self._changed:
            if not self.has_room:
                self._changed.wait(timeout)
            return self.has_room


def _size(item: Parcel | Lsn) -> int:
    return len(item.raw) if isinstance(item, Parcel) else 0
