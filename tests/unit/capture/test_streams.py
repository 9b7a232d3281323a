"""Streamed transactions that are set aside until they end."""

from __future__ import annotations

import threading

import numpy as np

from penstock.capture import streams as streams_module
from penstock.capture.streams import OpenStreams
from penstock.changes.wire import PADDING
from penstock.spool.folder import DiskGuard


def test_many_open_transactions_share_their_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(streams_module, "MEMORY_BYTES", 1_000)
    monkeypatch.setattr(streams_module, "ALL_MEMORY_BYTES", 2_000)
    streams = OpenStreams(tmp_path / "open", DiskGuard(tmp_path, min_free_bytes=0, stop=threading.Event()))
    for run in range(5):
        for xid in range(100):
            streams.start(xid)
            streams.append(xid, memoryview(bytes([xid, run]) * 50), np.array([60, 40]))
    kept = [streams.take(xid) for xid in range(100)]
    assert sum(stream.pending for stream in kept) <= 2_000
    for xid, stream in enumerate(kept):
        parcels = list(stream.parcels(10_000))
        assert b"".join(parcel.raw[: -len(PADDING)] for parcel in parcels) == b"".join(
            bytes([xid, run]) * 50 for run in range(5)
        )
        assert np.concatenate([parcel.lengths for parcel in parcels]).tolist() == [60, 40] * 5
