"""Decides which indexes to build and which relation maps to fill before changes can be followed.

Changes keep an index up to date only if it was complete once, in its present shape, and no change was missed since.
Relation maps have to be filled before documents are built, so that every later change has its old links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import psycopg

from penstock import failpoints
from penstock.documents.backfill import filling_of, serving_of
from penstock.documents.base import DocumentBuilder
from penstock.documents.builder import PostgresDocuments
from penstock.documents.builds import Builds
from penstock.documents.mapping import IndexMapping, is_built_from
from penstock.documents.relation_map import RelationMap
from penstock.lsn import Lsn
from penstock.sinks.base import Sink
from penstock.state import IndexBuild, IndexStatus

logger = logging.getLogger(__name__)

_SKIPPED = "not built: skip_backfill"
TAKEN_OVER = "another server took over"
"""Why an index is rebuilt after a failover."""
Boundary = Callable[[], AbstractContextManager[tuple[psycopg.Connection[Any], Lsn]]]
"""Opens a connection whose snapshot has everything before a position, and nothing after it."""


class Readiness:
    """Decides what to build. Used by the thread that follows changes, and before it starts."""

    def __init__(self, builds: Builds, sink: Sink, *, skip_backfill: bool = False) -> None:
        self._builds = builds
        self._sink = sink
        self._skip_backfill = skip_backfill

    def prepare(self, documents: DocumentBuilder, *, is_first: bool) -> None:
        """Create every index, and mark those for a rebuild that changes cannot bring up to date; builds nothing yet.

        `is_first` if no changes were followed yet, or some were missed since.
        """
        mappings = {each.index: each for each in documents.index_mappings()}
        self.stop_unfit(documents)
        for name in self._builds.all().keys() - mappings.keys() - self._builds.stopped.keys():
            self._builds.forget(name)
        for mapping in mappings.values():
            self._sink.ensure_index(mapping)
        for name, build in self._builds.all().items():
            if not build.fingerprint and name in mappings:
                self._builds.want(name, mappings[name].fingerprint, TAKEN_OVER)
        for mapping in mappings.values():
            self._want_unseeded(documents, mapping, is_first=is_first)

    def stop_unfit(self, documents: DocumentBuilder) -> None:
        """Mark indexes that no longer fit the database for a rebuild: their changes are not followed meanwhile."""
        stopped = documents.stopped if isinstance(documents, PostgresDocuments) else {}
        for name, error in stopped.items():
            if name not in self._builds.stopped:
                logger.error("index stopped index=%s error=%s", name, error)
            build = self._builds.of(name)
            if build is not None and not self._skip_backfill:
                self._builds.want(name, build.fingerprint, f"it did not fit the database: {error.message}")
        self._builds.stopped = stopped

    def look_again(self, documents: DocumentBuilder) -> None:
        """Mark indexes for a rebuild whose documents have other ids after compiling again."""
        for mapping in documents.index_mappings():
            build = self._builds.of(mapping.index)
            if build is not None and build.fingerprint != mapping.fingerprint and not self._skip_backfill:
                self._want_changed(documents, build, mapping)

    def learn(
        self,
        documents: PostgresDocuments,
        relations: RelationMap,
        boundary: Boundary,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill the maps of new relations, which takes as long as reading their tables.

        The indexes that use them are rebuilt afterwards. `check` raises when the output is stopping.
        """
        new = relations.prepare(documents.resolver.tracked)
        if not new:
            return
        # Before the maps exist: a crash in between must not make an index look complete.
        for name in sorted(documents.resolver.indexes_using(new)):
            build = self._builds.of(name)
            if not self._skip_backfill and (build is None or build.status is not IndexStatus.WANTED):
                self._builds.want(name, documents.mappings[name].fingerprint, "it needs a new relation map")
        with boundary() as (connection, position):
            for relation in new:
                check()
                relations.seed(connection, relation, position)
                logger.info("relation map filled table=%s columns=%s", relation.name, ", ".join(relation.links))
        failpoints.reach("after_maps")

    def _want_unseeded(self, documents: DocumentBuilder, mapping: IndexMapping, *, is_first: bool) -> None:
        name = mapping.index
        build, seeded = self._builds.of(name), self._sink.is_seeded(name)
        if self._skip_backfill:
            is_known = build is not None and build.status is IndexStatus.SEEDED and not is_first
            if build is None or not is_known or build.fingerprint != mapping.fingerprint:
                self._builds.skip(name, mapping.fingerprint, _SKIPPED)
            if not seeded:
                self._sink.serve(name)
        elif seeded and build is None and not is_first and not self._builds.are_durable:
            self._builds.skip(name, mapping.fingerprint, "built by an earlier process")
        elif is_first or build is None:
            self._builds.want(name, mapping.fingerprint, "its changes have not been followed so far")
            if not self._builds.are_durable:
                # After a crash only the sink knows that the index has a gap.
                self._sink.reindex(mapping)
        elif build.fingerprint != mapping.fingerprint:
            self._want_changed(documents, build, mapping)
        elif build.reason == _SKIPPED:
            self._builds.want(name, mapping.fingerprint, "it was skipped so far")
        elif build.status is IndexStatus.SEEDED and not seeded:
            self._builds.want(name, mapping.fingerprint, "the sink no longer has it")
        elif build.status is IndexStatus.SEEDED and not self._is_serving(build):
            reason = "another generation serves than the one that Penstock has kept up to date"
            self._builds.want(name, mapping.fingerprint, reason)
        elif build.status is IndexStatus.FILLING:
            generation = build.plan.get("generation")
            if seeded and generation == serving_of(self._sink, name):
                self._builds.seeded(build)
            elif generation != filling_of(self._sink, name):
                self._builds.want(name, mapping.fingerprint, "the generation being filled no longer exists")

    def _is_serving(self, build: IndexBuild) -> bool:
        """Return False if the sink serves another generation than the one that was built and kept up to date."""
        built, serving = build.plan.get("generation"), serving_of(self._sink, build.index)
        return built is None or serving is None or built == serving

    def _want_changed(self, documents: DocumentBuilder, build: IndexBuild, mapping: IndexMapping) -> None:
        is_same = isinstance(documents, PostgresDocuments) and is_built_from(
            build.fingerprint, documents.specifications[build.index]
        )
        reason = "a key of its tables changed" if is_same else "its specification changed"
        self._builds.want(build.index, mapping.fingerprint, reason)
