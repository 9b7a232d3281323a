"""Connections to the database that is written, and its errors as those of a destination.

A process keeps a few connections for its next batches: those of a task live as long as its worker. Each connection
remembers the temporary tables that it has, so that a batch need not create them.
"""

from __future__ import annotations

import atexit
import os
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, LiteralString, cast

import psycopg
from psycopg.rows import tuple_row

from penstock.destinations.refusals import out_of_reach, rejected, unusable
from penstock.errors import (
    RESYNC,
    ConfigError,
    DestinationUnavailable,
    PenstockError,
    ServerUnavailable,
    SourceError,
    StatementInterrupted,
    TableBusy,
)
from penstock.schema import quote_identifier
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.faults import Place, from_exception

_IDLE = 4
"""Connections that a process keeps."""
_LOCKED = "55P03"
_READ_ONLY = "25006"
_DEPENDENTS = "2BP01"
_ALTERED = frozenset({"42P01", "42703"})
_REFUSED = frozenset({"42501", "28000", "28P01", "3D000", "0LP01"})
_READING = {
    "array_nulls": "on",
    "xmloption": "content",
    "standard_conforming_strings": "on",
    # Any other level only adds failures: the row of a table in the control schema is locked first.
    "default_transaction_isolation": "read committed",
    # Rows are found by index, whatever the server takes the size of a temporary table for: the cost grows with the
    # changes alone.
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
"""How a session reads values and finds rows, whatever the database or role says."""
BY_HASH, BY_INDEX = (f"set local enable_hashjoin = {on}; set local enable_mergejoin = {on}" for on in ("on", "off"))
"""For a statement that reads whole tables, and for those after it in the same transaction."""
_DURABLE = "select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off'"
_GRANTS = (
    "Grant the role create on the database, or create and usage on its schemas; Penstock must own the tables it writes."
)


@dataclass(frozen=True, slots=True)
class Server:
    """How to reach the database. Pickles; the URL is never printed."""

    settings: SourceSettings
    lock_timeout: float = 30.0
    """Seconds to wait for a lock that another session has on a table."""

    @property
    def location(self) -> str:
        """`host:port/database`, for messages."""
        return self.settings.location

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Lend a connection, outside of a transaction; after an error it is closed. Errors are a destination's."""
        session = _take(self) or self._open()
        try:
            with self.translated(session.connection):
                yield session
                session.connection.rollback()
        except BaseException:
            session.connection.close()
            raise
        _give(self, session)

    @contextmanager
    def transaction(self, table: str | None = None) -> Iterator[Session]:
        """Run the block in one transaction. `table` is the table that its errors concern, also those of the commit."""
        with self.session() as session, self.translated(session.connection, table):
            yield session
            session.connection.commit()

    @contextmanager
    def translated(self, connection: psycopg.Connection[Any], table: str | None = None) -> Iterator[None]:
        """Raise errors of the server as those of a destination. `table` is the table that they concern."""
        place = Place.of(connection)
        try:
            yield
        except psycopg.Error as error:
            raise self.error(error, place, table) from None

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection that is not in autocommit mode."""
        parameters = {
            **NO_TIMEOUTS,
            **_READING,
            "lock_timeout": str(max(1, round(self.lock_timeout * 1000))),
        }
        try:
            connection = connect(self.settings, Role.DESTINATION, parameters=parameters)
        except SourceError as error:
            raise _from_source(error) from None
        with self.translated(connection):
            # Statements change with temporary tables; preparing them would cost more than it saves.
            connection.prepare_threshold = None
            connection.execute(_DURABLE)
            connection.autocommit = False
        return connection

    def _open(self) -> Session:
        return Session(self, self.connect())

    def error(self, error: psycopg.Error, place: Place, table: str | None) -> PenstockError:
        """Return the error of a destination; only what cannot contain a value of a row is quoted."""
        state = error.sqlstate or error.diag.sqlstate
        if state in _REFUSED:
            return unusable(f"{self.location}: {error.diag.message_primary}", hint=_GRANTS)
        named = from_exception(error, place, "write to the destination")
        if isinstance(named, ServerUnavailable | StatementInterrupted) or state == _READ_ONLY:
            said = error.diag.message_primary or "the connection was lost"
            return DestinationUnavailable(f"{self.location} cannot be written: {said}")
        name = table or self.location
        if state == _LOCKED:
            return TableBusy(
                f"{name}: another session holds a lock on the table at the destination",
                hint="Find the session with pg_locks and end it; Penstock keeps retrying.",
                table=name,
            )
        about = error.diag.constraint_name or error.diag.column_name or error.diag.datatype_name
        what = f"{self.location} refused a statement (SQLSTATE {state or 'unknown'}{f', {about}' if about else ''})"
        hint = "The server's log has the statement. Correct the cause, then run: penstock rollback."
        if state in _ALTERED:
            what = f"the table or one of its columns no longer exists at {self.location}"
            hint = f"Copy the table again: {RESYNC}."
        if state == _DEPENDENTS:
            what = f"other objects at {self.location} depend on the table or its column"
            hint = "Drop these views or constraints, or create them again, then run: penstock rollback."
        return rejected(name, what, hint=hint)


@dataclass(slots=True)
class Session:
    """A connection, and the temporary tables that it has."""

    server: Server
    connection: psycopg.Connection[Any]
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The columns of each temporary table, as they were created. Cleared when a transaction of several tables is rolled
    back in part; after any other error the connection is closed."""
    filled: dict[str, int] = field(default_factory=dict[str, int])
    """How many rows were copied to a temporary table since it was created or truncated."""

    def is_open(self) -> bool:
        """Return False if the server has ended the session while nothing was asked."""
        if self.connection.closed:
            return False
        poll = select.poll()
        poll.register(self.connection.pgconn.socket, select.POLLIN)
        return not poll.poll(0)

    def run(self, statement: str, parameters: Sequence[object] | None = None) -> int:
        """Execute a statement, or several; return how many rows the last one concerned."""
        cursor = self.connection.execute(cast("LiteralString", statement), parameters)
        while cursor.nextset():
            pass
        return cursor.rowcount

    def rows(self, query: str, parameters: Sequence[object] | None = None) -> list[tuple[Any, ...]]:
        """Return the rows of a query, the last one of several. Cold: only about tables, never their data."""
        with self.connection.cursor(row_factory=tuple_row) as cursor:
            cursor.execute(cast("LiteralString", query), parameters)
            while cursor.nextset():
                pass
            return cursor.fetchall()

    def copy(self, target: str, columns: Sequence[str], pieces: Iterator[memoryview]) -> int:
        """Send rows to a table; return how many."""
        listed = f" ({', '.join(map(quote_identifier, columns))})" if columns else ""
        with self.connection.cursor() as cursor:
            with cursor.copy(cast("LiteralString", f"copy {target}{listed} from stdin")) as copy:
                for piece in pieces:
                    copy.write(piece)
            if target.startswith("pg_temp."):
                self.filled[target] = self.filled.get(target, 0) + cursor.rowcount
            return cursor.rowcount


_free: dict[tuple[int, Server], list[Session]] = {}
_lock = threading.Lock()


def _take(server: Server) -> Session | None:
    with _lock:
        # A forked process must not use the connections of its parent.
        free = _free.get((os.getpid(), server), [])
        while free:
            session = free.pop()
            if session.is_open():
                return session
            session.connection.close()
    return None


def _give(server: Server, session: Session) -> None:
    with _lock:
        free = _free.setdefault((os.getpid(), server), [])
        if len(free) < _IDLE:
            free.append(session)
            return
    session.connection.close()


def close_idle(server: Server | None = None) -> None:
    """Close the connections that this process keeps; without a server, those to all."""
    with _lock:
        for process, other in list(_free):
            if process == os.getpid() and server in (None, other):
                for session in _free.pop((process, other)):
                    session.connection.close()


atexit.register(close_idle)


def settings_of(url: str) -> SourceSettings:
    """Return the settings of a connection string; raise `ConfigError` if it is not one."""
    try:
        return SourceSettings(url)
    except ConfigError as error:
        raise ConfigError(
            error.message.replace("the source URL", "the URL of the destination"), hint=error.hint
        ) from None


def _from_source(error: SourceError) -> PenstockError:
    """Return the error of a connection that could not be opened."""
    if isinstance(error, ServerUnavailable | StatementInterrupted):
        return out_of_reach(str(error.facts.get("where", "the database")), error.message)
    return unusable(error.message, hint="Check the user, password, database and sslmode in url of the destination.")
