"""Tables that are copied at the same time share a snapshot; never one from before their changes were held."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from penstock.errors import SnapshotBlocked
from penstock.spool import Stopping
from penstock.workers.copies import SharedSnapshots


class Taken:
    """Stands for a snapshot."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Tables:
    """Threads that want snapshots; taking one waits until it may end."""

    def __init__(self) -> None:
        self.shared = SharedSnapshots()
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.taken: list[Taken] = []
        self.results: dict[int, Any] = {}
        self.blockers: list[int] = []
        self.leave = threading.Event()
        self.error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self, number: int) -> None:
        self._threads.append(threading.Thread(target=self._run, args=[number]))
        self._threads[-1].start()

    def join(self) -> None:
        self.leave.set()
        for thread in self._threads:
            thread.join(30)

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while len(self.results) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(self.results) == count

    def _run(self, number: int) -> None:
        def take(on_wait: Any) -> Any:
            on_wait([])
            self.begun.release()
            assert self.may_end.acquire(timeout=30)
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            self.taken.append(Taken())
            return self.taken[-1]

        def tell(blockers: Any) -> None:
            self.blockers.append(number)

        try:
            with self.shared.enter(take, on_wait=tell, check=lambda: None) as snapshot:
                self.results[number] = snapshot
                self.leave.wait(30)
        except BaseException as error:
            self.results[number] = error


@pytest.fixture
def tables():
    made = Tables()
    with ExitStack() as stack:
        stack.callback(made.join)
        yield made


@pytest.mark.trap(23)
def test_who_comes_while_one_is_taken_gets_the_next_one(tables):
    tables.start(1)
    assert tables.begun.acquire(timeout=30)
    for number in (2, 3, 4):
        tables.start(number)
    while len(tables.shared._gathering.aboard if tables.shared._gathering else ()) < 3:
        time.sleep(0.005)
    tables.may_end.release()
    assert tables.begun.acquire(timeout=30)
    tables.may_end.release()
    tables.wait(4)
    first, second = tables.taken
    assert tables.results == {1: first, 2: second, 3: second, 4: second}
    assert sorted(tables.blockers) == [1, 2, 3, 4], "all hear whom their snapshot waits for"


def test_a_snapshot_is_let_go_by_the_last_who_leaves(tables):
    tables.start(1)
    tables.may_end.release()
    tables.wait(1)
    assert not tables.taken[0].closed
    tables.join()
    assert tables.taken[0].closed


def test_all_who_wait_hear_of_an_error_and_the_next_ones_try_again(tables):
    tables.error = SnapshotBlocked("blocked")
    tables.start(1)
    assert tables.begun.acquire(timeout=30)
    tables.may_end.release()
    tables.wait(1)
    assert isinstance(tables.results[1], SnapshotBlocked)
    tables.start(2)
    tables.may_end.release()
    tables.wait(2)
    assert tables.results[2] is tables.taken[0]


def test_who_is_not_wanted_any_more_does_not_take_the_others_along(tables):
    tables.start(1)
    assert tables.begun.acquire(timeout=30)
    for number in (2, 3):
        tables.start(number)
    while len(tables.shared._gathering.aboard if tables.shared._gathering else ()) < 2:
        time.sleep(0.005)
    tables.may_end.release()
    assert tables.begun.acquire(timeout=30)
    tables.error = Stopping()
    tables.may_end.release(2)
    tables.wait(3)
    stopped = [number for number in (2, 3) if isinstance(tables.results[number], Stopping)]
    assert len(stopped) == 1
    assert len(tables.taken) == 2
