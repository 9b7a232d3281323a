"""Finds all documents that changed rows affect, in batches, with a few statements whatever their number.

There are three steps. The old and new values of link columns are collected, column by column. For tables whose replica
identity omits them, the old ones are looked up in the relation map (`penstock.documents.relation_map`). Then one
statement per index follows every path from those values up to the documents' keys, in the current state of the
database; `penstock.documents.paths` explains why that is enough. It does not matter which columns a change touched, nor
whether the row passes a filter: a document that is built once too often costs time, one that is not built is wrong.

The result comes in pieces, since a single row can be part of a million documents.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.documents.catalog import SourceCatalog, SourceTable, complete
from penstock.documents.images import Cells, Changes, RowChanges, WantedColumns, distinct_tuples
from penstock.documents.paths import Entry, entries_of, link_columns, way_up
from penstock.documents.relation_map import RelationMap, TrackedRelation, canonical_links
from penstock.documents.statements import read_pieces
from penstock.errors import ConfigError
from penstock.source.patterns import TableName
from penstock.specification.tree import IndexSpecification

DEFAULT_CHUNK = 10_000


@dataclass(frozen=True, slots=True)
class ResolvedKeys:
    """Keys of an index's documents: one list of canonical texts per key column, without duplicates."""

    index: str
    keys: tuple[list[str], ...]

    @classmethod
    def of_rows(cls, index: str, rows: Sequence[Sequence[str]], width: int) -> ResolvedKeys:
        """Return keys that are given document by document; each has `width` columns."""
        return cls(index, tuple([row[place] for row in rows] for place in range(width)))

    def __len__(self) -> int:
        return len(self.keys[0])

    def part(self, first: int, stop: int | None = None) -> ResolvedKeys:
        """Return the keys from one place to another."""
        return ResolvedKeys(self.index, tuple(each[first:stop] for each in self.keys))


