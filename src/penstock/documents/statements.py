"""Runs this package's statements on the source: connections, parameters as `$1`, errors without values, visibility.

**Visibility.** The server decodes and sends a commit before it is visible to queries: with a synchronous standby,
before the standby has answered. A document built in between would lack the change, and no later change would correct
it. So before anything is read, every transaction of a batch must be visible in the reader's own snapshot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString, cast

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from penstock.errors import QueryFailed, ServerUnavailable, SnapshotBlocked, TableLocked, UnsupportedServer
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.faults import Place, from_exception, translated

SESSION: Mapping[str, str] = {
    **NO_TIMEOUTS,
    "lock_timeout": "200",
    # Each statement has a snapshot of its own, whatever the role's default is.
    "default_transaction_isolation": "read committed",
}
"""No timeout for rows, a short one for locks: in a deadlock with a session that truncates or alters several tables,
this session gives way and retries long before the server chooses a victim."""

_KEPT = 4
"""Idle connections to keep; a Python worker of Spark needs one."""
_OF_TYPES = "22"
OF_VALUES = ("21", _OF_TYPES, "23", "2F", "38", "39", "54", "P0")
"""Classes of SQLSTATE that a value causes: it is out of a type's range, a domain or a function of the user rejects it,
a subquery returns several rows for it, or the result is too large for the server."""
LOCKED = ("40P01", "55P03")
"""A deadlock, and a lock timeout."""
_FIRST_WAIT = 0.001
_LONGEST_WAIT = 0.1

# The stream has the lower 32 bits of a transaction id; the full id is the nearest to the server's current one.
_INVISIBLE = """
    select pg_catalog.count(*)
    from pg_catalog.pg_current_snapshot() s,
         lateral (select pg_catalog.pg_snapshot_xmax(s)::text::int8) now (xid),
         unnest($1::int8[]) u (short),
         lateral (select now.xid + ((u.short - now.xid % 4294967296) + 6442450944) % 4294967296 - 2147483648) w (whole)
    where not pg_catalog.pg_visible_in_snapshot(w.whole::text::pg_catalog.xid8, s)
"""


def run_statement(
    connection: psycopg.Connection[Any], text: str, parameters: Sequence[Any], doing: str
) -> list[tuple[Any, ...]]:
    """Run a statement and return all its rows. Percent signs in the text have no special meaning."""
    with translated(connection, doing):
        try:
            with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                cursor.execute(as_literal(text), parameters)
                return cursor.fetchall() if cursor.description is not None else []
        except psycopg.Error as error:
            raise without_values(error, connection, doing) from None


def explain(connection: psycopg.Connection[Any], text: str, parameters: int, doing: str) -> tuple[str, ...]:
    """Let the server plan a statement whose parameters are arrays, as if they were empty; return the plan's lines."""
    rows = run_statement(connection, f"explain {text}", [list[str]() for _ in range(parameters)], doing)
    return tuple(row[0] for row in rows)


def read_pieces(
    connection: psycopg.Connection[Any], text: str, parameters: Sequence[Any], chunk: int, doing: str
) -> Iterator[list[tuple[Any, ...]]]:
    """Run a query and yield its rows in pieces, from one snapshot, while the connection runs other statements."""
    with translated(connection, doing):
        try:
            with connection.transaction(), _server_cursor(connection) as cursor:
                cursor.execute(as_literal(text), parameters)
                while rows := cursor.fetchmany(chunk):
                    yield rows
        except psycopg.Error as error:
            raise without_values(error, connection, doing) from None


@contextmanager
def _server_cursor(connection: psycopg.Connection[Any]) -> Iterator[psycopg.RawServerCursor[tuple[Any, ...]]]:
    cursor = psycopg.RawServerCursor(connection, "penstock_pieces", row_factory=tuple_row)
    try:
        with cursor:
            yield cursor
    finally:
        # A cursor that lost its connection while it was being closed still counts as open.
        if connection.closed:
            cursor.close()


