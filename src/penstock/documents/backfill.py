"""Fills indexes from their root tables, in ranges; each range is a task that builds the documents of its rows.

A build goes into a fresh generation beside the one that serves; meanwhile changes go to both. Every range has its own
snapshot and version. That is enough: a row that moves from an unread range into a finished one has changed, and that
change is followed like any other. Documents that changes remove are recorded and built again when all ranges are done,
because an index may have forgotten a removal by the time a range writes what it read before. The generation serves once
changes have been followed up to the last range's position.

Finished ranges are stored, so a restarted process resumes the build. If the table was rewritten, its ranges are
meaningless and the build restarts, unless the table was truncated: then all its rows have come with changes, and only
documents of earlier rows are left for the next build to remove. An index without ranges is read from a snapshot of the
source instead, each time from the start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock import failpoints
from penstock.documents.base import DocumentBuilder, Observer
from penstock.documents.builds import Builds
from penstock.documents.writer import BuildRange, DocumentWriter
from penstock.errors import IndexIncomplete, PenstockError, Retry, TableRewritten
from penstock.retry import Backoff
from penstock.sinks.base import ReadableSink, Sink
from penstock.spool import Stopping
from penstock.state import IndexBuild, IndexStatus, Store, WorkKind

logger = logging.getLogger(__name__)

RANGES_PER_TASK = 4
"""Ranges that each task does before finished ones are stored."""
_POLL_SECONDS = 0.05


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


@dataclass(eq=False, kw_only=True)
class Backfill:
    """Builds the wanted indexes, one after the other. One thread calls `round`."""

    store: Store
    builds: Builds
    writer: DocumentWriter
    documents: Callable[[], DocumentBuilder]
    """Returns the builder as it was last compiled."""
    read: Callable[[str], None]
    """Writes the documents of an index that has no ranges."""
    barrier: Callable[[], Callable[[], bool]]
    """Returns a function that tells whether all changes until now are in the sink."""
    observer: Observer
    stop: threading.Event

    def __post_init__(self) -> None:
        self._delays: dict[str, _Delay] = {}
        """By index: one that cannot be built now holds back no other."""

    def round(self, timeout: float, *, alone: bool = False) -> None:
        """Wait for wanted builds, and do them.

        `alone` if no other thread follows changes meanwhile. Then an outage is raised, else it is waited for.
        """
        if not self.builds.wait(timeout):
            return
        due = [each for each in self.builds.unfinished if self._delays.setdefault(each.index, _Delay()).is_over]
        if not due:
            self.stop.wait(timeout)
            return
        self.observer.on_backfill_started([each.index for each in due])
        for build in due:
            try:
                self._build(build, alone=alone)
                self._delays.pop(build.index)
            except _Superseded:
                logger.info("build superseded by another one index=%s", build.index)
            except Stopping:
                return
            except TableRewritten as error:
                self.builds.want_again(build, error.message)
            except PenstockError as error:
                if isinstance(error, IndexIncomplete):
                    self.builds.want_again(build, error.message)
                elif alone or error.retry is not Retry.TIMED:
                    raise
                delay = self._delays[build.index].begin()
                logger.warning("build failed, retrying index=%s in=%.1fs error=%s", build.index, delay, error)
        if not self.builds.unfinished:
            self.observer.on_backfill_completed()

    def _build(self, build: IndexBuild, *, alone: bool) -> None:
        if build.status is IndexStatus.WANTED or build.plan.get("ranges") is None:
            build = self._begin(build)
        elif any("ids" not in each.details for each in self.store.get_index_work(build.index, WorkKind.REMOVAL)):
            self.builds.want_again(build, "an earlier version of Penstock began to build it")
            raise _Superseded
        if build.plan["ranges"] is None:
            self.read(build.index)
        else:
            try:
                self._fill_ranges(build)
                self.documents().require_unchanged(build.index, build.plan["ranges"])
            except TableRewritten:
                if not alone:
                    self._wait_followed(build)
                if not self.builds.is_emptied(build):
                    raise
        if not alone:
            self._wait_followed(build)
        failpoints.reach("before_removals")
        self._look_again(build)
        self._finish(build)

    def _begin(self, build: IndexBuild) -> IndexBuild:
        """Create a fresh generation, and plan its ranges."""
        documents = self.documents()
        mapping = next((each for each in documents.index_mappings() if each.index == build.index), None)
        if self.builds.held or mapping is None:
            raise _Superseded
        sink = self.writer.sink
        with self.writer.generations.changing(), sink.lock:
            sink.sink.reindex(mapping)
            failpoints.reach("after_reindex")
            # Before any write to it: from now on removals are recorded.
            plan = {"generation": filling_of(sink.sink, build.index), "ranges": documents.ranges(build.index)}
            planned = self.builds.fill(build, plan)
        if planned is None:
            raise _Superseded
        failpoints.reach("after_build_planned")
        return planned

    def _fill_ranges(self, build: IndexBuild) -> None:
        parts = [BuildRange(*each) for each in enumerate(build.plan["ranges"])]
        done = self.store.get_index_ranges(build.index, build.build)
        missing = [part for part in parts if part.part not in done]
        logger.info("filling index index=%s ranges=%d done=%d", build.index, len(parts), len(done))
        at_once = RANGES_PER_TASK * self.writer.parallel
        for first in range(0, len(missing), at_once):
            self._fill(build, missing[first : first + at_once])

    def _fill(self, build: IndexBuild, parts: Sequence[BuildRange]) -> None:
        self._check_wanted(build)
        done = self.writer.fill(build.index, parts)
        failpoints.reach("after_range")
        self.store.finish_index_ranges(build.index, build.build, done)

    def _wait_followed(self, build: IndexBuild) -> None:
        """Wait until changes were followed up to now, so that all ranges have them."""
        is_followed = self.barrier()
        while not is_followed():
            self._check_wanted(build)
            time.sleep(_POLL_SECONDS)

    def _look_again(self, build: IndexBuild) -> None:
        """Build documents that were removed meanwhile again: from the current rows, with a higher version."""
        for work in self.store.get_index_work(build.index, WorkKind.REMOVAL):
            self._check_wanted(build)
            self.writer.write_apart(self.documents().named(build.index, work.details["ids"]))
            self.store.delete_index_work(build.index, [work.number])

    def _check_wanted(self, build: IndexBuild) -> None:
        if self.stop.is_set():
            raise Stopping
        if not self.builds.is_current(build):
            raise _Superseded

    def _finish(self, build: IndexBuild) -> None:
        self._compare(build)
        sink = self.writer.sink
        with self.writer.generations.changing(), sink.lock:
            if not self.builds.is_current(build):
                raise _Superseded
            failpoints.reach("before_seeded")
            sink.sink.flush(True)
            sink.sink.mark_seeded(build.index)
            failpoints.reach("after_seeded")
            self.builds.seeded(build)
        logger.info("index serves index=%s", build.index)
        self.observer.on_index_seeded(build.index)

    def _compare(self, build: IndexBuild) -> None:
        """Raise unless the generation has as many documents as ranges wrote, allowing for those of changes."""
        if build.plan["ranges"] is None:
            return
        found = self.writer.filling(build.index).count(build.index)
        if found is None:
            return
        written = sum(self.store.get_index_ranges(build.index, build.build).values())
        stored = self.store.get_index_builds()[build.index]
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
