"""What the source's catalog says about types and tables.

Always the catalog of *now*: the stream may be minutes behind, so a table may have been altered, renamed or dropped
since a message was written. Names and types of columns therefore come from the RELATION message, and only what the
message lacks (attribute numbers, primary key) comes from here; `penstock.source.columns` brings the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema, TypeKind
from penstock.source.columns import (
    BACKFILLED,
    FORGOTTEN,
    MISSING,
    Attribute,
    CatalogTable,
    RelationColumn,
    build_schema,
    identify_columns,
    parse_missing,
    sent_key,
    unknown_type,
)
from penstock.source.faults import translated
from penstock.source.identity import Partitions, RowIdentity, load_partitions

__all__ = [
    "Attribute",
    "CatalogTable",
    "RelationColumn",
    "build_schema",
    "identify_columns",
    "load_attributes",
    "load_table",
    "load_tables",
    "load_types",
    "schema_from_catalog",
    "unknown_type",
]

_KINDS = {
    "b": TypeKind.BASE,
    "e": TypeKind.ENUM,
    "d": TypeKind.DOMAIN,
    "c": TypeKind.COMPOSITE,
    "r": TypeKind.RANGE,
    "m": TypeKind.MULTIRANGE,
    "p": TypeKind.PSEUDO,
}

# An array is what array_in reads: int2vector and oidvector have elements too, but print in another way.
_TYPES = """
    select t.oid::int8, t.typname, n.nspname, t.typtype::text,
           case when t.typinput = 'pg_catalog.array_in'::pg_catalog.regproc then t.typelem::int8 else 0 end,
           t.typbasetype::int8, t.typtypmod, t.typdelim::text
    from pg_catalog.pg_type t
    join pg_catalog.pg_namespace n on n.oid = t.typnamespace
    where t.oid = any(%s::pg_catalog.oid[])
"""

_ATTRIBUTES = f"""
    select a.attrelid::int8, a.attnum::int4, a.attname, a.atttypid::int8, a.atttypmod, a.attisdropped,
           a.attgenerated::text, a.attnotnull, ({BACKFILLED}) or ({FORGOTTEN}), {MISSING}
    from pg_catalog.pg_attribute a
    where a.attrelid = any(%s::pg_catalog.oid[]) and a.attnum > 0
    order by a.attrelid, a.attnum
"""  # noqa: S608 (a constant)

_TABLE = """
    select c.oid::int8, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, c.relreplident::text,
           c.relispartition, coalesce(i.inhparent, 0)::int8,
           coalesce(pg_catalog.pg_partition_root(c.oid)::pg_catalog.oid, 0)::int8,
           primary_key.columns, primary_key.immediate, chosen.columns, primary_key.size, chosen.size
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    left join pg_catalog.pg_inherits i on i.inhrelid = c.oid and c.relispartition
    left join lateral (
        select x.indkey::int2[] as columns, x.indimmediate as immediate, x.indnkeyatts as size
        from pg_catalog.pg_index x where x.indrelid = c.oid and x.indisprimary and x.indisvalid
    ) primary_key on true
    left join lateral (
        select x.indkey::int2[] as columns, x.indnkeyatts as size
        from pg_catalog.pg_index x where x.indrelid = c.oid and x.indisreplident and x.indisvalid
    ) chosen on true
    where c.oid = any(%s::pg_catalog.oid[])
    order by n.nspname, c.relname
