"""Maps of relations in a Postgres database, schema `penstock_documents`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.documents.expressions import column
from penstock.documents.relation_map.contract import TrackedRelation, link_names, map_name, source_links
from penstock.documents.statements import as_literal, run_statement
from penstock.lsn import Lsn
from penstock.source.faults import translated

SCHEMA = "penstock_documents"

_SETUP = """
    create schema if not exists penstock_documents;
    create table if not exists penstock_documents.relation_maps (
        owner text not null,
        source_table text not null,
        key_columns text[] not null,
        link_columns text[] not null,
        map_table text not null,
        seeded_at int8,
        primary key (owner, map_table)
    );
"""
_KNOWN = """
    select source_table, key_columns, link_columns, map_table, seeded_at
    from penstock_documents.relation_maps where owner = %s
"""
_ADDED = "insert into penstock_documents.relation_maps values (%s, %s, %s, %s, %s, null)"
_SEEDED = "update penstock_documents.relation_maps set seeded_at = %s where owner = %s and map_table = %s"
_REMOVED = "delete from penstock_documents.relation_maps where owner = %s and map_table = %s"


class PostgresRelationMap:
    """The maps of one pipeline in a Postgres database. The connection is in autocommit, and this object's alone."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        owner: str,
        *,
        reconnect: Callable[[], psycopg.Connection[Any]] | None = None,
    ) -> None:
        """`reconnect` gives another connection when this one was cut off."""
        self._opened = connection
        self._owner = owner
        self._reconnect = reconnect

    @property
    def _connection(self) -> psycopg.Connection[Any]:
        if self._opened.closed and self._reconnect is not None:
            self._opened = self._reconnect()
        return self._opened

    def prepare(self, relations: Sequence[TrackedRelation]) -> list[TrackedRelation]:
        """See `RelationMap`."""
        with translated(self._connection, "prepare the maps of relations"), self._connection.transaction():
            self._connection.execute(_SETUP)
            known = {
                (row[0], tuple(row[1]), tuple(row[2])): (row[3], row[4])
                for row in self._connection.execute(_KNOWN, [self._owner]).fetchall()
            }
            wanted = {(str(each.name), each.key, each.links): each for each in relations}
            for identity in known.keys() - wanted.keys():
                self._drop(known[identity][0])
            for identity in wanted.keys() - known.keys():
                self._create(wanted[identity])
            return [each for identity, each in wanted.items() if identity not in known or known[identity][1] is None]

    def seed(self, source: psycopg.Connection[Any], relation: TrackedRelation, position: Lsn) -> None:
        """See `RelationMap`. Rows pass as bytes of COPY, in pieces."""
        if source is self._connection:
            raise ValueError("a connection cannot copy to itself")
        target = self._table(relation)
        names = [sql.Identifier(each) for each in ("key", *link_names(relation), "commit_lsn", "ordinal")]
        incoming = sql.SQL("copy {} ({}) from stdin").format(target, sql.SQL(", ").join(names))
        outgoing = sql.SQL("copy ({}) to stdout").format(source_links(relation, position))
        with translated(source, f"seed the relations of {relation.name}"), self._connection.transaction():
            self._connection.execute(sql.SQL("truncate {}").format(target))
            with source.cursor().copy(outgoing) as rows, self._connection.cursor().copy(incoming) as taken:
                for piece in rows:
                    taken.write(piece)
            self._connection.execute(
                _SEEDED,
                [int(position), self._owner, map_name(self._owner, relation)],
            )

    def lookup(self, relation: TrackedRelation, keys: Sequence[str]) -> list[tuple[str | None, ...]]:
        """See `RelationMap`."""
        text = sql.SQL("select distinct {} from unnest($1::text[]) k (key) join {} m on m.key = k.key").format(
            sql.SQL(", ").join(column("m", each) for each in link_names(relation)), self._table(relation)
        )
        return run_statement(
            self._connection, text.as_string(None), [list(keys)], f"look up the relations of {relation.name}"
        )

    def apply(self, relation: TrackedRelation, update: pa.Table) -> None:
        """See `RelationMap`. One statement: the last change of each key decides whether it stays."""
        names = link_names(relation)
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
            map=self._table(relation),
        )
        parameters = [each.to_pylist() for each in update.columns]
        run_statement(self._connection, text.as_string(None), parameters, f"remember the relations of {relation.name}")

    def clear(self, relation: TrackedRelation) -> None:
        """See `RelationMap`."""
        with translated(self._connection, f"forget the relations of {relation.name}"):
            self._connection.execute(sql.SQL("truncate {}").format(self._table(relation)))

    def close(self) -> None:
        """See `RelationMap`."""
        self._reconnect = None
        self._opened.close()

    def _create(self, relation: TrackedRelation) -> None:
        columns = [sql.SQL("{} text").format(sql.Identifier(each)) for each in link_names(relation)]
        self._connection.execute(
            sql.SQL(
                "create table {} (key text primary key, {}, commit_lsn int8 not null, ordinal int8 not null)"
            ).format(self._table(relation), sql.SQL(", ").join(columns))
        )
        self._connection.execute(
            _ADDED,
            [
                self._owner,
                str(relation.name),
                list(relation.key),
                list(relation.links),
                map_name(self._owner, relation),
            ],
        )

    def _drop(self, name: str) -> None:
        self._connection.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(SCHEMA, name)))
        self._connection.execute(
            _REMOVED,
            [self._owner, name],
        )

    def _table(self, relation: TrackedRelation) -> sql.Identifier:
        return sql.Identifier(SCHEMA, map_name(self._owner, relation))
