"""Functions as tasks of a real Spark."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import TableRewritten, TasksFailed
from penstock.observe.batches import RecentBatches
from penstock.spark.copies import CopyGroup
from penstock.spark.session import APPLY_POOL, COPY_POOL, SparkSettings, build_session
from penstock.spark.tasks import TASKS_PER_CORE, SparkTasks


@pytest.fixture
def tasks(spark: Any) -> SparkTasks:
    return SparkTasks(spark)


class Jobs:
    """The jobs that Spark has run, as its own status store has them (there is no web server in tests)."""

    def __init__(self, spark: Any) -> None:
        self._store = spark.sparkContext._jsc.sc().statusStore()
        self._before = {job.jobId() for job in self._list()}

    def _list(self) -> list[Any]:
        jobs = self._store.jobsList(None)
        return [jobs.apply(index) for index in range(jobs.size())]

    def new(self, tasks: int | None = None) -> list[tuple[str, int]]:
        """Descriptions and numbers of tasks, oldest first; waits for the store, which follows behind."""
        deadline = time.monotonic() + 10
        while True:
            found = sorted((job.jobId(), job) for job in self._list() if job.jobId() not in self._before)
            if tasks is None or sum(job.numTasks() for _, job in found) >= tasks or time.monotonic() > deadline:
                return [(job.description().get(), job.numTasks()) for _, job in found]
            time.sleep(0.02)


def test_results_come_in_the_order_of_the_items(tasks: SparkTasks) -> None:
    assert tasks.run([], str, description="nothing") == []
    assert tasks.run(range(5), lambda item: item * item, description="square") == [0, 1, 4, 9, 16]
    assert tasks.run(["x"], str.upper, description="one") == ["X"]


def test_the_time_of_a_job_is_noted_in_the_record_of_its_batch(tasks: SparkTasks) -> None:
    with RecentBatches().recorded("apply") as record:
        tasks.run(range(2), str, description="part of a batch")
    assert [span.name for span in record.spans] == ["job"]
    assert record.stages["job"] > 0


@pytest.mark.trap(51)
def test_many_items_are_one_job_with_few_tasks(spark: Any, tasks: SparkTasks) -> None:
    jobs = Jobs(spark)
    assert tasks.run(range(300), lambda item: -item, description="batch of 300 tables") == [
        -item for item in range(300)
    ]
    count = TASKS_PER_CORE * tasks.cores
    assert jobs.new(count) == [("batch of 300 tables", count)]


def test_jobs_of_other_threads_keep_their_names(spark: Any, tasks: SparkTasks) -> None:
    jobs = Jobs(spark)
    threads = [
        threading.Thread(target=tasks.run, args=[[1, 2], str], kwargs={"description": f"job {number}"})
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in jobs.new(8)) == [f"job {number}" for number in range(4)]
    assert spark.sparkContext.getLocalProperty("spark.job.description") is None


def fail(item: int) -> int:
    if item == 3:
        raise TableRewritten("public.t was rewritten", table="public.t")
    if item == 5:
        return {}[item]
    return item


@pytest.mark.trap(33)
def test_an_exception_of_one_task_is_raised_as_it_was_when_the_others_are_done(
    tasks: SparkTasks, tmp_path: Path
) -> None:
    def work(item: int) -> int:
        (tmp_path / str(item)).touch()
        return fail(item)

    with pytest.raises(TableRewritten, match="was rewritten") as caught:
        tasks.run(range(5), work, description="fail")
    assert caught.value.table == "public.t"
    assert len(list(tmp_path.iterdir())) == 5
    with pytest.raises(KeyError) as other:
        tasks.run([5], work, description="fail")
    assert "in a task" in other.value.__notes__[0]


class Stubborn(Exception):
    """Does not survive pickling."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("stubborn")


def test_an_exception_that_cannot_travel_is_told(tasks: SparkTasks) -> None:
    def work(item: int) -> None:
        raise Stubborn(1, 2)

    with pytest.raises(TasksFailed, match="Stubborn: stubborn"):
        tasks.run([1], work, description="fail")


def test_a_worker_that_dies_is_an_error_and_not_the_end(tasks: SparkTasks) -> None:
    def die(item: int) -> None:
        os._exit(3)

    with pytest.raises(TasksFailed, match="could not kill a worker"):
        tasks.run([1], die, description="kill a worker")
    assert tasks.run([1], str, description="go on") == ["1"]


def test_a_copy_that_kills_its_worker_does_not_fail_the_copies_that_share_its_task(tasks: SparkTasks) -> None:
    def die(item: int) -> None:
        os._exit(3)

    groups = [CopyGroup([1], str, "copy a"), CopyGroup([2], die, "copy bad"), CopyGroup([3], str, "copy z")]
    tasks._run_together(groups)
    first, bad, last = (group.outcomes for group in groups)
    assert [outcome.result for each in (first, last) for outcome in each.result()] == ["1", "3"]
    with pytest.raises(TasksFailed, match="could not copy bad"):
        bad.result()


def property_of_task(_item: Any) -> tuple[str | None, str | None]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.getLocalProperty("spark.scheduler.pool"), context.getLocalProperty("spark.job.description")


