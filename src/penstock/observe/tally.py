"""Counters, timings and the last batches of one output, for metrics: added to once per batch, never per row."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import TypeAlias

from penstock.observe.batches import RecentBatches, current_batch

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of durations."""
ROWS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0)
"""Upper bounds of batch sizes."""

Labels: TypeAlias = tuple[str, ...]
"""The name of a counter, and the values of its labels."""


@dataclass(slots=True)
class Distribution:
    """How often values fell between bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list[int])
    """Of each bound, and of larger values."""
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> Distribution:
        return Distribution(self.bounds, list(self.counts), self.total)


class Tally:
    """Thread-safe; everything starts at zero with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Labels] = Counter()
        self._distributions: dict[Labels, Distribution] = {}
        self.batches = RecentBatches()

    def count(self, *labels: str, by: int = 1) -> None:
        """Add to a counter: `count("errors", "SlotLost")`."""
        with self._lock:
            self._counts[labels] += by

    def add(self, value: float, *labels: str, bounds: tuple[float, ...] = SECONDS) -> None:
        """Add a value to a distribution."""
        with self._lock:
            found = self._distributions.get(labels)
            if found is None:
                found = self._distributions[labels] = Distribution(bounds)
            found.add(value)

    @contextmanager
    def timed(self, *labels: str) -> Generator[None]:
        """Add the duration of the block, also if it fails; to the current batch, too, by its last label."""
        started, begun = time(), perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - begun
            self.add(seconds, *labels)
            if (batch := current_batch()) is not None:
                batch.add_span(labels[-1], started, seconds)

    def counts(self, name: str) -> Mapping[Labels, int]:
        """Return the counters of this name, by the values of their labels."""
        with self._lock:
            return {labels[1:]: count for labels, count in self._counts.items() if labels[0] == name}

    def distributions(self, name: str) -> Mapping[Labels, Distribution]:
        """Return the distributions of this name, by the values of their labels."""
        with self._lock:
            return {labels[1:]: each.copy() for labels, each in self._distributions.items() if labels[0] == name}
