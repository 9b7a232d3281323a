"""Documents from a Postgres source: the `DocumentBuilder` that everything else here adds up to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.documents.base import BackfillScope, DocumentBuilder, SnapshotTable
from penstock.documents.build import build_documents, compile_build
from penstock.documents.catalog import SourceCatalog, complete, load_catalog
from penstock.documents.expressions import canonical, column, conjunction, from_table
from penstock.documents.images import Changes
from penstock.documents.mapping import IndexMapping, index_mapping
from penstock.documents.relation_map import RelationMap
from penstock.documents.resolve import DEFAULT_CHUNK, Resolution, ResolvedKeys, Resolver
from penstock.documents.specification import IndexSpecification
from penstock.documents.visibility import wait_until_visible
from penstock.source.faults import translated
from penstock.source.patterns import TableName


class PostgresDocuments(DocumentBuilder):
    """Resolves and builds on two connections of its own: what is resolved is streamed while documents are built."""

    def __init__(
        self,
        resolving: psycopg.Connection[Any],
        building: psycopg.Connection[Any],
        specifications: Sequence[IndexSpecification],
        relation_map: RelationMap | None = None,
        *,
        catalog: SourceCatalog | None = None,
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        tables = {name for each in specifications for name in each.tables()}
        self._catalog = catalog or load_catalog(building, tables)
        self._specifications = {each.name: complete(each, self._catalog) for each in specifications}
        self._written = {each.name: each for each in specifications}
        self._queries = {each.name: compile_build(each, self._catalog) for each in specifications}
        self._resolving = resolving
        self._building = building
        self._chunk = chunk
        self.resolver = Resolver(specifications, self._catalog, relation_map, chunk=chunk)

    def resolve(self, changes: Changes, scope: frozenset[str] | None = None) -> Resolution:
        """See `DocumentBuilder`."""
        wait_until_visible(self._resolving, sorted(changes.xids))
        return self.resolver.resolve(self._resolving, changes, scope)

    def build(self, keys: ResolvedKeys) -> pa.Table:
        """See `DocumentBuilder`."""
        return build_documents(self._building, self._queries[keys.index], keys.keys)

    def remember(self, resolution: Resolution) -> None:
        """See `DocumentBuilder`."""
        self.resolver.remember(resolution)

    def every_key(self, index: str) -> Iterator[ResolvedKeys]:
        """See `DocumentBuilder`. In pieces, from one snapshot."""
        specification = self._specifications[index]
        root = self._catalog.table(specification.table)
        keys = [canonical(column("r", each.name), each) for each in root.select(specification.doc_id)]
        text = sql.SQL("select {} from {} where {}").format(
            sql.SQL(", ").join(keys),
            from_table(root, "r"),
            conjunction([sql.SQL("{} is not null").format(column("r", name)) for name in specification.doc_id]),
        )
        with (
            translated(self._resolving, f"list the documents of {index!r}"),
            self._resolving.transaction(),
            psycopg.ServerCursor(self._resolving, "penstock_every_key", row_factory=tuple_row) as cursor,
        ):
            cursor.execute(text)
            while rows := cursor.fetchmany(self._chunk):
                yield ResolvedKeys(index, tuple(list(each) for each in zip(*rows, strict=True)))

    def backfill_scopes(self) -> Sequence[BackfillScope]:
        """See `DocumentBuilder`. Indexes with the same root share the reading of its rows."""
        columns: dict[TableName, dict[str, None]] = {}
        for each in self._specifications.values():
            columns.setdefault(each.table, {}).update(dict.fromkeys(each.doc_id))
        return [
            BackfillScope(name, SnapshotTable(each.table, tuple(columns[each.table])))
            for name, each in self._specifications.items()
        ]

    def index_mappings(self) -> Sequence[IndexMapping]:
        """See `DocumentBuilder`."""
        return [index_mapping(each, self._catalog) for each in self._written.values()]
