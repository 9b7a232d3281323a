"""The shape of a table: the parts of the catalog that reveal changed rows that the stream does not mention.

The stream carries rows and, before a row, the columns of its table. It is silent when rows come or go with a partition,
when a partition is truncated by itself, when ALTER TABLE computes a column again, and when a label of an enum gets
another name. `load_shapes` reads the catalog and takes no lock on any table; `silent_changes` compares two readings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from penstock.source.faults import translated

# A table that was created as a partition has had no rows that were not sent. ATTACH updates all its attributes, so one
# that is as it was created tells.
_HEAPS = """
    with recursive tree (root, id, links) as (
        select t, t, '' from pg_catalog.unnest(%(tables)s::oid[]) t
        union all
        select tree.root, i.inhrelid, tree.links || ' ' || i.xmin::text
        from tree
        join pg_catalog.pg_class p on p.oid = tree.id and p.relkind = 'p'
        join pg_catalog.pg_inherits i on i.inhparent = tree.id
        where pg_catalog.to_jsonb(i) ->> 'inhdetachpending' is distinct from 'true'
    )
    select tree.root::int8, c.oid::int8, c.relfilenode::int8, tree.links, n.nspname || '.' || c.relname,
           case when pg_catalog.current_setting('server_version_num')::int < 140000
                then c.reltuples > 0 else c.reltuples >= 0 end,
           c.oid = tree.root or exists (
               select from pg_catalog.pg_type y join pg_catalog.pg_attribute a on a.attrelid = c.oid
               where y.oid = c.reltype and a.attnum > 0 and a.xmin = y.xmin and a.cmin = y.cmin
           )
    from tree
    join pg_catalog.pg_class c on c.oid = tree.id and c.relkind = 'r'
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
"""
_COLUMNS = """
    select a.attrelid::int8, a.attnum, a.attname, a.xmin::text
    from pg_catalog.pg_attribute a
    where a.attrelid = any(%(tables)s::oid[]) and a.attnum > 0 and not a.attisdropped
"""
_FIRST_OWN_OID = 16384
"""Types below it are the server's own, and never change."""
_PARTS_OF_TYPES = f"""
    with recursive used (root, id) as (
        select a.attrelid, a.atttypid from pg_catalog.pg_attribute a
        where a.attrelid = any(%(tables)s::oid[]) and a.attnum > 0 and not a.attisdropped
          and a.atttypid >= {_FIRST_OWN_OID}
        union
        select used.root, part.id
        from used
        join pg_catalog.pg_type t on t.oid = used.id
        cross join lateral (
            select t.typelem where t.typelem <> 0
            union all select t.typbasetype where t.typbasetype <> 0
            union all select r.rngsubtype from pg_catalog.pg_range r where t.oid in (r.rngtypid, r.rngmultitypid)
            union all select a.atttypid from pg_catalog.pg_attribute a
                where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
        ) part (id)
        where part.id >= {_FIRST_OWN_OID}
    )
    select used.root::int8, t.oid::int8, t.typname, 'label ' || e.oid::text, e.enumlabel
    from used
    join pg_catalog.pg_type t on t.oid = used.id
    join pg_catalog.pg_enum e on e.enumtypid = used.id
    union all
    select used.root::int8, t.oid::int8, t.typname, 'attributes',
           pg_catalog.string_agg(a.attnum::text || ' ' || a.atttypid::text, ',' order by a.attnum)
    from used
    join pg_catalog.pg_type t on t.oid = used.id and t.typtype = 'c'
    join pg_catalog.pg_attribute a on a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
    group by used.root, t.oid, t.typname
"""  # noqa: S608 (a constant)


class Heap(NamedTuple):
    """A relation that stores rows of the table: the table itself, or a leaf."""

    filenode: int
    """Another one after TRUNCATE, VACUUM FULL, CLUSTER and any ALTER TABLE that rewrites all rows."""
    links: str
    """The versions of the catalog rows that make it a partition: other ones if it was detached and attached again."""
    name: str
    counted: bool
    """The server has counted its rows: false after TRUNCATE, true after VACUUM FULL and CLUSTER."""
    born: bool
    """It was created as what it is; false of a leaf that was attached later."""


