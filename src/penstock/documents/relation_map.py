"""The old links of rows, for tables whose replica identity does not include them.

Under the default identity the server sends only the primary key of a deleted row, and only the new values of an updated
row. So the foreign keys of these tables are kept here: one map per relation, from the row's key to the values of its
link columns, each with the order key of the change that set them. The newest wins, so a batch that is delivered again
changes nothing.

The maps are side tables (`penstock.documents.side_tables`): `key text primary key`, one text column per link column,
`commit_lsn`, `ordinal`. Keys and values are the canonical texts of `penstock.documents.expressions.canonical`, so no
type of the source has to exist there. A map has as many rows as its table; lookups and updates take a statement or two
per map and batch, whatever the number of keys. The table `relation_maps` lists them, with the columns that each covers
and the boundary at which it was filled. Tables whose identity includes the link columns (FULL, or an index that has
them) need no map, nor do tables that are only pointed at.

A batch becomes durable in this order: documents in all indexes, then the maps, then progress. After a crash in between,
the batch is delivered again and finds a map that may be ahead of it. Then the documents were ahead, too.

A map that is filled at a boundary has no earlier links. So the documents of an index are built after all its maps are
filled. Since each relation has its own map, adding an index does not disturb the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from penstock.documents.catalog import SourceColumn, SourceTable
from penstock.documents.expressions import (
    canonical,
    column,
    document_id,
    equal_columns,
    from_table,
    rows_of,
    values_source,
)
from penstock.documents.images import Cells, RowChanges
from penstock.documents.side_tables import SCHEMA, SideTables, open_side_tables
from penstock.documents.statements import run_statement
from penstock.lsn import Lsn
from penstock.source.patterns import TableName

BEFORE_ALL = -1
"""The ordinal of rows that existed at a boundary: before any change of a transaction that starts there."""

_SUFFIX = ".relations"
_CREATE_LIST = """
    create table if not exists penstock_documents.relation_maps (
        owner text not null, source_table text not null, key_columns {list} not null, link_columns {list} not null,
        map_table text not null, seeded_at int8, primary key (owner, map_table)
    )
"""
_CREATE = "create table {map} (key text primary key, {links}, commit_lsn int8 not null, ordinal int8 not null)"
_KNOWN = """
    select source_table, key_columns, link_columns, map_table, seeded_at
    from penstock_documents.relation_maps where owner = $1
"""
_ADDED = "insert into penstock_documents.relation_maps values ($1, $2, $3, $4, $5, null)"
_REMOVED = "delete from penstock_documents.relation_maps where owner = $1 and map_table = $2"
_SEEDED = "update penstock_documents.relation_maps set seeded_at = $1 where owner = $2 and map_table = $3"
_LOOKUP = "select distinct {links} from {keys} join {map} m on m.key = k.value"
_UPSERT = """
    insert into {map} as m ({names}) select {names} from {{rows}} where true
    on conflict (key) do update set {changed}
    where (m.commit_lsn, m.ordinal) < (excluded.commit_lsn, excluded.ordinal)
"""
_DELETE = """
    delete from {map} where key in (
        select m.key from {{rows}} join {map} m on m.key = r.key
        where (m.commit_lsn, m.ordinal) < (r.commit_lsn, r.ordinal)
    )
"""


@dataclass(frozen=True, slots=True)
class TrackedRelation:
    """Columns by which rows of a source table belong to other rows, and whose old values have to be kept."""

    table: SourceTable
    key: tuple[str, ...]
    """The columns that identify a row in the stream."""
    links: tuple[str, ...]

    @property
    def name(self) -> TableName:
        return self.table.name


def link_update_schema(relation: TrackedRelation) -> pa.Schema:
    """Return the schema of link changes, one row per change: `present` says whether the row exists after it."""
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
    """Return the names of the link columns in a map."""
    return [f"link_{number}" for number in range(len(relation.links))]


def open_relation_map(state_url: str, owner: str) -> RelationMap:
    """Open the maps beside the state of this URL; `owner` is the output's id."""
    return RelationMap(open_side_tables(state_url, _SUFFIX), owner)


