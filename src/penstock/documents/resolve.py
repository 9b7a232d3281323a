"""From changed rows to the documents that they change: complete, in batches, a few statements whatever their number.

Three steps. The old and new values of link columns are collected, column by column. For tables whose replica identity
does not send them, the old ones are looked up in the map of relations (`penstock.documents.relation_map`). Then one
statement per index follows every way from those values up to the documents' keys, in the database as it is now;
`penstock.documents.paths` says why that is enough. Which columns a change touched does not matter, nor whether the row
passes a filter: a document that is built once too often is only work, one that is not built is wrong.

The result comes in pieces, since a single row can be part of a million documents.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.documents.canonical_links import canonical_links
from penstock.documents.catalog import SourceCatalog, SourceTable, complete
from penstock.documents.images import Cells, Changes, RowChanges, WantedColumns, distinct_tuples
from penstock.documents.paths import Entry, entries_of, link_columns, way_up
from penstock.documents.relation_map import RelationMap, TrackedRelation
from penstock.documents.specification import IndexSpecification
from penstock.documents.statements import as_literal, without_values
from penstock.errors import ConfigError
from penstock.source.faults import translated
from penstock.source.patterns import TableName

DEFAULT_CHUNK = 10_000


@dataclass(frozen=True, slots=True)
class ResolvedKeys:
    """Some documents of an index: one array of canonical texts per key column, without duplicates."""

    index: str
    keys: tuple[list[str], ...]

    def __len__(self) -> int:
        return len(self.keys[0])


@dataclass(frozen=True, slots=True)
class Question:
    """Which documents of an index do these values lead to? Plain values: it can be asked again in another process."""

    index: str
    ways: tuple[int, ...]
    """Numbers of the index's entries."""
    values: tuple[list[str], ...]
    """One array of texts per column, of one entry after the other."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a batch of changes concerns."""

    documents: Iterator[ResolvedKeys]
    """The answers to all questions. Read it to the end before the connection is used for something else."""
    whole_indexes: frozenset[str]
    """A table of theirs was emptied: all their documents may be concerned."""
    links: tuple[tuple[TrackedRelation, pa.Table], ...] = ()
    """To be handed to `Resolver.remember` when the documents are durable, and not before."""
    cleared: tuple[TrackedRelation, ...] = ()
    """Relations of which nothing is left."""
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class _Index:
    specification: IndexSpecification
    entries: tuple[Entry, ...]


