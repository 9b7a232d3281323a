"""Reports from tasks: what a task did besides its result, for the code that started it, and whether it may go on.

A task runs in this thread or elsewhere, perhaps on another machine. There it collects its reports and returns them with
its result, so a task that failed and ran again reports nothing twice. Spark ends a task that is no longer wanted; one
that runs in this process ends itself where it calls `may_end_here`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

Listener: TypeAlias = Callable[[Any], None]

_listener: ContextVar[Listener | None] = ContextVar("penstock_listener", default=None)
_check: ContextVar[Callable[[], None] | None] = ContextVar("penstock_check", default=None)


@contextmanager
def listening(listener: Listener | None) -> Generator[None]:
    """Call `listener` for every report from this thread, and from tasks that it runs, inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Listener | None:
    """The listener of this thread, for code that works on its behalf."""
    return _listener.get()


def tell(report: object) -> None:
    """Report something that pickles, if there is a listener."""
    listener = _listener.get()
    if listener is not None:
        listener(report)


@contextmanager
def ended_by(check: Callable[[], None]) -> Generator[None]:
    """Let `check` raise in the tasks of this thread, inside the block, where they call `may_end_here`."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def may_end_here() -> None:
    """Raise if the task is no longer wanted. Called where nothing that it has done is visible yet."""
    check = _check.get()
    if check is not None:
        check()
