"""Counting for metrics."""

from __future__ import annotations

import threading

from penstock.observe.tally import Tally


def test_counters_have_labels_and_add_up() -> None:
    tally = Tally()
    tally.count("changes", "a", "insert", by=3)
    tally.count("changes", "a", "insert")
    tally.count("errors", "SlotLost")
    assert tally.counts("changes") == {("a", "insert"): 4}
    assert tally.counts("errors") == {("SlotLost",): 1}
    assert tally.counts("other") == {}


def test_distributions_count_by_upper_bound() -> None:
    tally = Tally()
    for value in (0.5, 1.0, 1.1, 99):
        tally.add(value, "rows", bounds=(1.0, 10.0))
    found = tally.distributions("rows")[()]
    assert found.counts == [2, 1, 1]
    assert found.total == 101.6


def test_a_block_that_fails_is_timed_too() -> None:
    tally = Tally()
    try:
        with tally.timed("seconds", "write"):
            raise ValueError
    except ValueError:
        pass
    assert sum(tally.distributions("seconds")[("write",)].counts) == 1


def test_threads_lose_no_counts() -> None:
    tally = Tally()
    threads = [
        threading.Thread(target=lambda: [tally.count("changes") for _ in range(1000)] and None) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tally.counts("changes") == {(): 8000}
