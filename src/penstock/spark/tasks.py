"""Run functions as Spark tasks: one job over many items, results in order, exceptions unchanged.

Changes and copies share the cores. A batch of changes is one job in the pool `apply`, regardless of the number of
tables. Copies run in the pool `copy`, as jobs of one task, each of which holds a turn. There are always fewer turns
than cores, because a running task cannot be pre-empted and changes must not wait for one. Starting a job costs a tenth
of a second, more on a busy machine, so one task copies a few ranges or several small tables.
"""

from __future__ import annotations

import logging
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import py4j.protocol
from pyspark import SparkContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.changes.frames import is_local
from penstock.copy.plan import RANGE_BYTES, bytes_of
from penstock.errors import ConfigError, PenstockError, SparkGone, TasksFailed
from penstock.observe.batches import spanned
from penstock.observe.reports import current_listener, listening, tell
from penstock.spark.copies import CopyGroup, LightCopies, Turns, TurnsClosed
from penstock.spark.session import APPLY_POOL, COPY_POOL, StartingSpark, cause_of, reason_of

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

ITEMS_PER_TASK = 4
"""Where executors come when tasks wait for them (`spark.dynamicAllocation`), the number of tasks follows from that of
the items: one per present core would never wait."""
TASKS_PER_CORE = 1
"""Further items share tasks. With four tasks per core a batch of 20 small tables took three times as long, when a
Python task still cost 0.2 s (see docs/decisions/0013). Items are dealt out in turn and none is very large, so more
tasks would hardly balance better."""
COPY_TASK_BYTES = 4 * RANGE_BYTES
"""Bytes of a table in one task, at most, unless a single item has more: a few seconds of work without interruption."""
COPY_TASK_ITEMS = 4
"""Items of a copy in one task, at most."""
_CANCEL_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0
_NO_JVM = (py4j.protocol.Py4JNetworkError, OSError, EOFError)
_DESCRIPTION, _POOL, _GROUP = "spark.job.description", "spark.scheduler.pool", "spark.jobGroup.id"
_LACKING = (
    "Give every executor the same Python and the same packages as the driver: install them, or ship an environment "
    "(spark.archives, spark.pyspark.python); docs/guides/cluster.md shows how."
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Done(Generic[_Result]):
    """The result of a function, and its reports (`penstock.observe.reports`)."""

    result: _Result
    reports: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class _Raised:
    """The exception of a function, and its traceback."""

    error: Exception
    at: str


@dataclass(frozen=True, slots=True)
class _Shipped:
    """The part of a `CopyGroup` that is sent to its task."""

    items: Sequence[Any]
    function: Callable[[Any], Any]


class SparkTasks:
    """Runs functions in Spark tasks (`penstock.destinations.base.Tasks`). Thread-safe.

    `copy_tasks` limits the tasks that copy tables at the same time; the default is all cores but one, at least one.
    """

    def __init__(self, spark: SparkSession | StartingSpark, *, copy_tasks: int | None = None) -> None:
        self._spark = spark
        self._copy_tasks = copy_tasks
        self._here = threading.local()
        self._turns = Turns(lambda: self.copy_tasks)
        self._light_copies = LightCopies()
        self._tag = f"penstock-copy-{uuid.uuid4().hex}"

    @cached_property
    def _grows(self) -> bool:
        """True if executors come when tasks wait for them."""
        return self._context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"

    @property
    def elsewhere(self) -> bool:
        """True if tasks run on other machines, which may not see the files of this one."""
        return not is_local(self._context.master)

    @property
    def _context(self) -> SparkContext:
        return self._spark.sparkContext

    @property
    def cores(self) -> int:
        """How many tasks run at the same time; on a cluster this changes with the number of executors.

        Raises `SparkGone` if Spark was stopped.
        """
        try:
            return max(1, self._context.defaultParallelism)
        except (py4j.protocol.Py4JError, OSError, AttributeError):
            # A context that was stopped by Python no longer has a counterpart in the JVM.
            logger.debug("the number of cores is unknown", exc_info=True)
            raise SparkGone("Spark was stopped: it no longer says how many cores it has") from None

    @property
    def copy_tasks(self) -> int:
        """How many tasks copy tables at the same time, at most."""
        if self._copy_tasks:
            return self._copy_tasks
        cores = self.cores
        # Tasks that wait are what makes a cluster grow; it then has room for changes, too.
        return 2 * cores if self._grows else max(1, cores - 1)

    @property
    def parallel(self) -> int:
        """How many tasks of a job of this thread run at the same time."""
        if self._is_copying:
            return self.copy_tasks
        return 2 * self.cores if self._grows else self.cores

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run this thread's jobs as parts of a copy: in the pool `copy`, a few items at a time, in turns that all
        copies share. Table sync workers call `Destination.write_table_rows` inside; a destination applies a huge
        transaction inside."""
        before = self._is_copying
        self._here.copying = True
        try:
            yield
        finally:
            self._here.copying = before

    def run(self, items: Sequence[_Item], function: Callable[[_Item], _Result], *, description: str) -> list[_Result]:
        """Run one job over all items and return the results in their order; `Tasks` says what the function must obey.

        An exception in a task does not stop the other tasks of the job; it is raised here, unchanged, when they are
        done. A failure of Spark itself raises `TasksFailed`. Results pass through the driver, so keep them small.
        """
        items = list(items)
        if not items:
            return []
        if self._is_copying:
            return self._run_in_turns(items, function, description)
        count = TASKS_PER_CORE * self.cores
        if self._grows:
            count = max(count, -(-len(items) // ITEMS_PER_TASK))
        count = min(len(items), count)
        shares = [list(range(number, len(items), count)) for number in range(count)]
        payloads = [[items[index] for index in share] for share in shares]
        results: list[Any] = [None] * len(items)
        for share, outcomes in zip(shares, self._job(payloads, function, description, APPLY_POOL), strict=True):
            for index, outcome in zip(share, outcomes, strict=True):
                results[index] = outcome
        _tell_all(results)
        return [_value(outcome) for outcome in results]

    def wait_for_executors(self, say: Callable[[str], None], seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait until a task has run, on a cluster; after some seconds, tell people what this waits for.

        Raises `ConfigError` if executors lack something.
        """
        if not self.elsewhere:
            return
        text = (
            f"waiting for executors of {self._context.master}: none has run a task yet. Perhaps other applications "
            "hold all cores, like a pipeline that is running; spark.cores.max limits what one takes"
        )
        # In a thread, because a signal cannot end a thread's call to the JVM cleanly. Stopping Spark ends the job.
        job: Future[None] = Future()

        def run() -> None:
            try:
                self.run([None], _do_nothing, description="wait for an executor")
            except BaseException as error:
                job.set_exception(error)
            else:
                job.set_result(None)

        threading.Thread(target=run, name="wait-for-executors", daemon=True).start()
        try:
            job.result(seconds)
        except TimeoutError:
            say(text)
            job.result()

    def close(self) -> None:
        """Stop copies and other long jobs: cancel running tasks and start no more. Other jobs that apply changes
        continue."""
        self._turns.close()
        # Again and again: a job that has its turn, and that Spark does not know yet, would run to its end.
        threading.Thread(target=self._cancel_until_over, name="cancel-copies", daemon=True).start()

    def _cancel_until_over(self) -> None:
        try:
            while not self._turns.wait_returned(_CANCEL_SECONDS):
                self._context.cancelJobsWithTag(self._tag)
        except (py4j.protocol.Py4JError, OSError, AttributeError):
            logger.debug("spark ended before its copies could be cancelled", exc_info=True)

    @property
    def _is_copying(self) -> bool:
        return getattr(self._here, "copying", False)

    def _run_in_turns(
        self, items: list[_Item], function: Callable[[_Item], _Result], description: str
    ) -> list[_Result]:
        """Run jobs of a few items each, as many at a time as there are turns, until all are done or one raises. Small
        tables get their turns before large ones."""
        turns = min(len(items), self.parallel)
        parts = group_for_turns(items, turns)
        groups = [
            CopyGroup(part, function, f"{description} ({number} of {len(parts)})")
            for number, part in enumerate(parts, 1)
        ]
        size = bytes_of(items)
        failed = threading.Event()
        listener = current_listener()

        def run_group(group: CopyGroup) -> list[_Result]:
            try:
                with self._turn(size):
                    if failed.is_set():
                        return []
                    self._run_together(self._light_copies.take(group))
                outcomes = group.outcomes.result()
                # Threads of a pool do not inherit the listener.
                with listening(listener):
                    _tell_all(outcomes)
                return [_value(outcome) for outcome in outcomes]
            except BaseException:
                failed.set()
                raise
            finally:
                self._light_copies.withdraw(group)

        if len(groups) == 1:
            self._light_copies.offer(groups[0])
            return run_group(groups[0])
        with ThreadPoolExecutor(turns, thread_name_prefix="copy") as pool:
            futures = [pool.submit(run_group, group) for group in groups]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [result for future in futures for result in future.result()]

    def _run_together(self, groups: list[CopyGroup]) -> None:
        """Run these groups in one task, and set the outcome of each."""
        if not groups:
            return
        more = f" and {len(groups) - 1} more" if len(groups) > 1 else ""
        try:
            shipped = [_Shipped(group.items, group.function) for group in groups]
            done = self._job([shipped], _run_group, groups[0].description + more, COPY_POOL, tagged=True)[0]
            for group, outcome in zip(groups, done, strict=True):
                group.outcomes.set_result(_value(outcome))
        except BaseException as error:
            if isinstance(error, TasksFailed) and len(groups) > 1 and not self._turns.closed:
                # One of them may have killed the worker: the others must not fail with it.
                for group in groups:
                    self._run_together([group])
            for group in groups:
                if not group.outcomes.done():
                    group.outcomes.set_exception(error)

    @contextmanager
    def _turn(self, size: int) -> Iterator[None]:
        try:
            with self._turns.take(size):
                yield
        except TurnsClosed:
            raise _cancelled() from None

    def _job(
        self,
        payloads: list[list[_Item]],
        function: Callable[[_Item], _Result],
        description: str,
        pool: str,
        *,
        tagged: bool = False,
    ) -> list[list[_Done[_Result] | _Raised]]:
        """Run one task per payload; a `tagged` job can be cancelled."""
        try:
            with spanned("job"), self._described(description, pool, tagged=tagged):
                return self._context.parallelize(payloads, len(payloads)).mapPartitions(_Work(function)).collect()
        except _NO_JVM:
            logger.debug("the jvm does not answer description=%s", description, exc_info=True)
            raise SparkGone(f"Spark could not {description}: its JVM no longer answers") from None
        except (py4j.protocol.Py4JError, PySparkException, AttributeError, AssertionError) as error:
            logger.debug("a job failed description=%s", description, exc_info=True)
            if tagged and self._turns.closed:
                raise _cancelled() from None
            if self._is_stopped():
                raise SparkGone(f"Spark could not {description}: it was stopped") from None
            if isinstance(error, AttributeError | AssertionError):
                raise
            lacking = cause_of(error)
            if lacking is not None:
                raise ConfigError(f"Spark could not {description}: {lacking}", hint=_LACKING) from None
            raise TasksFailed(f"Spark could not {description}: {reason_of(error)}") from None

    def _is_stopped(self) -> bool:
        java: Any = self._context._jsc  # pyright: ignore[reportPrivateUsage]
        try:
            return java is None or bool(java.sc().isStopped())
        except (py4j.protocol.Py4JError, OSError):
            return True

    @contextmanager
    def _described(self, description: str, pool: str, *, tagged: bool) -> Iterator[None]:
        """Describe this thread's jobs, and give them the tag that cancels them if they are `tagged`."""
        with described(self._context, description, pool):
            if tagged:
                self._context.addJobTag(self._tag)
            try:
                yield
            finally:
                if tagged:
                    self._context.removeJobTag(self._tag)


@contextmanager
def described(context: SparkContext, description: str, pool: str) -> Iterator[None]:
    """Give this thread's jobs a description, a group and a pool inside the block."""
    before = {name: context.getLocalProperty(name) for name in (_DESCRIPTION, _POOL, _GROUP)}
    context.setLocalProperty(_DESCRIPTION, description)
    context.setLocalProperty(_POOL, pool)
    context.setLocalProperty(_GROUP, group_of(pool))
    try:
        yield
    finally:
        for name, value in before.items():
            # None removes a property, although the annotation does not allow it.
            context.setLocalProperty(name, value)  # pyright: ignore[reportArgumentType]


def group_of(pool: str) -> str:
    """Return the job group of a pool, as Spark's UI shows it."""
    return f"penstock {pool}"


class _Work:
    """The function that is sent to a task: returns exceptions as values."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, payloads: Iterable[list[Any]]) -> Iterator[list[_Done[Any] | _Raised]]:
        for payload in payloads:
            yield [_call(self._function, item) for item in payload]


def _run_group(group: _Shipped) -> list[_Done[Any] | _Raised]:
    """Run the items of one copy in a task, up to the first that raises."""
    outcomes: list[_Done[Any] | _Raised] = []
    for item in group.items:
        outcomes.append(_call(group.function, item))
        if isinstance(outcomes[-1], _Raised):
            break
    return outcomes


def _call(function: Callable[[Any], Any], item: Any) -> _Done[Any] | _Raised:
    reports: list[object] = []
    try:
        with listening(reports.append):
            result = function(item)
        return _Done(result, tuple(reports))
    except Exception as error:
        return _Raised(_portable(error), traceback.format_exc())


def group_for_turns(items: list[_Item], turns: int) -> list[list[_Item]]:
    """Split items into groups of one task each: in order, about equal, and the same number for every turn."""
    per_item = max(1, bytes_of(items) // len(items))
    together = max(1, min(COPY_TASK_ITEMS, COPY_TASK_BYTES // per_item))
    rounds = -(-len(items) // (together * turns))
    count = min(len(items), rounds * turns)
    borders = [len(items) * number // count for number in range(count)]
    return [items[first:end] for first, end in zip(borders, [*borders[1:], len(items)], strict=True)]


def _tell_all(outcomes: Iterable[_Done[Any] | _Raised]) -> None:
    for report in (report for outcome in outcomes if isinstance(outcome, _Done) for report in outcome.reports):
        tell(report)


def _do_nothing(_: None) -> None:
    """Run as a task to see that tasks run."""


def _cancelled() -> TasksFailed:
    return TasksFailed("a task was cancelled because Penstock is stopping")


def _portable(error: Exception) -> Exception:
    """Return the exception if it can be pickled, otherwise a `TasksFailed` with its message."""
    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return TasksFailed(f"a task failed: {type(error).__name__}: {error}")
    return error


def _value(outcome: _Done[_Result] | _Raised) -> _Result:
    if isinstance(outcome, _Done):
        return outcome.result
    if not isinstance(outcome.error, PenstockError):
        outcome.error.add_note(f"in a task:\n{outcome.at}")
    raise outcome.error
