"""Explains an index: its relations, how a change of each table finds its documents, and the statements and their plans.

The statements are those that run (`penstock.documents.paths`, `penstock.documents.build`). The server plans them as for
one changed row, and executes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.documents.build import compile_build
from penstock.documents.catalog import SourceCatalog, complete
from penstock.documents.checks import missing_indexes
from penstock.documents.paths import Entry, entries_of, way_up
from penstock.documents.statements import explain
from penstock.source.preflight import Check
from penstock.specification.tree import Aggregate, Field, Group, IndexSpecification, Join, Relation


@dataclass(frozen=True, slots=True)
class Branch:
    """A field whose value comes from rows of another table, with such fields below it."""

    field: str
    """Its name; those of the groups around it come first, with dots."""
    kind: str
    """`belongs_to`, `has_many` and so on, or the operation of an aggregate."""
    table: str
    condition: str
    """Which rows belong to the row above."""
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement and its plan."""

    query: str
    plan: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChangePath:
    """How a changed row of a table finds the documents that show it."""

    table: str
    columns: tuple[str, ...]
    """Their old and new values lead to the table above."""
    through: tuple[str, ...]
    """The tables on the way, ending with that of the documents; empty for that table itself."""
    in_relation_map: bool
    """True if the server does not send the old values, so that Penstock stores them."""
    statement: Statement


@dataclass(frozen=True, slots=True)
class Explanation:
    """What an index reads, and how it follows changes."""

    index: str
    table: str
    key: tuple[str, ...]
    branches: tuple[Branch, ...]
    paths: tuple[ChangePath, ...]
    build: Statement
    """Builds the documents with given keys."""
    findings: tuple[Check, ...]
    """Lookups without an index."""


def explain_index(
    connection: psycopg.Connection[Any], specification: IndexSpecification, catalog: SourceCatalog
) -> Explanation:
    """Explain an index; raises `ConfigError` for missing tables and columns."""
    completed = complete(specification, catalog)
    build = compile_build(completed, catalog)
    return Explanation(
        completed.name,
        str(completed.table),
        completed.doc_id,
        tuple(_branches(completed.fields)),
        tuple(_path(connection, entry, completed, catalog) for entry in entries_of(completed)),
        _planned(connection, build.text, len(build.key_columns)),
        tuple(missing_indexes(completed, catalog)),
    )


def _branches(fields: Sequence[Field], group: str = "") -> Iterator[Branch]:
    for each in fields:
        name = f"{group}{each.name}"
        if isinstance(each, Group):
            yield from _branches(each.fields, f"{name}.")
        elif isinstance(each, Join):
            below = tuple(_branches(each.fields))
            yield Branch(name, each.verb, str(each.relation.table), _condition(each.relation), below)
        elif isinstance(each, Aggregate):
            yield Branch(name, each.operation, str(each.relation.table), _condition(each.relation))


def _condition(relation: Relation) -> str:
    parent, own = _listed(relation.parent_columns), _listed(relation.columns)
    if relation.junction is None:
        return f"{own} = {parent} above"
    junction = relation.junction
    return (
        f"{own} = {_listed(junction.right_key)} of {junction.table} where {_listed(junction.left_key)} = {parent} above"
    )


def _path(
    connection: psycopg.Connection[Any], entry: Entry, specification: IndexSpecification, catalog: SourceCatalog
) -> ChangePath:
    text = way_up(entry, specification, catalog, 1).as_string(None)
    return ChangePath(
        str(entry.table),
        entry.columns,
        tuple(str(each) for each in _tables_above(entry, specification)),
        not catalog.table(entry.table).identity_columns.issuperset(entry.columns),
        _planned(connection, text, len(entry.columns)),
    )


def _tables_above(entry: Entry, specification: IndexSpecification) -> Iterator[object]:
    tables = [specification.table, *(relation.table for relation in entry.relations)]
    for depth in range(len(entry.relations) - 1, -1, -1):
        junction = entry.relations[depth].junction
        if junction is not None and not (entry.is_junction and depth == len(entry.relations) - 1):
            yield junction.table
        yield tables[depth]


def _planned(connection: psycopg.Connection[Any], query: str, parameters: int) -> Statement:
    return Statement(query, explain(connection, query, parameters, "explain the index"))


def _listed(columns: Sequence[str]) -> str:
    return columns[0] if len(columns) == 1 else f"({', '.join(columns)})"
