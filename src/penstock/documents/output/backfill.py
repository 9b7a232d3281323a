"""Fills indexes from their root tables, in ranges; each range is a task that builds the documents of its rows.

A build goes into a fresh generation beside the one that serves; meanwhile changes go to both. Every range has its own
snapshot and version. That is enough: a row that moves from an unread range into a finished one has changed, and that
change is followed like any other. Documents that changes remove are recorded and built again when all ranges are done,
because an index may have forgotten a removal by the time a range writes what it read before. The generation serves once
changes have been followed up to the last range's position.

Finished ranges are stored, so a restarted process resumes the build. If the table was rewritten, its ranges are
meaningless and the build restarts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock import failpoints
from penstock.copy.plan import TID_RANGES_SINCE, plan_ranges
from penstock.copy.rows import load_leaves
from penstock.destinations.base import Tasks
from penstock.documents.base import Observer, ReadableSink, Sink
from penstock.documents.output.indexes import Builds, Indexes
from penstock.documents.output.writer import (
    POOL,
    DocumentsSettings,
    DocumentWriter,
    Generations,
    HeapRange,
    RangeJob,
    SharedSink,
)
from penstock.documents.quarantine import Rejections
from penstock.documents.resolve import ResolvedKeys
from penstock.documents.statements import run_statement
from penstock.errors import IndexIncomplete, PenstockError, Retry, TableRewritten
from penstock.lsn import Lsn, reaches
from penstock.retry import Backoff
from penstock.schema import TableSchema
from penstock.source.connections import SourceSettings
from penstock.source.lineage import current_position
from penstock.spool import Stopping
from penstock.state import IndexBuild, IndexStatus, Store, WorkKind

logger = logging.getLogger(__name__)

RANGES_AT_ONCE = 4
"""Ranges that run before finished ones are stored."""
_POLL_SECONDS = 0.05

_OID = "select pg_catalog.to_regclass(pg_catalog.format('%I.%I', $1::text, $2::text))::pg_catalog.oid::int8"


class _Superseded(Exception):
    """Another build of this index was requested."""


class _Delay:
    """The time until the next attempt."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=0.5, longest=30.0)
        self._until = float("-inf")

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def begin(self) -> float:
        delay = self._backoff.next_delay()
        self._until = time.monotonic() + delay
        return delay