"""


def load_types(
    connection: psycopg.Connection[Any], oids: Iterable[int], known: Mapping[int, PostgresType] | None = None
) -> dict[int, PostgresType]:
    """The types with these numbers, with what they consist of; numbers that no longer exist are left out.

    One statement per level of nesting (domain over array over …). `known` types are neither asked for nor loaded
    again: pass what earlier calls returned. The result has the types asked for, those of `known` included.
    """
    wanted = {int(oid) for oid in oids if oid}
    built = dict(known or {})
    rows: dict[int, tuple[Any, ...]] = {}
    missing = wanted - built.keys()
    with translated(connection, "read the types"), connection.cursor(row_factory=tuple_row) as cursor:
        while missing:
            cursor.execute(_TYPES, [sorted(missing)])
            level = {int(row[0]): row for row in cursor.fetchall()}
            rows |= level
            missing = {part for row in level.values() for part in (row[4], row[5]) if part} - rows.keys() - built.keys()
    for oid in rows:
        _build_type(oid, rows, built)
    return {oid: built[oid] for oid in wanted if oid in built}


def load_attributes(connection: psycopg.Connection[Any], table_oid: int) -> list[Attribute]:
    """All columns of a table by attribute number, dropped ones included; empty if there is no such table."""
    return _load_attributes(connection, [table_oid]).get(table_oid, [])


def load_table(connection: psycopg.Connection[Any], table_oid: int) -> CatalogTable | None:
    """Return a table with its columns; None if it does not exist."""
    return load_tables(connection, [table_oid]).get(table_oid)


def load_tables(connection: psycopg.Connection[Any], table_oids: Iterable[int]) -> dict[int, CatalogTable]:
    """Tables with their columns, by schema and name; those that do not exist are left out."""
    wanted = sorted(set(table_oids))
    with translated(connection, "read the tables"), connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(_TABLE, [wanted]).fetchall()
        attributes = _load_attributes(connection, wanted)
        # A table without columns may have been dropped between the two statements.
        if empty := [row[0] for row in rows if row[0] not in attributes]:
            still = {row[0] for row in cursor.execute(_TABLE, [empty]).fetchall()}
            rows = [row for row in rows if row[0] in attributes or row[0] in still]
    roots = [row[0] for row in rows if row[3] == "p"]
    partitions = load_partitions(connection, roots) if roots else {}
    return {row[0]: _build_table(row, attributes.get(row[0], []), partitions.get(row[0])) for row in rows}


def schema_from_catalog(
    table: CatalogTable,
    types: Mapping[int, PostgresType],
    attnums: Sequence[int] | None = None,
    *,
    identity: RowIdentity | None = None,
) -> TableSchema:
    """A table as it is published now; `attnums` is the publication's column list, None for all but generated ones.

    `identity` is for a description that lacks the table's partitions.
    """
    if attnums is None:
        chosen = [attribute for attribute in table.live_attributes if not attribute.generated]
    else:
        chosen = [attribute for attribute in table.live_attributes if attribute.attnum in set(attnums)]
    sent = [attribute.attnum for attribute in chosen]
    positions = sent_key(table.unique_key_attnums, sent)
    identity = identity or table.row_identity
    if not identity.attnums <= set(sent):
        identity = RowIdentity(identity.kind, frozenset())
    full = identity.kind is ReplicaIdentity.FULL
    return TableSchema(
        table_id=table.oid,
        namespace=table.namespace,
        name=table.name,
        columns=tuple(
            Column(
                name=attribute.name,
                attnum=attribute.attnum,
                type=types.get(attribute.type_oid) or unknown_type(attribute.type_oid),
                type_modifier=attribute.type_modifier,
                identity=full or attribute.attnum in identity.attnums,
                primary_key_position=positions.get(attribute.attnum),
                backfilled=attribute.backfilled,
                missing=attribute.missing,
            )
            for attribute in chosen
        ),
        replica_identity=identity.kind,
    )


def _load_attributes(connection: psycopg.Connection[Any], table_oids: Sequence[int]) -> dict[int, list[Attribute]]:
    found: dict[int, list[Attribute]] = {}
    with translated(connection, "read the columns"), connection.cursor(row_factory=tuple_row) as cursor:
        for table, *fields, missing in cursor.execute(_ATTRIBUTES, [list(table_oids)]).fetchall():
            found.setdefault(table, []).append(Attribute(*fields, missing=parse_missing(missing)))
    return found


def _build_table(row: tuple[Any, ...], attributes: Sequence[Attribute], partitions: Partitions | None) -> CatalogTable:
    oid, namespace, name, kind, persistence, identity, is_partition, parent, root, *indexes = row
    primary, immediate, chosen, primary_count, chosen_count = indexes
    replica_identity = ReplicaIdentity(identity)
    primary_attnums = tuple((primary or [])[: primary_count or 0])
    identity_attnums: tuple[int, ...] = ()
    if replica_identity is ReplicaIdentity.DEFAULT and immediate:
        # A deferrable primary key is not used as identity.
        identity_attnums = primary_attnums
    elif replica_identity is ReplicaIdentity.INDEX:
        identity_attnums = tuple((chosen or [])[: chosen_count or 0])
    return CatalogTable(
        oid=oid,
        namespace=namespace,
        name=name,
        kind=kind,
        persistence=persistence,
        replica_identity=replica_identity,
        identity_attnums=identity_attnums,
        primary_key_attnums=primary_attnums,
        is_partition=is_partition,
        partition_parent_oid=parent or None,
        partition_root_oid=root or None,
        attributes=tuple(attributes),
        deferrable_key=bool(primary) and not immediate,
        partitions=partitions,
    )


def _build_type(oid: int, rows: Mapping[int, tuple[Any, ...]], built: dict[int, PostgresType]) -> PostgresType:
    if oid in built:
        return built[oid]
    row = rows.get(oid)
    if row is None:
        return unknown_type(oid)
    _oid, name, namespace, kind, element, base, modifier, delimiter = row
    built[oid] = PostgresType(
        oid=oid,
        name=name,
        namespace=namespace,
        kind=TypeKind.ARRAY if element else _KINDS.get(kind, TypeKind.BASE),
        element=_build_type(element, rows, built) if element else None,
        base=_build_type(base, rows, built) if base else None,
        base_modifier=modifier if base else -1,
        delimiter=delimiter,
    )
    return built[oid]


# A partitioned table has no heap of its own: its leaves count. `pg_partition_tree` knows nothing of ordinary tables.
_SIZES = """
    select wanted.oid::int8,
           sum(pg_catalog.pg_table_size(c.oid))::int8,
           case when bool_and(c.reltuples >= 0) then sum(c.reltuples)::int8 end
    from unnest(%s::pg_catalog.oid[]) wanted (oid)
    cross join lateral (
        select wanted.oid as leaf
        where not exists (select from pg_catalog.pg_partitioned_table p where p.partrelid = wanted.oid)
        union
        select t.relid::pg_catalog.oid from pg_catalog.pg_partition_tree(wanted.oid) t where t.isleaf
    ) leaves
    join pg_catalog.pg_class c on c.oid = leaves.leaf
    group by wanted.oid