def test_copies_run_in_their_own_pool_a_few_ranges_at_a_time(spark: Any, tasks: SparkTasks) -> None:
    assert tasks.run([0], property_of_task, description="apply") == [(APPLY_POOL, "apply")]
    jobs = Jobs(spark)
    with tasks.copying():
        found = tasks.run(range(10), property_of_task, description="copy public.t")
    assert found == [(COPY_POOL, f"copy public.t ({group} of 3)") for group in (1, 1, 1, 2, 2, 2, 3, 3, 3, 3)]
    assert [count for _, count in jobs.new(3)] == [1, 1, 1]
    assert tasks.run([0], property_of_task, description="apply") == [(APPLY_POOL, "apply")]


@pytest.mark.trap(51)
def test_changes_need_not_wait_for_copies(tasks: SparkTasks, tmp_path: Path) -> None:
    """Two tables copy at the same time on two cores; they share one of them, and the other is free for changes."""
    go = tmp_path / "go"

    def slow(item: int) -> int:
        (tmp_path / f"started-{item}").touch()
        while not go.exists():
            time.sleep(0.01)
        return item

    results: list[list[int]] = []

    def copy(first: int) -> None:
        with tasks.copying():
            results.append(tasks.run(range(first, first + 2), slow, description=f"copy {first}"))

    assert tasks.copy_tasks == 1
    threads = [threading.Thread(target=copy, args=[first]) for first in (0, 10)]
    for thread in threads:
        thread.start()
    try:
        while not list(tmp_path.glob("started-*")):
            time.sleep(0.01)
        for _ in range(3):
            assert tasks.run([1, 2, 3], str, description="changes") == ["1", "2", "3"]
        assert len(list(tmp_path.glob("started-*"))) == 1
    finally:
        go.touch()
        for thread in threads:
            thread.join()
    assert sorted(results) == [[0, 1], [10, 11]]


def test_jobs_that_take_long_leave_a_core_for_others(spark: Any) -> None:
    """A destination splits work over so many tasks."""
    tasks = SparkTasks(spark)
    assert tasks.parallel == tasks.cores == 2
    with tasks.copying():
        assert tasks.parallel == 1


def test_more_turns_can_be_asked_for(spark: Any, tmp_path: Path) -> None:
    tasks = SparkTasks(spark, copy_tasks=2)

    def meet(item: int) -> int:
        (tmp_path / str(item)).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        return item

    with tasks.copying():
        assert tasks.run([1, 2], meet, description="copy") == [1, 2]


def test_a_failed_range_ends_its_copy(tasks: SparkTasks, tmp_path: Path) -> None:
    def work(item: int) -> int:
        (tmp_path / str(item)).touch()
        return fail(item)

    with tasks.copying(), pytest.raises(TableRewritten):
        tasks.run([1, 3, 4, 6, 7, 8, 9], work, description="copy")
    assert {path.name for path in tmp_path.iterdir()} == {"1", "3"}


def test_a_copy_is_given_up_when_closed(spark: Any, tmp_path: Path) -> None:
    tasks = SparkTasks(spark)

    def work(item: int) -> int:
        (tmp_path / str(item)).touch()
        threading.Event().wait(200)
        return item

    def close() -> None:
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        tasks.close()

    closing = threading.Thread(target=close)
    closing.start()
    with tasks.copying(), pytest.raises(TasksFailed, match="stopping"):
        tasks.run(range(10), work, description="copy")
    closing.join()
    with tasks.copying(), pytest.raises(TasksFailed, match="stopping"):
        tasks.run([1], str, description="copy")
    assert tasks.run([1], str, description="changes still drain") == ["1"]


def test_a_copy_whose_job_is_being_submitted_when_closed_is_given_up(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = SparkTasks(spark)
    context, cancelled = spark.sparkContext, threading.Event()
    cancel, parallelize = context.cancelJobsWithTag, context.parallelize

    def submit(*arguments: Any) -> Any:
        tasks.close()
        assert cancelled.wait(60)
        return parallelize(*arguments)

    def work(item: int) -> int:
        threading.Event().wait(200)
        return item

    monkeypatch.setattr(context, "cancelJobsWithTag", lambda tag: (cancel(tag), cancelled.set()))
    monkeypatch.setattr(context, "parallelize", submit)
    with tasks.copying(), pytest.raises(TasksFailed, match="stopping"):
        tasks.run([1], work, description="copy")


def test_a_second_session_is_the_first(spark: Any) -> None:
    assert build_session(SparkSettings(master="local[2]")).sparkContext is spark.sparkContext
    assert spark.conf.get("spark.sql.timeType.enabled") == "true"


STOPPED = """
from penstock.spark.session import SparkSettings, build_session
from penstock.spark.tasks import SparkTasks

session = build_session(SparkSettings(master="local[1]"))
tasks = SparkTasks(session)
assert tasks.run([1], str, description="work") == ["1"]


def copy():
    with tasks.copying():
        tasks.run([1, 2], str, description="copy")


def show():
    for what in (lambda: tasks.run([1, 2], str, description="write"), lambda: tasks.cores, copy):
        try:
            what()
        except Exception as error:
            print(type(error).__name__)


session.sparkContext._jsc.sc().stop()
show()
session.stop()
show()
"""


def test_a_context_that_was_stopped_is_a_spark_that_is_gone() -> None:
    """By its JVM, as after the master has removed the application, or by Python."""
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["SparkGone"] * 6, done.stderr
