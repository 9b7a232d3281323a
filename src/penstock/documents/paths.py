"""The places of each table in an index, and the paths from its rows up to the documents that show them.

A table can have several places in an index: as the root, as the target of a relation, as a junction, and again deeper
down. Each place is an `Entry`: the columns that link a row to the level above (`columns`), and the path up.

Following these paths in the *current* state of the database, from the values that the columns have now *and* from those
they had before, finds every document that has changed. Take a document that showed a changed row, and the chain of rows
between the two as it was. If the chain is still whole, the row's old values lead up to the document. If it is broken,
take the break nearest to the document: a row there has changed too, above it the chain is whole, and so that row's own
old values lead up. Documents that show a row now are found from its new values in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from psycopg import sql

from penstock.documents.catalog import SourceCatalog, SourceColumn
from penstock.documents.expressions import (
    Sql,
    canonical,
    column,
    conjunction,
    equal_columns,
    from_table,
    values_source,
)
from penstock.source.patterns import TableName
from penstock.specification.tree import Aggregate, Field, Group, IndexSpecification, Join, Relation


@dataclass(frozen=True, slots=True)
class Entry:
    """A place of a table in an index."""

    table: TableName
    columns: tuple[str, ...]
    """Their values lead up: they equal columns one level above. For the root, they are the document's key."""
    relations: tuple[Relation, ...] = ()
    """From the root down to this place; empty for the root itself."""
    is_junction: bool = False
    """The table is the junction of the last relation, not its target."""

    @property
    def path(self) -> str:
        """Identifies the path up, whatever else the specification has and in whatever order."""
        return hashlib.sha256(repr(_way_up(self)).encode()).hexdigest()[:16]


def entries_of(specification: IndexSpecification) -> list[Entry]:
    """Return every place of every table of a complete specification; places with the same path up count once."""
    found = [Entry(specification.table, specification.doc_id)]
    for relations in _chains(specification.fields, ()):
        last = relations[-1]
        if last.junction is not None:
            found.append(Entry(last.junction.table, last.junction.left_key, relations, is_junction=True))
        found.append(Entry(last.table, last.columns, relations))
    return list({_way_up(each): each for each in found}.values())


def link_columns(entries: Iterable[Entry], table: TableName) -> tuple[str, ...]:
    """Return all columns of a table whose old values are needed, sorted."""
    return tuple(sorted({name for entry in entries if entry.table == table for name in entry.columns}))


def way_up(entry: Entry, specification: IndexSpecification, catalog: SourceCatalog, parameter: int) -> Sql:
    """Return the SQL from values of an entry's columns to the keys of documents.

    It takes one array of texts per column, as parameters from `$parameter` on, and returns the canonical texts of the
    keys as `k0`, `k1`, …. For the root it does not check that the row exists: it may have been deleted.
    """
    key = catalog.table(specification.table).select(specification.doc_id)
    values = catalog.table(entry.table).select(entry.columns)
    source = values_source("s", values, parameter)
    if not entry.relations:
        named = [column("s", f"v{number}") for number in range(len(key))]
        return sql.SQL("select {} from {}").format(_keys(named, key), source)
    joins, top = _joins_up(entry, specification, catalog)
    named = [column(top, each.name) for each in key]
    return sql.SQL("select {} from {} {} where {}").format(
        _keys(named, key),
        source,
        sql.SQL(" ").join(joins),
        conjunction([sql.SQL("{} is not null").format(each) for each in named]),
    )


def _joins_up(entry: Entry, specification: IndexSpecification, catalog: SourceCatalog) -> tuple[list[Sql], str]:
    """Join every level above to the one below; return the joins and the root's alias."""
    levels = [specification.table, *(relation.table for relation in entry.relations)]
    below = "s"
    below_columns = [
        SourceColumn(f"v{number}", each.type, each.not_null)
        for number, each in enumerate(catalog.table(entry.table).select(entry.columns))
    ]
    joins: list[Sql] = []
    for depth in range(len(entry.relations) - 1, -1, -1):
        relation = entry.relations[depth]
        at_junction = entry.is_junction and depth == len(entry.relations) - 1
        if relation.junction is not None and not at_junction:
            junction = catalog.table(relation.junction.table)
            alias = f"j{depth}"
            right = equal_columns(alias, junction.select(relation.junction.right_key), below, below_columns)
            joins.append(sql.SQL("join {} on {}").format(from_table(junction, alias), right))
            below, below_columns = alias, junction.select(relation.junction.left_key)
        table = catalog.table(levels[depth])
        alias = f"t{depth}"
        link = equal_columns(alias, table.select(relation.parent_columns), below, below_columns)
        joins.append(sql.SQL("join {} on {}").format(from_table(table, alias), link))
        if depth:
            below, below_columns = alias, table.select(entry.relations[depth - 1].columns)
    return joins, "t0"


def _keys(values: Sequence[Sql], key: Sequence[SourceColumn]) -> Sql:
    return sql.SQL(", ").join(
        sql.SQL("{} as {}").format(canonical(value, each), sql.Identifier(f"k{number}"))
        for number, (value, each) in enumerate(zip(values, key, strict=True))
    )


def _chains(fields: tuple[Field, ...], above: tuple[Relation, ...]) -> Iterator[tuple[Relation, ...]]:
    for each in fields:
        if isinstance(each, Join | Aggregate):
            yield (*above, each.relation)
        if isinstance(each, Join):
            yield from _chains(each.fields, (*above, each.relation))
        elif isinstance(each, Group):
            yield from _chains(each.fields, above)


def _way_up(entry: Entry) -> tuple[object, ...]:
    """Return what identifies a path up: filters, order and limits do not matter."""
    links = tuple((each.table, each.parent_columns, each.columns, each.junction) for each in entry.relations)
    return entry.table, entry.columns, entry.is_junction, links
