"""The lifecycle of one output: whether its threads continue, and why they ended.

The coordinator creates one before it acquires the output's lease, and every thread of the output checks it. The first
error counts; it stops this output and no other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import LeaseLost, PenstockError

logger = logging.getLogger(__name__)


class Lifecycle:
    """The state that an output's threads share. Thread-safe."""

    def __init__(self, name: str) -> None:
        """`name` is the output's."""
        self.name = name
        self.stop = threading.Event()
        """Set when the output must finish its current batch and end."""
        self.lost = threading.Event()
        """Set when the lease is lost: another process may already write, so this one must not, not even to finish."""
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._paused = False
        self._working = False

    @property
    def error(self) -> BaseException | None:
        """The error that stopped the output, or None."""
        return self._error

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def resting(self) -> bool:
        """True if the output is paused and has finished the batch that it was writing."""
        with self._lock:
            return self._paused and not self._working

    def pause(self) -> None:
        """Start no further batch; the current one is finished."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False

    @contextmanager
    def working(self) -> Iterator[bool]:
        """Write a batch inside the block, unless it yields False because the output is paused."""
        with self._lock:
            may_work = self._working = not self._paused
        try:
            yield may_work
        finally:
            with self._lock:
                self._working = False

    def fail(self, error: BaseException) -> None:
        """Stop the output; `wait` raises the first error."""
        with self._lock:
            is_first, self._error = self._error is None, self._error or error
        if is_first:
            # For an unknown error only the class: libraries quote values in their messages.
            reason = error if isinstance(error, PenstockError) else type(error).__name__
            logger.error("output stopped output=%s error=%s", self.name, reason)
        self.stop.set()

    def lose(self, error: LeaseLost) -> None:
        """Stop the output at once, because its lease is lost."""
        self.lost.set()
        self.fail(error)
