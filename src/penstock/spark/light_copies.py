"""Copies of small tables that wait for their turn, to be taken along by whoever has one.

A job costs a tenth of a second and more, a small table a few milliseconds. With hundreds of them the jobs would be all
there is, so one task reads as many as make a good size together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.copy.plan import RANGE_BYTES

MAX_TOGETHER = 16
"""Each has a connection to make, and files to sync."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyGroup:
    """Items of one copy that make one task, or a part of one."""

    items: Sequence[Any]
    function: Callable[[Any], Any]
    description: str
    outcomes: Future[list[Any]] = field(default_factory=Future[list[Any]])

    @property
    def bytes(self) -> int:
        """On the source's disk."""
        return bytes_of(self.items)


def bytes_of(items: Sequence[Any]) -> int:
    """What a copy reads from the source's disk; items that do not know theirs count as large."""
    return sum(getattr(item, "estimated_bytes", RANGE_BYTES) for item in items)


class LightCopies:
    """May be used from any thread."""

    def __init__(self, *, max_bytes: int = RANGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: list[CopyGroup] = []

    def offer(self, group: CopyGroup) -> None:
        """Let others take it along, if it is small."""
        if group.bytes < self._max_bytes:
            with self._lock:
                self._waiting.append(group)

    def withdraw(self, group: CopyGroup) -> None:
        """Nobody takes it any more."""
        with self._lock:
            if group in self._waiting:
                self._waiting.remove(group)

    def take(self, group: CopyGroup) -> list[CopyGroup]:
        """This one with others that wait, for one task; nothing if somebody has taken it already."""
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