def without_values(error: psycopg.Error, connection: psycopg.Connection[Any], doing: str) -> Exception:
    """Return the error without the cell values that it may quote; lock errors become `TableLocked`."""
    state = error.sqlstate or ""
    if state in LOCKED:
        said = from_exception(error, Place.of(connection), doing)
        return TableLocked(said.message, **said.facts)
    if not state.startswith(OF_VALUES):
        return error
    where = Place.of(connection).where
    what, hint = "an expression or a function fails for a value", "Correct the row, or the expression."
    if state.startswith(_OF_TYPES):
        what = "a value does not fit its type"
        hint = "A column's type changed, or a filter compares a column with a value that it cannot hold."
    return QueryFailed(
        f"cannot {doing} ({where}): {what} (SQLSTATE {state})",
        hint=hint,
        where=where,
        sqlstate=state,
    )


def as_literal(text: str) -> LiteralString:
    """Mark SQL that this package composed as safe."""
    return cast("LiteralString", text)


def is_standby(connection: psycopg.Connection[Any]) -> bool:
    """Return True if the server is a standby, whose snapshots would give different documents the same version."""
    return run_statement(connection, "select pg_catalog.pg_is_in_recovery()", [], "check the server's role")[0][0]


def require_primary(connection: psycopg.Connection[Any]) -> None:
    """Raise `UnsupportedServer` for a standby, where documents would have no versions."""
    if is_standby(connection):
        where = Place.of(connection).where
        raise UnsupportedServer(
            f"documents cannot be built from a standby, whose snapshots have no versions for them ({where})",
            hint="Use the primary as source.",
            where=where,
        )


class ConnectionPool:
    """Connections that tasks of this process reuse; a fork does not use those that it inherited."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, SourceSettings], list[psycopg.Connection[Any]]] = {}

    @contextmanager
    def borrow(self, source: SourceSettings) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection in autocommit to this thread; it is closed after an error."""
        key = (os.getpid(), source)
        with self._lock:
            idle = self._idle.setdefault(key, [])
            connection = idle.pop() if idle else None
        is_new = connection is None
        connection = connection or connect(source, Role.DOCUMENTS, parameters=SESSION)
        try:
            # A connection that was idle may be broken: its first statement says so, and that may be a `begin`.
            with translated(connection, "read rows for documents"):
                if is_new:
                    require_primary(connection)  # the address may lead to several servers
                yield connection
        except BaseException as error:
            connection.close()
            if isinstance(error, ServerUnavailable):
                self.clear()  # the others are broken as well
            raise
        if connection.info.transaction_status != pq.TransactionStatus.IDLE:
            connection.close()
            return
        with self._lock:
            if len(idle) < _KEPT:
                idle.append(connection)
                return
        connection.close()

    def clear(self) -> None:
        """Close idle connections."""
        with self._lock:
            waiting = [each for (process, _), idle in self._idle.items() if process == os.getpid() for each in idle]
            self._idle.clear()
        for each in waiting:
            each.close()


POOL = ConnectionPool()
"""The pool of this process."""


def wait_until_visible(
    connection: psycopg.Connection[Any],
    xids: Sequence[int],
    *,
    timeout: float = 30.0,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Return when a new snapshot of this connection sees all these transactions; `SnapshotBlocked` after `timeout`.

    Do not call it in a repeatable read transaction, whose snapshot never changes.
    """
    if not xids:
        return
    deadline = time.monotonic() + timeout
    wait = _FIRST_WAIT
    while hidden := run_statement(connection, _INVISIBLE, [list(xids)], "check whether changes are visible")[0][0]:
        if time.monotonic() >= deadline:
            raise SnapshotBlocked(
                f"{hidden} received transactions are still not visible to queries after {timeout:g} s",
                hint="A commit that waits for a synchronous standby is not visible yet: check pg_stat_replication.",
                blockers=[],
            )
        pause(wait)
        wait = min(wait * 2, _LONGEST_WAIT)
