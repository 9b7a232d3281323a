"""What rows hung on before they changed, for tables whose replica identity does not say it.

Under the default identity the server sends a deleted row's primary key and nothing else, and of an updated row only
how it is now. So the foreign keys of such tables are remembered here: one map per table, from the row's key to the
values of its link columns, each with the order key of the change that they come from. The newest wins, so a batch that
comes again changes nothing.

What lives where:

- The maps are tables beside the state: in its Postgres database (which may be the source itself), schema
  `penstock_documents`, or in an SQLite file. There is one per source table: `key text primary key`, one text column per
  link column, `commit_lsn`, `ordinal`. Keys and values are the canonical texts of
  `penstock.documents.expressions.canonical`, so no type of the source has to exist there. A map has as many rows as its
  table; lookups and updates are a statement or two per table and batch, whatever the number of keys.
- `relation_maps` lists them, with the columns that each covers and the boundary at which it was seeded. Another set of
  columns is another map, seeded anew; the old one goes.
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
from penstock.lsn import Lsn
from penstock.source.patterns import TableName

BEFORE_ALL = -1
"""The ordinal of what was there at a boundary: before any change of a transaction that starts there."""


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


def map_name(owner: str, table: TrackedTable) -> str:
    """What a map is called: other columns have another one."""
    parts = "\0".join([owner, *table.name, "", *table.key, "", *table.links])
    return f"links_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def source_links(table: TrackedTable, position: Lsn) -> sql.Composed:
    """The query that gives a map's rows as they are in the source: key, links, and the order key of a boundary."""
    return sql.SQL("select {}, {}, {}, {} from {} r").format(
        document_id([canonical(column("r", each.name), each) for each in table.table.select(table.key)]),
        sql.SQL(", ").join(canonical(column("r", each.name), each) for each in table.table.select(table.links)),
        sql.Literal(int(position)),
        sql.Literal(BEFORE_ALL),
        table_name(table.name),
    )