class ColumnVersion(NamedTuple):
    """A column's row in the catalog."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class TableShape:
    """One table at one moment."""

    heaps: Mapping[int, Heap]
    """By oid; of a partitioned table its leaves, of any other the table itself."""
    columns: Mapping[int, ColumnVersion]
    """By attribute number."""
    types: Mapping[str, str] = field(default_factory=dict[str, str])
    """The parts of types that the database defines: labels of enums, attributes of composites."""
    is_partitioned: bool = False


def load_shapes(connection: psycopg.Connection[Any], tables: Collection[int]) -> dict[int, TableShape]:
    """The shapes of tables, by oid; those that are gone are left out."""
    parameters = {"tables": list(tables)}
    heaps: dict[int, dict[int, Heap]] = {table: {} for table in tables}
    columns: dict[int, dict[int, ColumnVersion]] = {}
    types: dict[int, dict[str, str]] = {}
    with translated(connection, "inspect the tables"), connection.cursor(row_factory=tuple_row) as cursor:
        # One statement per look, so one snapshot each: a difference between them is seen again by the next look.
        for table, oid, *found in cursor.execute(_HEAPS, parameters):
            heaps[table][oid] = Heap(*found)
        for table, attnum, *found in cursor.execute(_COLUMNS, parameters):
            columns.setdefault(table, {})[attnum] = ColumnVersion(*found)
        for table, type_id, name, part, content in cursor.execute(_PARTS_OF_TYPES.encode(), parameters):
            types.setdefault(table, {})[f"{name} {type_id} {part}"] = content
    return {
        table: TableShape(heaps[table], columns.get(table, {}), types.get(table, {}), table not in heaps[table])
        for table in tables
        if heaps[table] or table in columns
    }


def shape_to_json(shape: TableShape) -> dict[str, Any]:
    """The shape as plain dictionaries and lists."""
    return {
        "heaps": {str(oid): list(heap) for oid, heap in shape.heaps.items()},
        "columns": {str(attnum): list(column) for attnum, column in shape.columns.items()},
        "types": dict(shape.types),
        "partitioned": shape.is_partitioned,
    }


def shape_from_json(record: Mapping[str, Any]) -> TableShape:
    """Read what `shape_to_json` returned."""
    return TableShape(
        {int(oid): Heap(*heap) for oid, heap in record["heaps"].items()},
        {int(attnum): ColumnVersion(*column) for attnum, column in record["columns"].items()},
        record["types"],
        record["partitioned"],
    )


class SilentChange(NamedTuple):
    """A difference between two moments that the stream does not carry."""

    text: str
    """What happened, after the table's name."""
    leaves: bool = False
    """Rows left the table with their partition, and nothing else happened to it."""


def silent_changes(before: TableShape, now: TableShape) -> list[SilentChange]:
    """Why the rows may differ from what the stream said between two moments; empty if they cannot.

    In doubt there is a reason. Two things cannot be noticed: a partition that was truncated and analyzed in between,
    and one that was created and dropped in between.
    """
    return [*_changed_partitions(before, now), *_changed_values(before, now)]


def _rewritten(before: TableShape, now: TableShape) -> list[Heap]:
    return [
        heap for oid, heap in now.heaps.items() if oid in before.heaps and heap.filenode != before.heaps[oid].filenode
    ]


def _changed_partitions(before: TableShape, now: TableShape) -> Iterator[SilentChange]:
    for oid, heap in before.heaps.items():
        if oid not in now.heaps:
            yield SilentChange(f"partition {heap.name} was detached or dropped", leaves=True)
    for oid, heap in now.heaps.items():
        earlier = before.heaps.get(oid)
        if not heap.born if earlier is None else heap.links != earlier.links:
            yield SilentChange(f"partition {heap.name} was attached")
        # A new relation has its oid as the number of its file.
        elif now.is_partitioned and not heap.counted and heap.filenode != (earlier.filenode if earlier else oid):
            yield SilentChange(f"partition {heap.name} was truncated", leaves=True)


def _changed_values(before: TableShape, now: TableShape) -> Iterator[SilentChange]:
    for attnum, column in now.columns.items() if _rewritten(before, now) else ():
        earlier = before.columns.get(attnum)
        if earlier is None:
            yield SilentChange(f"column {column.name!r} was added and all rows were rewritten")
        elif column.version != earlier.version:
            # Or VACUUM FULL has stored the default of an added column in the rows; the catalog looks the same then.
            yield SilentChange(f"column {column.name!r} was altered and all rows were rewritten")
    for part, content in before.types.items():
        if now.types.get(part, content) != content:
            yield SilentChange(f"type {part.split(' ')[0]!r} was altered")