class Resolver:
    """Knows all indexes of a pipeline, and which rows their documents are made of."""

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
        self._texts: dict[tuple[str, tuple[int, ...]], str] = {}
        everything = [entry for index in self._indexes for entry in index.entries]
        self._links = {name: link_columns(everything, name) for name in {entry.table for entry in everything}}
        for name, links in self._links.items():
            _refuse_generated(catalog.table(name), links)
        self.tracked = _tracked_relations(everything, catalog)
        """The relations whose old values have to be remembered."""
        self._tracked = {
            name: [each for each in self.tracked if each.name == name] for name in {each.name for each in self.tracked}
        }

    @property
    def wanted(self) -> dict[TableName, WantedColumns]:
        """What has to be read of each table's changes; partitions are listed under their own names, too."""
        found: dict[TableName, WantedColumns] = {}
        for name, links in self._links.items():
            table = self._catalog.table(name)
            key = self._tracked[name][0].key if name in self._tracked else ()
            columns = WantedColumns(tuple(dict.fromkeys((*links, *key))), table.identity_columns)
            found |= dict.fromkeys((name, *table.leaves), columns)
        return found

    def resolve(
        self, connection: psycopg.Connection[Any], changes: Changes, scope: frozenset[str] | None = None
    ) -> Resolution:
        """The documents that these changes concern, of all indexes or of those in `scope`.

        `connection` reads the source and sees at least all that the changes did.
        """
        known: dict[TableName, list[RowChanges | _Links]] = {}
        updates: list[tuple[TrackedRelation, pa.Table]] = []
        for name, rows in self._by_table(changes.rows):
            known[name] = [rows]
            if name in self._tracked and not changes.is_snapshot:
                links = canonical_links(connection, self._tracked[name], rows)
                known[name].append(_Links(links.after()))
                for relation in self._tracked[name]:
                    known[name].append(self._look_up(relation, links.old_keys()))
                    updates.append((relation, links.update_of(relation)))
        truncated = frozenset(self._catalog.top(each) for each in changes.truncated)
        indexes = [each for each in self._indexes if scope is None or each.specification.name in scope]
        emptied = [each for each in indexes if any(entry.table in truncated for entry in each.entries)]
        questions = tuple(self._questions(indexes, known, roots_only=changes.is_snapshot))
        return Resolution(
            documents=(part for question in questions for part in self.answer(connection, question)),
            whole_indexes=frozenset(each.specification.name for each in emptied),
            links=tuple(updates),
            # Not the table of a partition that was emptied: the others have their rows still.
            cleared=tuple(each for each in self.tracked if each.name in changes.truncated),
            questions=questions,
        )

    def answer(self, connection: psycopg.Connection[Any], question: Question) -> Generator[ResolvedKeys, None, None]:
        """The documents that a question is about, each once, in pieces; from the database as it is now.

        It may be asked later than the changes that it comes from were resolved: what has broken a way since then is a
        change of its own, and whoever builds its documents builds them with all that was before.
        """
        index = next(each for each in self._indexes if each.specification.name == question.index)
        text = self._texts.get((question.index, question.ways))
        if text is None:
            text = self._texts[question.index, question.ways] = self._compile(index, question.ways)
        doing = f"find the documents of {question.index!r} that changed"
        with translated(connection, doing):
            try:
                with (
                    connection.transaction(),
                    psycopg.RawServerCursor(connection, "penstock_resolve", row_factory=tuple_row) as cursor,
                ):
                    cursor.execute(as_literal(text), question.values)
                    while rows := cursor.fetchmany(self._chunk):
                        yield ResolvedKeys(question.index, tuple(list(each) for each in zip(*rows, strict=True)))
            except psycopg.Error as error:
                raise without_values(error, connection, doing) from None

    def indexes_over(self, tables: Collection[TableName]) -> frozenset[str]:
        """The indexes with rows of one of these tables."""
        return frozenset(
            index.specification.name for index in self._indexes if any(entry.table in tables for entry in index.entries)
        )

    def indexes_using(self, relations: Collection[TrackedRelation]) -> frozenset[str]:
        """The indexes that need one of these relations to find their documents."""
        wanted = {(each.name, each.links) for each in relations}
        return frozenset(
            index.specification.name
            for index in self._indexes
            if any((entry.table, tuple(sorted(entry.columns))) in wanted for entry in index.entries)
        )

    def remember(self, resolution: Resolution) -> None:
        """Store the links as they are after the changes. Call it when the documents are durable, before progress is."""
        for relation in resolution.cleared:
            self._relations.clear(relation)
        for relation, update in resolution.links:
            self._relations.apply(relation, update)

    def _by_table(self, changes: Sequence[RowChanges]) -> Iterator[tuple[TableName, RowChanges]]:
        """The changes of each table as one piece, partitions under the name of their table."""
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
        known: Mapping[TableName, Sequence[RowChanges | _Links]],
        *,
        roots_only: bool,
    ) -> Iterator[Question]:
        for index in indexes:
            values: list[list[str]] = []
            ways: list[int] = []
            for number, entry in enumerate(index.entries):
                if roots_only and entry.relations:
                    continue
                tuples = _start_values(entry, known.get(entry.table, ()))
                if tuples[0]:
                    ways.append(number)
                    values += tuples
            if ways:
                yield Question(index.specification.name, tuple(ways), tuple(values))

    def _compile(self, index: _Index, chosen: tuple[int, ...]) -> str:
        parameter = 1
        ways: list[sql.Composable] = []
        for number in chosen:
            entry = index.entries[number]
            ways.append(way_up(entry, index.specification, self._catalog, parameter))
            parameter += len(entry.columns)
        # One way alone can lead to the same document several times.
        return sql.SQL("select distinct * from ({}) d").format(sql.SQL(" union all ").join(ways)).as_string(None)

    def _look_up(self, relation: TrackedRelation, keys: list[str]) -> _Links:
        found = self._relations.lookup(relation, keys) if keys else []
        columns = list(zip(*found, strict=True)) if found else [() for _ in relation.links]
        everything = np.ones(len(found), np.bool_)
        return _Links(
            {
                name: Cells(pa.array(values, pa.string()), everything)
                for name, values in zip(relation.links, columns, strict=True)
            }
        )

    @property
    def _relations(self) -> RelationMap:
        if self._map is None:
            names = ", ".join(sorted(str(each.name) for each in self.tracked))
            raise ConfigError(
                f"deletes and moves of rows cannot be followed without a map of relations: {names}",
                hint="Give the resolver one, or have the server send old values: replica identity full.",
            )
        return self._map


@dataclass(frozen=True, slots=True)
class _Links:
    """What rows hung on, as a map of relations has it, or hang on now."""

    links: Mapping[str, Cells]


def _start_values(entry: Entry, known: Sequence[RowChanges | _Links]) -> list[list[str]]:
    images: list[list[Cells]] = []
    for each in known:
        if isinstance(each, RowChanges):
            images += [[image[name] for name in entry.columns] for image in (each.old, each.new)]
        elif each.links.keys() >= set(entry.columns):
            images.append([each.links[name] for name in entry.columns])
    return distinct_tuples(images, len(entry.columns))


def _refuse_generated(table: SourceTable, links: tuple[str, ...]) -> None:
    for each in table.select(links):
        if each.generated:
            raise ConfigError(
                f"{table.name}.{each.name} is generated, and the server does not send it",
                hint="Connect the tables by the columns that it is made of.",
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