class RelationMap:
    """The maps of one output. One process uses them at a time; every call is durable when it returns."""

    def __init__(self, tables: SideTables, owner: str) -> None:
        self._tables = tables
        self._owner = owner
        tables.create(_CREATE_LIST.format(list=tables.list_type), "prepare the relation maps")

    def prepare(self, relations: Sequence[TrackedRelation]) -> list[TrackedRelation]:
        """Keep maps for exactly these relations, and return those that have to be filled.

        An index that uses one of the latter has to be rebuilt afterwards.
        """
        doing = "prepare the relation maps"
        with self._tables.transaction(doing):
            rows = self._tables.run(_KNOWN, [self._owner], doing)
            known = {(row[0], _names(row[1]), _names(row[2])): row[3:] for row in rows}
            wanted = {(str(each.name), each.key, each.links): each for each in relations}
            for identity in known.keys() - wanted.keys():
                self._drop(known[identity][0], doing)
            for identity in wanted.keys() - known.keys():
                self._create(wanted[identity], doing)
            return [each for identity, each in wanted.items() if identity not in known or known[identity][1] is None]

    def seed(self, source: psycopg.Connection[Any], relation: TrackedRelation, position: Lsn) -> None:
        """Fill a map from all rows of the source in the connection's snapshot, which is at `position`.

        Replaces the map's content. Changes from `position` on are applied after it.
        """
        doing = f"fill the relation map of {relation.name}"
        with self._tables.transaction(doing):
            self._tables.refill(_qualified(self._name(relation)), source, _source_links(relation, position), doing)
            self._tables.run(_SEEDED, [int(position), self._owner, self._name(relation)], doing)

    def lookup(self, relation: TrackedRelation, keys: Sequence[str]) -> list[tuple[str | None, ...]]:
        """Return the links of these rows, without duplicates; unknown rows are left out."""
        links = ", ".join(f"m.{each}" for each in link_names(relation))
        text = _LOOKUP.format(links=links, keys=self._tables.each("$1"), map=_qualified(self._name(relation)))
        return self._tables.run(text, [list(keys)], f"look up the relations of {relation.name}")

    def apply(self, relation: TrackedRelation, update: pa.Table) -> None:
        """Store the link changes of a batch (`link_update_schema`); changes older than the stored ones have no effect.

        The last change of each key decides whether it stays.
        """
        last = _last_of_each_key(update)
        present = last.filter(last.column("present")).drop_columns(["present"])
        gone = last.filter(pc.invert(last.column("present"))).select(["key", "commit_lsn", "ordinal"])
        map_ = _qualified(self._name(relation))
        names = present.column_names
        changed = ", ".join(f"{each} = excluded.{each}" for each in names[1:])
        upsert = _UPSERT.format(map=map_, names=", ".join(names), changed=changed)
        delete = _DELETE.format(map=map_)
        doing = f"store the relations of {relation.name}"
        with self._tables.transaction(doing):
            for text, rows in ((delete, gone), (upsert, present)):
                if rows.num_rows:
                    types = {each.name: "int8" if each.type == pa.int64() else "text" for each in rows.schema}
                    self._tables.run_on_rows(text, types, [each.to_pylist() for each in rows.columns], doing)

    def clear(self, relation: TrackedRelation) -> None:
        """Forget all rows: the table was truncated."""
        self._tables.clear(_qualified(self._name(relation)), f"clear the relation map of {relation.name}")

    def close(self) -> None:
        """Close connections and files; may be called twice."""
        self._tables.close()

    def _create(self, relation: TrackedRelation, doing: str) -> None:
        links = ", ".join(f"{each} text" for each in link_names(relation))
        name = self._name(relation)
        self._tables.run(_CREATE.format(map=_qualified(name), links=links) + self._tables.keyed, [], doing)
        described = [str(relation.name), list(relation.key), list(relation.links), name]
        self._tables.run(_ADDED, [self._owner, *described], doing)

    def _drop(self, name: str, doing: str) -> None:
        self._tables.run(f"drop table if exists {_qualified(name)}", [], doing)
        self._tables.run(_REMOVED, [self._owner, name], doing)

    def _name(self, relation: TrackedRelation) -> str:
        """Return the map's name; other columns have another map."""
        parts = "\0".join([self._owner, *relation.name, "", *relation.key, "", *relation.links])
        return f"links_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class CanonicalLinks:
    """Change by change: the row's key before and after (null if it did not exist), and its links after."""

    rows: RowChanges
    old: pa.StringArray
    new: pa.StringArray
    links: Mapping[str, pa.StringArray]

    def old_keys(self) -> list[str]:
        """Return the keys of rows that existed before, without duplicates."""
        return self.old.drop_null().unique().to_pylist()

    def after(self) -> dict[str, Cells]:
        """Return the links of the rows after the changes, including values that the server omitted."""
        there = self.new.is_valid()
        sent = np.ones(len(self.new) - self.new.null_count, np.bool_)
        return {name: Cells(values.filter(there), sent) for name, values in self.links.items()}

    def update_of(self, relation: TrackedRelation) -> pa.Table:
        """Return the argument of `RelationMap.apply`: keys that are gone, and keys with their links."""
        count = len(self.rows)
        schema = link_update_schema(relation)
        order = [pa.array(self.rows.commit_lsn), pa.array(self.rows.ordinal)]
        absent = [pa.nulls(count, pa.string()) for _ in relation.links]
        links = [self.links[name] for name in relation.links]
        left = pc.and_(self.old.is_valid(), pc.coalesce(pc.not_equal(self.old, self.new), pa.scalar(True)))
        removed = pa.table([self.old, *absent, pa.array(np.zeros(count, np.bool_)), *order], schema=schema)
        there = pa.table([self.new, *links, pa.array(np.ones(count, np.bool_)), *order], schema=schema)
        return pa.concat_tables([removed.filter(left), there.filter(self.new.is_valid())])