class Backfill:
    """Builds the wanted indexes, one after the other. One thread calls `round`."""

    def __init__(
        self,
        *,
        source: SourceSettings,
        settings: DocumentsSettings,
        store: Store,
        sink: SharedSink,
        tasks: Tasks,
        generations: Generations,
        builds: Builds,
        writer: DocumentWriter,
        rejections: Rejections,
        indexes: Callable[[], Indexes],
        followed: Callable[[], Lsn],
        observer: Observer,
        stop: threading.Event,
    ) -> None:
        """`followed` returns the position up to which changes are in the sink."""
        self._source = source
        self._settings = settings
        self._store = store
        self._sink = sink
        self._tasks = tasks
        self._generations = generations
        self._builds = builds
        self._writer = writer
        self._rejections = rejections
        self._indexes = indexes
        self._followed = followed
        self._observer = observer
        self._stop = stop
        self._delays: dict[str, _Delay] = {}
        """By index: one that cannot be built now holds back no other."""

    def round(self, timeout: float) -> None:
        """Wait for wanted builds, and do them."""
        if not self._builds.wait(timeout):
            return
        due = [each for each in self._builds.unfinished if self._delays.setdefault(each.index, _Delay()).is_over]
        if not due:
            self._stop.wait(timeout)
            return
        self._observer.on_backfill_started([each.index for each in due])
        for build in due:
            try:
                self._build(build)
                self._delays.pop(build.index)
            except _Superseded:
                logger.info("build superseded by another one index=%s", build.index)
            except Stopping:
                return
            except TableRewritten as error:
                self._builds.want(build.index, build.fingerprint, error.message)
            except PenstockError as error:
                if error.retry is not Retry.TIMED:
                    raise
                if isinstance(error, IndexIncomplete):
                    self._builds.want(build.index, build.fingerprint, error.message)
                delay = self._delays[build.index].begin()
                logger.warning("build failed, retrying index=%s in=%.1fs error=%s", build.index, delay, error)
        if not self._builds.unfinished:
            self._observer.on_backfill_completed()

    def _build(self, build: IndexBuild) -> None:
        if build.status is IndexStatus.WANTED:
            build = self._begin(build)
        parts = _parts(build)
        done = self._store.get_index_ranges(build.index, build.build)
        missing = [part for part in parts if part.part not in done]
        logger.info("filling index index=%s ranges=%d done=%d", build.index, len(parts), len(done))
        for first in range(0, len(missing), RANGES_AT_ONCE):
            self._fill(build, missing[first : first + RANGES_AT_ONCE])
        if self._plan(build.index) != _heaps(parts):
            raise TableRewritten("the root table of the index was rewritten, or its partitions changed")
        self._wait_followed(build, current_position(self._source))
        failpoints.reach("before_removals")
        self._look_again(build)
        self._finish(build)

    def _begin(self, build: IndexBuild) -> IndexBuild:
        """Create a fresh generation, and plan its ranges."""
        if self._builds.held:
            raise _Superseded
        indexes = self._indexes()
        with self._generations.changing(), self._sink.lock:
            self._sink.sink.reindex(indexes.mappings[build.index])
            failpoints.reach("after_reindex")
            # Before any write to it: from now on removals are recorded.
            plan = {"generation": filling_of(self._sink.sink, build.index), "ranges": self._ranges(build.index)}
            planned = self._builds.fill(build, plan)
        if planned is None:
            raise _Superseded
        failpoints.reach("after_build_planned")
        return planned

    def _ranges(self, index: str) -> list[list[Any]]:
        """Return the ranges of the root table, as plain values."""
        with POOL.borrow(self._source) as connection:
            can_seek = connection.info.server_version >= TID_RANGES_SINCE
        leaves = self._leaves(index)
        planned = plan_ranges(0, leaves, range_bytes=self._settings.range_bytes, can_seek=can_seek)
        return [[each.leaf.oid, each.leaf.filenode, each.condition] for each in planned]

    def _plan(self, index: str) -> set[tuple[int, int]]:
        """Return the current heaps of the root table."""
        return {(leaf.oid, leaf.filenode) for leaf in self._leaves(index)}

    def _leaves(self, index: str) -> list[Any]:
        table = self._indexes().specifications[index].table
        with POOL.borrow(self._source) as connection:
            [(oid,)] = run_statement(connection, _OID, [*table], f"find {table}")
            if oid is None:
                raise TableRewritten(f"table {table} no longer exists")
            return load_leaves(connection, TableSchema(oid, table.namespace, table.name, ()))

    def _fill(self, build: IndexBuild, parts: Sequence[HeapRange]) -> None:
        if self._stop.is_set():
            raise Stopping
        if not self._builds.is_current(build):
            raise _Superseded
        filling = self._filling(build.index)
        # Its own lock: changes do not wait for the requests of a backfill.
        sink = SharedSink(filling, self._sink.lock if filling is self._sink.sink else None)
        query = self._indexes().queries[build.index]
        quarantined = self._rejections.quarantined.get(build.index, frozenset())
        job = RangeJob(self._source, query, sink, self._settings.chunk_documents, quarantined)
        with self._tasks.copying():
            outcomes = self._tasks.run(list(parts), job, description=f"fill index {build.index}")
        self._rejections.handle([rejection for each in outcomes for rejection in each.rejections], None)
        for each in outcomes:
            self._rejections.release(each.index, each.taken)
        failpoints.reach("after_range")
        done = {part.part: outcome.bodies for part, outcome in zip(parts, outcomes, strict=True)}
        self._store.finish_index_ranges(build.index, build.build, done)

    def _filling(self, index: str) -> Sink:
        with self._sink.lock:
            return self._sink.sink.filling(index)

    def _wait_followed(self, build: IndexBuild, position: Lsn) -> None:
        """Wait until changes were followed up to the last range's position, so that all ranges have them."""
        while not reaches(self._followed(), position):
            if self._stop.is_set():
                raise Stopping
            if not self._builds.is_current(build):
                raise _Superseded
            time.sleep(_POLL_SECONDS)

    def _look_again(self, build: IndexBuild) -> None:
        """Build documents that were removed meanwhile again: from the current rows, with a higher version."""
        for work in self._store.get_index_work(build.index, WorkKind.REMOVAL):
            columns = [list(each) for each in work.details["keys"]]
            written = self._writer.write(self._chunks(build.index, columns))
            self._rejections.handle(written.rejections, None)
            self._store.delete_index_work(build.index, [work.number])

    def _chunks(self, index: str, columns: list[list[str]]) -> Iterator[ResolvedKeys]:
        size = self._settings.chunk_documents
        for first in range(0, len(columns[0]), size):
            if self._stop.is_set():
                raise Stopping
            yield ResolvedKeys(index, tuple(column[first : first + size] for column in columns))

    def _finish(self, build: IndexBuild) -> None:
        self._compare(build)
        with self._generations.changing(), self._sink.lock:
            if not self._builds.is_current(build):
                raise _Superseded
            failpoints.reach("before_seeded")
            self._sink.sink.flush(True)
            self._sink.sink.mark_seeded(build.index)
            failpoints.reach("after_seeded")
            self._builds.seeded(build)
        logger.info("index serves index=%s", build.index)
        self._observer.on_index_seeded(build.index)

    def _compare(self, build: IndexBuild) -> None:
        """Raise unless the generation has as many documents as ranges wrote, allowing for those of changes."""
        found = self._filling(build.index).count(build.index)
        if found is None:
            return
        written = sum(self._store.get_index_ranges(build.index, build.build).values())
        stored = self._store.get_index_builds()[build.index]
        logger.info(
            "documents counted index=%s built=%d changed=%d found=%d", build.index, written, stored.changed, found
        )
        if abs(found - written) > stored.changed:
            wanted = f"{written} documents (±{stored.changed})"
            raise IndexIncomplete(f"index {build.index!r} should have {wanted}, but has {found}", index=build.index)


def filling_of(sink: Sink, index: str) -> str | None:
    """Return the name of the generation being filled; None if the sink does not know."""
    return sink.facts(index).filling if isinstance(sink, ReadableSink) else None


def serving_of(sink: Sink, index: str) -> str | None:
    """Return the name of the generation that serves; None if none does or the sink does not know."""
    return sink.facts(index).generation if isinstance(sink, ReadableSink) else None


def _parts(build: IndexBuild) -> list[HeapRange]:
    ranges: list[list[Any]] = build.plan["ranges"]
    return [HeapRange(part, oid, filenode, condition) for part, (oid, filenode, condition) in enumerate(ranges)]


def _heaps(parts: Sequence[HeapRange]) -> set[tuple[int, int]]:
    return {(part.oid, part.filenode) for part in parts}
