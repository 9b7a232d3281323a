"""What rows hung on before they changed, for tables whose replica identity does not say it.

Under the default identity the server sends a deleted row's primary key and nothing else, and of an updated row only
how it is now. So the foreign keys of such tables are remembered here: one map per relation, from the row's key to the
values of the columns by which it hangs on something, each with the order key of the change that they come from. The
newest wins, so a batch that comes again changes nothing.

What lives where:

- The maps are tables beside the state: in its Postgres database (which may be the source itself), schema
  `penstock_documents`, or in an SQLite file. A map is `key text primary key`, one text column per link column,
  `commit_lsn`, `ordinal`. Keys and values are the canonical texts of `penstock.documents.expressions.canonical`, so no
  type of the source has to exist there. A map has as many rows as its table; lookups and updates are a statement or two
  per map and batch, whatever the number of keys.
- `relation_maps` lists them, with the columns that each covers and the boundary at which it was seeded.
- Nothing is kept for tables whose identity has the link columns (FULL, or an index that has them), nor for those that
  are only pointed at.

The order in which a batch becomes durable: documents in all indexes, then the maps, then progress. After a crash in
between, a batch comes again and finds a map that may be ahead of it. Then the documents were ahead, too.

A map that is seeded at a boundary says nothing of what was before. So the documents of an index are built after all its
maps are seeded. Since each relation has a map of its own, another index does not disturb those that are there.
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
class TrackedRelation:
    """Columns by which rows of a source table hang on something, and whose old values have to be remembered."""

    table: SourceTable
    key: tuple[str, ...]
    """What identifies a row in the stream."""
    links: tuple[str, ...]

    @property
    def name(self) -> TableName:
        return self.table.name


def link_update_schema(relation: TrackedRelation) -> pa.Schema:
    """What a batch did to links, change by change: `present` says whether the row is there after it."""
    return pa.schema(
        [
            pa.field("key", pa.string(), nullable=False),
            *(pa.field(name, pa.string()) for name in link_names(relation)),
            pa.field("present", pa.bool_(), nullable=False),
            pa.field("commit_lsn", pa.int64(), nullable=False),
            pa.field("ordinal", pa.int64(), nullable=False),
        ]
    )


def link_names(relation: TrackedRelation) -> list[str]:
    """What the link columns are called in a map."""
    return [f"link_{number}" for number in range(len(relation.links))]


class RelationMap(Protocol):
    """Remembers links. Called by one process at a time; every call is durable when it returns."""

    def prepare(self, relations: Sequence[TrackedRelation]) -> list[TrackedRelation]:
        """Make room for exactly these relations, and say which of them have to be seeded.

        An index that uses one of the latter has to be built anew after that.
        """
        ...

    def seed(self, source: psycopg.Connection[Any], relation: TrackedRelation, position: Lsn) -> None:
        """Take the links of all rows from the source, as the connection's snapshot has them, which is at `position`.

        What the map had before goes. Changes from `position` on are applied after it.
        """
        ...

    def lookup(self, relation: TrackedRelation, keys: Sequence[str]) -> list[tuple[str | None, ...]]:
        """The links of these rows, without duplicates; rows that are not known are left out."""
        ...

    def apply(self, relation: TrackedRelation, update: pa.Table) -> None:
        """Remember what a batch did (`link_update_schema`); what is older than what is known changes nothing."""
        ...

    def clear(self, relation: TrackedRelation) -> None:
        """The table was emptied."""
        ...

    def close(self) -> None:
        """Give up connections and files; may be called twice."""
        ...


def map_name(owner: str, relation: TrackedRelation) -> str:
    """What a map is called: other columns have another one."""
    parts = "\0".join([owner, *relation.name, "", *relation.key, "", *relation.links])
    return f"links_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def source_links(relation: TrackedRelation, position: Lsn) -> sql.Composed:
    """The query that gives a map's rows as they are in the source: key, links, and the order key of a boundary."""
    return sql.SQL("select {}, {}, {}, {} from {} r").format(
        document_id([canonical(column("r", each.name), each) for each in relation.table.select(relation.key)]),
        sql.SQL(", ").join(canonical(column("r", each.name), each) for each in relation.table.select(relation.links)),
        sql.Literal(int(position)),
        sql.Literal(BEFORE_ALL),
        table_name(relation.name),
    )
