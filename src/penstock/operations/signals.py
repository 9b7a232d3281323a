"""Stopping cleanly when a signal arrives."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EXIT_STATUSES = frozenset(128 + number for number in _ENDINGS)
"""Exit statuses of a command that a signal has interrupted: 130 for Ctrl-C."""


class Ended(BaseException):
    """A signal arrived while stopping at once loses nothing."""


class Ending:
    """Turns SIGINT, SIGTERM and SIGHUP into `stop`, and into `Ended` where waiting could take long.

    Signals are handled inside a `with` block only; without one, `stop` can still be set by hand.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.exit_status: int | None = None
        """For a command that cannot finish because of a signal; None if none has arrived."""
        self._interruptible = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        for number in _ENDINGS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        return kind is not None and issubclass(kind, Ended | BrokenPipeError)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal inside this block raises `Ended`; elsewhere the work at hand is finished first."""
        self._interruptible = True
        try:
            if self.stop.is_set():
                raise Ended
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.exit_status = 128 + number
        self.stop.set()
        if self._interruptible:
            raise Ended
