"""Streamed transactions that are still open: their messages, kept as they came.

A transaction stays in memory while it is small, then goes to a file. Everything is discarded when the connection ends,
because the server sends an open transaction again from its beginning.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.capture.parcels import Parcel
from penstock.changes.wire import PADDING
from penstock.errors import DecodeError
from penstock.spool.folder import DiskGuard, append

MEMORY_BYTES = 1 << 20
"""Limit per transaction; beyond it, messages go to its file."""
ALL_MEMORY_BYTES = 64 << 20
"""Limit for all together; beyond it, the largest goes to its file."""
_WINDOW = 1 << 18
"""Messages whose lengths are in memory while a transaction is read again."""


@dataclass(slots=True)
class OpenStream:
    """The messages of one transaction, in order."""

    path: Path
    disk: DiskGuard
    aborted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """The sub-transactions that were rolled back."""
    _raw: list[bytes] = field(default_factory=list)
    _lengths: list[NDArray[np.int64]] = field(default_factory=list)
    pending: int = 0
    """Bytes in memory."""
    _on_disk: bool = False

    def append(self, raw: memoryview, lengths: NDArray[np.int64]) -> None:
        self._raw.append(bytes(raw))
        # A copy, so that the lengths of the whole parcel can be freed.
        self._lengths.append(lengths.copy())
        self.pending += len(raw)
        if self.pending >= MEMORY_BYTES:
            self.flush()

    def flush(self) -> None:
        """Move what is in memory to the file."""
        numbers = np.concatenate(self._lengths).astype(np.int64).tobytes()
        sizes = {path: path.stat().st_size if self._on_disk else 0 for path in (self._messages, self._numbers)}

        def write() -> None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append(self._messages, *self._raw)
            append(self._numbers, numbers)

        def undo() -> None:
            for path, size in sizes.items():
                if path.exists():
                    os.truncate(path, size)

        self.disk.run(write, undo)
        self._raw, self._lengths, self.pending, self._on_disk = [], [], 0, True

    def parcels(self, most_bytes: int) -> Iterator[Parcel]:
        """Read all messages again, in parcels of about this size; can be done once."""
        if self._on_disk:
            yield from self._parcels_on_disk(most_bytes)
        if self._raw:
            yield Parcel(b"".join((*self._raw, PADDING)), np.concatenate(self._lengths))
        self.discard()

    def discard(self) -> None:
        if self._on_disk:
            self._messages.unlink(missing_ok=True)
            self._numbers.unlink(missing_ok=True)
        self._raw, self._lengths, self._on_disk = [], [], False

    def _parcels_on_disk(self, most_bytes: int) -> Iterator[Parcel]:
        # A very large transaction has many lengths, too, and pages of a mapped file would stay in memory.
        with open(self._messages, "rb") as messages, open(self._numbers, "rb") as numbers:
            lengths = np.zeros(0, np.int64)
            while len(lengths := np.concatenate((lengths, np.fromfile(numbers, np.int64, _WINDOW - len(lengths))))):
                total = np.cumsum(lengths)
                count = max(1, int(np.searchsorted(total, most_bytes, side="right")))
                yield Parcel(messages.read(int(total[count - 1])) + PADDING, lengths[:count])
                lengths = lengths[count:]

    @property
    def _messages(self) -> Path:
        return self.path.with_suffix(".messages")

    @property
    def _numbers(self) -> Path:
        return self.path.with_suffix(".lengths")


class OpenStreams:
    """The streamed transactions of one connection."""

    def __init__(self, folder: Path, disk: DiskGuard) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        self._disk = disk
        self._streams: dict[int, OpenStream] = {}

    def start(self, xid: int) -> None:
        """Begin a run of this transaction's messages."""
        if xid not in self._streams:
            self._streams[xid] = OpenStream(self._folder / str(xid), self._disk)

    def append(self, xid: int, raw: memoryview, lengths: NDArray[np.int64]) -> None:
        """Keep messages of a transaction."""
        self._streams[xid].append(raw, lengths)
        if sum(stream.pending for stream in self._streams.values()) > ALL_MEMORY_BYTES:
            max(self._streams.values(), key=lambda stream: stream.pending).flush()

    def abort(self, xid: int, subtransaction_xid: int) -> None:
        """Discard a transaction, or note that a sub-transaction was rolled back."""
        stream = self._streams.get(xid)
        if stream is None:
            return
        if xid == subtransaction_xid:
            stream.discard()
            del self._streams[xid]
        else:
            stream.aborted = np.append(stream.aborted, subtransaction_xid)

    def take(self, xid: int) -> OpenStream:
        """Take the messages of a transaction that has committed."""
        stream = self._streams.pop(xid, None)
        if stream is None:
            raise DecodeError(f"the server committed transaction {xid}, which it had not streamed", offset=1)
        return stream
