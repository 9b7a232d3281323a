"""What rows hung on before they changed, for tables whose replica identity does not say it.

Under the default identity the server sends a deleted row's primary key and nothing else, and of an updated row only
how it is now. So the foreign keys of such tables are remembered here: one map per table, from the row's key to the
values of its link columns, each with the order key of the change that they come from. The newest wins, so a batch that
comes again changes nothing.

What lives where:

- The maps are tables in the state's database (which may be the source itself), schema `penstock_documents`, one per
  source table: `key text primary key`, one text column per link column, `commit_lsn`, `ordinal`. Keys and values are
  the canonical texts of `penstock.documents.expressions.canonical`, so no type of the source has to exist there. A map
  has as many rows as its table; lookups and updates are one statement per table and batch, whatever the number of keys.
- `penstock_documents.relation_maps` lists them, with the columns that each covers and the boundary at which it was
  seeded. Another set of columns is another map, seeded anew; the old one goes.
- Nothing is kept for tables whose identity has the link columns (FULL, or an index that has them), nor for those that
  are only pointed at.

The order in which a batch becomes durable: documents in all indexes, then the maps, then progress. After a crash in
between, a batch comes again and finds a map that may be ahead of it. Then the documents were ahead, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.documents.catalog import SourceTable
from penstock.documents.expressions import canonical, column, document_id, table_name
from penstock.documents.statements import as_literal, run_statement
from penstock.lsn import Lsn
from penstock.source.faults import translated
from penstock.source.patterns import TableName

SCHEMA = "penstock_documents"
# The order key of what was there at a boundary: before any change of a transaction that starts there.
_BEFORE_ALL = -1

_SETUP = """
    create schema if not exists penstock_documents;
    create table if not exists penstock_documents.relation_maps (
        owner text not null,
        source_table text not null,
        key_columns text[] not null,
        link_columns text[] not null,
        map_table text not null,
        seeded_at int8,
        primary key (owner, source_table)
    );
"""
_KNOWN = """
    select source_table, key_columns, link_columns, map_table, seeded_at
    from penstock_documents.relation_maps where owner = %s
