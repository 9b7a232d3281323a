"""Tasks without Spark: functions run in this process, in the calling thread.

For small databases, where starting Spark would take longer than the work. Several tables are still copied at the same
time, each in the thread of its table sync worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from penstock.errors import TasksFailed
from penstock.observe.batches import spanned
from penstock.observe.reports import ended_by, may_end_here

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ProcessTasks:
    """See `penstock.destinations.base.Tasks`; `copy_tasks` limits how many tables are read at the same time."""

    elsewhere = False
    """True if tasks run on other machines, which may not see the files of this one."""
    parallel = 1
    """How many tasks of a job run at the same time."""

    def __init__(self, *, copy_tasks: int | None = None) -> None:
        self._turns = None if copy_tasks is None else threading.BoundedSemaphore(copy_tasks)
        self._here = threading.local()
        self._closed = threading.Event()

    def run(self, items: Sequence[_Item], function: Callable[[_Item], _Result], *, description: str) -> list[_Result]:
        """Run the items one after the other, in this thread."""
        results: list[_Result] = []
        with spanned("job"), ended_by(self._check):
            for item in items:
                may_end_here()
                results.append(function(item))
        return results

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Wait for a turn, and copy, or do other work that takes long, inside the block."""
        while self._turns is not None and not self._turns.acquire(timeout=0.2):
            self._check(copying=True)
        self._here.copying = True
        try:
            yield
        finally:
            self._here.copying = False
            if self._turns is not None:
                self._turns.release()

    def close(self) -> None:
        """Stop what runs in `copying` after the current range or slice. Batches of changes continue."""
        self._closed.set()

    def _check(self, *, copying: bool = False) -> None:
        if self._closed.is_set() and (copying or getattr(self._here, "copying", False)):
            raise TasksFailed("the task was stopped because Penstock is stopping")
