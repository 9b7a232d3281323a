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
from collections.abc import Iterator, Sequence

import pyarrow as pa

from penstock.documents.base import (
    DOCUMENT_SCHEMA,
    BatchPolicy,
    BatchStatistics,
    Change,
    ChangeCapture,
    DocumentBuilder,
    FailurePolicies,
    FlushReport,
    NoopObserver,
    Observer,
    Sink,
)
from penstock.documents.images import Changes, merge_changes
from penstock.documents.resolve import Resolution, ResolvedKeys

DEFAULT_QUEUE_CAPACITY = 1024

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
        queue_capacity: int = DEFAULT_QUEUE_CAPACITY,
        batch: BatchPolicy | None = None,
        skip_backfill: bool = False,
        failure_policies: FailurePolicies | None = None,
    ) -> None:
        """`queue_capacity` is how many changes may wait between capture and the worker, at least 1.

        `skip_backfill` fills no index, whatever the sink says: for sinks that cannot store that they were filled.
        """
        self.queue_capacity = max(1, queue_capacity)
        self.batch = batch or BatchPolicy()
        self.skip_backfill = skip_backfill
        self.failure_policies = failure_policies or FailurePolicies()
        self._source = source
        self._documents = documents
        self._sink = sink
        self._observer = observer or NoopObserver()

    def run(self) -> None:
        """Ensure all indexes, fill those that are not seeded, then follow changes until the source ends."""
        try:
            self._run()
        except Exception as error:
            self._observer.on_error(str(error))
            raise

    def _run(self) -> None:
        mappings = self._documents.index_mappings()
        for mapping in mappings:
            self._sink.ensure_index(mapping)
        self._observer.on_indexes_ensured(len(mappings))
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
        queue = ChangeQueue(self.queue_capacity)
        capture = threading.Thread(target=self._drain, args=(stream, queue), name="documents-capture", daemon=True)
        capture.start()
        try:
            while not queue.is_finished:
                batch = self._receive(queue)
                if batch:
                    self._commit(batch, scope, queue)
        finally:
            queue.close()

    def _drain(self, stream: Iterator[Change], queue: ChangeQueue) -> None:
        try:
            for change in stream:
                if not queue.publish(change):
                    return
                self._observer.on_changes_captured(change.count)
        except BaseException as error:
            queue.close(error)
        else:
            queue.close()

    def _receive(self, queue: ChangeQueue) -> list[Change]:
        first = queue.receive()
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

    def _commit(self, batch: Sequence[Change], scope: frozenset[str] | None, queue: ChangeQueue) -> None:
        changes = merge_changes([each.changes for each in batch])
        resolution = self._documents.resolve(changes, scope)
        documents: Counter[str] = Counter()
        for keys in resolution.documents:
            self._write(keys)
            documents[keys.index] += len(keys)
        for index in sorted(resolution.whole_indexes):
            documents[index] += self._rebuild(index)
        started = time.monotonic()
        report = self._sink.flush(queue.is_empty)
        seconds = time.monotonic() - started
        self._handle_rejections(report)
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
        self._handle_rejections(self._sink.flush(False))
        self._seeded(index)
        return count

    def _seeded(self, index: str) -> None:
        self._sink.mark_seeded(index)
        self._observer.on_index_seeded(index)

    def _write(self, keys: ResolvedKeys) -> None:
        built = self._documents.build(keys)
        index = pa.repeat(pa.scalar(keys.index, pa.string()), built.num_rows)
        self._sink.write(pa.Table.from_arrays([index, *built.columns], schema=DOCUMENT_SCHEMA))

    def _handle_rejections(self, report: FlushReport) -> None:
        """Decide about all rejections before reporting one: a batch delivered again must not be counted twice."""
        self.failure_policies.raise_fatal(report.rejections)
        for each in report.rejections:
            logger.warning("document quarantined index=%s reason=%s", each.index, each.reason)
            self._observer.on_document_quarantined(each)


class ChangeQueue:
    """A queue with one producer and one consumer. The bound counts changes; a larger piece waits until it is empty."""

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
