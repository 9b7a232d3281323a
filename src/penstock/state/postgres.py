"""State in a Postgres database, in a schema of its own; many pipelines, on many machines, can share it.

Each transaction takes the pipeline's advisory lock, so that writers of one pipeline come one after the other, and is
read committed, so that what it reads after that is new. A connection that breaks is made again, and the transaction
run again: it notices what the broken one did. Times are those of the server.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb

from penstock.errors import ConfigError, ServerUnavailable, SourceError, StateUnusable
from penstock.lsn import Lsn
from penstock.retry import Backoff
from penstock.schema import quote_identifier
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.state.records import ColumnKind, ResultT, Transaction
from penstock.state.sql import Migration, SqlTransaction, check_unused, load_migrations, pending
from penstock.state.store import Store

DEFAULT_SCHEMA = "penstock"
RETRY_SECONDS = 10.0

# Two numbers that name our locks among those of others in the same database.
_MIGRATION_LOCK = 0x50454E53
_PIPELINE_LOCK = 0x50454E54

_SESSION = {
    "statement_timeout": "30s",
    "lock_timeout": "30s",
    # A process that was stopped inside a transaction must not keep its successor from the lease. No timeout concerns a
    # session in the middle of a pipeline: hence no `executemany`, which uses one.
    "idle_in_transaction_session_timeout": "10s",
}
_TCP_USER_TIMEOUT = "20000"

logger = logging.getLogger(__name__)


class PostgresStore(Store):
    """A store in a database; its schema and tables are made by the first who opens it.

    `retry_seconds` is how long one call keeps trying while the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        pipeline_id: str = "default",
        *,
        schema: str = DEFAULT_SCHEMA,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        database = PostgresDatabase(_settings(url), pipeline_id, schema=schema, retry_seconds=retry_seconds)
        try:
            database.migrate(load_migrations("postgres"))
        except BaseException:
            database.close()
            raise
        super().__init__(database)


class PostgresDialect:
    """Positions as `pg_lsn`, times as `timestamptz`, the rest as `jsonb`."""

    placeholder = "%s"

    def __init__(self, schema: str) -> None:
        self.prefix = f"{_quoted(schema)}."

    def encode(self, kind: ColumnKind, value: Any) -> Any:
        """See `sql.Dialect`."""
        match kind:
            case ColumnKind.LSN:
                return str(value)
            case ColumnKind.JSON:
                return Jsonb(value)
            case _:
                return value

    def decode(self, kind: ColumnKind, value: Any) -> Any:
        """See `sql.Dialect`."""
        return Lsn.parse(value) if kind is ColumnKind.LSN else value


