"""Decides which indexes to build and which relation maps to fill before changes can be followed.

Changes keep an index up to date only if it was complete once, in its present shape, and no change was missed since.
Relation maps have to be filled before documents are built, so that every later change has its old links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from penstock import failpoints
from penstock.documents.base import Sink
from penstock.documents.mapping import is_built_from
from penstock.documents.output.backfill import filling_of, serving_of
from penstock.documents.output.indexes import Builds, Indexes, require_published
from penstock.documents.output.live import TAKEN_OVER
from penstock.documents.output.writer import DocumentsSettings
from penstock.documents.relation_map import RelationMap
from penstock.lsn import Lsn
from penstock.source.connections import NO_TIMEOUTS, Role, connect
from penstock.source.membership import Membership, changes_between
from penstock.source.shapes import may_have_rows
from penstock.source.snapshots import take_snapshot
from penstock.state import IndexBuild, IndexStatus, Store
from penstock.stream import Published, StreamSettings

logger = logging.getLogger(__name__)


class Readiness:
    """Decides what to build. Used by the thread that follows changes, and before it starts."""

    def __init__(
        self,
        settings: StreamSettings,
        documents: DocumentsSettings,
        store: Store,
        sink: Sink,
        relations: RelationMap,
        builds: Builds,
        check: Callable[[], None],
    ) -> None:
        """`check` raises when the output is stopping."""
        self._settings = settings
        self._documents = documents
        self._store = store
        self._sink = sink
        self._relations = relations
        self._builds = builds
        self._check = check
        self._membership: Membership | None = None

    def prepare(self, indexes: Indexes) -> None:
        """Create every index, and mark those for a rebuild that changes cannot bring up to date; builds nothing yet."""
        self._builds.load()
        self._builds.held = True
        for name in self._builds.all().keys() - indexes.specifications.keys():
            self._builds.forget(name)
        for mapping in indexes.mappings.values():
            self._sink.ensure_index(mapping)
        for name, build in self._builds.all().items():
            if not build.fingerprint:
                self._builds.want(name, indexes.mappings[name].fingerprint, TAKEN_OVER)
        self._want_unseeded(indexes, is_first=self._is_first)

    def look_again(self, indexes: Indexes) -> None:
        """Mark indexes for a rebuild whose documents have other ids after compiling again."""
        for name, mapping in indexes.mappings.items():
            build = self._builds.of(name)
            if build is not None and build.fingerprint != mapping.fingerprint and not self._documents.skip_backfill:
                self._want_changed(indexes, build)

    def begin(self, indexes: Indexes, published: Published, position: Lsn) -> None:
        """Fill the relation maps, which takes as long as reading their tables; then builds may start."""
        if self._is_first:
            self._relations.prepare([])  # old maps are useless: changes were missed since
        self._learn(indexes)
        self.note(indexes, published)
        self._store.upsert_replication_progress(position)
        self._builds.held = False

    @property
    def _is_first(self) -> bool:
        """True if no changes were followed yet, or the slot was lost."""
        return self._store.get_replication_progress() is None

    def note(self, indexes: Indexes, published: Published) -> None:
        """Start over with tables that left the publication for a while or were replaced: changes were missed."""
        publication = self._settings.publication
        seen = self._membership or self._store.get_publication_membership(publication)
        now = replace(published.membership, heaps=indexes.catalog.heaps)
        if now == seen:
            self._membership = seen
            return
        require_published(indexes, published.tables.values(), publication)
        if seen is not None:
            change = changes_between(seen, now)
            names = {published.tables[each] for each in change.readded | change.added if each in published.tables}
            self._start_over(indexes, names.intersection(seen.names.values()) | self._moved(seen, now))
        # Last, so that a table that was not processed is noticed again, even by the next process.
        self._store.store_publication_membership(publication, now)
        self._membership = now

    def resume(self, indexes: Indexes, published: Published) -> None:
        """Bring builds and maps up to date after compiling again: tables may have been replaced."""
        self.note(indexes, published)
        with self._builds.holding():
            self._learn(indexes)

    def _moved(self, seen: Membership, now: Membership) -> set[str]:
        """Return tables with other heaps or other old values than before, except for new and empty partitions."""
        moved: set[str] = set()
        with connect(self._settings.source, Role.CATALOG) as connection:
            for name in seen.heaps.keys() & now.heaps.keys():
                added = now.heaps[name] - seen.heaps[name]
                if seen.heaps[name] - now.heaps[name] or any(may_have_rows(connection, each.oid) for each in added):
                    moved.add(name)
        return moved

    def _want_unseeded(self, indexes: Indexes, *, is_first: bool) -> None:
        for name, mapping in indexes.mappings.items():
            build, seeded = self._builds.of(name), self._sink.is_seeded(name)
            if self._documents.skip_backfill:
                self._builds.skip(name, mapping.fingerprint)
            elif is_first or build is None:
                self._builds.want(name, mapping.fingerprint, "its changes have not been followed so far")
            elif build.fingerprint != mapping.fingerprint:
                self._want_changed(indexes, build)
            elif build.status is IndexStatus.SEEDED and not seeded:
                self._builds.want(name, mapping.fingerprint, "the sink no longer has it")
            elif build.status is IndexStatus.FILLING:
                generation = build.plan["generation"]
                if seeded and generation == serving_of(self._sink, name):
                    self._builds.seeded(build)
                elif generation != filling_of(self._sink, name):
                    self._builds.want(name, mapping.fingerprint, "the generation being filled no longer exists")

    def _want_changed(self, indexes: Indexes, build: IndexBuild) -> None:
        is_same = is_built_from(build.fingerprint, indexes.specifications[build.index])
        reason = "a key of its tables changed" if is_same else "its specification changed"
        self._builds.want(build.index, indexes.mappings[build.index].fingerprint, reason)

    def _learn(self, indexes: Indexes) -> None:
        """Fill the maps of new relations; the indexes that use them are rebuilt afterwards."""
        new = self._relations.prepare(indexes.resolver.tracked)
        if not new:
            return
        # Before the maps exist: a crash in between must not make an index look complete.
        for name in sorted(indexes.resolver.indexes_using(new)):
            build = self._builds.of(name)
            if not self._documents.skip_backfill and (build is None or build.status is not IndexStatus.WANTED):
                fingerprint = indexes.mappings[name].fingerprint
                self._builds.want(name, fingerprint, "it needs a new relation map")
        with take_snapshot(self._settings.source, check=self._check) as snapshot:
            for relation in new:
                self._check()
                with snapshot.connect(Role.DOCUMENTS, parameters=NO_TIMEOUTS) as connection:
                    self._relations.seed(connection, relation, snapshot.position)
                logger.info("relation map filled table=%s columns=%s", relation.name, ", ".join(relation.links))
        failpoints.reach("after_maps")

    def _start_over(self, indexes: Indexes, tables: Collection[str]) -> None:
        """Rebuild the indexes and maps of these tables."""
        names = indexes.over(tables)
        if not names:
            return
        tops = {indexes.catalog.top(name) for name in indexes.wanted if str(name) in tables}
        with self._builds.holding():
            self._relations.prepare([each for each in indexes.resolver.tracked if each.name not in tops])
            for name in sorted(names):
                reason = "one of its tables left the publication for a while or was replaced"
                self._builds.want(name, indexes.mappings[name].fingerprint, reason)
            self._learn(indexes)
