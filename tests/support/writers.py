"""Random transactions in the background: a `Workload` in its own thread.

    with Writers(dsn, Random(seed), tables, size) as writers:
        writers.wait_for_actions(500)

The seed determines what the sessions do, one statement after another, but not how this interleaves with anything else.
Lost connections are reopened and counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

import psycopg

from tests.support.planned_tables import PlannedTable, Size
from tests.support.workload import Ddl, Truth, Workload

HANG_SECONDS = 120.0
"""A guard, far longer than a recovery or a statement takes."""
PAUSE_SECONDS = 0.005
"""Between two statements."""
_Result = TypeVar("_Result")
_LOSSES = ("57", "08")
"""SQLSTATE classes of a lost connection or a server that stops or starts; an error without one is a cut connection."""


class Writers:
    """Sessions that change tables until the end of the `with` block, which ends open transactions."""

    def __init__(
        self,
        dsn: str,
        random: Random,
        tables: Sequence[PlannedTable],
        size: Size,
        *,
        truncates: bool = True,
        pause: float = PAUSE_SECONDS,
        ddl: Ddl = Ddl.NONE,
    ) -> None:
        """Create the tables with their first rows; `pause` is the time between two statements."""
        self._workload = Workload(dsn, random, tables, size, truncates=truncates, ddl=ddl)
        self._pause = pause
        self._truth = self._workload.create()
        self._stop = threading.Event()
        self._moved = threading.Condition()
        self._actions = 0
        self._reconnects = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="writers", daemon=True)

    def __enter__(self) -> Writers:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(HANG_SECONDS)
        self._workload.__exit__()
        if self._error is not None:
            raise self._error

    def begin_truncates(self) -> None:
        """From now on also truncate tables, which makes running copies restart."""
        self._workload.truncates = True

    @property
    def actions(self) -> int:
        """The number of statements so far."""
        return self._actions

    @property
    def reconnects(self) -> int:
        """How many times connections were lost."""
        return self._reconnects

    @property
    def restructured(self) -> Counter[str]:
        """What was done to whole tables."""
        restructuring = self._workload.restructuring
        return Counter() if restructuring is None else restructuring.done

    @property
    def backends(self) -> list[int]:
        """The current process ids of the sessions' backends."""
        return self._workload.backends

    @property
    def transactions(self) -> int:
        """The number of commits, without those whose answer was lost."""
        return len(self._truth.transactions)

    def wait_for_actions(self, count: int, timeout: float = HANG_SECONDS) -> None:
        """Wait until `count` statements ran; raise the error that ended the writers."""
        with self._moved:
            if not self._moved.wait_for(lambda: self._actions >= count or self._error is not None, timeout):
                raise TimeoutError(f"{self._actions} statements instead of {count} in {timeout:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._pause):
                self._through_losses(self._workload.act)
                with self._moved:
                    self._actions += 1
                    self._moved.notify_all()
            while not self._through_losses(self._workload.end):
                pass
            self._workload.insert_everywhere()
        except BaseException as error:
            with self._moved:
                self._error = error
                self._moved.notify_all()

    def _through_losses(self, step: Callable[[Truth], None]) -> bool:
        """Run an action; if connections are lost, reopen them and return False, without repeating it."""
        try:
            step(self._truth)
        except psycopg.OperationalError as error:
            if error.sqlstate is not None and error.sqlstate[:2] not in _LOSSES:
                raise
            self._reconnects += 1
            when_recovered(self._workload.reconnect)
            return False
        return True


def when_recovered(step: Callable[[], _Result]) -> _Result:
    """Run a step that reads or connects; if the server is recovering, retry until it answers."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        try:
            return step()
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