class PostgresDatabase:
    """One connection, made when it is first needed and whenever it broke."""

    def __init__(
        self,
        settings: SourceSettings,
        pipeline_id: str,
        *,
        schema: str = DEFAULT_SCHEMA,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self.pipeline_id = pipeline_id
        self._settings = settings
        self._schema = schema
        self._retry_seconds = retry_seconds
        self._dialect = PostgresDialect(schema)
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._closed = False

    def run(self, work: Callable[[Transaction], ResultT], *, writing: bool = True) -> ResultT:
        """See `records.Database`."""

        def attempt(connection: psycopg.Connection[Any]) -> ResultT:
            mode = b"read write" if writing else b"read only"
            connection.execute(b"begin isolation level read committed " + mode)
            if writing:
                number = _number(f"{self._schema} {self.pipeline_id}")
                connection.execute("select pg_advisory_xact_lock(%s::int, %s::int)", (_PIPELINE_LOCK, number))
            result = work(self._transaction(connection))
            connection.execute("commit")
            return result

        return self._attempt(attempt, "write the state" if writing else "read the state")

    def migrate(self, migrations: Sequence[Migration]) -> None:
        """Bring the tables up to date; called once, when a store is opened."""
        where = f"{self._settings.location}, schema {self._schema}"
        tables = sql.Identifier(self._schema)

        def attempt(connection: psycopg.Connection[Any]) -> None:
            # Who may not create anything can still use what is there.
            if not pending(migrations, self._version(connection), where):
                return
            connection.execute("begin isolation level read committed read write")
            connection.execute(
                "select pg_advisory_xact_lock(%s::int, %s::int)", (_MIGRATION_LOCK, _number(self._schema))
            )
            if not connection.execute("select to_regnamespace(%s)", (_quoted(self._schema),)).fetchall()[0][0]:
                connection.execute(sql.SQL("create schema {}").format(tables))
            connection.execute(
                sql.SQL(
                    "create table if not exists {}.migrations (version integer primary key, name text not null,"
                    " applied_at timestamptz not null default now())"
                ).format(tables)
            )
            version = self._version(connection)
            missing = pending(migrations, version, where)
            if version and missing:
                check_unused(self._holders(connection), where)
            for migration in missing:
                logger.info("migrating the state version=%d name=%s", migration.number, migration.name)
                connection.execute(migration.sql.replace("{schema}", _quoted(self._schema)).encode())
                connection.execute(
                    sql.SQL("insert into {}.migrations (version, name) values (%s, %s)").format(tables),
                    (migration.number, migration.name),
                )
            connection.execute("commit")

        self._attempt(attempt, "migrate the state")

    def another(self) -> PostgresDatabase:
        """See `records.Database`. It does not try again by itself: a lease has its own patience."""
        return PostgresDatabase(self._settings, self.pipeline_id, schema=self._schema, retry_seconds=0.0)

    def close(self) -> None:
        """See `records.Database`."""
        with self._lock:
            self._closed = True
            self._drop_connection()

    def _attempt(self, attempt: Callable[[psycopg.Connection[Any]], ResultT], doing: str) -> ResultT:
        """Run something once, and again on a new connection when the one it had broke."""
        backoff = Backoff(first=0.05, longest=1.0)
        deadline = time.monotonic() + self._retry_seconds
        with self._lock:
            reused = self._connection is not None
            while True:
                try:
                    return self._once(attempt, doing)
                except SourceError as error:
                    broken = self._connection is None or self._connection.closed
                    if not (broken or isinstance(error, ServerUnavailable)):
                        raise
                    self._drop_connection()
                    # A connection that was left alone may have been cut long ago: that costs no patience.
                    if not reused and time.monotonic() >= deadline:
                        raise
                    if not reused:
                        time.sleep(backoff.next_delay())
                    reused = False

    def _once(self, attempt: Callable[[psycopg.Connection[Any]], ResultT], doing: str) -> ResultT:
        if self._closed:
            raise StateUnusable(f"the state in {self._settings.location} is already closed")
        if self._connection is None:
            self._connection = _connect(self._settings)
        connection = self._connection
        with translated(connection, doing):
            try:
                return attempt(connection)
            except BaseException:
                _roll_back(connection)
                raise

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _transaction(self, connection: psycopg.Connection[Any]) -> SqlTransaction:
        def execute(statement: str, parameters: Sequence[Any]) -> psycopg.Cursor[Any]:
            return connection.execute(statement.encode(), parameters)

        def now() -> datetime:
            return connection.execute("select clock_timestamp()").fetchall()[0][0]

        return SqlTransaction(self.pipeline_id, self._dialect, execute, now)

    def _version(self, connection: psycopg.Connection[Any]) -> int:
        name = f"{_quoted(self._schema)}.migrations"
        if connection.execute("select to_regclass(%s)", (name,)).fetchall()[0][0] is None:
            return 0
        query = sql.SQL("select coalesce(max(version), 0) from {}.migrations").format(sql.Identifier(self._schema))
        return connection.execute(query).fetchall()[0][0]

    def _holders(self, connection: psycopg.Connection[Any]) -> list[tuple[str, str, int, datetime]]:
        query = sql.SQL(
            "select pipeline_id, host, pid, since from {}.pipelines"
            " where holder is not null and expires > clock_timestamp()"
        ).format(sql.Identifier(self._schema))
        return connection.execute(query).fetchall()


def _settings(url: str) -> SourceSettings:
    settings = SourceSettings(url)
    given = conninfo_to_dict(url)
    if "tcp_user_timeout" in given:
        return settings
    # Or a write into a network that swallows everything would hang for a quarter of an hour.
    return SourceSettings(make_conninfo(url, tcp_user_timeout=_TCP_USER_TIMEOUT))


def _connect(settings: SourceSettings) -> psycopg.Connection[Any]:
    connection = connect(settings, Role.STATE, parameters=_SESSION)
    try:
        with translated(connection, "set up the session"):
            # Progress is acknowledged to the source after it is stored: it must survive the server's crash.
            connection.execute(
                "select set_config(name, 'on', false) from pg_settings"
                " where name = 'synchronous_commit' and setting = 'off'"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _roll_back(connection: psycopg.Connection[Any]) -> None:
    if connection.closed or connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        return
    try:
        connection.execute("rollback")
    except psycopg.Error:
        connection.close()


def _number(name: str) -> int:
    """A lock's number, the same in every process, within Postgres' `int`."""
    return zlib.crc32(name.encode()) - (1 << 31)


def _quoted(name: str) -> str:
    if not name or any(each in name for each in "\0%") or len(name.encode()) > 63:
        raise ConfigError("a schema name must have 1 to 63 bytes and no %", schema=name)
    return quote_identifier(name)
