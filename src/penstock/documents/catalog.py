"""The source's catalog for the tables of a specification: columns with their types, keys, indexes, identity.

It is loaded once and passed on, so building, resolving and checking need no catalog queries of their own. `complete`
fills in the keys that a specification leaves to the catalog.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.errors import ConfigError
from penstock.schema import PostgresType, ReplicaIdentity, TypeKind, resolve_domain
from penstock.source.catalog import load_tables, load_types, unknown_type
from penstock.source.columns import CatalogTable
from penstock.source.faults import translated
from penstock.source.membership import Heap
from penstock.source.patterns import TableName
from penstock.source.shapes import TableShape, load_shapes
from penstock.specification.tree import Aggregate, Field, Group, IndexSpecification, Join, Operation, Relation

# A partitioned table and its leaves, or just the table.
_TABLES = """
    select w.namespace, w.name, c.oid::int8, coalesce(p.relid::pg_catalog.oid, c.oid)::int8
    from unnest(%s::text[], %s::text[]) w (namespace, name)
    join pg_catalog.pg_namespace n on n.nspname = w.namespace
    join pg_catalog.pg_class c
        on c.relnamespace = n.oid and c.relname = w.name and c.relkind in ('r', 'p', 'f', 'v', 'm')
    left join lateral pg_catalog.pg_partition_tree(c.oid) p on c.relkind = 'p' and p.isleaf
"""

_INDEXES = """
    select x.indrelid::int8, x.indisunique and x.indimmediate and x.indpred is null,
           array(select coalesce(a.attname, '')
                 from unnest((x.indkey::int2[])[0:x.indnkeyatts - 1]) with ordinality k (attnum, place)
                 left join pg_catalog.pg_attribute a on a.attrelid = x.indrelid and a.attnum = k.attnum
                 order by k.place)::text[]
    from pg_catalog.pg_index x
    where x.indrelid = any(%s::pg_catalog.oid[]) and x.indisvalid and x.indpred is null