@dataclass(frozen=True, slots=True)
class Question:
    """A stored question: which documents of an index these values lead to. Another process can answer it."""

    index: str
    paths: tuple[str, ...]
    """Of the index's entries (`Entry.path`)."""
    values: tuple[list[str], ...]
    """One list of texts per column, entry by entry."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """The documents that a batch of changes affects."""

    documents: Iterator[ResolvedKeys]
    """The answers to all questions. Read it to the end before using the connection otherwise."""
    whole_indexes: frozenset[str]
    """Indexes with a truncated table: all their documents may be affected."""
    emptied_indexes: frozenset[str] = frozenset()
    """Those whose root table was truncated, with all its partitions: all its rows come with later changes."""
    outdated_indexes: frozenset[str] = frozenset()
    """Indexes whose affected documents cannot be found (`Changes.unreadable`)."""
    unidentified_indexes: frozenset[str] = frozenset()
    """Indexes whose documents of before cannot be found (`Changes.unidentified`)."""
    links: tuple[tuple[TrackedRelation, pa.Table], ...] = ()
    """For `Resolver.remember`, once the documents are durable."""
    cleared: tuple[TrackedRelation, ...] = ()
    """Relations whose table was truncated."""
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class _Index:
    specification: IndexSpecification
    entries: tuple[Entry, ...]


class Resolver:
    """Finds the documents of all indexes of an output that changes affect."""

    def __init__(
        self,
        specifications: Sequence[IndexSpecification],
        catalog: SourceCatalog,
        relation_map: RelationMap | None = None,
        *,
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        self._catalog = catalog
        self._map = relation_map
        self._chunk = chunk
        completed = [complete(each, catalog) for each in specifications]
        self._indexes = [_Index(each, tuple(entries_of(each))) for each in completed]
        self._texts: dict[tuple[str, tuple[str, ...]], str] = {}
        everything = [entry for index in self._indexes for entry in index.entries]
        self._links = {name: link_columns(everything, name) for name in {entry.table for entry in everything}}
        for name, links in self._links.items():
            _refuse_generated(catalog.table(name), links)
        self.tracked = _tracked_relations(everything, catalog)
        """The relations whose old values have to be kept."""
        self._tracked = {
            name: [each for each in self.tracked if each.name == name] for name in {each.name for each in self.tracked}
        }

    @property
    def wanted(self) -> dict[TableName, WantedColumns]:
        """The columns to read of each table's changes; partitions are listed under their own names, too."""
        found: dict[TableName, WantedColumns] = {}
        for name, links in self._links.items():
            table = self._catalog.table(name)
            key = self._tracked[name][0].key if name in self._tracked else ()
            columns = tuple(dict.fromkeys((*links, *key)))
            types = {each.name: each.type.oid for each in table.select(columns)}
            for oid, member in table.members.items():
                found[member] = WantedColumns(columns, table.identity_columns, oid, types)
        return found

    def resolve(
        self, connection: psycopg.Connection[Any], changes: Changes, scope: frozenset[str] | None = None
    ) -> Resolution:
        """Return the documents that these changes affect, of all indexes or of those in `scope`.

        The changes must be visible to `connection`, which reads the source.
        """
        known: dict[TableName, list[Mapping[str, Cells]]] = {}
        updates: list[tuple[TrackedRelation, pa.Table]] = []
        for name, rows in self._by_table(changes.rows):
            known[name] = [rows.old, rows.new]
            if name in self._tracked and not changes.is_snapshot:
                links = canonical_links(connection, self._tracked[name], rows)
                known[name].append(links.after())
                for relation in self._tracked[name]:
                    known[name].append(self._look_up(relation, links.old_keys()))
                    updates.append((relation, links.update_of(relation)))
        truncated = frozenset(self._catalog.top(each) for each in changes.truncated)
        indexes = [each for each in self._indexes if scope is None or each.specification.name in scope]
        affected = [each for each in indexes if any(entry.table in truncated for entry in each.entries)]
        questions = tuple(self._questions(indexes, known, roots_only=changes.is_snapshot))
        return Resolution(
            documents=(part for question in questions for part in self.answer(connection, question)),
            whole_indexes=frozenset(each.specification.name for each in affected),
            emptied_indexes=frozenset(
                each.specification.name
                for each in affected
                if changes.truncated.issuperset(self._catalog.table(each.specification.table).heap_names)
            ),
            outdated_indexes=self.indexes_over({self._catalog.top(each) for each in changes.unreadable}),
            unidentified_indexes=self.indexes_over({self._catalog.top(each) for each in changes.unidentified}),
            links=tuple(updates),
            # Not the table of a truncated partition: the other partitions still have their rows.
            cleared=tuple(each for each in self.tracked if each.name in changes.truncated),
            questions=questions,
        )

    def answer(self, connection: psycopg.Connection[Any], question: Question) -> Generator[ResolvedKeys, None, None]:
        """Yield the documents of a question, each once, in pieces, from the current state of the database.

        It may be answered later than its changes were resolved: a change that broke a path since then resolves its own
        documents, which are built with everything before it.
        """
        index = next(each for each in self._indexes if each.specification.name == question.index)
        text = self._texts.get((question.index, question.paths))
        if text is None:
            text = self._texts[question.index, question.paths] = self._compile(index, question.paths)
        doing = f"find the documents of {question.index!r} that changed"
        for rows in read_pieces(connection, text, question.values, self._chunk, doing):
            yield ResolvedKeys.of_rows(question.index, rows, len(rows[0]))

    def indexes_over(self, tables: Collection[TableName]) -> frozenset[str]:
        """Return the indexes that use one of these tables."""
        return frozenset(
            index.specification.name for index in self._indexes if any(entry.table in tables for entry in index.entries)
        )

    def indexes_using(self, relations: Collection[TrackedRelation]) -> frozenset[str]:
        """Return the indexes that need one of these relations to find their documents."""
        wanted = {(each.name, each.links) for each in relations}
        return frozenset(
            index.specification.name
            for index in self._indexes
            if any((entry.table, tuple(sorted(entry.columns))) in wanted for entry in index.entries)
        )

    def remember(self, resolution: Resolution) -> None:
        """Store the links after the changes. Call it when the documents are durable, before recording progress."""
        for relation in resolution.cleared:
            self._relations.clear(relation)
        for relation, update in resolution.links:
            self._relations.apply(relation, update)

    def _by_table(self, changes: Sequence[RowChanges]) -> Iterator[tuple[TableName, RowChanges]]:
        """Join the changes of each table; partitions go under the name of their table."""
        parts: dict[TableName, list[RowChanges]] = {}
        for rows in changes:
            name = self._catalog.top(rows.table)
            if name in self._links and len(rows):
                parts.setdefault(name, []).append(rows)
        for name, pieces in parts.items():
            yield name, RowChanges.joined(name, pieces)

    def _questions(
        self,
        indexes: Sequence[_Index],
        known: Mapping[TableName, Sequence[Mapping[str, Cells]]],
        *,
        roots_only: bool,
    ) -> Iterator[Question]:
        for index in indexes:
            values: list[list[str]] = []
            paths: list[str] = []
            for entry in index.entries:
                if roots_only and entry.relations:
                    continue
                tuples = _start_values(entry, known.get(entry.table, ()))
                if tuples[0]:
                    paths.append(entry.path)
                    values += tuples
            if paths:
                yield Question(index.specification.name, tuple(paths), tuple(values))

    def _compile(self, index: _Index, chosen: tuple[str, ...]) -> str:
        parameter = 1
        ways: list[sql.Composable] = []
        entries = {entry.path: entry for entry in index.entries}
        for path in chosen:
            entry = entries[path]
            ways.append(way_up(entry, index.specification, self._catalog, parameter))
            parameter += len(entry.columns)
        # A single path can lead to the same document several times.
        return sql.SQL("select distinct * from ({}) d").format(sql.SQL(" union all ").join(ways)).as_string(None)

    def _look_up(self, relation: TrackedRelation, keys: list[str]) -> dict[str, Cells]:
        """Return the old links of rows from their relation map."""
        found = self._relations.lookup(relation, keys) if keys else []
        return Cells.of_rows(relation.links, found)

    @property
    def _relations(self) -> RelationMap:
        if self._map is None:
            names = ", ".join(sorted(str(each.name) for each in self.tracked))
            raise ConfigError(
                f"deleted and moved rows cannot be followed without a relation map: {names}",
                hint="Pass one to the resolver, or set replica identity full so that the server sends old values.",
            )
        return self._map


