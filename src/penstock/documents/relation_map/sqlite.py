"""Maps of relations in an SQLite file, for pipelines whose state is in one.

A file of its own beside the state: maps are as large as tables, and nobody should wait for their writing. Every call is
one transaction, synced when it returns.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg.rows import tuple_row

from penstock.documents.relation_map.contract import TrackedRelation, link_names, map_name, source_links
from penstock.errors import StateUnusable
from penstock.lsn import Lsn
from penstock.source.faults import translated

_PIECE = 10_000
_BUSY_SECONDS = 10.0

_SETUP = """
    create table if not exists relation_maps (
        owner text not null, source_table text not null, key_columns text not null, link_columns text not null,
        map_table text not null, seeded_at integer, primary key (owner, map_table)
    )
"""


class SqliteRelationMap:
    """The maps of one pipeline in a file, which is created if it is not there; its folder is not."""

    def __init__(self, path: Path, owner: str) -> None:
        self._path = path
        self._owner = owner
        with self._translated("open"):
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")

    def close(self) -> None:
        """See `RelationMap`."""
        self._connection.close()

    def prepare(self, relations: Sequence[TrackedRelation]) -> list[TrackedRelation]:
        """See `RelationMap`."""
        with self._transaction("prepare"):
            self._connection.execute(_SETUP)
            rows = self._connection.execute(
                "select source_table, key_columns, link_columns, map_table, seeded_at from relation_maps"
                " where owner = ?",
                [self._owner],
            ).fetchall()
            known = {(row[0], tuple(json.loads(row[1])), tuple(json.loads(row[2]))): row[3:] for row in rows}
            wanted = {(str(each.name), each.key, each.links): each for each in relations}
            for identity in known.keys() - wanted.keys():
                self._connection.execute(f"drop table if exists {known[identity][0]}")
                self._connection.execute(
                    "delete from relation_maps where owner = ? and map_table = ?", [self._owner, known[identity][0]]
                )
            for identity in wanted.keys() - known.keys():
                self._create(wanted[identity])
            return [each for identity, each in wanted.items() if identity not in known or known[identity][1] is None]

    def seed(self, source: psycopg.Connection[Any], relation: TrackedRelation, position: Lsn) -> None:
        """See `RelationMap`. Rows pass in pieces."""
        name = map_name(self._owner, relation)
        places = ", ".join("?" * (len(relation.links) + 3))
        with (
            translated(source, f"seed the relations of {relation.name}"),
            self._transaction("seed"),
            source.transaction(),
            psycopg.ServerCursor(source, "penstock_links", row_factory=tuple_row) as cursor,
        ):
            self._connection.execute(f"delete from {name}")  # noqa: S608 (a name of ours)
            cursor.execute(source_links(relation, position))
            while rows := cursor.fetchmany(_PIECE):
                self._connection.executemany(f"insert into {name} values ({places})", rows)  # noqa: S608 (a name of ours)
            self._connection.execute(
                "update relation_maps set seeded_at = ? where owner = ? and map_table = ?",
                [int(position), self._owner, map_name(self._owner, relation)],
            )

    def lookup(self, relation: TrackedRelation, keys: Sequence[str]) -> list[tuple[str | None, ...]]:
        """See `RelationMap`."""
        links = ", ".join(f"m.{each}" for each in link_names(relation))
        name = map_name(self._owner, relation)
        text = f"select distinct {links} from json_each(?) k join {name} m on m.key = k.value"  # noqa: S608 (a name of ours)
        with self._translated("read"):
            return self._connection.execute(text, [json.dumps(list(keys))]).fetchall()

    def apply(self, relation: TrackedRelation, update: pa.Table) -> None:
        """See `RelationMap`. The last change of each key decides whether it stays."""
        name = map_name(self._owner, relation)
        last = _last_of_each_key(update)
        present = last.filter(last.column("present")).drop_columns(["present"])
        gone = last.filter(pc.invert(last.column("present"))).select(["key", "commit_lsn", "ordinal"])
        columns = ["key", *link_names(relation), "commit_lsn", "ordinal"]
        changed = ", ".join(f"{each} = excluded.{each}" for each in columns[1:])
        upsert = (
            f"insert into {name} ({', '.join(columns)}) values ({', '.join('?' * len(columns))})"  # noqa: S608 (names of ours)
            f" on conflict (key) do update set {changed}"
            " where (commit_lsn, ordinal) < (excluded.commit_lsn, excluded.ordinal)"
        )
        delete = f"delete from {name} where key = ? and (commit_lsn, ordinal) < (?, ?)"  # noqa: S608 (a name of ours)
        with self._transaction("write"):
            self._connection.executemany(delete, _rows(gone))
            self._connection.executemany(upsert, _rows(present.select(columns)))

    def clear(self, relation: TrackedRelation) -> None:
        """See `RelationMap`."""
        with self._transaction("write"):
            self._connection.execute(f"delete from {map_name(self._owner, relation)}")  # noqa: S608 (a name of ours)

    def _create(self, relation: TrackedRelation) -> None:
        name = map_name(self._owner, relation)
        links = ", ".join(f"{each} text" for each in link_names(relation))
        self._connection.execute(
            f"create table {name} (key text primary key, {links}, commit_lsn integer not null,"
            " ordinal integer not null) without rowid"
        )
        self._connection.execute(
            "insert into relation_maps values (?, ?, ?, ?, ?, null)",
            [self._owner, str(relation.name), json.dumps(relation.key), json.dumps(relation.links), name],
        )

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        with self._translated(doing):
            self._connection.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._connection.execute("rollback")
                raise
            self._connection.execute("commit")

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateUnusable(f"cannot {doing} the maps of relations in {str(self._path)!r}: {error}") from None


def _last_of_each_key(update: pa.Table) -> pa.Table:
    ordered = update.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])
    places = ordered.select(["key"]).append_column("place", pa.array(np.arange(update.num_rows)))
    return ordered.take(places.group_by("key").aggregate([("place", "max")]).column("place_max"))


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(each.to_pylist() for each in table.columns), strict=True)