"""

# From the catalog alone: asking for a file's size waits for DDL on its table.
_PAGES = """
    with recursive tree as (
        select wanted.oid as table_id, wanted.oid from unnest(%s::pg_catalog.oid[]) wanted (oid)
        union all
        select t.table_id, i.inhrelid
        from tree t
        join pg_catalog.pg_inherits i on i.inhparent = t.oid
        join pg_catalog.pg_class parent on parent.oid = t.oid and parent.relkind = 'p'
    )
    select t.table_id::int8, sum(greatest(c.relpages, 0) + coalesce(greatest(toast.relpages, 0), 0))::int8
    from tree t
    join pg_catalog.pg_class c on c.oid = t.oid
    left join pg_catalog.pg_class toast on toast.oid = c.reltoastrelid
    where c.relkind <> 'p'
    group by t.table_id
"""


@dataclass(frozen=True, slots=True)
class TableSize:
    """The size of a table, all its partitions included."""

    bytes: int
    """With TOAST, without indexes."""
    rows: int | None
    """None if it was never analyzed."""


def load_sizes(connection: psycopg.Connection[Any], table_ids: Sequence[int]) -> dict[int, TableSize]:
    """The sizes of those tables that exist; one without any partition is not among them."""
    with translated(connection, "read the sizes of tables"), connection.cursor(row_factory=tuple_row) as cursor:
        return {
            table_id: TableSize(size or 0, rows)
            for table_id, size, rows in cursor.execute(_SIZES, [list(table_ids)]).fetchall()
        }


def sort_by_size(connection: psycopg.Connection[Any], table_ids: Sequence[int]) -> list[int]:
    """Small tables first, as of the last time that the server looked; those that it knows nothing of come before.

    Waits for no lock, unlike `load_sizes`.
    """
    with translated(connection, "read the sizes of tables"), connection.cursor(row_factory=tuple_row) as cursor:
        pages: dict[int, int] = dict(cursor.execute(_PAGES, [list(table_ids)]).fetchall())
    return sorted(table_ids, key=lambda table_id: pages.get(table_id, 0))