def _start_values(entry: Entry, known: Sequence[Mapping[str, Cells]]) -> list[list[str]]:
    """Return the values of an entry's columns in all images of rows that have these columns."""
    images = [[image[name] for name in entry.columns] for image in known if image.keys() >= set(entry.columns)]
    return distinct_tuples(images, len(entry.columns))


def _refuse_generated(table: SourceTable, links: tuple[str, ...]) -> None:
    for each in table.select(links):
        if each.generated:
            raise ConfigError(
                f"{table.name}.{each.name} is generated, so the server does not send it",
                hint="Connect the tables by the columns from which it is computed.",
            )


def _tracked_relations(entries: Sequence[Entry], catalog: SourceCatalog) -> tuple[TrackedRelation, ...]:
    wanted = dict.fromkeys((entry.table, tuple(sorted(entry.columns))) for entry in entries)
    return tuple(
        _track(catalog.table(name), links)
        for name, links in sorted(wanted)
        if not catalog.table(name).identity_columns.issuperset(links)
    )


def _track(table: SourceTable, links: tuple[str, ...]) -> TrackedRelation:
    key = tuple(name for name in table.columns if name in table.identity_columns)
    if not key:
        raise ConfigError(
            f"{table.name} has no replica identity, so its deletes cannot be followed",
            hint=f"Give it a primary key, or run: alter table {table.name} replica identity full;",
        )
    return TrackedRelation(table, key, links)
