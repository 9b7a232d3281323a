"""Functions as Spark tasks: one job over many items, results in order, exceptions as what they were.

Changes and copies share the cores. A batch of changes is one job in the pool `apply`, whatever the number of tables.
Copies run in the pool `copy`, a job of one task at a time for each of their turns, and there are always fewer turns
than cores: a task cannot be pre-empted, and changes must not wait for one. Starting a job costs a tenth of a second,
more on a busy machine, so such a task takes a few ranges, or the whole of several small tables.
"""

from __future__ import annotations

import logging
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import py4j.protocol
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.copy.listening import RangeRead, current_listener, listening
from penstock.copy.plan import RANGE_BYTES
from penstock.errors import PenstockError, SparkGone, TasksFailed
from penstock.spark.light_copies import CopyGroup, LightCopies, bytes_of
from penstock.spark.session import APPLY_POOL, COPY_POOL, reason_of
from penstock.spark.turns import Turns, TurnsClosed

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

TASKS_PER_CORE = 1
"""More items than that share tasks. A batch of 20 small tables took three times as long with four tasks per core, when
a Python task cost 0.2 s by itself (it does not any more: docs/decisions/0013). Items are dealt out in turn and none is
very large, so more tasks would hardly balance better."""
COPY_TASK_BYTES = 4 * RANGE_BYTES
"""Of a table in one task, at most, unless a single item has more: some seconds of work, which nobody can interrupt."""
COPY_TASK_ITEMS = 4
"""Items of a copy in one task, at most."""
_NO_JVM = (py4j.protocol.Py4JNetworkError, OSError, EOFError)
_DESCRIPTION, _POOL = "spark.job.description", "spark.scheduler.pool"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Done(Generic[_Result]):
    """What a function returned, and which ranges of a copy it has read."""

    result: _Result
    reads: tuple[RangeRead, ...] = ()


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a function raised, with where."""

    error: Exception
    at: str


@dataclass(frozen=True, slots=True)
class _Shipped:
    """What of a group of items goes to its task."""

    items: Sequence[Any]
    function: Callable[[Any], Any]


class SparkTasks:
    """Runs functions in Spark tasks (`penstock.destinations.base.Tasks`). May be called from any thread.

    `copy_tasks` bounds the tasks that read tables, over all tables; by default all cores but one, at least one.
    """

    def __init__(self, session: SparkSession, *, copy_tasks: int | None = None) -> None:
        self._context = session.sparkContext
        self._copy_tasks = copy_tasks
        self._here = threading.local()
        self._turns = Turns(lambda: self.copy_tasks)
        self._light_copies = LightCopies()
        self._tag = f"penstock-copy-{uuid.uuid4().hex}"

    @property
    def cores(self) -> int:
        """How many tasks run at the same time; on a cluster this changes as executors come and go."""
        return max(1, self._context.defaultParallelism)

    @property
    def copy_tasks(self) -> int:
        """How many of them may read tables."""
        return self._copy_tasks or max(1, self.cores - 1)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, jobs of this thread are parts of a copy: they run in the pool `copy`, a few items at a time, in turns
        that all copies share. Whoever calls `Destination.write_table_rows` does so inside."""
        before = self._is_copying
        self._here.copying = True
        try:
            yield
        finally:
            self._here.copying = before

    def run(self, items: Sequence[_Item], function: Callable[[_Item], _Result], *, description: str) -> list[_Result]:
        """One job over all items, results in their order; see `Tasks` for what the function must keep to.

        An exception of a task does not stop the others of its job, and is raised here when they are done, as it was.
        What Spark itself cannot do is `TasksFailed`. Results go through the driver: they should be small.
        """
        items = list(items)
        if not items:
            return []
        if self._is_copying:
            return self._run_in_turns(items, function, description)
        count = min(len(items), TASKS_PER_CORE * self.cores)
        shares = [list(range(number, len(items), count)) for number in range(count)]
        payloads = [[items[index] for index in share] for share in shares]
        results: list[Any] = [None] * len(items)
        for share, outcomes in zip(shares, self._job(payloads, function, description, APPLY_POOL), strict=True):
            for index, outcome in zip(share, outcomes, strict=True):
                results[index] = outcome
        return [_value(outcome) for outcome in results]

    def close(self) -> None:
        """Give copies up: no further task starts, and those that run are ended. Changes are not concerned."""
        self._turns.close()
        try:
            self._context.cancelJobsWithTag(self._tag)
        except (py4j.protocol.Py4JError, OSError):
            logger.debug("spark was gone before its copies could be cancelled", exc_info=True)

    @property
    def _is_copying(self) -> bool:
        return getattr(self._here, "copying", False)

    def _run_in_turns(
        self, items: list[_Item], function: Callable[[_Item], _Result], description: str
    ) -> list[_Result]:
        """Jobs of a few items, as many at a time as there are turns; the first exception ends it. Small tables get
        their turns before large ones."""
        turns = min(len(items), self.copy_tasks)
        parts = group_for_turns(items, turns)
        groups = [
            CopyGroup(part, function, f"{description} ({number} of {len(parts)})")
            for number, part in enumerate(parts, 1)
        ]
        size = bytes_of(items)
        failed = threading.Event()
        listener = current_listener() or _ignore

        def run_group(group: CopyGroup) -> list[_Result]:
            try:
                with self._turn(size):
                    if failed.is_set():
                        return []
                    self._run_together(self._light_copies.take(group))
                outcomes = group.outcomes.result()
                for read in (read for outcome in outcomes if isinstance(outcome, _Done) for read in outcome.reads):
                    listener(read)
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
        """One task for these; each group hears what became of it."""
        if not groups:
            return
        more = f" and {len(groups) - 1} more" if len(groups) > 1 else ""
        try:
            shipped = [_Shipped(group.items, group.function) for group in groups]
            done = self._job([shipped], _run_group, groups[0].description + more, COPY_POOL, tagged=True)[0]
            for group, outcome in zip(groups, done, strict=True):
                group.outcomes.set_result(_value(outcome))
        except BaseException as error:
            for group in groups:
                if not group.outcomes.done():
                    group.outcomes.set_exception(error)

    @contextmanager
    def _turn(self, size: int) -> Iterator[None]:
        try:
            with self._turns.take(size):
                yield
        except TurnsClosed:
            raise _given_up() from None

    def _job(
        self,
        payloads: list[list[_Item]],
        function: Callable[[_Item], _Result],
        description: str,
        pool: str,
        *,
        tagged: bool = False,
    ) -> list[list[_Done[_Result] | _Raised]]:
        """One task per payload; a job that is `tagged` can be cancelled."""
        try:
            with self._described(description, pool, tagged=tagged):
                return self._context.parallelize(payloads, len(payloads)).mapPartitions(_Work(function)).collect()
        except _NO_JVM:
            logger.debug("the JVM does not answer description=%s", description, exc_info=True)
            gone = f"Spark could not {description}: its JVM does not answer any more"
            # A table is tried again by the next process; this one ends as soon as it has changes to write.
            raise (TasksFailed(gone) if pool == COPY_POOL else SparkGone(gone)) from None
        except (py4j.protocol.Py4JError, PySparkException) as error:
            logger.debug("a job failed description=%s", description, exc_info=True)
            if tagged and self._turns.closed:
                raise _given_up() from None
            raise TasksFailed(f"Spark could not {description}: {reason_of(error)}") from None

    @contextmanager
    def _described(self, description: str, pool: str, *, tagged: bool) -> Iterator[None]:
        """Inside, jobs of this thread have a description and a pool, and can be cancelled if they are `tagged`."""
        context = self._context
        before = {name: context.getLocalProperty(name) for name in (_DESCRIPTION, _POOL)}
        context.setLocalProperty(_DESCRIPTION, description)
        context.setLocalProperty(_POOL, pool)
        if tagged:
            context.addJobTag(self._tag)
        try:
            yield
        finally:
            if tagged:
                context.removeJobTag(self._tag)
            for name, value in before.items():
                # None removes a property, whatever the annotation says.
                context.setLocalProperty(name, value)  # pyright: ignore[reportArgumentType]


