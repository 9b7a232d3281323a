"""Who hears that a range was read to its end: whoever listens where it is read.

A range may be read in this thread, or in a task on another machine. There the task listens, and sends what it heard
back with its result; whoever runs the task tells it on. So a task that failed and ran again has told nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A range of a copy was read to its end."""

    index: int
    rows: int


Listener: TypeAlias = Callable[[RangeRead], None]

_listener: ContextVar[Listener | None] = ContextVar("penstock_copy_listener", default=None)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Inside, `listener` hears of every range that this thread reads; None for nobody."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Listener | None:
    """Who listens here: to be told by others who read for this thread."""
    return _listener.get()


def tell(read: RangeRead) -> None:
    """A range was read; nothing happens where nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(read)
