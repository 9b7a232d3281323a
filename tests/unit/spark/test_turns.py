"""The order in which copies get their turns."""

from __future__ import annotations

import threading
import time

import pytest

from penstock.spark.turns import Turns, TurnsClosed

HANG_SECONDS = 30.0


def wait_until_waiting(turns: Turns, count: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while turns.waiting < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ask(turns: Turns, size: int, served: list[int]) -> threading.Thread:
    """Ask for a turn in a thread of its own; returns when it waits."""

    def run() -> None:
        with turns.take(size):
            served.append(size)

    before = turns.waiting
    thread = threading.Thread(target=run)
    thread.start()
    wait_until_waiting(turns, before + 1)
    return thread


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def test_the_smallest_of_those_who_wait_goes_next() -> None:
    turns = Turns(lambda: 1)
    served: list[int] = []
    with turns.take(100):
        threads = [ask(turns, size, served) for size in (100, 3, 50, 1, 3)]
        assert served == []
    join(threads)
    assert served == [1, 3, 3, 50, 100]


def test_a_large_copy_that_asks_again_at_once_lets_a_small_one_in() -> None:
    turns = Turns(lambda: 1)
    served: list[int] = []
    with turns.take(100):
        small = ask(turns, 1, served)
    # The small one may not have woken up by now.
    with turns.take(100):
        assert served == [1]
    join([small])


def test_there_are_as_many_at_a_time_as_the_limit_says_now() -> None:
    limit = 2
    turns = Turns(lambda: limit)
    served: list[int] = []
    with turns.take(9), turns.take(9):
        threads = [ask(turns, size, served) for size in (5, 6)]
        assert served == []
        limit = 4
        with turns.take(1):
            join(threads[:1])
            assert served[0] == 5
    join(threads)
    assert served == [5, 6]


def test_nobody_waits_for_turns_that_are_closed() -> None:
    turns = Turns(lambda: 1)
    refused = threading.Event()

    def run() -> None:
        with pytest.raises(TurnsClosed), turns.take(1):
            pass
        refused.set()

    with turns.take(1):
        thread = threading.Thread(target=run)
        thread.start()
        wait_until_waiting(turns, 1)
        turns.close()
        assert refused.wait(HANG_SECONDS)
        with pytest.raises(TurnsClosed), turns.take(0):
            pass
    join([thread])
    assert turns.closed
