"""From changed rows to the documents that they change: complete, in batches, a few statements whatever their number.

Three steps. The old and new values of link columns are collected, column by column. For tables whose replica identity
does not send them, the old ones are looked up in the map of relations (`penstock.documents.relation_map`). Then one
statement per index follows every way from those values up to the documents' keys, in the database as it is now;
`penstock.documents.paths` says why that is enough. Which columns a change touched does not matter, nor whether the row
passes a filter: a document that is built once too often is only work, one that is not built is wrong.

The result comes in pieces, since a single row can be part of a million documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.documents.catalog import SourceCatalog, SourceTable, complete
from penstock.documents.expressions import canonical, column, document_id, equal_columns, from_table, values_source
from penstock.documents.images import Cells, Changes, RowChanges, WantedColumns, distinct_tuples
from penstock.documents.paths import Entry, entries_of, link_columns, way_up
from penstock.documents.relation_map import RelationMap, TrackedTable, link_names, link_update_schema
from penstock.documents.specification import IndexSpecification
from penstock.documents.statements import as_literal, run_statement, without_values
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
class Resolution:
    """What a batch of changes concerns."""

    documents: Iterator[ResolvedKeys]
    """Read it to the end before the connection is used for something else."""
    whole_indexes: frozenset[str]
    """A table of theirs was emptied: all their documents may be concerned."""
    links: Mapping[TableName, pa.Table] = field(default_factory=dict[TableName, pa.Table])
    """To be handed to `Resolver.remember` when the documents are durable, and not before."""
    cleared: frozenset[TableName] = frozenset()


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
        self.tracked = {
            name: _track(catalog.table(name), links)
            for name, links in self._links.items()
            if not catalog.table(name).identity_columns.issuperset(links)
        }
        """The tables whose links have to be remembered."""

    @property
    def wanted(self) -> dict[TableName, WantedColumns]:
        """What has to be read of each table's changes; partitions are listed under their own names, too."""
        found: dict[TableName, WantedColumns] = {}
        for name, links in self._links.items():
            table = self._catalog.table(name)
            key = self.tracked[name].key if name in self.tracked else ()
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
        updates: dict[TableName, pa.Table] = {}
        for name, rows in self._by_table(changes.rows):
            known[name] = [rows]
            if name in self.tracked and not changes.is_snapshot:
                keys, update = _canonical_links(connection, self.tracked[name], rows)
                known[name] += [self._look_up(self.tracked[name], keys), _links_after(self.tracked[name], update)]
                updates[name] = update
        cleared = frozenset(self._catalog.top(each) for each in changes.truncated).intersection(self._links)
        indexes = [each for each in self._indexes if scope is None or each.specification.name in scope]
        emptied = [each for each in indexes if any(entry.table in cleared for entry in each.entries)]
        return Resolution(
            documents=self._documents(connection, indexes, known, roots_only=changes.is_snapshot),
            whole_indexes=frozenset(each.specification.name for each in emptied),
            links=updates,
            cleared=cleared.intersection(self.tracked),
        )

    def remember(self, resolution: Resolution) -> None:
        """Store the links as they are after the changes. Call it when the documents are durable, before progress is."""
        for name in resolution.cleared:
            self._relations.clear(self.tracked[name])
        for name, update in resolution.links.items():
            self._relations.apply(self.tracked[name], update)

    def _by_table(self, changes: Sequence[RowChanges]) -> Iterator[tuple[TableName, RowChanges]]:
        """The changes of each table as one piece, partitions under the name of their table."""
        parts: dict[TableName, list[RowChanges]] = {}
        for rows in changes:
            name = self._catalog.top(rows.table)
            if name in self._links and len(rows):
                parts.setdefault(name, []).append(rows)
        for name, pieces in parts.items():
            yield name, RowChanges.joined(name, pieces)

    def _documents(
        self,
        connection: psycopg.Connection[Any],
        indexes: Sequence[_Index],
        known: Mapping[TableName, Sequence[RowChanges | _Links]],
        *,
        roots_only: bool,
    ) -> Iterator[ResolvedKeys]:
        for index in indexes:
            parameters: list[list[str]] = []
            chosen: list[int] = []
            for number, entry in enumerate(index.entries):
                if roots_only and entry.relations:
                    continue
                tuples = _start_values(entry, known.get(entry.table, ()))
                if tuples[0]:
                    chosen.append(number)
                    parameters += tuples
            if chosen:
                yield from self._stream(connection, index, tuple(chosen), parameters)

    def _stream(
        self, connection: psycopg.Connection[Any], index: _Index, chosen: tuple[int, ...], parameters: list[list[str]]
    ) -> Iterator[ResolvedKeys]:
        name = index.specification.name
        text = self._texts.get((name, chosen))
        if text is None:
            text = self._texts[name, chosen] = self._compile(index, chosen)
        doing = f"find the documents of {name!r} that changed"
        with translated(connection, doing):
            try:
                with (
                    connection.transaction(),
                    psycopg.RawServerCursor(connection, "penstock_resolve", row_factory=tuple_row) as cursor,
                ):
                    cursor.execute(as_literal(text), parameters)
                    while rows := cursor.fetchmany(self._chunk):
                        yield ResolvedKeys(name, tuple(list(each) for each in zip(*rows, strict=True)))
            except psycopg.Error as error:
                raise without_values(error, connection, doing) from None

    def _compile(self, index: _Index, chosen: tuple[int, ...]) -> str:
        parameter = 1
        ways: list[sql.Composable] = []
        for number in chosen:
            entry = index.entries[number]
            ways.append(way_up(entry, index.specification, self._catalog, parameter))
            parameter += len(entry.columns)
        # One way alone can lead to the same document several times.
        return sql.SQL("select distinct * from ({}) d").format(sql.SQL(" union all ").join(ways)).as_string(None)

    def _look_up(self, table: TrackedTable, keys: list[str]) -> _Links:
        found = self._relations.lookup(table, keys) if keys else []
        columns = list(zip(*found, strict=True)) if found else [() for _ in table.links]
        everything = np.ones(len(found), np.bool_)
        return _Links(
            {
                name: Cells(pa.array(values, pa.string()), everything)
                for name, values in zip(table.links, columns, strict=True)
            }
        )

    @property
    def _relations(self) -> RelationMap:
        if self._map is None:
            names = ", ".join(sorted(map(str, self.tracked)))
            raise ConfigError(
                f"deletes and moves of rows cannot be followed without a map of relations: {names}",
                hint="Give the resolver one, or have the server send old values: replica identity full.",
            )
        return self._map


