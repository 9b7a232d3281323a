"""The order of copies: turns for the smallest first, and small tables that share a task."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import pytest

from penstock.spark.copies import MAX_TOGETHER, CopyGroup, LightCopies, Turns, TurnsClosed

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


def test_a_turn_that_cannot_be_given_blocks_nobody_behind_it() -> None:
    limits = iter([OSError("the JVM is gone")])

    def limit() -> int:
        for error in limits:
            raise error
        return 1

    turns = Turns(limit)
    with pytest.raises(OSError, match="JVM"), turns.take(1):
        pass
    served: list[int] = []
    thread = threading.Thread(target=lambda: served.append(turns.take(9).__enter__() is None))
    thread.start()
    join([thread])
    assert served == [True]


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


@dataclass(frozen=True)
class Range:
    estimated_bytes: int


def group(*sizes: int) -> CopyGroup:
    return CopyGroup([Range(size) for size in sizes], str, "copy")


def test_whoever_has_a_turn_takes_small_ones_along_up_to_a_size():
    copies = LightCopies(max_bytes=100)
    first, second, third, large = group(40), group(10, 20), group(50), group(100)
    for each in (first, second, third, large):
        copies.offer(each)
    assert copies.take(first) == [first, second]
    assert copies.take(second) == []
    assert copies.take(third) == [third]
    assert copies.take(large) == [large]


def test_what_was_withdrawn_or_never_offered_is_not_taken_along():
    copies = LightCopies(max_bytes=100)
    first, gone, alone = group(1), group(1), group(1)
    copies.offer(first)
    copies.offer(gone)
    copies.withdraw(gone)
    assert copies.take(first) == [first]
    # One part of a larger copy: nobody else runs it.
    assert copies.take(alone) == [alone]


def test_a_task_takes_only_so_many():
    copies = LightCopies(max_bytes=1_000)
    groups = [group(0) for _ in range(MAX_TOGETHER + 3)]
    for each in groups:
        copies.offer(each)
    assert copies.take(groups[0]) == groups[:MAX_TOGETHER]


def test_items_that_do_not_know_their_size_count_as_large():
    copies = LightCopies()
    unknown, other = CopyGroup([1], str, "copy"), group(1)
    copies.offer(unknown)
    copies.offer(other)
    assert copies.take(other) == [other]
