"""Drives changes from a source to a sink in this process: ensure the indexes, backfill them, follow changes.

    ChangeCapture ─▶ queue ─▶ resolve ─▶ build ─▶ Sink ─▶ flush ─▶ ack

One thread drains the source into a bounded queue; when the queue is full, capture waits. The thread that called `run`
takes changes from it in batches. For each batch it resolves the documents, builds and writes them in pieces, flushes
once, stores the links, and only then confirms. After any error nothing unflushed is confirmed, so stopping is safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from penstock.documents.base import (
    DOCUMENT_SCHEMA,
    BatchPolicy,
    BatchStatistics,
    Change,
    ChangeCapture,
    DocumentBuilder,
    FailurePolicies,
    NoopObserver,
    Observer,
    Queue,
    Rejection,
    Sink,
)
from penstock.documents.builder import build_apart
from penstock.documents.images import Changes, merge_changes
from penstock.documents.quarantine import Quarantine, Rejections
from penstock.documents.resolve import Resolution, ResolvedKeys
from penstock.errors import PenstockError

DEFAULT_QUEUE_CAPACITY = 1024
DEFAULT_LAG_INTERVAL = 5.0
RETRY_SECONDS = 0.5
"""How often the engine checks for quarantined documents that a user wants to retry."""

logger = logging.getLogger(__name__)


class Engine:
    """One run from a source through a builder to a sink."""

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
    ) -> None:
        """`queue` makes a queue for a capacity, `ChangeQueue` by default.

        `queue_capacity` is how many changes may wait between capture and the worker, at least 1. `skip_backfill` fills
        no index, whatever the sink says: for sinks that cannot store that they were filled; searches see it as it is.
        `quarantine` stores rejected documents. An observer hears of the lag every `lag_interval` seconds.
        """
        self.queue_capacity = max(1, queue_capacity)
        self.batch = batch or BatchPolicy()
        self.skip_backfill = skip_backfill
        self.failure_policies = failure_policies or FailurePolicies()
        self.lag_interval = lag_interval
        self._queue = queue or ChangeQueue
        self._source = source
        self._documents = documents
        self._sink = sink
        self._is_observed = observer is not None
        self._observer = observer or NoopObserver()
        self._rejections = Rejections(self.failure_policies, quarantine, self._observer)
        self._unbuilt: list[Rejection] = []
        self._returning: dict[str, set[str]] = {}
        """Quarantined documents that were written since the last flush."""
        self._retried_at = 0.0

    def run(self) -> None:
        """Ensure all indexes, fill those that are not seeded, then follow changes until the source ends."""
        batch = self.batch
        text = "engine started skip_backfill=%s queue_capacity=%d max_changes=%d max_delay=%gs"
        logger.info(text, self.skip_backfill, self.queue_capacity, batch.max_changes, batch.max_delay)
        started = time.monotonic()
        try:
            with self._reporting_lag():
                self._run()
        except Exception as error:
            self._observer.on_error(str(error))
            raise
        finally:
            logger.info("engine ended seconds=%.1f", time.monotonic() - started)

    @contextmanager
    def _reporting_lag(self) -> Iterator[None]:
        """Sample the lag in a thread of its own inside the block, if an observer receives it."""
        ended = threading.Event()

        def sample() -> None:
            while not ended.wait(self.lag_interval):
                try:
                    lag = self._source.lag()
                except PenstockError as error:
                    logger.warning("cannot read the lag error=%s", error)
                    continue
                if lag is not None:
                    self._observer.on_slot_lag(lag)

        if self._is_observed:
            threading.Thread(target=sample, name="documents-lag", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _run(self) -> None:
        mappings = self._documents.index_mappings()
        for mapping in mappings:
            self._sink.ensure_index(mapping)
        self._observer.on_indexes_ensured(len(mappings))
        self._rejections.load()
        if self.skip_backfill:
            for mapping in mappings:
                if not self._sink.is_seeded(mapping.index):
                    self._sink.serve(mapping.index)
        elif not self._source.resumes():
            # Before there is a position: after a crash in between, indexes with a gap must not look complete.
            for mapping in mappings:
                self._sink.reindex(mapping)
        self._source.prepare()
        if not self.skip_backfill:
            self._backfill()
        self._observer.on_backfill_completed()
        self._observer.on_live_started()
        self._pump(self._source.live(), None)

    def _backfill(self) -> None:
        scopes = [each for each in self._documents.backfill_scopes() if not self._sink.is_seeded(each.index)]
        if not scopes:
            return
        indexes = [each.index for each in scopes]
        # Rows of documents that an interrupted run wrote may have been deleted since.
        for mapping in self._documents.index_mappings():
            if mapping.index in indexes:
                self._sink.reindex(mapping)
        self._observer.on_backfill_started(indexes)
        tables = list(dict.fromkeys(each.table for each in scopes))
        self._pump(self._source.snapshot(tables), frozenset(indexes))
        for index in indexes:
            self._seeded(index)

    def _pump(self, stream: Iterator[Change], scope: frozenset[str] | None) -> None:
        queue = self._queue(self.queue_capacity)
        capture = threading.Thread(target=self._drain, args=(stream, queue), name="documents-capture", daemon=True)
        capture.start()
        try:
            while not queue.is_finished:
                batch = self._receive(queue)
                if batch:
                    self._commit(batch, scope, queue)
                if scope is None:
                    self._retry_wanted()
        finally:
            queue.close()

    def _drain(self, stream: Iterator[Change], queue: Queue) -> None:
        try:
            for change in stream:
                if not queue.publish(change):
                    return
                self._observer.on_changes_captured(change.count)
        except BaseException as error:
            queue.close(error)
        else:
            queue.close()

    def _receive(self, queue: Queue) -> list[Change]:
        first = queue.receive(RETRY_SECONDS)
        if first is None:
            return []
        batch, count = [first], first.count
        deadline = time.monotonic() + self.batch.max_delay
        while count < self.batch.max_changes:
            following = queue.receive(max(0.0, deadline - time.monotonic()))
            if following is None:
                break
            batch.append(following)
            count += following.count
        return batch

    def _commit(self, batch: Sequence[Change], scope: frozenset[str] | None, queue: Queue) -> None:
        changes = merge_changes([each.changes for each in batch])
        resolution = self._documents.resolve(changes, scope)
        documents: Counter[str] = Counter()
        for keys in resolution.documents:
            self._write(keys)
            documents[keys.index] += len(keys)
        for index in sorted(resolution.whole_indexes):
            documents[index] += self._rebuild(index)
        started = time.monotonic()
        rejections = self._flush(queue.is_empty)
        seconds = time.monotonic() - started
        # Decides about all before it acts on one: a batch delivered again must not be counted twice.
        self._rejections.handle(rejections, None)
        self._finish(batch, changes, resolution, BatchStatistics(sum(each.count for each in batch), documents, seconds))

    def _finish(
        self, batch: Sequence[Change], changes: Changes, resolution: Resolution, statistics: BatchStatistics
    ) -> None:
        # In this order: after a crash in between, changes are delivered again and never lost.
        self._documents.remember(resolution)
        for each in batch:
            each.ack.confirm()
        self._observer.on_batch_committed(statistics)
        logger.debug("batch committed changes=%d tables=%d", statistics.changes, len(changes.rows))

    def _rebuild(self, index: str) -> int:
        """Build all documents beside the old ones: a table was truncated, and any of them may have shown its rows."""
        mapping = next(each for each in self._documents.index_mappings() if each.index == index)
        self._sink.reindex(mapping)
        count = 0
        for keys in self._documents.every_key(index):
            self._write(keys)
            count += len(keys)
        self._rejections.handle(self._flush(False), None)
        self._seeded(index)
        return count

    def _seeded(self, index: str) -> None:
        self._sink.mark_seeded(index)
        self._observer.on_index_seeded(index)

    def _write(self, keys: ResolvedKeys) -> None:
        quarantined = self._rejections.quarantined.get(keys.index, frozenset())
        for built in build_apart(lambda part: [self._documents.build(part)], keys):
            if isinstance(built, Rejection):
                self._unbuilt.append(built)
                continue
            index = pa.repeat(pa.scalar(keys.index, pa.string()), built.num_rows)
            self._sink.write(pa.Table.from_arrays([index, *built.columns], schema=DOCUMENT_SCHEMA))
            if quarantined:
                self._returning.setdefault(keys.index, set()).update(quarantined.intersection(built["id"].to_pylist()))

    def _flush(self, caught_up: bool) -> list[Rejection]:
        """Make everything durable; return the rejections. Documents that the sink accepts leave the quarantine."""
        report = self._sink.flush(caught_up)
        rejections, self._unbuilt = [*self._unbuilt, *report.rejections], []
        refused = {(each.index, each.id) for each in rejections}
        for index, ids in self._returning.items():
            self._rejections.release(index, [id_ for id_ in sorted(ids) if (index, id_) not in refused])
        self._returning.clear()
        return rejections

    def _retry_wanted(self) -> None:
        """Build quarantined documents that a user wants to retry; those rejected again stay quarantined."""
        now = time.monotonic()
        if now - self._retried_at < RETRY_SECONDS:
            return
        self._retried_at = now
        for mapping in self._documents.index_mappings():
            ids = self._rejections.wanted(mapping.index)
            if ids:
                self._rejections.load()
                for keys in self._documents.named(mapping.index, ids):
                    self._write(keys)
                self._rejections.quarantine(self._flush(False), None)
                self._rejections.forget(mapping.index, set(ids).intersection(self._rejections.wanted(mapping.index)))


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
        """True if nothing is waiting now."""
        with self._changed:
            return not self._items

    def publish(self, change: Change) -> bool:
        """Wait for room and add a piece; False if the queue is closed."""
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
        """Return the next piece; None after the timeout or at the end. Raises the error that ended the producer."""
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
        """True if the queue is closed and empty."""
        with self._changed:
            return self._closed and not self._items and self._failure is None

    def close(self, failure: BaseException | None = None) -> None:
        """Accept no more pieces, because of `failure` if there is one, and wake up waiting threads."""
        with self._changed:
            self._closed = True
            self._failure = self._failure or failure
            self._changed.notify_all()
