"""Tables that documents keep beside the state: in its Postgres database, or in a file next to its SQLite file.

Relation maps and their list are side tables. They are not part of the state store: maps are as large as the source's
tables, and writing them must not delay other work. In Postgres they live in the schema `penstock_documents`.

Statements are written once, in the SQL that both databases share, with parameters `$1`, `$2`, …. Table names have the
schema in front, which is removed for SQLite. Lists are passed as arrays to Postgres and as JSON to SQLite. Every call
outside `transaction` is durable when it returns. Thread-safe.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg import sql

from penstock.documents.statements import as_literal, read_pieces, run_statement
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.state.opening import file_beside
from penstock.state.sqlite import unusable

SCHEMA = "penstock_documents"
_BUSY_SECONDS = 10.0
_FETCHED_ROWS = 10_000


class SideTables(Protocol):
    """Runs statements on side tables; hides the differences between Postgres and SQLite."""

    list_type: str
    """The type of a column with a list of texts."""
    keyed: str
    """Follows the definition of a table that is read by its key."""

    def create(self, text: str, doing: str) -> None:
        """Create a table if it does not exist; safe if several processes start at the same time."""
        ...

    def run(self, text: str, parameters: Sequence[Any], doing: str) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; `doing` is for error messages."""
        ...

    def run_on_rows(self, text: str, columns: dict[str, str], values: Sequence[Sequence[Any]], doing: str) -> None:
        """Run a statement on many rows at once.

        `{rows}` in the text is a source called `r` with these columns (name and type); `values` has a list for each.
        """
        ...

    def each(self, parameter: str) -> str:
        """Return a source called `k` with a column `value`: the texts of a list that is passed as this parameter."""
        ...

    def transaction(self, doing: str) -> AbstractContextManager[None]:
        """Return a context manager that commits all statements inside, or none."""
        ...

    def refill(self, table: str, source: psycopg.Connection[Any], query: sql.Composed, doing: str) -> None:
        """Replace a table's rows by those of a query on the source; call it in a transaction."""
        ...

    def clear(self, table: str, doing: str) -> None:
        """Remove a table's rows."""
        ...

    def close(self) -> None:
        """Close connections and files; may be called twice."""
        ...


def open_side_tables(state_url: str, suffix: str) -> SideTables:
    """Open the side tables of the state with this URL; in SQLite, those of the file with this suffix."""
    path = file_beside(state_url, suffix)
    if path is not None:
        return SqliteTables(path)
    settings = SourceSettings(state_url)
    return PostgresTables(lambda: connect(settings, Role.STATE, parameters=NO_TIMEOUTS))


class PostgresTables(SideTables):
    """Side tables in a Postgres database. `connect` returns connections in autocommit, used by this object alone."""

    list_type = "text[]"
    keyed = ""

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._lock = threading.RLock()
        self._opened: psycopg.Connection[Any] | None = None

    def create(self, text: str, doing: str) -> None:
        with self.transaction(doing):
            # Without the lock, two processes that start together would both find no schema.
            self.run(f"select pg_advisory_xact_lock(hashtext('{SCHEMA}'))", [], doing)
            self.run(f"create schema if not exists {SCHEMA}", [], doing)
            self.run(text, [], doing)

    def run(self, text: str, parameters: Sequence[Any], doing: str) -> list[tuple[Any, ...]]:
        with self._connection() as connection:
            return run_statement(connection, text, parameters, doing)

    def run_on_rows(self, text: str, columns: dict[str, str], values: Sequence[Sequence[Any]], doing: str) -> None:
        """Runs one statement for any number of rows."""
        arrays = ", ".join(f"${number}::{type_}[]" for number, type_ in enumerate(columns.values(), start=1))
        self.run(text.replace("{rows}", f"unnest({arrays}) r ({', '.join(columns)})"), values, doing)

    def each(self, parameter: str) -> str:
        return f"unnest({parameter}::text[]) k (value)"

    @contextmanager
    def transaction(self, doing: str) -> Iterator[None]:
        with self._connection() as connection, translated(connection, doing), connection.transaction():
            yield

    def refill(self, table: str, source: psycopg.Connection[Any], query: sql.Composed, doing: str) -> None:
        """Passes rows on as bytes of COPY."""
        self.clear(table, doing)
        with self._connection() as connection, translated(source, doing):
            if source is connection:
                raise ValueError("a connection cannot copy to itself")
            incoming = as_literal(f"copy {table} from stdin")
            outgoing = sql.SQL("copy ({}) to stdout").format(query)
            with source.cursor().copy(outgoing) as rows, connection.cursor().copy(incoming) as taken:
                for piece in rows:
                    taken.write(piece)

    def clear(self, table: str, doing: str) -> None:
        self.run(f"truncate {table}", [], doing)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend the connection to this thread alone; opens a new one if the server has closed it."""
        with self._lock:
            if self._opened is None or self._opened.closed:
                self._opened = self._connect()
            yield self._opened


class SqliteTables(SideTables):
    """Side tables in an SQLite file, which is created if it does not exist; its folder is not."""

    list_type = "text"
    keyed = " without rowid"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        with self._translated("open tables of documents"):
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute("pragma synchronous = full")

    def create(self, text: str, doing: str) -> None:
        self.run(text, [], doing)

    def run(self, text: str, parameters: Sequence[Any], doing: str) -> list[tuple[Any, ...]]:
        with self._translated(doing):
            return self._connection.execute(_unqualified(text), _named(parameters)).fetchall()

    def run_on_rows(self, text: str, columns: dict[str, str], values: Sequence[Sequence[Any]], doing: str) -> None:
        row = ", ".join(f"${number} as {name}" for number, name in enumerate(columns, start=1))
        with self.transaction(doing):
            statement = _unqualified(text.replace("{rows}", f"(select {row}) r"))
            self._connection.executemany(statement, map(_named, zip(*values, strict=True)))

    def each(self, parameter: str) -> str:
        return f"json_each({parameter}) k"

    @contextmanager
    def transaction(self, doing: str) -> Iterator[None]:
        """A nested one is part of the outer one."""
        with self._translated(doing):
            if self._connection.in_transaction:
                yield
                return
            self._connection.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._connection.execute("rollback")
                raise
            self._connection.execute("commit")

    def refill(self, table: str, source: psycopg.Connection[Any], query: sql.Composed, doing: str) -> None:
        self.clear(table, doing)
        with self._translated(doing):
            for rows in read_pieces(source, query.as_string(None), [], _FETCHED_ROWS, doing):
                places = ", ".join("?" * len(rows[0]))
                self._connection.executemany(f"insert into {_unqualified(table)} values ({places})", rows)  # noqa: S608

    def clear(self, table: str, doing: str) -> None:
        self.run(f"delete from {table}", [], doing)  # noqa: S608 (a name of ours)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise unusable(f"cannot {doing} in {str(self._path)!r}", error) from None


def _unqualified(text: str) -> str:
    return text.replace(f"{SCHEMA}.", "")


def _named(parameters: Sequence[Any]) -> dict[str, Any]:
    """Return parameters by name, as SQLite binds `$1`, each as a type that it stores."""
    return {str(number): _stored(value) for number, value in enumerate(parameters, start=1)}


def _stored(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return value.isoformat() if isinstance(value, datetime) else value
