"""Replication lag, in bytes of WAL and in seconds.

The server's position is sampled every second. The lag in seconds is the age of the first sample that is ahead of the
applied position, so that the server's clock is not needed. For a backlog that is older than the first sample, it is
the age of the last applied commit.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from penstock.errors import SourceError
from penstock.lsn import Lsn, distance, reaches
from penstock.source import Role, SourceSettings, connect
from penstock.source.lineage import flushed_position

_SAMPLE_SECONDS = 1.0
_SAMPLES = 10_000
_LOST_SECONDS = 15.0
"""A server that gave no sample for this long is unreachable, although no error says so."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The lag of an output."""

    bytes: int
    seconds: float


class Lag:
    """Samples of the server's position."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Lsn]] = deque(maxlen=_SAMPLES)

    def add(self, now: float, server: Lsn) -> None:
        """Add a sample; `now` is Unix time."""
        if not self._samples or self._samples[-1][1] != server:
            self._samples.append((now, server))

    def behind(self, now: float, applied: Lsn, last_commit_time: int) -> Behind | None:
        """The lag of `applied`; None before the first sample. The commit time is in Unix microseconds."""
        if not self._samples:
            return None
        server = self._samples[-1][1]
        if reaches(applied, server):
            return Behind(0, 0.0)
        first_beyond = bisect_left(self._samples, True, key=lambda sample: not reaches(applied, sample[1]))
        seconds = now - self._samples[first_beyond][0]
        if first_beyond == 0 and last_commit_time:
            # It is older than the first sample.
            seconds = max(seconds, now - last_commit_time / 1e6)
        return Behind(distance(applied, server), max(0.0, seconds))


class LagWatch:
    """Samples the server's position in a thread, so that a server that does not answer delays nothing."""

    def __init__(self, source: SourceSettings) -> None:
        self._source = source
        self._lag = Lag()
        self._sampled_at = time.time()
        self._has_failed = False
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lag", daemon=True)

    def __enter__(self) -> LagWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(2)

    def behind(self, applied: Lsn, last_commit_time: int) -> Behind | None:
        """See `Lag.behind`."""
        with self._lock:
            return self._lag.behind(time.time(), applied, last_commit_time)

    @property
    def age(self) -> float:
        """Seconds since the server last answered."""
        with self._lock:
            return max(0.0, time.time() - self._sampled_at)

    @property
    def lost_since(self) -> float | None:
        """When the server last answered, as Unix time, if it no longer does; None if it does."""
        with self._lock:
            is_lost = self._has_failed or time.time() - self._sampled_at > _LOST_SECONDS
            return self._sampled_at if is_lost else None

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with connect(self._source, Role.CATALOG) as connection:
                    while not self._stop.wait(_SAMPLE_SECONDS):
                        position = flushed_position(connection)
                        with self._lock:
                            self._sampled_at = time.time()
                            self._has_failed = False
                            self._lag.add(self._sampled_at, position)
            except SourceError:
                with self._lock:
                    self._has_failed = True
                self._stop.wait(5)  # the pipeline's own connections report what is wrong
