"""The bounds of partitions, as conditions that a destination can apply to its own rows.

Only bounds that compare exactly at any destination count: LIST and RANGE over plain columns of integers, dates and
timestamps, LIST also over texts and UUIDs, where no setting changes their values. A leaf below a hash or an
expression, or a DEFAULT partition, has no bounds here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import tuple_row

from penstock.schema import Column, TableSchema
from penstock.schema.types import resolve_domain
from penstock.source.faults import translated
from penstock.values import TypeSettings, codec_for, merging_setting

_TREE = """
    with recursive tree (id, parent) as (
        select %(table)s::oid, null::oid
        union all
        select i.inhrelid, tree.id
        from tree
        join pg_catalog.pg_class p on p.oid = tree.id and p.relkind = 'p'
        join pg_catalog.pg_inherits i on i.inhparent = tree.id
        where pg_catalog.to_jsonb(i) ->> 'inhdetachpending' is distinct from 'true'
    )
    select tree.id::int8, tree.parent::int8, c.relkind::text, pg_catalog.pg_get_expr(c.relpartbound, c.oid),
        k.partstrat::text, (
            select pg_catalog.array_agg(a.attname::text order by part.number)
            from pg_catalog.unnest(k.partattrs::int2[]) with ordinality part (attnum, number)
            join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = part.attnum
            having pg_catalog.bool_and(part.attnum <> 0)
        ),
        (
            select pg_catalog.bool_and(o.opcdefault)
            from pg_catalog.unnest(k.partclass::oid[]) part (id) join pg_catalog.pg_opclass o on o.oid = part.id
        ) and not exists (
            select from pg_catalog.unnest(k.partcollation::oid[]) part (id)
            join pg_catalog.pg_collation l on l.oid = part.id
            where pg_catalog.to_jsonb(l) ->> 'collisdeterministic' = 'false'
        ),
        pg_catalog.cardinality(k.partattrs::int2[])
    from tree
    join pg_catalog.pg_class c on c.oid = tree.id
    left join pg_catalog.pg_partitioned_table k on k.partrelid = c.oid
"""
_ORDERED = frozenset({"int2", "int4", "int8", "date", "timestamp", "timestamptz"})
_EQUAL = _ORDERED | {"text", "varchar", "uuid"}
_RANGE = re.compile(r"FOR VALUES FROM \((.*)\) TO \((.*)\)", re.DOTALL)
_LIST = re.compile(r"FOR VALUES IN \((.*)\)", re.DOTALL)
_VALUE = re.compile(r"\s*(?:'((?:[^']|'')*)'|([A-Za-z0-9_.+-]+))\s*(?:,|$)", re.DOTALL)


class Edge(Enum):
    """A bound that is not a value."""

    LOWEST = "MINVALUE"
    HIGHEST = "MAXVALUE"


class InRange(NamedTuple):
    """`low <= (columns) < high`, compared from left to right; no column is NULL."""

    columns: tuple[str, ...]
    low: tuple[str | Edge, ...]
    """Texts of values, as the server prints them."""
    high: tuple[str | Edge, ...]


class InList(NamedTuple):
    """The column has one of the values, or is NULL if that is in the list."""

    column: str
    values: tuple[str, ...]
    with_null: bool


Bounds = tuple[InRange | InList, ...]
"""All of them hold, one for each level above the leaf; by the names of the table's columns."""


@dataclass(frozen=True, slots=True)
class _Node:
    parent: int | None
    kind: str
    bound: str | None
    strategy: str | None
    columns: tuple[str, ...] | None
    """The columns of the key of its partitions; None if some are expressions."""


def load_bounds(connection: psycopg.Connection[Any], schema: TableSchema, settings: TypeSettings) -> dict[int, Bounds]:
    """Return the bounds of a table's leaves, by oid; leaves whose bounds cannot be applied elsewhere are left out.

    So are those of columns whose values a setting changes: a row would be outside of its own partition.
    """
    nodes: dict[int, _Node] = {}
    doing = f"read the bounds of the partitions of {schema}"
    with translated(connection, doing), connection.cursor(row_factory=tuple_row) as cursor:
        rows = cursor.execute(_TREE, {"table": schema.table_id}).fetchall()
    for oid, parent, kind, bound, strategy, names, is_plain, count in rows:
        columns = tuple(names) if names is not None and is_plain and len(names) == count else None
        nodes[oid] = _Node(parent, kind, bound, strategy, columns)
    types = {column.name: resolve_domain(column.type, column.type_modifier)[0] for column in schema.columns}
    exact = {column.name for column in schema.columns if _is_exact(column, settings.of(str(schema), column.name))}
    kinds = {name: type_.name for name, type_ in types.items() if type_.is_builtin and name in exact}
    found: dict[int, Bounds] = {}
    for oid, node in nodes.items():
        if node.kind == "r" and node.parent is not None:
            levels = list(_levels(oid, nodes, kinds))
            if None not in levels:
                found[oid] = tuple(level for level in levels if level is not None)
    return found


def parse_bound(strategy: str | None, columns: Sequence[str] | None, text: str | None) -> InRange | InList | None:
    """Parse what `pg_get_expr` prints of a bound; None if it is DEFAULT, a hash, or not understood."""
    if not columns or text is None:
        return None
    if strategy == "r" and (match := _RANGE.fullmatch(text)):
        low, high = (_parse_values(part) for part in match.groups())
        if low is None or high is None or not len(low) == len(high) == len(columns) or None in (*low, *high):
            return None
        edges = [tuple(each for each in part if each is not None) for part in (low, high)]
        return InRange(tuple(columns), edges[0], edges[1])
    if strategy == "l" and len(columns) == 1 and (match := _LIST.fullmatch(text)):
        values = _parse_values(match[1])
        if values is None or any(isinstance(value, Edge) for value in values):
            return None
        return InList(columns[0], tuple(value for value in values if isinstance(value, str)), None in values)
    return None


def _is_exact(column: Column, settings: TypeSettings) -> bool:
    """True if the settings leave every value of a column as it is, and of the type that it has without them."""
    type_, modifier = column.type, column.type_modifier
    chosen, usual = (codec_for(type_, modifier, each).arrow_type for each in (settings, TypeSettings()))
    return chosen == usual and merging_setting(type_, modifier, settings) is None


def _levels(oid: int, nodes: Mapping[int, _Node], kinds: Mapping[str, str]) -> Iterator[InRange | InList | None]:
    node = nodes[oid]
    while node.parent is not None:
        parent = nodes[node.parent]
        bound = parse_bound(parent.strategy, parent.columns, node.bound)
        names = parent.columns or ()
        allowed = _ORDERED if isinstance(bound, InRange) else _EQUAL
        yield bound if all(kinds.get(name) in allowed for name in names) else None
        node = parent


def _parse_values(text: str) -> list[str | Edge | None] | None:
    """Return the values of a list of constants: texts, edges, None for NULL. None if it has anything else."""
    values: list[str | Edge | None] = []
    at = 0
    while at < len(text):
        match = _VALUE.match(text, at)
        if match is None:
            return None
        quoted, bare = match.groups()
        if quoted is not None:
            values.append(quoted.replace("''", "'"))
        elif bare == "NULL":
            values.append(None)
        elif bare in (Edge.LOWEST.value, Edge.HIGHEST.value):
            values.append(Edge(bare))
        else:
            values.append(bare)
        at = match.end()
    return values
