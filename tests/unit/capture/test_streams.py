"""Streamed transactions that are set aside until they end."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

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


@pytest.mark.parametrize("window", [1, 3, 1 << 18])
def test_a_transaction_is_read_again_whatever_is_read_at_once(window, tmp_path, monkeypatch):
    monkeypatch.setattr(streams_module, "MEMORY_BYTES", 1)
    monkeypatch.setattr(streams_module, "_WINDOW", window)
    streams = OpenStreams(tmp_path / "open", DiskGuard(tmp_path, min_free_bytes=0, stop=threading.Event()))
    streams.start(7)
    for number in range(5):
        streams.append(7, memoryview(bytes([number]) * 100), np.array([10, 70, 20]))
    parcels = list(streams.take(7).parcels(85))
    assert b"".join(parcel.raw[: -len(PADDING)] for parcel in parcels) == bytes(
        number for number in range(5) for _ in range(100)
    )
    assert np.concatenate([parcel.lengths for parcel in parcels]).tolist() == [10, 70, 20] * 5
    assert all(parcel.lengths.sum() <= 85 or len(parcel.lengths) == 1 for parcel in parcels)


READ_AGAIN = """
import os, sys
from pathlib import Path
from penstock.capture.streams import OpenStream
from tests.support.processes import peak_bytes
stream = OpenStream(Path(sys.argv[1]), None, _on_disk=True)
before = peak_bytes(os.getpid())
for parcel in stream.parcels(1 << 20):
    pass
print(peak_bytes(os.getpid()) - before)
"""


def test_reading_a_transaction_again_takes_no_memory_for_its_lengths(tmp_path):
    """Of twenty million messages, they are 160 MB."""
    (tmp_path / "7.messages").write_bytes(b"x" * 20_000_000)
    with open(tmp_path / "7.lengths", "wb") as file:
        np.ones(20_000_000, np.int64).tofile(file)
    done = subprocess.run(
        [sys.executable, "-c", READ_AGAIN, tmp_path / "7"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 40 << 20