def canonical_links(
    connection: psycopg.Connection[Any], relations: Sequence[TrackedRelation], rows: RowChanges
) -> CanonicalLinks:
    """Return the links of all these relations of one table as canonical texts, for changes of that table.

    The server converts the values: one statement per table and batch. An omitted link (an unchanged TOAST value) is
    read from the current row: if it has changed since, that change is still to come.
    """
    table, key = relations[0].table, relations[0].key
    links = sorted({name for each in relations for name in each.links})
    gone = ~rows.new[key[0]].sent
    all_sent = all(bool(np.all(rows.new[name].sent | gone)) for name in links)
    parameters = [rows.old[name].texts.to_pylist() for name in key]
    parameters += [rows.new[name].texts.to_pylist() for name in (*key, *links)]
    text = _links_statement(relations[0], links, all_sent)
    found = run_statement(connection, text, parameters, f"read the relations of {table.name}")
    old, new, *values = (pa.array(each, pa.string()) for each in zip(*found, strict=True))
    return CanonicalLinks(rows, old, new, dict(zip(links, values, strict=True)))


def _links_statement(relation: TrackedRelation, links: Sequence[str], all_sent: bool) -> str:
    """Return a statement that takes old keys, new keys and new links as arrays, and returns canonical ones in order."""
    key = relation.table.select(relation.key)
    linked = relation.table.select(links)
    width = len(key)
    old = [canonical(column("s", f"v{number}"), each) for number, each in enumerate(key)]
    new = [canonical(column("s", f"v{number + width}"), each) for number, each in enumerate(key)]
    values: list[sql.Composable] = []
    for number, each in enumerate(linked):
        value: sql.Composable = column("s", f"v{number + 2 * width}")
        if not all_sent:
            value = sql.SQL("coalesce({}, {})").format(value, column("now", each.name))
        values.append(canonical(value, each))
    current = sql.SQL("")
    if not all_sent:
        sent_key: list[SourceColumn] = [replace(each, name=f"v{number + width}") for number, each in enumerate(key)]
        current = sql.SQL("left join {} on {}").format(
            from_table(relation.table, "now"), equal_columns("now", key, "s", sent_key)
        )
    return (
        sql.SQL("select {}, {}, {} from {} {} order by s.place")
        .format(
            document_id(old),
            document_id(new),
            sql.SQL(", ").join(values),
            values_source("s", [*key, *key, *linked], 1, ordered=True),
            current,
        )
        .as_string(None)
    )


def _source_links(relation: TrackedRelation, position: Lsn) -> sql.Composed:
    """Return the query for a map's rows on the source: key, links, and the order key of a boundary."""
    return sql.SQL("select {}, {}, {}, {} from {} r").format(
        document_id([canonical(column("r", each.name), each) for each in relation.table.select(relation.key)]),
        sql.SQL(", ").join(canonical(column("r", each.name), each) for each in relation.table.select(relation.links)),
        sql.Literal(int(position)),
        sql.Literal(BEFORE_ALL),
        rows_of(relation.table),
    )


def _qualified(name: str) -> str:
    return f"{SCHEMA}.{name}"


def _names(stored: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(json.loads(stored) if isinstance(stored, str) else stored)


def _last_of_each_key(update: pa.Table) -> pa.Table:
    ordered = update.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])
    places = ordered.select(["key"]).append_column("place", pa.array(np.arange(update.num_rows)))
    return ordered.take(places.group_by("key").aggregate([("place", "max")]).column("place_max"))
