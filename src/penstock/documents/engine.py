"""Drives changes from a source to a sink: ensure the indexes, fill them, follow changes.

    ChangeCapture ─▶ queue ─▶ resolve ─▶ build and write ─▶ flush ─▶ links ─▶ ack

Changes are taken in batches. For each batch the engine resolves the documents, builds and writes them in waves,
flushes, stores the links, and only then confirms. After any error nothing unflushed is confirmed: stopping is safe.

`run` does everything in the thread that calls it; another thread drains the source into a bounded queue, and waits when
it is full. `penstock.documents.output` drives the same engine as an output of a stream: with a thread each for changes
(`step`), for builds (`backfill`) and for changes that affect very many documents (`fan_outs`), and with Spark tasks
that build and write. There the spool is the queue.

Work for later (rebuilding an index, a change that affects very many documents) is stored before the batch is confirmed:
in the output's store, or in memory if there is none. Without a store an index is rebuilt before its batch is confirmed,
and only the sink knows whether it is complete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from penstock import failpoints
from penstock.destinations.base import Tasks
from penstock.documents.backfill import Backfill
from penstock.documents.base import (
    BatchPolicy,
    BatchStatistics,
    Change,
    ChangeCapture,
    DocumentBuilder,
    FailurePolicies,
    NoopObserver,
    Observer,
    Queue,
    Receiver,
)
from penstock.documents.builds import EMPTIED, OUTDATED, Builds
from penstock.documents.fan_out import FanOuts, fingerprints_of
from penstock.documents.images import Changes, merge_changes
from penstock.documents.quarantine import Rejections
from penstock.documents.readiness import TAKEN_OVER, Readiness
from penstock.documents.resolve import Question, Resolution, ResolvedKeys
from penstock.documents.writer import (
    DocumentsSettings,
    DocumentWriter,
)
from penstock.errors import PenstockError
from penstock.observe.batches import BatchRecord, spanned
from penstock.observe.tally import Tally
from penstock.sinks.base import Sink
from penstock.state import MemoryStore, Store
from penstock.state.quarantine import Quarantine
from penstock.workers.process_tasks import ProcessTasks

DEFAULT_QUEUE_CAPACITY = 1024
DEFAULT_LAG_INTERVAL = 5.0
IDLE_SECONDS = 0.2
"""How long a step waits for changes."""
RETRY_SECONDS = 0.5
"""How often the engine checks for quarantined documents that a user wants to retry."""

logger = logging.getLogger(__name__)


class Engine:
    """Changes of a source, through a builder, into a sink."""

    def __init__(
        self,
        source: ChangeCapture,
        documents: DocumentBuilder,
        sink: Sink,
        *,
        observer: Observer | None = None,
        queue: Callable[[int], Queue] | None = None,
        queue_capacity: int = DEFAULT_QUEUE_CAPACITY,
        batch: BatchPolicy | None = None,
        skip_backfill: bool = False,
        failure_policies: FailurePolicies | None = None,
        quarantine: Quarantine | None = None,
        lag_interval: float = DEFAULT_LAG_INTERVAL,
        settings: DocumentsSettings | None = None,
        store: Store | None = None,
        tasks: Tasks | None = None,
        stop: threading.Event | None = None,
        tally: Tally | None = None,
    ) -> None:
        """`queue` makes a queue for a capacity, `ChangeQueue` by default; not used if the source has its own.

        `queue_capacity` is how many changes may wait between capture and the worker, at least 1. `skip_backfill` fills
        no index, whatever the sink says: for sinks that cannot store that they were filled; searches see it as it is.
        `quarantine` stores rejected documents. An observer hears of the lag every `lag_interval` seconds. `settings`
        replace `batch`, `skip_backfill` and `failure_policies`. `store` keeps builds and work for later; its lease is
        the caller's. `tasks` build and write; by default this process does. `stop` ends `run` and work that takes long.
        """
        self.settings = settings or DocumentsSettings(
            batch or BatchPolicy(), failure_policies or FailurePolicies(), skip_backfill
        )
        self.queue_capacity = max(1, queue_capacity)
        self.lag_interval = lag_interval
        self.documents = documents
        """The builder. A thread that follows changes replaces it when it was compiled again."""
        self._queue = queue or ChangeQueue
        self._source = source
        self._is_observed = observer is not None
        self._observer = observer or NoopObserver()
        self._stop = stop or threading.Event()
        sink.retry_until(self._stop)
        self._has_own_store = store is None
        self.store = MemoryStore("engine") if store is None else store
        runs_here = not sink.runs_in_tasks or documents.for_tasks() is None
        if tasks is None or (runs_here and not isinstance(tasks, ProcessTasks)):
            tasks = ProcessTasks()
        self._tally = tally or Tally()
        self.rejections = Rejections(self.settings.failure_policies, quarantine, self._observer, tally)
        self.builds = Builds(self.store, are_durable=store is not None)
        self.readiness = Readiness(self.builds, sink, skip_backfill=self.settings.skip_backfill)
        self.writer = DocumentWriter(
            self.settings, tasks, sink, lambda: self.documents, self.builds, self.rejections, tally
        )
        self.fan_outs = FanOuts(
            store=self.store,
            builds=self.builds,
            tasks=tasks,
            writer=self.writer,
            documents=lambda: self.documents,
            stop=self._stop,
        )
        self.backfill = Backfill(
            store=self.store,
            builds=self.builds,
            writer=self.writer,
            documents=lambda: self.documents,
            read=self._read_index,
            barrier=source.barrier,
            observer=self._observer,
            stop=self._stop,
        )
        self._receiver: Receiver | None = None
        self._opened = ExitStack()
        """What ends when changes are received from the last confirmed one on again."""
        self._retried_at = 0.0

    @property
    def batch(self) -> BatchPolicy:
        """How changes are grouped."""
        return self.settings.batch

    @property
    def skip_backfill(self) -> bool:
        """True if no index is filled."""
        return self.settings.skip_backfill

    @property
    def failure_policies(self) -> FailurePolicies:
        """What happens to rejected documents."""
        return self.settings.failure_policies

    # Everything in one thread

    def run(
        self, before_builds: Callable[[], None] = lambda: None, between_batches: Callable[[], None] = lambda: None
    ) -> None:
        """Ensure all indexes, fill those that are not seeded, then follow changes until the source ends.

        `before_builds` is called once the source has a position and before anything is built, `between_batches` then
        and after each batch.
        """
        batch = self.batch
        text = "engine started skip_backfill=%s queue_capacity=%d max_changes=%d max_delay=%gs"
        logger.info(text, self.skip_backfill, self.queue_capacity, batch.max_changes, batch.max_delay)
        started = time.monotonic()
        try:
            with ExitStack() as stack:
                if self._has_own_store:
                    self.store.acquire_lease()
                    stack.callback(self.store.release_lease)
                stack.enter_context(self._reporting_lag())
                stack.callback(self.receive_again)
                self._run(before_builds, between_batches)
        except Exception as error:
            self._observer.on_error(str(error))
            raise
        finally:
            logger.info("engine ended seconds=%.1f", time.monotonic() - started)

    def _run(self, before_builds: Callable[[], None], between_batches: Callable[[], None]) -> None:
        self.load()
        self.prepare()
        self._source.prepare()
        before_builds()
        between_batches()
        if not self.builds.unfinished:
            self._observer.on_backfill_completed()
        self._build_wanted()
        if self._stop.is_set():
            return
        self._observer.on_live_started()
        while self.step(RETRY_SECONDS) or not (self._is_finished or self._stop.is_set()):
            self.retry_wanted()
            self.fan_outs.round(0)
            between_batches()
            self._build_wanted()

    @property
    def _is_finished(self) -> bool:
        return self._receiver is not None and self._receiver.is_finished

    def _build_wanted(self) -> None:
        while self.builds.unfinished and not self._stop.is_set():
            self.backfill.round(RETRY_SECONDS, alone=True)

    @contextmanager
    def _reporting_lag(self) -> Iterator[None]:
        """Sample the lag in a thread of its own inside the block, if an observer receives it."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(self.lag_interval):
                try:
                    self.report_lag()
                except PenstockError as error:
                    logger.warning("cannot read the lag error=%s", error)

        if self._is_observed:
            threading.Thread(target=sample, name="documents-lag", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def report_lag(self) -> None:
        """Tell the observer how far the source's durable position is behind."""
        lag = self._source.lag()
        if lag is not None:
            self._observer.on_slot_lag(lag)

    # The steps of a run

    def load(self) -> None:
        """Load which documents are quarantined, and how far builds are."""
        self.rejections.load()
        self.builds.load()

    def prepare(self) -> None:
        """Create every index, and mark those that have to be filled; before the source gets a position."""
        self.readiness.prepare(self.documents, is_first=not self._source.resumes())
        self._observer.on_indexes_ensured(len(self.documents.index_mappings()))

    def step(self, timeout: float = IDLE_SECONDS) -> bool:
        """Process one batch, if there are changes; return False if there are none."""
        try:
            receiver = self._receiver = self._receiver or self._receive_from_source()
            batch = self._take(receiver, timeout)
            if batch:
                self._commit(batch, None, receiver)
            return bool(batch)
        except BaseException:
            self.receive_again()
            raise

    def receive_again(self) -> None:
        """Let the next step receive changes from the last confirmed one on."""
        self._receiver = None
        self._opened.close()

    def retry_wanted(self) -> None:
        """Build quarantined documents that a user wants to retry; those rejected again stay quarantined."""
        now = time.monotonic()
        if now - self._retried_at < RETRY_SECONDS:
            return
        self._retried_at = now
        for mapping in self.documents.index_mappings():
            ids = self.rejections.wanted(mapping.index)
            if not ids:
                continue
            self.rejections.load()
            _, rejections = self.writer.write(self.documents.named(mapping.index, ids))
            self.rejections.quarantine(rejections, None)
            # Neither accepted nor rejected: ids that no document can have, such as those of an earlier key.
            # Those that were rejected may be wanted again by now.
            unknown = set(ids).difference(each.id for each in rejections)
            self.rejections.forget(mapping.index, unknown.intersection(self.rejections.wanted(mapping.index)))

    def rebuild(self, names: Collection[str]) -> None:
        """Request a rebuild of these indexes, or of all if none is named."""
        known = fingerprints_of(self.documents)
        unknown = sorted(set(names) - known.keys())
        if unknown:
            listed = ", ".join(sorted(known))
            raise PenstockError(f"no such index: {', '.join(unknown)}", hint=f"Known indexes: {listed}.")
        for name in sorted(names or known):
            self.builds.want(name, known[name], "requested by a user")

    # Receiving

    def _receive_from_source(self) -> Receiver:
        return self._source.opened() or self._opened.enter_context(self._drained(self._source.live()))

    @contextmanager
    def _drained(self, stream: Iterator[Change]) -> Iterator[Receiver]:
        """Drain a stream into a queue, in a thread of its own."""
        queue = self._queue(self.queue_capacity)

        def drain() -> None:
            try:
                for change in stream:
                    if not queue.publish(change):
                        return
            except BaseException as error:
                queue.close(error)
            else:
                queue.close()

        threading.Thread(target=drain, name="documents-capture", daemon=True).start()
        try:
            yield queue
        finally:
            queue.close()

    def _take(self, receiver: Receiver, timeout: float) -> list[Change]:
        """Return changes up to `max_changes`, or those that arrive within `max_delay`; none after the timeout."""
        change = receiver.receive(timeout)
        deadline = time.monotonic() + self.batch.max_delay
        batch: list[Change] = []
        count = 0
        while change is not None:
            batch.append(change)
            count += change.count
            if change.count:
                self._observer.on_changes_captured(change.count)
            left = deadline - time.monotonic()
            if not 0 < count < self.batch.max_changes or self._stop.is_set():
                break
            change = receiver.receive(max(0.0, left))
        return batch

    # A batch

    def _commit(self, batch: Sequence[Change], scope: frozenset[str] | None, receiver: Receiver) -> None:
        """Make all documents that changes affect durable, or store them as work for later; then confirm."""
        with self._tally.batches.recorded("documents") as record:
            record.position = str(batch[-1].position or "")
            record.rows = sum(each.count for each in batch)
            self._commit_recorded(batch, scope, receiver, record)

    def _commit_recorded(
        self, batch: Sequence[Change], scope: frozenset[str] | None, receiver: Receiver, record: BatchRecord
    ) -> None:
        caught_up = receiver.is_empty
        changes = merge_changes([each.changes for each in batch])
        with spanned("build"):
            resolution = self.documents.resolve(changes, scope)
        with self.writer.generations.writing():  # a build that is wrong must not begin to serve meanwhile
            self._want_builds(changes, resolution)
        if not self.builds.are_durable and scope is None:
            self._build_wanted()
        many: list[Question] = []
        with spanned("write"):
            documents, rejections = self.writer.write(self._affected(resolution, many))
            record.operations = Counter(document=documents.total())
            started = time.monotonic()
            with spanned("commit"), self.writer.sink.lock:
                report = self.writer.sink.sink.flush(caught_up)
            seconds = time.monotonic() - started
        # Decides about all before it acts on one: a batch delivered again must not be counted twice.
        self.rejections.handle([*rejections, *report.rejections], batch[-1].position)
        self.fan_outs.add(many, fingerprints_of(self.documents))
        failpoints.reach("after_documents")
        with spanned("record"):
            self.documents.remember(resolution)
            failpoints.reach("after_links")
            # The last one first: a source that moves its position past confirmed changes stores it once.
            for each in reversed(batch):
                each.ack.confirm()
        count = record.rows
        if count or documents:
            self._observer.on_batch_committed(BatchStatistics(count, documents, seconds))
            logger.debug("batch committed changes=%d tables=%d", count, len(changes.rows))

    def _affected(self, resolution: Resolution, many: list[Question]) -> Iterator[ResolvedKeys]:
        """Yield the affected documents; questions with very many go into `many` instead, if they can be stored."""
        if not resolution.questions or not self.builds.are_durable:
            yield from resolution.documents
            return
        for question in resolution.questions:
            count = 0
            with closing(self.documents.answer(question)) as parts:
                for part in parts:
                    count += len(part)
                    if count > self.settings.fan_out_documents:
                        many.append(question)
                        break
                    yield part

    def _want_builds(self, changes: Changes, resolution: Resolution) -> None:
        """Store which indexes cannot be brought up to date by changes."""
        marks = fingerprints_of(self.documents)
        if changes.is_new_server and not self.skip_backfill:
            # It may reuse transaction numbers, which are the versions of documents.
            for index, mark in marks.items():
                self.builds.want(index, mark, TAKEN_OVER)
        reasons = {
            EMPTIED: resolution.emptied_indexes,
            "one of its tables was truncated": resolution.whole_indexes - resolution.emptied_indexes,
            OUTDATED: resolution.outdated_indexes,
            "one of its tables had a different replica identity": resolution.unidentified_indexes,
        }
        for reason, indexes in reasons.items():
            for index in sorted(indexes):
                self.builds.invalidate(index, marks[index], reason)

    def _read_index(self, index: str) -> None:
        """Write all documents of an index that has no ranges: from a snapshot of the source, later by their keys."""
        if self._receiver is not None:
            self.writer.write_apart(self.documents.every_key(index))
            return
        tables = [each.table for each in self.documents.backfill_scopes() if each.index == index]
        with self._drained(self._source.snapshot(tables)) as queue:
            while not queue.is_finished:
                batch = self._take(queue, RETRY_SECONDS)
                if batch:
                    self._commit(batch, frozenset({index}), queue)


class ChangeQueue(Queue):
    """A queue in memory with one producer and one consumer.

    The bound counts changes; a larger piece waits until the queue is empty.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._items: deque[Change] = deque()
        self._count = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def is_empty(self) -> bool:
        with self._changed:
            return not self._items

    def publish(self, change: Change) -> bool:
        with self._changed:
            while self._items and self._count + change.count > self._capacity and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(change)
            self._count += change.count
            self._changed.notify_all()
            return True

    def receive(self, timeout: float | None = None) -> Change | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._items:
                if self._failure is not None:
                    raise self._failure
                remaining = None if deadline is None else deadline - time.monotonic()
                if self._closed or (remaining is not None and remaining <= 0):
                    return None
                self._changed.wait(remaining)
            change = self._items.popleft()
            self._count -= change.count
            self._changed.notify_all()
            return change

    @property
    def is_finished(self) -> bool:
        with self._changed:
            return self._closed and not self._items and self._failure is None

    def close(self, failure: BaseException | None = None) -> None:
        with self._changed:
            self._closed = True
            self._failure = self._failure or failure
            self._changed.notify_all()
