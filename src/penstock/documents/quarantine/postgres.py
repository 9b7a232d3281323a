"""The quarantine in a Postgres database, schema `penstock_documents`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from penstock.documents.base import Rejection
from penstock.documents.quarantine.contract import Quarantined
from penstock.documents.statements import run_statement
from penstock.lsn import Lsn
from penstock.source.faults import translated

_SETUP = """
    create schema if not exists penstock_documents;
    create table if not exists penstock_documents.quarantine (
        owner text not null,
        index_name text not null,
        id text not null,
        reason text not null,
        position int8,
        body_hash text not null,
        first_at timestamptz not null,
        last_at timestamptz not null,
        attempts int8 not null,
        wanted bool not null,
        primary key (owner, index_name, id)
    );
"""
# A document may be refused twice in a batch, by a range and by a change.
_ADD = """
    insert into penstock_documents.quarantine as q
    select distinct on (u.index_name, u.id)
        $1, u.index_name, u.id, u.reason, $2::int8, u.body_hash, clock_timestamp(), clock_timestamp(), 1, false
    from unnest($3::text[], $4::text[], $5::text[], $6::text[]) with ordinality
        u (index_name, id, reason, body_hash, place)
    order by u.index_name, u.id, u.place desc
    on conflict (owner, index_name, id) do update set
        reason = excluded.reason, position = excluded.position, body_hash = excluded.body_hash,
        last_at = excluded.last_at, attempts = q.attempts + 1, wanted = false
"""
_ENTRIES = """
    select index_name, id, reason, position, body_hash, first_at, last_at, attempts, wanted
    from penstock_documents.quarantine
    where owner = $1 and ($2::text is null or index_name = $2)
    order by last_at desc, index_name, id limit $3::int8
"""
_COUNTS = "select index_name, count(*) from penstock_documents.quarantine where owner = $1 group by index_name"
_RETRY = """
    update penstock_documents.quarantine set wanted = true
    where owner = $1 and index_name = $2 and ($3::text[] is null or id = any ($3)) returning id
"""
_WANTED = """
    select id from penstock_documents.quarantine where owner = $1 and index_name = $2 and wanted order by id
"""
_DROP = """
    with gone as (
        delete from penstock_documents.quarantine
        where owner = $1 and index_name = $2 and ($3::text[] is null or id = any ($3)) returning 1
    )
    select count(*) from gone
"""


class PostgresQuarantine:
    """See `QuarantineStore`. `connect` gives connections in autocommit, which are this object's alone."""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], owner: str) -> None:
        self._connect = connect
        self._owner = owner
        self._lock = threading.Lock()
        self._opened = connect()
        with translated(self._opened, "prepare the quarantine"), self._opened.transaction():
            # Two that come at the same time would both find no schema.
            self._opened.execute("select pg_advisory_xact_lock(hashtext('penstock_documents'))")
            self._opened.execute(_SETUP)

    def add(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """See `QuarantineStore`. One statement, whatever their number."""
        columns = [[getattr(each, name) for each in rejections] for name in ("index", "id", "reason", "body_hash")]
        self._run(_ADD, [self._owner, None if position is None else int(position), *columns])

    def entries(self, index: str | None = None, *, limit: int | None = None) -> list[Quarantined]:
        """See `QuarantineStore`."""
        return [
            Quarantined(row[0], row[1], row[2], None if row[3] is None else Lsn(row[3]), *row[4:])
            for row in self._run(_ENTRIES, [self._owner, index, limit])
        ]

    def counts(self) -> dict[str, int]:
        """See `QuarantineStore`."""
        return dict(self._run(_COUNTS, [self._owner]))

    def retry(self, index: str, ids: Sequence[str] | None = None) -> list[str]:
        """See `QuarantineStore`."""
        return sorted(each for (each,) in self._run(_RETRY, [self._owner, index, _array(ids)]))

    def wanted(self, index: str) -> list[str]:
        """See `QuarantineStore`."""
        return [each for (each,) in self._run(_WANTED, [self._owner, index])]

    def drop(self, index: str, ids: Sequence[str] | None = None) -> int:
        """See `QuarantineStore`."""
        [(count,)] = self._run(_DROP, [self._owner, index, _array(ids)])
        return count

    def close(self) -> None:
        """See `QuarantineStore`."""
        self._opened.close()

    def _run(self, text: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._connection() as connection:
            return run_statement(connection, text, parameters, "use the quarantine")

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        with self._lock:
            if self._opened.closed:
                self._opened = self._connect()
            yield self._opened


def _array(ids: Sequence[str] | None) -> list[str] | None:
    return None if ids is None else list(ids)
