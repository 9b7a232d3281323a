"""The shape of a parcel of messages, read for all of them at once.

Every message stands behind the 25 bytes of a replication message (`w`, three 64-bit numbers). Kinds, tables and
positions are at fixed offsets, so NumPy reads them as columns; only the tuples need waves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.capture.messages import POSTGRES_EPOCH_MICROSECONDS
from penstock.errors import DecodeError

HEADER = 25
"""Bytes of the replication message before pgoutput's own."""
PADDING = bytes(8)
"""Behind each parcel, so that reads at the last message stay inside."""

BEGIN, COMMIT, INSERT, UPDATE, DELETE = b"BCIUD"
RELATION, TYPE, TRUNCATE, MESSAGE, ORIGIN = b"RYTMO"
STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT = b"SEcA"

IS_ROW = np.zeros(256, np.bool_)
IS_ROW[[INSERT, UPDATE, DELETE]] = True
IS_SINGLE = np.zeros(256, np.bool_)
"""Kinds that are read one at a time."""
IS_SINGLE[[RELATION, TRUNCATE, MESSAGE, STREAM_START, STREAM_STOP, STREAM_COMMIT, STREAM_ABORT]] = True
_IS_KNOWN = IS_ROW | IS_SINGLE
_IS_KNOWN[[BEGIN, COMMIT, TYPE, ORIGIN]] = True

_SHORTEST = np.full(256, HEADER + 1, np.int64)
_SHORTEST[[INSERT, UPDATE, DELETE]] = HEADER + 5 + 3
_SHORTEST[BEGIN] = HEADER + 21
_SHORTEST[COMMIT] = HEADER + 26


@dataclass(frozen=True, slots=True)
class Parcel:
    """Some consecutive messages: their bytes in one piece, with padding behind, and their lengths."""

    raw: bytes | bytearray
    lengths: NDArray[np.int64]


class Scan:
    """Columns over the messages of a parcel."""

    __slots__ = ("_int64", "_raw", "_uint32", "bytes", "count", "end", "kind", "start")

    def __init__(self, parcel: Parcel) -> None:
        self._raw = parcel.raw
        self.bytes = np.frombuffer(parcel.raw, np.uint8)
        self.count = len(parcel.lengths)
        self.end = np.cumsum(parcel.lengths)
        self.start = self.end - parcel.lengths
        short = parcel.lengths <= HEADER
        if short.any():
            raise DecodeError("a replication message without content", offset=0)
        self.kind = self.bytes[self.start + HEADER]
        self._uint32 = np.ndarray((len(self.bytes) - 3,), ">u4", self.bytes, 0, (1,))
        self._int64 = np.ndarray((len(self.bytes) - 7,), ">i8", self.bytes, 0, (1,))
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
        return self._uint32[self.start[messages] + (HEADER + offset)].astype(np.int64)

    def positions(self, messages: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
        """A position in the log at the same offset of several messages."""
        positions = self._int64[self.start[messages] + (HEADER + offset)].astype(np.int64)
        if (positions < 0).any():
            raise DecodeError(f"a position beyond all logs at offset {offset}", offset=offset)
        return positions

    def commit_times(self, messages: NDArray[np.int64], offset: int) -> NDArray[np.int64]:
        """A time at the same offset of several messages, in Unix microseconds."""
        return self._int64[self.start[messages] + (HEADER + offset)].astype(np.int64) + POSTGRES_EPOCH_MICROSECONDS