"""
_ADDED = "insert into penstock_documents.relation_maps values (%s, %s, %s, %s, %s, null)"
_SEEDED = "update penstock_documents.relation_maps set seeded_at = %s where owner = %s and source_table = %s"
_REMOVED = "delete from penstock_documents.relation_maps where owner = %s and source_table = %s"


@dataclass(frozen=True, slots=True)
class TrackedTable:
    """A source table whose links have to be remembered."""

    table: SourceTable
    key: tuple[str, ...]
    """What identifies a row in the stream."""
    links: tuple[str, ...]

    @property
    def name(self) -> TableName:
        return self.table.name


def link_update_schema(table: TrackedTable) -> pa.Schema:
    """What a batch did to the links of a table, change by change: `present` says whether the row is there after it."""
    return pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            *(pa.field(name, pa.string()) for name in link_names(table)),
            pa.field("present", pa.bool_(), nullable=False),
            pa.field("commit_lsn", pa.int64(), nullable=False),
            pa.field("ordinal", pa.int64(), nullable=False),
        ]
    )


def link_names(table: TrackedTable) -> list[str]:
    """What the link columns are called in a map."""
    return [f"link_{number}" for number in range(len(table.links))]


class RelationMap(Protocol):
    """Remembers links. Called by one process at a time; every call is durable when it returns."""

    def prepare(self, tables: Sequence[TrackedTable]) -> list[TrackedTable]:
        """Make room for exactly these tables, and say which of them have to be seeded."""
        ...

    def seed(self, source: psycopg.Connection[Any], table: TrackedTable, position: Lsn) -> None:
        """Take the links of all rows from the source, as the connection's snapshot has them, which is at `position`.

        What the map had before goes. Changes from `position` on are applied after it.
        """
        ...

    def lookup(self, table: TrackedTable, keys: Sequence[str]) -> list[tuple[str | None, ...]]:
        """The links of these rows, without duplicates; rows that are not known are left out."""
        ...

    def apply(self, table: TrackedTable, update: pa.Table) -> None:
        """Remember what a batch did (`link_update_schema`); what is older than what is known changes nothing."""
        ...

    def clear(self, table: TrackedTable) -> None:
        """The table was emptied."""
        ...


class PostgresRelationMap:
    """The maps of one pipeline in a Postgres database. The connection is in autocommit, and this object's alone."""

    def __init__(self, connection: psycopg.Connection[Any], owner: str) -> None:
        self._connection = connection
        self._owner = owner

    def prepare(self, tables: Sequence[TrackedTable]) -> list[TrackedTable]:
        """See `RelationMap`."""
        with translated(self._connection, "prepare the maps of relations"), self._connection.transaction():
            self._connection.execute(_SETUP)
            known = {
                (row[0], tuple(row[1]), tuple(row[2])): (row[3], row[4])
                for row in self._connection.execute(_KNOWN, [self._owner]).fetchall()
            }
            wanted = {(str(each.name), each.key, each.links): each for each in tables}
            for identity in known.keys() - wanted.keys():
                self._drop(identity[0], known[identity][0])
            for identity in wanted.keys() - known.keys():
                self._create(wanted[identity])
            return [each for identity, each in wanted.items() if identity not in known or known[identity][1] is None]

    def seed(self, source: psycopg.Connection[Any], table: TrackedTable, position: Lsn) -> None:
        """See `RelationMap`. Rows pass as bytes of COPY, in pieces."""
        if source is self._connection:
            raise ValueError("a connection cannot copy to itself")
        target = self._table(table)
        names = [sql.Identifier(each) for each in ("key", *link_names(table), "commit_lsn", "ordinal")]
        incoming = sql.SQL("copy {} ({}) from stdin").format(target, sql.SQL(", ").join(names))
        outgoing = sql.SQL("copy (select {}, {}, {}, {} from {} r) to stdout").format(
            document_id([canonical(column("r", each.name), each) for each in table.table.select(table.key)]),
            sql.SQL(", ").join(canonical(column("r", each.name), each) for each in table.table.select(table.links)),
            sql.Literal(int(position)),
            sql.Literal(_BEFORE_ALL),
            table_name(table.name),
        )
        with translated(source, f"seed the relations of {table.name}"), self._connection.transaction():
            self._connection.execute(sql.SQL("truncate {}").format(target))
            with source.cursor().copy(outgoing) as rows, self._connection.cursor().copy(incoming) as taken:
                for piece in rows:
                    taken.write(piece)
            self._connection.execute(
                _SEEDED,
                [int(position), self._owner, str(table.name)],
            )

    def lookup(self, table: TrackedTable, keys: Sequence[str]) -> list[tuple[str | None, ...]]:
        """See `RelationMap`."""
        text = sql.SQL("select distinct {} from unnest($1::text[]) k (key) join {} m on m.key = k.key").format(
            sql.SQL(", ").join(column("m", each) for each in link_names(table)), self._table(table)
        )
        return run_statement(
            self._connection, text.as_string(None), [list(keys)], f"look up the relations of {table.name}"
        )

    def apply(self, table: TrackedTable, update: pa.Table) -> None:
        """See `RelationMap`. One statement: the last change of each key decides whether it stays."""
        names = link_names(table)
        types = ["text"] * (len(names) + 1) + ["bool", "int8", "int8"]
        arrays = [sql.SQL(as_literal(f"${number}::{each}[]")) for number, each in enumerate(types, start=1)]
        text = sql.SQL(
            "with changed as ("
            "  select distinct on (key) * from unnest({arrays}) u (key, {links}, present, commit_lsn, ordinal)"
            "  order by key, commit_lsn desc, ordinal desc),"
            " gone as ("
            "  delete from {map} m using changed c where m.key = c.key and not c.present"
            "  and (m.commit_lsn, m.ordinal) < (c.commit_lsn, c.ordinal))"
            " insert into {map} as m (key, {links}, commit_lsn, ordinal)"
            " select key, {links}, commit_lsn, ordinal from changed where present"
            " on conflict (key) do update set ({links}, commit_lsn, ordinal)"
            "  = row ({excluded}, excluded.commit_lsn, excluded.ordinal)"
            " where (m.commit_lsn, m.ordinal) < (excluded.commit_lsn, excluded.ordinal)"
        ).format(
            arrays=sql.SQL(", ").join(arrays),
            links=sql.SQL(", ").join(map(sql.Identifier, names)),
            excluded=sql.SQL(", ").join(column("excluded", each) for each in names),
            map=self._table(table),
        )
        parameters = [each.to_pylist() for each in update.columns]
        run_statement(self._connection, text.as_string(None), parameters, f"remember the relations of {table.name}")

    def clear(self, table: TrackedTable) -> None:
        """See `RelationMap`."""
        with translated(self._connection, f"forget the relations of {table.name}"):
            self._connection.execute(sql.SQL("truncate {}").format(self._table(table)))

    def _create(self, table: TrackedTable) -> None:
        columns = [sql.SQL("{} text").format(sql.Identifier(each)) for each in link_names(table)]
        self._connection.execute(
            sql.SQL(
                "create table {} (key text primary key, {}, commit_lsn int8 not null, ordinal int8 not null)"
            ).format(self._table(table), sql.SQL(", ").join(columns))
        )
        self._connection.execute(
            _ADDED,
            [self._owner, str(table.name), list(table.key), list(table.links), self._name(table)],
        )

    def _drop(self, source_table: str, name: str) -> None:
        self._connection.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(SCHEMA, name)))
        self._connection.execute(
            _REMOVED,
            [self._owner, source_table],
        )

    def _table(self, table: TrackedTable) -> sql.Identifier:
        return sql.Identifier(SCHEMA, self._name(table))

    def _name(self, table: TrackedTable) -> str:
        parts = "\0".join([self._owner, *table.name, "", *table.key, "", *table.links])
        return f"links_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"
