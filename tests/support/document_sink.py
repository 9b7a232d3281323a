"""A sink in an SQLite file, with the generations, versions and seeding of a search server.

Several processes write to it, it outlives them, and tests read it. It can forget removals, as a search server does
after a while.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.documents.base import SCAN_CHUNK, FlushReport, IndexFacts, Rejection, Sink
from penstock.documents.mapping import IndexMapping

_SETUP = """
create table if not exists generations (
    index_name text, generation text primary key, fingerprint text, state text, made integer
);
create table if not exists documents (
    generation text, id text, version integer, body text, primary key (generation, id)
) without rowid;
"""
_TAKE = """
insert into documents values (?, ?, ?, ?) on conflict (generation, id) do update
set version = excluded.version, body = excluded.body where version <= excluded.version
"""


class FileSink(Sink):
    """Can be pickled: holds a path and names only. A generation is `filling`, `serving` or `retired`."""

    def __init__(self, path: str | Path, *, forgetful: bool = False, refuse: str = "", only: str | None = None) -> None:
        """With `forgetful`, it keeps no trace of removals; it refuses documents whose body contains `refuse`."""
        self.path = str(path)
        self.forgetful = forgetful
        self.refuse = refuse
        self._only = only
        self._waiting: list[pa.Table] = []
        self.largest_write = 0

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        self._waiting.append(batch)
        self.largest_write = max(self.largest_write, batch.num_rows)

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`. One transaction."""
        rejections: list[Rejection] = []
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return FlushReport()
        with self._transaction() as connection:
            for batch in waiting:
                # Row by row: this sink is for tests only.
                for index, id_, version, body in zip(*(each.to_pylist() for each in batch.columns), strict=True):
                    if body is not None and self.refuse and self.refuse in body:
                        rejections.append(Rejection(index, id_, "refused by the test"))
                        continue
                    for generation in self._generations(connection, index):
                        if body is None and self.forgetful:
                            forgotten = "delete from documents where generation = ? and id = ? and version <= ?"
                            connection.execute(forgotten, [generation, id_, version])
                        else:
                            connection.execute(_TAKE, [generation, id_, version, body])
        return FlushReport(tuple(rejections))

    def ensure_index(self, mapping: IndexMapping) -> None:
        """See `Sink`."""
        with self._transaction() as connection:
            newest = connection.execute(
                "select fingerprint from generations where index_name = ? and state <> 'retired' order by made desc",
                [mapping.index],
            ).fetchone()
            if newest != (mapping.fingerprint,):
                self._begin(connection, mapping)

    def reindex(self, mapping: IndexMapping) -> None:
        """See `Sink`."""
        with self._transaction() as connection:
            self._begin(connection, mapping)

    def is_seeded(self, index: str) -> bool:
        """See `Sink`."""
        facts = self.facts(index)
        return facts.generation is not None and facts.filling is None

    def mark_seeded(self, index: str) -> None:
        """See `Sink`."""
        filling = self.facts(index).filling
        if filling is None:
            return
        with self._transaction() as connection:
            connection.execute(
                "update generations set state = 'retired' where index_name = ? and state = 'serving'", [index]
            )
            connection.execute("update generations set state = 'serving' where generation = ?", [filling])

    def move_alias(self, index: str) -> bool:
        """Let the newest former generation serve, as if somebody had moved an alias; False if there is none."""
        with self._transaction() as connection:
            former = connection.execute(
                "select generation from generations where index_name = ? and state = 'retired' order by made desc",
                [index],
            ).fetchone()
            if former is None:
                return False
            connection.execute(
                "update generations set state = 'retired' where index_name = ? and state = 'serving'", [index]
            )
            connection.execute("update generations set state = 'serving' where generation = ?", former)
            return True

    def filling(self, index: str) -> Sink:
        """See `Sink`."""
        facts = self.facts(index)
        only = facts.filling or facts.generation
        return FileSink(self.path, forgetful=self.forgetful, refuse=self.refuse, only=only)

    def count(self, index: str) -> int | None:
        """See `Sink`."""
        with self._transaction() as connection:
            return _count(connection, self._only or _by_state(connection, index).get("serving"))

    def facts(self, index: str) -> IndexFacts:
        """See `ReadableSink`."""
        with self._transaction() as connection:
            found = _by_state(connection, index)
            return IndexFacts(found.get("serving"), found.get("filling"), _count(connection, found.get("serving")))

    def documents(self, index: str) -> dict[str, Any]:
        """Return the documents that a search sees, by id."""
        with self._transaction() as connection:
            rows = connection.execute(
                "select id, body from documents join generations using (generation)"
                " where index_name = ? and state = 'serving' and body is not null",
                [index],
            ).fetchall()
        return {id_: json.loads(body) for id_, body in rows}

    def fetch(self, index: str, ids: Sequence[str]) -> Mapping[str, Any]:
        """See `ReadableSink`."""
        wanted = set(ids)
        return {id_: body for id_, body in self.documents(index).items() if id_ in wanted}

    def scan(self, index: str, chunk: int = SCAN_CHUNK) -> Iterator[list[str]]:
        """See `ReadableSink`."""
        ids = list(self.documents(index))
        for first in range(0, len(ids), chunk):
            yield ids[first : first + chunk]

    def sample(self, index: str, count: int) -> list[str]:
        """See `ReadableSink`."""
        return list(self.documents(index))[:count]

    def _begin(self, connection: sqlite3.Connection, mapping: IndexMapping) -> None:
        gone = "select generation from generations where index_name = ? and state = 'filling'"
        for (generation,) in connection.execute(gone, [mapping.index]).fetchall():
            connection.execute("delete from documents where generation = ?", [generation])
            connection.execute("delete from generations where generation = ?", [generation])
        made = connection.execute("select count(*) + 1 from generations").fetchone()[0]
        row = [mapping.index, uuid.uuid4().hex, mapping.fingerprint, "filling", made]
        connection.execute("insert into generations values (?, ?, ?, ?, ?)", row)

    def _generations(self, connection: sqlite3.Connection, index: str) -> list[str]:
        if self._only is not None:
            return [self._only]
        text = "select generation from generations where index_name = ? and state <> 'retired'"
        return [generation for (generation,) in connection.execute(text, [index]).fetchall()]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        try:
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = normal")
            connection.executescript(_SETUP)
            connection.execute("begin immediate")
            yield connection
            connection.execute("commit")
        finally:
            connection.close()


def _by_state(connection: sqlite3.Connection, index: str) -> dict[str, str]:
    """Return the generations of an index; if several are retired, any of them."""
    return dict(
        connection.execute("select state, generation from generations where index_name = ?", [index]).fetchall()
    )


def _count(connection: sqlite3.Connection, generation: str | None) -> int:
    text = "select count(*) from documents where generation = ? and body is not null"
    return connection.execute(text, [generation]).fetchone()[0]
