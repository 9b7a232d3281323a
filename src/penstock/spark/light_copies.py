"""Copies of small tables that wait for a turn and can share a task with each other.

Starting a job costs a tenth of a second or more, copying a small table a few milliseconds. With hundreds of small
tables nearly all time would go into starting jobs, so one task copies several of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.copy.plan import RANGE_BYTES

MAX_TOGETHER = 16
"""Copies in one task, at most: each opens a connection and syncs files."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyGroup:
    """Items of one copy that run in the same task, possibly together with other groups."""

    items: Sequence[Any]
    function: Callable[[Any], Any]
    description: str
    outcomes: Future[list[Any]] = field(default_factory=Future[list[Any]])

    @property
    def bytes(self) -> int:
        """Size on the source's disk."""
        return bytes_of(self.items)


def bytes_of(items: Sequence[Any]) -> int:
    """Return how much a copy reads from the source's disk; items of unknown size count as large."""
    return sum(getattr(item, "estimated_bytes", RANGE_BYTES) for item in items)


class LightCopies:
    """The waiting groups. Thread-safe."""

    def __init__(self, *, max_bytes: int = RANGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: list[CopyGroup] = []

    def offer(self, group: CopyGroup) -> None:
        """Let other copies run this group in their task, if it is small."""
        if group.bytes < self._max_bytes:
            with self._lock:
                self._waiting.append(group)

    def withdraw(self, group: CopyGroup) -> None:
        """Remove a group, so that no other copy runs it."""
        with self._lock:
            if group in self._waiting:
                self._waiting.remove(group)

    def take(self, group: CopyGroup) -> list[CopyGroup]:
        """Return this group and waiting ones that fit into the same task; empty if another copy has taken it."""
        with self._lock:
            if group.outcomes.running() or group.outcomes.done():
                return []
            taken, size = [group], group.bytes
            for other in self._waiting:
                if other is not group and len(taken) < MAX_TOGETHER and size + other.bytes <= self._max_bytes:
                    taken.append(other)
                    size += other.bytes
            self._waiting = [each for each in self._waiting if each not in taken]
            for each in taken:
                each.outcomes.set_running_or_notify_cancel()
            return taken
