"""Where the server's WAL is now."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.lsn import Lsn, reaches
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import translated

_FLUSHED = (
    "select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()"
    " else pg_catalog.pg_current_wal_flush_lsn() end::text"
)
_WRITTEN = (
    "select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()"
    " else pg_catalog.pg_current_wal_insert_lsn() end::text"
)
_FLUSH_SECONDS = 1.0


def flushed_position(connection: psycopg.Connection[Any]) -> Lsn:
    """Up to where the server sends changes."""
    return _ask(connection, _FLUSHED)


def current_position(source: SourceSettings) -> Lsn:
    """A boundary behind everything that is committed now, and that the server will send.

    What is written and not flushed by then belongs to no commit, or to one that did not wait for its own.
    """
    with connect(source, Role.CATALOG) as connection:
        written = _ask(connection, _WRITTEN)
        deadline = time.monotonic() + _FLUSH_SECONDS
        while not reaches(flushed := flushed_position(connection), written):
            if time.monotonic() > deadline:
                return flushed
            time.sleep(0.05)
        return written


def _ask(connection: psycopg.Connection[Any], query: str) -> Lsn:
    with translated(connection, "ask for the server's position"), connection.cursor(row_factory=tuple_row) as cursor:
        found = cursor.execute(query.encode()).fetchone()
    assert found is not None
    return Lsn.parse(found[0])