"""


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column of a source table."""

    name: str
    type: PostgresType
    not_null: bool
    generated: bool = False
    """Computed from other columns; the server does not send it."""
    modifier: int = -1

    @property
    def base(self) -> PostgresType:
        """The type without domains."""
        return resolve_domain(self.type, -1)[0]

    @property
    def element(self) -> PostgresType:
        """The element type of an array, otherwise the type itself; without domains."""
        base = self.base
        return resolve_domain(base.element, -1)[0] if base.kind is TypeKind.ARRAY and base.element else base


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table, a partitioned table, or another relation with rows."""

    name: TableName
    kind: str
    columns: Mapping[str, SourceColumn]
    primary_key: tuple[str, ...]
    identity: ReplicaIdentity
    identity_columns: frozenset[str]
    """The columns of an old row that the server sends; of a partitioned table, those that all leaves send."""
    indexes: tuple[tuple[str, ...], ...] = ()
    """The columns of each index; an expression is an empty name."""
    unique: tuple[frozenset[str], ...] = ()
    leaves: tuple[TableName, ...] = ()
    heaps: frozenset[Heap] = frozenset()
    members: Mapping[int, TableName] = field(default_factory=dict[int, TableName])
    """The table and its leaves, by oid: in the stream, a table may have had another name for a while."""
    shape: TableShape | None = None
    """Shows that rows changed although the stream does not say so."""

    @property
    def heap_names(self) -> tuple[TableName, ...]:
        """The names of the tables that have its rows."""
        return self.leaves or (self.name,)

    def column(self, name: str) -> SourceColumn:
        """Return a column; raise `ConfigError` if it does not exist."""
        found = self.columns.get(name)
        if found is None:
            raise ConfigError(
                f"{self.name} has no column {name!r}, which an index specification names",
                hint="Run: penstock index check. It shows where; correct the specification, then: penstock run.",
            )
        return found

    def select(self, names: Iterable[str]) -> list[SourceColumn]:
        """Return several columns."""
        return [self.column(name) for name in names]

    def is_unique(self, columns: Iterable[str]) -> bool:
        """Return whether a unique index has no other columns than these."""
        named = set(columns)
        return any(each <= named for each in self.unique)

    def has_index_on(self, columns: Iterable[str]) -> bool:
        """Return whether an index begins with these columns, in any order."""
        wanted = set(columns)
        return any(set(index[: len(wanted)]) == wanted for index in self.indexes)


@dataclass(frozen=True, slots=True)
class SourceCatalog:
    """The tables that one or more specifications use."""

    tables: Mapping[TableName, SourceTable] = field(default_factory=dict[TableName, SourceTable])

    def table(self, name: TableName) -> SourceTable:
        """Return a table; raise `ConfigError` if it does not exist."""
        found = self.tables.get(name)
        if found is None:
            raise ConfigError(
                f"there is no table {name}",
                hint="Create it, or correct the index specification, then: penstock index check.",
            )
        return found

    def top(self, name: TableName) -> TableName:
        """Return the partitioned table of a leaf, or the same name if it is not a partition."""
        return next((each.name for each in self.tables.values() if name in each.leaves), name)

    @property
    def heaps(self) -> dict[str, frozenset[Heap]]:
        """The heaps of each table."""
        return {str(each.name): each.heaps for each in self.tables.values()}


def load_catalog(connection: psycopg.Connection[Any], names: Iterable[TableName]) -> SourceCatalog:
    """Load the tables of these names that exist, with a handful of statements whatever their number."""
    wanted = sorted(set(names))
    with translated(connection, "find the tables of an index"), connection.cursor(row_factory=tuple_row) as cursor:
        found = cursor.execute(_TABLES, [[each[0] for each in wanted], [each[1] for each in wanted]]).fetchall()
        oids = {int(oid) for row in found for oid in row[2:]}
        indexes = cursor.execute(_INDEXES, [sorted(oids)]).fetchall()
    tables = load_tables(connection, oids)
    types = load_types(connection, {each.type_oid for table in tables.values() for each in table.live_attributes})
    shapes = load_shapes(connection, {int(row[2]) for row in found})
    built: dict[TableName, SourceTable] = {}
    # A table that was dropped since the first statement does not exist.
    for oid in {int(row[2]) for row in found} & tables.keys():
        leaves = [tables[row[3]] for row in found if row[2] == oid and row[3] in tables]
        own = [(bool(unique), tuple(columns)) for table, unique, columns in indexes if table == oid]
        table = _build(tables[oid], leaves, own, types)
        built[table.name] = replace(table, shape=shapes.get(oid))
    return SourceCatalog(built)


def complete(specification: IndexSpecification, catalog: SourceCatalog) -> IndexSpecification:
    """Fill in every key of a specification; raises `ConfigError` for tables that are missing or have no key."""
    root = catalog.table(specification.table)
    key = specification.primary_key or _primary_key(root)
    return replace(
        specification,
        primary_key=key,
        doc_id=specification.doc_id or key,
        fields=_complete_fields(specification.fields, key, catalog),
    )


def _complete_fields(fields: tuple[Field, ...], key: tuple[str, ...], catalog: SourceCatalog) -> tuple[Field, ...]:
    completed: list[Field] = []
    for each in fields:
        if isinstance(each, Group):
            each = replace(each, fields=_complete_fields(each.fields, key, catalog))
        elif isinstance(each, Join):
            relation = _complete_relation(each.relation, key, catalog)
            inner = _complete_fields(each.fields, relation.primary_key, catalog)
            each = replace(each, relation=relation, fields=inner)
        elif isinstance(each, Aggregate):
            each = replace(each, relation=_complete_relation(each.relation, key, catalog))
            if each.operation is Operation.IDS and len(each.relation.primary_key) != 1:
                raise ConfigError(
                    f"'ids' of {each.name!r} needs one primary key column, unlike {each.relation.table} has",
                    hint="Use has_many with the columns of the key.",
                )
        completed.append(each)
    return tuple(completed)


def _complete_relation(relation: Relation, parent_key: tuple[str, ...], catalog: SourceCatalog) -> Relation:
    primary_key = relation.primary_key or catalog.table(relation.table).primary_key
    columns = relation.columns or primary_key or _primary_key(catalog.table(relation.table))
    parent_columns = relation.parent_columns or parent_key
    junction = relation.junction
    pairs = [(parent_columns, columns)]
    if junction is not None:
        pairs = [(parent_columns, junction.left_key), (columns, junction.right_key)]
    for one, other in pairs:
        if len(one) != len(other):
            raise ConfigError(
                f"{relation.table}: ({', '.join(one)}) and ({', '.join(other)}) have different numbers of columns",
                hint="Name as many columns as the referenced key has.",
            )
    return replace(relation, primary_key=primary_key, columns=columns, parent_columns=parent_columns)


def _primary_key(table: SourceTable) -> tuple[str, ...]:
    if not table.primary_key:
        raise ConfigError(f"{table.name} has no primary key", hint="Add one, or set primary_key in the specification.")
    return table.primary_key


def _build(
    table: CatalogTable,
    leaves: list[CatalogTable],
    indexes: list[tuple[bool, tuple[str, ...]]],
    types: Mapping[int, PostgresType],
) -> SourceTable:
    columns = {
        each.name: SourceColumn(
            each.name,
            types.get(each.type_oid) or unknown_type(each.type_oid),
            each.not_null,
            bool(each.generated),
            each.type_modifier,
        )
        for each in table.live_attributes
    }
    names = {each.attnum: each.name for each in table.attributes}
    identities = [_identity_columns(each) for each in leaves or [table]]
    kinds = {each.replica_identity for each in leaves or [table]}
    return SourceTable(
        name=TableName(table.namespace, table.name),
        kind=table.kind,
        columns=columns,
        primary_key=tuple(names[each] for each in table.primary_key_attnums),
        identity=table.replica_identity if len(kinds) > 1 else next(iter(kinds)),
        identity_columns=frozenset.intersection(*identities),
        indexes=tuple(each for _, each in indexes),
        unique=tuple(frozenset(each) for unique, each in indexes if unique and "" not in each),
        leaves=tuple(TableName(each.namespace, each.name) for each in leaves if each.oid != table.oid),
        heaps=frozenset(_heap(each) for each in leaves or [table]),
        members={each.oid: TableName(each.namespace, each.name) for each in (table, *leaves)},
    )


def _heap(table: CatalogTable) -> Heap:
    attnums = ",".join(str(each) for each in sorted(table.identity_attnums))
    return Heap(table.oid, f"{table.replica_identity.value} {attnums}".rstrip())


def _identity_columns(table: CatalogTable) -> frozenset[str]:
    if table.replica_identity is ReplicaIdentity.FULL:
        return frozenset(each.name for each in table.live_attributes)
    names = {each.attnum: each.name for each in table.attributes}
    return frozenset(names[each] for each in table.identity_attnums)
