"""All indexes of an output as they are compiled against the source at one moment: queries, ways up, mappings.

Made anew when the connection is, or when a table's columns have changed; whoever works with an older one finishes with
it, and what the change of the table broke is then said by the server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.documents.build import BuildQuery, compile_build
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.documents.images import WantedColumns
from penstock.documents.mapping import IndexMapping, index_mapping
from penstock.documents.relation_map import RelationMap
from penstock.documents.resolve import Resolver
from penstock.documents.specification import IndexSpecification
from penstock.errors import PublicationChanged
from penstock.source.catalog import load_tables
from penstock.source.patterns import TableName
from penstock.source.publications import published_tables


@dataclass(frozen=True, slots=True)
class Indexes:
    """What specifications mean in this database."""

    specifications: Mapping[str, IndexSpecification]
    mappings: Mapping[str, IndexMapping]
    """How each index is created."""
    catalog: SourceCatalog
    queries: Mapping[str, BuildQuery]
    resolver: Resolver
    wanted: Mapping[TableName, WantedColumns]
    """What is read of changes; partitions are listed under their own names, too."""

    def over(self, tables: Collection[str]) -> frozenset[str]:
        """The indexes with rows of one of these tables, as the publication names them."""
        named = {self.catalog.top(name) for name in self.wanted if str(name) in tables}
        return self.resolver.indexes_over(named)


def compile_indexes(
    connection: psycopg.Connection[Any],
    specifications: Sequence[IndexSpecification],
    relations: RelationMap | None,
    *,
    chunk: int,
) -> Indexes:
    """Load the catalog and compile all of it; `ConfigError` for what does not fit the database."""
    catalog = load_catalog(connection, {name for each in specifications for name in each.tables()})
    resolver = Resolver(specifications, catalog, relations, chunk=chunk)
    return Indexes(
        {each.name: each for each in specifications},
        {each.name: index_mapping(each, catalog) for each in specifications},
        catalog,
        {each.name: compile_build(each, catalog) for each in specifications},
        resolver,
        resolver.wanted,
    )


def require_published(indexes: Indexes, published: Collection[str], publication: str) -> None:
    """`PublicationChanged` unless the changes of every table are sent: as a whole, or partition by partition."""
    missing: set[str] = set()
    for name in {name for each in indexes.specifications.values() for name in each.tables()}:
        leaves = indexes.catalog.table(name).leaves
        if str(name) not in published and not (leaves and all(str(leaf) in published for leaf in leaves)):
            missing.add(str(name))
    if missing:
        names = ", ".join(sorted(missing))
        raise PublicationChanged(
            f"publication {publication!r} does not send changes of {names}, which documents are made of",
            hint="Name them in source.tables; if the publication is not managed, alter it to have them.",
            tables=sorted(missing),
        )


def require_whole(connection: psycopg.Connection[Any], indexes: Indexes, publication: str) -> None:
    """`PublicationChanged` if rows or columns that documents are found by are not sent."""
    wanted = {str(name): each for name, each in indexes.wanted.items()}
    published = [each for each in published_tables(connection, publication) if str(each) in wanted]
    listed = load_tables(connection, [each.oid for each in published if each.column_attnums is not None])
    for each in published:
        if each.row_filter is not None:
            raise PublicationChanged(
                f"publication {publication!r} sends only some rows of {each}, and documents would miss the others",
                hint="Publish the table without a row filter; documents have filters of their own.",
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
                    f"publication {publication!r} does not send {names} of {each}, by which documents are found",
                    hint="Add them to the column list of the publication, or publish the table without one.",
                    tables=[str(each)],
                )