class _Work:
    """What is shipped: a function that turns exceptions into values."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, payloads: Iterable[list[Any]]) -> Iterator[list[_Done[Any] | _Raised]]:
        for payload in payloads:
            yield [_call(self._function, item) for item in payload]


def _run_group(group: _Shipped) -> list[_Done[Any] | _Raised]:
    """In a task: the items of one copy, up to the first that raises."""
    outcomes: list[_Done[Any] | _Raised] = []
    for item in group.items:
        outcomes.append(_call(group.function, item))
        if isinstance(outcomes[-1], _Raised):
            break
    return outcomes


def _call(function: Callable[[Any], Any], item: Any) -> _Done[Any] | _Raised:
    reads: list[RangeRead] = []
    try:
        with listening(reads.append):
            result = function(item)
        return _Done(result, tuple(reads))
    except Exception as error:
        return _Raised(_portable(error), traceback.format_exc())


def group_for_turns(items: list[_Item], turns: int) -> list[list[_Item]]:
    """Groups of one task each, in order and about equal, as many as give every turn the same number."""
    per_item = max(1, bytes_of(items) // len(items))
    together = max(1, min(COPY_TASK_ITEMS, COPY_TASK_BYTES // per_item))
    rounds = -(-len(items) // (together * turns))
    count = min(len(items), rounds * turns)
    borders = [len(items) * number // count for number in range(count)]
    return [items[first:end] for first, end in zip(borders, [*borders[1:], len(items)], strict=True)]


def _ignore(read: RangeRead) -> None:
    pass


def _given_up() -> TasksFailed:
    return TasksFailed("a copy was given up: Penstock is stopping")


def _portable(error: Exception) -> Exception:
    """The exception, if it survives the way back; otherwise what it said."""
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
