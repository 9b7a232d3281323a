"""How large tables are, by the server's own statistics: quick to ask for, and never exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.source.faults import translated

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
    with translated(connection, "ask for the sizes of tables"), connection.cursor(row_factory=tuple_row) as cursor:
        return {
            table_id: TableSize(size or 0, rows)
            for table_id, size, rows in cursor.execute(_SIZES, [list(table_ids)]).fetchall()
        }


def sort_by_size(connection: psycopg.Connection[Any], table_ids: Sequence[int]) -> list[int]:
    """Small tables first, as of the last time that the server looked; those that it knows nothing of come before.

    Waits for no lock, unlike `load_sizes`.
    """
    with translated(connection, "ask for the sizes of tables"), connection.cursor(row_factory=tuple_row) as cursor:
        pages: dict[int, int] = dict(cursor.execute(_PAGES, [list(table_ids)]).fetchall())
    return sorted(table_ids, key=lambda table_id: pages.get(table_id, 0))
