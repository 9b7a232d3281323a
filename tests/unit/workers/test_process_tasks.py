"""Tasks that run in this process."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import TasksFailed
from penstock.observe.reports import may_end_here
from penstock.workers.process_tasks import ProcessTasks


def test_results_come_in_order():
    assert ProcessTasks().run([3, 1, 2], lambda item: item * 2, description="double") == [6, 2, 4]


def test_closing_gives_up_copies_and_no_changes():
    tasks = ProcessTasks()
    with tasks.copying(), pytest.raises(TasksFailed, match="was stopped"):
        tasks.run([1, 2], lambda item: tasks.close(), description="copy")
    assert tasks.run([1], str, description="apply") == ["1"]


def test_closing_ends_a_long_task_where_it_allows_that():
    tasks = ProcessTasks()

    def work(item: int) -> None:
        tasks.close()
        may_end_here()

    with tasks.copying(), pytest.raises(TasksFailed, match="was stopped"):
        tasks.run([1], work, description="a long batch")
    assert tasks.run([1], work, description="apply") == [None]


def test_copies_wait_for_their_turn():
    tasks = ProcessTasks(copy_tasks=1)
    order: list[str] = []

    def second() -> None:
        with tasks.copying():
            order.append("second")

    thread = threading.Thread(target=second)
    with tasks.copying():
        thread.start()
        thread.join(0.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