@dataclass(frozen=True, slots=True)
class _Links:
    """What rows hung on, as the map of relations has it, or hang on now."""

    old: Mapping[str, Cells]


def _start_values(entry: Entry, known: Sequence[RowChanges | _Links]) -> list[list[str]]:
    images: list[list[Cells]] = []
    for each in known:
        images.append([each.old[name] for name in entry.columns])
        if isinstance(each, RowChanges):
            images.append([each.new[name] for name in entry.columns])
    return distinct_tuples(images, len(entry.columns))


def _links_after(table: TrackedTable, update: pa.Table) -> _Links:
    """What the rows hang on after the changes, also where that was not sent."""
    there = update.filter(update.column("present"))
    sent = np.ones(there.num_rows, np.bool_)
    return _Links(
        {
            name: Cells(there.column(stored).combine_chunks(), sent)
            for name, stored in zip(table.links, link_names(table), strict=True)
        }
    )


def _refuse_generated(table: SourceTable, links: tuple[str, ...]) -> None:
    for each in table.select(links):
        if each.generated:
            raise ConfigError(
                f"{table.name}.{each.name} is generated, and the server does not send it",
                hint="Connect the tables by the columns that it is made of.",
            )


def _track(table: SourceTable, links: tuple[str, ...]) -> TrackedTable:
    key = tuple(name for name in table.columns if name in table.identity_columns)
    if not key:
        raise ConfigError(
            f"{table.name} has no replica identity, so its deletes cannot be followed",
            hint=f"Give it a primary key, or run: alter table {table.name} replica identity full;",
        )
    return TrackedTable(table, key, links)


def _canonical_links(
    connection: psycopg.Connection[Any], table: TrackedTable, rows: RowChanges
) -> tuple[list[str], pa.Table]:
    """The keys of rows that were there before, and what became of the links.

    The server brings keys and values to their canonical texts. A link that was not sent (a large value that stayed the
    same) is read from the row as it is now: if it has changed since, that change is still to come.
    """
    gone = ~rows.new[table.key[0]].sent
    all_sent = all(bool(np.all(rows.new[name].sent | gone)) for name in table.links)
    parameters = [rows.old[name].texts.to_pylist() for name in table.key]
    parameters += [rows.new[name].texts.to_pylist() for name in (*table.key, *table.links)]
    found = run_statement(connection, _links_text(table, all_sent), parameters, f"read the relations of {table.name}")
    old, new, *links = (pa.array(each, pa.string()) for each in zip(*found, strict=True))
    order = [pa.array(rows.commit_lsn), pa.array(rows.ordinal)]
    schema = link_update_schema(table)
    left = pc.and_(old.is_valid(), pc.coalesce(pc.not_equal(old, new), pa.scalar(True)))
    absent = [pa.nulls(len(rows), pa.string()) for _ in links]
    removed = pa.table([old, *absent, pa.array(np.zeros(len(rows), np.bool_)), *order], schema=schema).filter(left)
    there = pa.table([new, *links, pa.array(np.ones(len(rows), np.bool_)), *order], schema=schema)
    return old.drop_null().unique().to_pylist(), pa.concat_tables([removed, there.filter(new.is_valid())])


def _links_text(table: TrackedTable, all_sent: bool) -> str:
    """Takes old keys, new keys and new links as arrays; gives old key, new key and links, canonical, in their order."""
    key, links = table.table.select(table.key), table.table.select(table.links)
    columns = [*key, *key, *links]
    source = values_source("s", columns, 1, ordered=True)
    old = [canonical(column("s", f"v{number}"), each) for number, each in enumerate(key)]
    new = [canonical(column("s", f"v{number + len(key)}"), each) for number, each in enumerate(key)]
    values: list[sql.Composable] = []
    for number, each in enumerate(links):
        value: sql.Composable = column("s", f"v{number + 2 * len(key)}")
        if not all_sent:
            value = sql.SQL("coalesce({}, {})").format(value, column("now", each.name))
        values.append(canonical(value, each))
    row = sql.SQL("")
    if not all_sent:
        typed = [type(each)(f"v{number + len(key)}", each.type, each.not_null) for number, each in enumerate(key)]
        row = sql.SQL("left join {} on {}").format(
            from_table(table.table, "now"), equal_columns("now", key, "s", typed)
        )
    return (
        sql.SQL("select {}, {}, {} from {} {} order by s.place")
        .format(document_id(old), document_id(new), sql.SQL(", ").join(values), source, row)
        .as_string(None)
    )
