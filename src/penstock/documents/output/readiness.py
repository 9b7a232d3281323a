"""Decides which indexes to build and which relation maps to fill before changes can be followed.

Changes keep an index up to date only if it was complete once, in its present shape, and no change was missed since.
Relation maps have to be filled before documents are built, so that every later change has its old links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from penstock import failpoints
from penstock.documents.base import Sink
from penstock.documents.mapping import is_built_from
from penstock.documents.output.backfill import filling_of, serving_of
from penstock.documents.output.indexes import Builds, Indexes, require_published, require_whole
from penstock.documents.output.live import TAKEN_OVER, Session
from penstock.documents.output.writer import DocumentsSettings
from penstock.documents.relation_map import RelationMap
from penstock.documents.specification.tree import EVERY_COLUMN
from penstock.lsn import Lsn
from penstock.source.connections import NO_TIMEOUTS, Role, connect
from penstock.source.membership import Membership, changes_between
from penstock.source.patterns import TableName
from penstock.source.shapes import SilentChange, TableShape, may_have_rows, silent_changes, vanished
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

    def begin(self, session: Session, published: Published, position: Lsn) -> None:
        """Fill the relation maps, which takes as long as reading their tables; then builds may start."""
        if self._is_first:
            self._relations.prepare([])  # old maps are useless: changes were missed since
        self._learn(session.indexes)
        self.note(session, published)
        self._store.upsert_replication_progress(position)
        self._builds.held = False

    @property
    def _is_first(self) -> bool:
        """True if no changes were followed yet, or the slot was lost."""
        return self._store.get_replication_progress() is None

    def note(self, session: Session, published: Published) -> None:
        """Start over with tables whose changes were missed, or whose rows changed without a word in the stream."""
        publication, indexes = self._settings.publication, session.indexes
        seen = self._membership or self._store.get_publication_membership(publication)
        now = replace(published.membership, heaps=indexes.catalog.heaps)
        if now != seen:
            require_published(indexes, published.tables.values(), publication)
            require_whole(session.connection, indexes, publication)
        shapes, stale = self._silent(indexes, published)
        if seen is not None and now != seen:
            change = changes_between(seen, now)
            names = {published.tables[each] for each in change.readded | change.added if each in published.tables}
            missed = names.intersection(seen.names.values()) | self._moved(seen, now)
            tops = {indexes.catalog.top(name) for name in indexes.wanted if str(name) in missed}
            reason = "one of its tables left the publication for a while or was replaced"
            stale = {
                **stale,
                **{(index, top): reason for top in tops for index in indexes.resolver.indexes_over([top])},
            }
        self._start_over(indexes, stale)
        # Last, so that a table that was not processed is noticed again, even by the next process.
        if shapes:
            self._store.store_table_shapes(shapes)
        if now != seen:
            self._store.store_publication_membership(publication, now)
        self._membership = now

    def resume(self, session: Session, published: Published) -> None:
        """Bring builds and maps up to date after compiling again: tables may have been replaced."""
        self.note(session, published)
        with self._builds.holding():
            self._learn(session.indexes)

    def _silent(
        self, indexes: Indexes, published: Published
    ) -> tuple[dict[int, TableShape], dict[tuple[str, TableName], str]]:
        """Compare the tables with their shapes when Penstock last acted on them.

        Returns the shapes to store, and the indexes that read something that changed, with the table and the reason.
        """
        known = self._store.get_table_shapes()
        shapes: dict[int, TableShape] = {}
        stale: dict[tuple[str, TableName], str] = {}
        for table in indexes.catalog.tables.values():
            oid = next((oid for oid, member in table.members.items() if member == table.name), 0)
            now, before = table.shape, known.get(oid)
            mentioned = published.leaves.get(oid, {})
            if now is None:
                continue
            if before is None:
                shapes[oid] = replace(now, former=frozenset(mentioned))
                continue
            if before == now and not vanished(before, now, mentioned):
                continue
            for index in indexes.resolver.indexes_over([table.name]):
                changes = unseen_changes(before, now, indexes.reads[index][table.name], mentioned)
                # An attached partition without rows brings none.
                changes = [each for each in changes if each.attached is None or self._has_rows(each.attached)]
                if changes:
                    stale[index, table.name] = f"{table.name}: {changes[0].text}"
            shapes[oid] = now.following(before, mentioned)
        return shapes, stale

    def _has_rows(self, heap: int) -> bool:
        with connect(self._settings.source, Role.CATALOG) as connection:
            return may_have_rows(connection, heap)

    def _moved(self, seen: Membership, now: Membership) -> set[str]:
        """Return tables with other heaps or other old values than before, except for new and empty partitions."""
        moved: set[str] = set()
        for name in seen.heaps.keys() & now.heaps.keys():
            added = now.heaps[name] - seen.heaps[name]
            if seen.heaps[name] - now.heaps[name] or any(self._has_rows(each.oid) for each in added):
                moved.add(name)
        return moved

    def _want_unseeded(self, indexes: Indexes, *, is_first: bool) -> None:
        for name, mapping in indexes.mappings.items():
            build, seeded = self._builds.of(name), self._sink.is_seeded(name)
            if self._documents.skip_backfill:
                self._builds.skip(name, mapping.fingerprint)
                if not seeded:
                    self._sink.serve(name)
            elif is_first or build is None:
                self._builds.want(name, mapping.fingerprint, "its changes have not been followed so far")
            elif build.fingerprint != mapping.fingerprint:
                self._want_changed(indexes, build)
            elif build.status is IndexStatus.SEEDED and not seeded:
                self._builds.want(name, mapping.fingerprint, "the sink no longer has it")
            elif build.status is IndexStatus.SEEDED and not self._is_serving(build):
                reason = "another generation serves than the one that Penstock has kept up to date"
                self._builds.want(name, mapping.fingerprint, reason)
            elif build.status is IndexStatus.FILLING:
                generation = build.plan["generation"]
                if seeded and generation == serving_of(self._sink, name):
                    self._builds.seeded(build)
                elif generation != filling_of(self._sink, name):
                    self._builds.want(name, mapping.fingerprint, "the generation being filled no longer exists")

    def _is_serving(self, build: IndexBuild) -> bool:
        """Return False if the sink serves another generation than the one that was built and kept up to date."""
        built, serving = build.plan.get("generation"), serving_of(self._sink, build.index)
        return built is None or serving is None or built == serving

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

    def _start_over(self, indexes: Indexes, stale: Mapping[tuple[str, TableName], str]) -> None:
        """Rebuild indexes, and the maps of the tables because of which they are rebuilt; `stale` has the reasons."""
        if not stale:
            return
        tops = {table for _, table in stale}
        with self._builds.holding():
            self._relations.prepare([each for each in indexes.resolver.tracked if each.name not in tops])
            for (name, _), reason in sorted(stale.items()):
                self._builds.want(name, indexes.mappings[name].fingerprint, reason)
            self._learn(indexes)


def unseen_changes(
    before: TableShape, now: TableShape, columns: Collection[str], mentioned: Mapping[int, Lsn]
) -> list[SilentChange]:
    """Why rows may have other values in these columns than the stream said between two moments."""
    one, other = (_reading(each, columns) for each in (before, now))
    recomputed = [
        SilentChange(f"generated column {other.columns[attnum]!r} was altered")
        for attnum in sorted(other.generated & one.generated & other.columns.keys())
        if _versions(one, attnum) != _versions(other, attnum)
    ]
    # Documents have always had the values of generated columns, though the server does not send them.
    nothing = frozenset[int]()
    silent = silent_changes(replace(one, generated=nothing), replace(other, generated=nothing), mentioned)
    return [*silent, *recomputed]


def _reading(shape: TableShape, columns: Collection[str]) -> TableShape:
    """Return the part of a shape that concerns these columns."""
    if EVERY_COLUMN in columns:
        return replace(shape, attributes=None)
    read = {attnum: name for attnum, name in shape.columns.items() if name in columns}
    heaps = shape.heaps
    if not shape.is_partitioned:  # the columns of a partition may have other numbers
        kept = {
            oid: [each for each in heap.columns.split() if int(each.partition(":")[0]) in read]
            for oid, heap in heaps.items()
        }
        heaps = {oid: heap._replace(columns=" ".join(kept[oid])) for oid, heap in heaps.items()}
    return replace(shape, heaps=heaps, columns=read, attributes=None)


def _versions(shape: TableShape, attnum: int) -> set[str]:
    """Return the versions of a column in the catalog."""
    prefix = f"{attnum}:"
    return {each for heap in shape.heaps.values() for each in heap.columns.split() if each.startswith(prefix)}
