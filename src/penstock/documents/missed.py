"""Changes that the stream does not report: tables that left the publication or were replaced, and DDL that gives rows
other values. The indexes that read them are rebuilt. A publication or setting that loses changes for good is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from penstock.documents.builder import PostgresDocuments
from penstock.documents.builds import Builds
from penstock.documents.polling import PollPositions
from penstock.documents.readiness import Readiness
from penstock.documents.relation_map import RelationMap
from penstock.errors import ConfigError, PublicationChanged
from penstock.lsn import Lsn
from penstock.source.catalog import load_tables
from penstock.source.connections import NO_TIMEOUTS, Role, connect
from penstock.source.membership import Membership, changes_between
from penstock.source.patterns import TableName
from penstock.source.publications import published_tables, require_publication
from penstock.source.shapes import SilentChange, TableShape, may_have_rows, silent_changes, vanished
from penstock.source.snapshots import take_snapshot
from penstock.specification.tree import EVERY_COLUMN
from penstock.state import Store
from penstock.stream import Published, StreamSettings
from penstock.values import TypeSettings
from penstock.values.policy import merging_setting


@dataclass(eq=False)
class MissedChanges:
    """Compares the catalog with what it was when Penstock last acted on it. One thread calls it."""

    settings: StreamSettings
    store: Store
    builds: Builds
    readiness: Readiness
    relations: RelationMap
    check: Callable[[], None]
    """Raises when the output is stopping."""

    def __post_init__(self) -> None:
        self._membership: Membership | None = None

    def begin(self, documents: PostgresDocuments, published: Published, *, is_first: bool) -> None:
        """Fill the relation maps, and look for the first time.

        Old maps are useless if changes were missed since, or if polling wrote them: the order of its changes is a time,
        which no position in the stream reaches. Polling starts from the beginning if it ever runs again.
        """
        polled = PollPositions(self.store.database)
        if is_first or polled.load() is not None:
            self.relations.prepare([])
        self._learn(documents)
        polled.forget()
        self.note(documents, published)

    def resume(self, documents: PostgresDocuments, published: Published) -> None:
        """Bring builds and maps up to date after compiling again: tables may have been replaced. No build may start."""
        self.note(documents, published)
        self._learn(documents)

    def note(self, documents: PostgresDocuments, published: Published) -> None:
        """Start over with tables whose changes were missed, or whose rows changed without a word in the stream."""
        publication = self.settings.publication
        seen = self._membership or self.store.get_publication_membership(publication)
        now = replace(published.membership, heaps=documents.catalog.heaps)
        if now != seen:
            require_published(documents, published.tables.values(), publication)
            require_whole(documents, publication)
        shapes, stale = self._silent(documents, published)
        if seen is not None and now != seen:
            change = changes_between(seen, now)
            names = {published.tables[each] for each in change.readded | change.added if each in published.tables}
            missed = names.intersection(seen.names.values()) | self._moved(seen, now)
            tops = {documents.catalog.top(name) for name in documents.wanted if str(name) in missed}
            reason = "one of its tables left the publication for a while or was replaced"
            stale = {
                **stale,
                **{(index, top): reason for top in tops for index in documents.resolver.indexes_over([top])},
            }
        self._start_over(documents, stale)
        # Last, so that a table that was not processed is noticed again, even by the next process.
        if shapes:
            self.store.store_table_shapes(shapes)
        if now != seen:
            self.store.store_publication_membership(publication, now)
        self._membership = now

    def _silent(
        self, documents: PostgresDocuments, published: Published
    ) -> tuple[dict[int, TableShape], dict[tuple[str, TableName], str]]:
        """Compare the tables with their shapes when Penstock last acted on them.

        Returns the shapes to store, and the indexes that read something that changed, with the table and the reason.
        """
        known = self.store.get_table_shapes()
        shapes: dict[int, TableShape] = {}
        stale: dict[tuple[str, TableName], str] = {}
        for table in documents.catalog.tables.values():
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
            for index in documents.resolver.indexes_over([table.name]):
                changes = unseen_changes(before, now, documents.reads(index, table.name), mentioned)
                # An attached partition without rows brings none.
                changes = [each for each in changes if each.attached is None or self._has_rows(each.attached)]
                if changes:
                    stale[index, table.name] = f"{table.name}: {changes[0].text}"
            shapes[oid] = now.following(before, mentioned)
        return shapes, stale

    def _start_over(self, documents: PostgresDocuments, stale: Mapping[tuple[str, TableName], str]) -> None:
        """Rebuild indexes, and the maps of the tables because of which they are rebuilt; `stale` has the reasons."""
        if not stale:
            return
        tops = {table for _, table in stale}
        with self.builds.holding():
            self.relations.prepare([each for each in documents.resolver.tracked if each.name not in tops])
            for (name, _), reason in sorted(stale.items()):
                self.builds.want(name, documents.mappings[name].fingerprint, reason)
            self._learn(documents)

    def _learn(self, documents: PostgresDocuments) -> None:
        self.readiness.learn(documents, self.relations, self._boundary, self.check)

    @contextmanager
    def _boundary(self) -> Iterator[tuple[psycopg.Connection[Any], Lsn]]:
        with (
            take_snapshot(self.settings.source, check=self.check) as snapshot,
            snapshot.connect(Role.DOCUMENTS, parameters=NO_TIMEOUTS) as connection,
        ):
            yield connection, snapshot.position

    def _has_rows(self, heap: int) -> bool:
        with connect(self.settings.source, Role.CATALOG) as connection:
            return may_have_rows(connection, heap)

    def _moved(self, seen: Membership, now: Membership) -> set[str]:
        """Return tables with other heaps or other old values than before, except for new and empty partitions."""
        moved: set[str] = set()
        for name in seen.heaps.keys() & now.heaps.keys():
            added = now.heaps[name] - seen.heaps[name]
            if seen.heaps[name] - now.heaps[name] or any(self._has_rows(each.oid) for each in added):
                moved.add(name)
        return moved


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


def require_published(documents: PostgresDocuments, published: Collection[str], publication: str) -> None:
    """Raise `PublicationChanged` unless every table is published, as a whole or partition by partition."""
    missing: set[str] = set()
    for name in {name for each in documents.specifications.values() for name in each.tables()}:
        leaves = documents.catalog.table(name).leaves
        if str(name) not in published and not (leaves and all(str(leaf) in published for leaf in leaves)):
            missing.add(str(name))
    if missing:
        names = ", ".join(sorted(missing))
        raise PublicationChanged(
            f"publication {publication!r} does not include {names}, which documents need",
            hint="Add them to source.tables; if Penstock does not manage the publication, alter it.",
            tables=sorted(missing),
        )


def require_whole(documents: PostgresDocuments, publication: str) -> None:
    """Raise `PublicationChanged` if the publication omits operations, rows, or columns by which documents are found."""
    omitted = sorted(
        {"insert", "update", "delete", "truncate"} - require_publication(documents.connection, publication).operations
    )
    if omitted:
        raise PublicationChanged(
            f"publication {publication!r} does not send {' and '.join(omitted)}, so documents would miss these changes",
            hint=f"Run: alter publication {publication} set (publish = 'insert, update, delete, truncate'); then start "
            "the pipeline again, which rebuilds the indexes.",
        )
    wanted = {str(name): each for name, each in documents.wanted.items()}
    published = [each for each in published_tables(documents.connection, publication) if str(each) in wanted]
    listed = load_tables(documents.connection, [each.oid for each in published if each.column_attnums is not None])
    for each in published:
        if each.row_filter is not None:
            raise PublicationChanged(
                f"publication {publication!r} sends only some rows of {each}, so documents would miss the others",
                hint="Publish the table without a row filter; specifications have filters of their own.",
                tables=[str(each)],
            )
        if each.oid in listed:
            sent = {
                column.name for column in listed[each.oid].attributes if column.attnum in (each.column_attnums or ())
            }
            missing = sorted({*wanted[str(each)].columns} - sent)
            if missing:
                names = ", ".join(missing)
                raise PublicationChanged(
                    f"publication {publication!r} does not send {names} of {each}, which documents need",
                    hint="Add them to the column list of the publication, or publish the table without one.",
                    tables=[str(each)],
                )


def require_exact(documents: PostgresDocuments, types: TypeSettings) -> None:
    """Raise `ConfigError` if `[types]` makes different keys the same: the stream has their values in these types."""
    kept = types.keeping()
    for name, wanted in documents.wanted.items():
        for column in documents.catalog.table(documents.catalog.top(name)).select(wanted.columns):
            chosen = kept.of(str(name), column.name)
            setting = merging_setting(column.type, column.modifier, chosen)
            if setting is not None:
                value = getattr(chosen, setting)
                raise ConfigError(
                    f'{name}: {setting} = "{value}" cannot be used for column {column.name!r}, by which documents are '
                    "found: different values would become the same",
                    hint=f'Set {setting} = "string" in [tables."{name}".types.columns."{column.name}"].',
                )
