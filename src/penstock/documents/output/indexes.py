"""The indexes of an output: compiled against the source (`Indexes`), and the state of their builds (`Builds`).

`Indexes` is compiled again with each new connection, and when a table's columns have changed. A thread that works with
an older one finishes with it; the server reports what the change of the table broke.

`Builds` keeps which indexes serve and which are being built, in the state store, for all threads of an output. A thread
that finds that an index cannot be brought up to date calls `want`, and continues once that is stored;
`penstock.documents.output.backfill` then builds the index into a fresh generation.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from penstock import failpoints
from penstock.documents.build import BuildQuery, compile_build
from penstock.documents.catalog import SourceCatalog, complete, load_catalog
from penstock.documents.images import WantedColumns
from penstock.documents.mapping import IndexMapping, index_mapping
from penstock.documents.output.writer import Outcome
from penstock.documents.relation_map import RelationMap
from penstock.documents.resolve import Resolver
from penstock.documents.specification import IndexSpecification, columns_read
from penstock.errors import ConfigError, PublicationChanged
from penstock.source.catalog import load_tables
from penstock.source.patterns import TableName
from penstock.source.publications import published_tables, require_publication
from penstock.state import IndexBuild, IndexStatus, Store, WorkKind
from penstock.values import TypeSettings
from penstock.values.policy import merging_setting

logger = logging.getLogger(__name__)

_NEXT = "next"
"""In the plan of a build: why another one has to follow."""


@dataclass(frozen=True, slots=True)
class Indexes:
    """Specifications compiled against the database."""

    specifications: Mapping[str, IndexSpecification]
    mappings: Mapping[str, IndexMapping]
    """What creates each index."""
    catalog: SourceCatalog
    queries: Mapping[str, BuildQuery]
    resolver: Resolver
    wanted: Mapping[TableName, WantedColumns]
    """The columns to read of changes; partitions are listed under their own names, too."""
    reads: Mapping[str, Mapping[TableName, Collection[str]]]
    """By index and table: the columns that documents depend on."""

    @property
    def names(self) -> dict[int, TableName]:
        """The tables of `wanted` by their oids, which the stream has."""
        return {each.oid: name for name, each in self.wanted.items()}

    def over(self, tables: Collection[str]) -> frozenset[str]:
        """Return the indexes that use one of these published tables."""
        named = {self.catalog.top(name) for name in self.wanted if str(name) in tables}
        return self.resolver.indexes_over(named)


def compile_indexes(
    connection: psycopg.Connection[Any],
    specifications: Sequence[IndexSpecification],
    relations: RelationMap | None,
    *,
    chunk: int,
    owner: str,
) -> Indexes:
    """Load the catalog and compile all indexes; raises `ConfigError` if they do not match the database."""
    catalog = load_catalog(connection, {name for each in specifications for name in each.tables()})
    resolver = Resolver(specifications, catalog, relations, chunk=chunk)
    return Indexes(
        {each.name: each for each in specifications},
        {each.name: index_mapping(each, catalog, owner=owner) for each in specifications},
        catalog,
        {each.name: compile_build(each, catalog) for each in specifications},
        resolver,
        resolver.wanted,
        {each.name: columns_read(complete(each, catalog)) for each in specifications},
    )


def require_published(indexes: Indexes, published: Collection[str], publication: str) -> None:
    """Raise `PublicationChanged` unless every table is published, as a whole or partition by partition."""
    missing: set[str] = set()
    for name in {name for each in indexes.specifications.values() for name in each.tables()}:
        leaves = indexes.catalog.table(name).leaves
        if str(name) not in published and not (leaves and all(str(leaf) in published for leaf in leaves)):
            missing.add(str(name))
    if missing:
        names = ", ".join(sorted(missing))
        raise PublicationChanged(
            f"publication {publication!r} does not include {names}, which documents need",
            hint="Add them to source.tables; if Penstock does not manage the publication, alter it.",
            tables=sorted(missing),
        )


def require_whole(connection: psycopg.Connection[Any], indexes: Indexes, publication: str) -> None:
    """Raise `PublicationChanged` if the publication omits operations, rows, or columns by which documents are found."""
    omitted = sorted(
        {"insert", "update", "delete", "truncate"} - require_publication(connection, publication).operations
    )
    if omitted:
        raise PublicationChanged(
            f"publication {publication!r} does not send {' and '.join(omitted)}, so documents would miss these changes",
            hint=f"Run: alter publication {publication} set (publish = 'insert, update, delete, truncate'); then start "
            "the pipeline again, which rebuilds the indexes.",
        )
    wanted = {str(name): each for name, each in indexes.wanted.items()}
    published = [each for each in published_tables(connection, publication) if str(each) in wanted]
    listed = load_tables(connection, [each.oid for each in published if each.column_attnums is not None])
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


def require_exact(indexes: Indexes, types: TypeSettings) -> None:
    """Raise `ConfigError` if `[types]` makes different keys the same: the stream has their values in these types."""
    kept = types.keeping()
    for name, wanted in indexes.wanted.items():
        for column in indexes.catalog.table(indexes.catalog.top(name)).select(wanted.columns):
            chosen = kept.of(str(name), column.name)
            setting = merging_setting(column.type, column.modifier, chosen)
            if setting is not None:
                value = getattr(chosen, setting)
                raise ConfigError(
                    f'{name}: {setting} = "{value}" cannot be used for column {column.name!r}, by which documents are '
                    "found: different values would become the same",
                    hint=f'Set {setting} = "string" in [tables."{name}".types.columns."{column.name}"].',
                )


class Builds:
    """The builds of all indexes. Any thread may call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._builds: dict[str, IndexBuild] = {}
        self.held = False
        """True while no build may start because a prerequisite is missing."""

    def load(self) -> None:
        """Load the builds from the store."""
        with self._changed:
            self._builds = dict(self._store.get_index_builds())
            self._changed.notify_all()

    def all(self) -> dict[str, IndexBuild]:
        """Return the last build of every index."""
        with self._changed:
            return dict(self._builds)

    def of(self, index: str) -> IndexBuild | None:
        """Return the last build of an index."""
        with self._changed:
            return self._builds.get(index)

    def is_current(self, build: IndexBuild) -> bool:
        """Return whether no other build was requested since."""
        current = self.of(build.index)
        return current is not None and current.build == build.build

    @property
    def unfinished(self) -> list[IndexBuild]:
        """The builds that are not finished, by name."""
        with self._changed:
            return [each for _, each in sorted(self._builds.items()) if each.status is not IndexStatus.SEEDED]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let no build start inside the block."""
        held, self.held = self.held, True
        try:
            yield
        finally:
            self.held = held

    def wait(self, timeout: float) -> bool:
        """Wait until there is something to build; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.held and bool(self.unfinished), timeout)

    def want(self, index: str, fingerprint: str, reason: str) -> IndexBuild:
        """Request a rebuild of an index from the start; stored when it returns.

        One that has not begun sees everything that is committed now, so a second one is not needed.
        """
        known = self.of(index)
        if known is not None and known.status is IndexStatus.WANTED and known.fingerprint == fingerprint:
            return known
        build = IndexBuild(index, uuid.uuid4().hex, fingerprint, IndexStatus.WANTED, reason)
        logger.info("rebuilding index index=%s reason=%s", index, reason)
        self._put(build)
        failpoints.reach("after_build_wanted")
        return build

    def want_next(self, index: str, fingerprint: str, reason: str) -> None:
        """Request a rebuild that starts after the current one, if there is one; stored when it returns.

        For what may happen more often than a build takes: each build is complete as of its start, or later.
        """
        with self._changed:
            known = self._builds.get(index)
            if known is None or known.status is not IndexStatus.FILLING or known.fingerprint != fingerprint:
                self.want(index, fingerprint, reason)
            elif _NEXT not in known.plan:
                logger.info("rebuilding index after the current build index=%s reason=%s", index, reason)
                self._put(replace(known, plan={**known.plan, _NEXT: reason}))

    def skip(self, index: str, fingerprint: str) -> None:
        """Count an index as built, whatever its content, because of `skip_backfill`."""
        self._put(IndexBuild(index, uuid.uuid4().hex, fingerprint, IndexStatus.SEEDED, "not built: skip_backfill"))

    def fill(self, build: IndexBuild, plan: Mapping[str, Any]) -> IndexBuild | None:
        """Store the plan of a build whose generation exists; None if another build was requested meanwhile."""
        return self._advance(replace(build, status=IndexStatus.FILLING, plan=plan))

    def seeded(self, build: IndexBuild) -> IndexBuild | None:
        """Store that the build is complete and serves, or that the next one is wanted (`want_next`)."""
        with self._changed:
            if not self.is_current(build):
                return None
            reason = self._builds[build.index].plan.get(_NEXT)
            if reason is not None:
                return self.want(build.index, build.fingerprint, reason)
            kept = {"generation": build.plan.get("generation")}
            return self._advance(replace(build, status=IndexStatus.SEEDED, plan=kept))

    def forget(self, index: str) -> None:
        """Forget an index that is no longer in the config file."""
        with self._changed:
            self._store.delete_index(index)
            self._builds.pop(index, None)

    @property
    def recorded(self) -> frozenset[str]:
        """The indexes whose removals have to be recorded."""
        with self._changed:
            return frozenset(name for name, each in self._builds.items() if each.status is IndexStatus.FILLING)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Record what changes wrote to indexes that are being built, and which documents they removed."""
        for index in sorted({each.index for each in outcomes}):
            build = self.of(index)
            if build is None or build.status is not IndexStatus.FILLING:
                continue
            mine = [each for each in outcomes if each.index == index]
            removed = [{"keys": [*each.removed]} for each in mine if each.removed]
            changed = sum(each.documents for each in mine)
            self._store.add_index_work(index, WorkKind.REMOVAL, removed, changed=changed)

    def _advance(self, build: IndexBuild) -> IndexBuild | None:
        with self._changed:
            if not self.is_current(build):
                return None
            self._put(build)
            return build

    def _put(self, build: IndexBuild) -> None:
        with self._changed:
            self._store.store_index_build(build)
            self._builds[build.index] = build
            self._changed.notify_all()
