"""Requests to ClickHouse, and its errors as those of a destination.

Each thread of a process keeps one client, because a client runs one request at a time. Rows are sent and read as Arrow.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import clickhouse_connect
import pyarrow as pa
from clickhouse_connect.driver.client import Client
from clickhouse_connect.driver.exceptions import ClickHouseError, DataError, NotSupportedError, ProgrammingError

from penstock.destinations.refusals import is_passing, not_copied, out_of_reach, rejected, unusable
from penstock.errors import DestinationUnavailable, PenstockError

TOO_MANY_PARTS = 252
UNKNOWN_TABLE, UNKNOWN_DATABASE = 60, 81
PASSING = frozenset(
    {
        *(159, 160, 202, 209, 210, 236, 241, 242, 243, 279, 319, 394, 425, 439, 745, 999),
        *(TOO_MANY_PARTS, 692),
    }
)
"""Codes of errors that time or an operator heals: time-outs, full disks and memory, too many queries, parts or
mutations, a table that is read-only, a lost keeper, an insert of unknown outcome."""
REFUSED = frozenset({UNKNOWN_DATABASE, 164, 192, 193, 194, 291, 497, 516})
"""Codes of errors that the configuration causes: user, password, privileges, database."""
_OF_THE_CLIENT = (ProgrammingError, DataError, NotSupportedError)
"""Errors that a server has no part in."""
_GRANTS = "Check user, password and database in [destination]. The user needs select, insert, alter, create and drop."
_TIMEOUT_SECONDS = 900
"""For one request; appending a new copy to a log takes longest."""
_INSERT_SETTINGS: Mapping[str, Any] = {
    "async_insert": 0,
    # One block, so one part: an insert is there as a whole or not at all.
    "max_insert_block_size": 1 << 26,
    "min_insert_block_size_rows": 1 << 26,
    "min_insert_block_size_bytes": 1 << 32,
}
_READ_SETTINGS: Mapping[str, Any] = {"output_format_arrow_string_as_string": 0}


@dataclass(frozen=True, slots=True)
class Server:
    """How to reach the database. Pickles; user and password are never printed."""

    url: str = field(repr=False)
    database: str
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def location(self) -> str:
        """`host:port/database`, for messages."""
        return f"{urlsplit(self.url).netloc.rpartition('@')[2] or 'chdb'}/{self.database}"

    def name(self, table: str) -> str:
        """Return the name of a table or view in SQL."""
        return f"{quote(self.database)}.{quote(table)}"

    def run(self, statement: str, table: str | None = None) -> None:
        """Execute a statement; `table` is the source's table that errors concern."""
        with self._client(table) as client:
            client.command(statement)

    def rows(self, query: str, settings: Mapping[str, Any] | None = None) -> Sequence[Sequence[Any]]:
        """Return the rows of a query. Cold: only about tables, never their data."""
        with self._client(None) as client:
            return client.query(query, settings=dict(settings or {})).result_rows

    def insert(self, into: str, rows: pa.Table, token: str, table: str | None = None) -> None:
        """Insert rows at once; an insert with the same token as one of the last thousand changes nothing.

        So a token must not be used for other rows, also after a crash.
        """
        if rows.num_rows:
            with self._client(table) as client:
                client.insert_arrow(
                    self.name(into), rows, settings={**_INSERT_SETTINGS, "insert_deduplication_token": token}
                )

    def read(self, query: str, table: str | None = None) -> pa.Table:
        """Return the rows of a query; texts are binary."""
        with self._client(table) as client:
            return client.query_arrow(query, settings={**_READ_SETTINGS, "max_query_size": len(query.encode()) + 1024})

    def stream(self, query: str, table: str | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query block by block; texts are binary."""
        with self._client(table) as client, client.query_arrow_stream(query, settings=dict(_READ_SETTINGS)) as stream:
            for block in stream:
                yield from block.to_batches() if isinstance(block, pa.Table) else (block,)

    @contextmanager
    def _client(self, table: str | None) -> Iterator[Client]:
        """Lend this thread's client; after an error it is closed. Errors are a destination's."""
        # A forked process must not use the connections of its parent.
        key = (os.getpid(), self)
        try:
            client = _of_thread.clients.pop(key, None) or self._connect()
        except ProgrammingError as error:
            raise unusable(f"{self.location} cannot be opened (code {error.code})", hint=_GRANTS) from None
        except Exception as error:
            raise self._error(error, table) from None
        try:
            yield client
        except Exception as error:
            client.close()
            raise self._error(error, table) from None
        except BaseException:
            client.close()
            raise
        _of_thread.clients[key] = client

    def _connect(self) -> Client:
        options: dict[str, Any] = {"autogenerate_session_id": False, "send_receive_timeout": _TIMEOUT_SECONDS}
        if self.user is not None:
            options["username"] = self.user
        if self.password is not None:
            options["password"] = self.password
        if self.url.startswith("chdb:"):
            options = {}
        return clickhouse_connect.get_client(dsn=self.url, **options)

    def _error(self, error: Exception, table: str | None) -> Exception:
        """Return the error of a destination; only what cannot contain a value of a row is quoted."""
        if isinstance(error, PenstockError) or not (isinstance(error, ClickHouseError) or is_passing(error)):
            return error
        code, name = getattr(error, "code", None), getattr(error, "name", None) or "no name"
        if code in REFUSED:
            return unusable(f"{self.location} refuses access (code {code}, {name})", hint=_GRANTS)
        if code in PASSING:
            hint = "Insert less often (commit_interval), or let merges catch up." if code == TOO_MANY_PARTS else ""
            return DestinationUnavailable(f"{self.location} cannot be written (code {code}, {name})", hint=hint)
        if code is None and not isinstance(error, _OF_THE_CLIENT):
            return out_of_reach(self.location, "no answer")
        if code == UNKNOWN_TABLE and table is not None:
            # A newer copy, another process or a person has dropped what this one writes.
            return not_copied(table)
        return rejected(
            table or self.location,
            f"{self.location} refused a statement (code {code}, {name})",
            hint="system.query_log has the statement. Correct the cause, then run: penstock rollback.",
        )


def server_of(url: str, database: str | None, user: str | None, password: str | None) -> Server:
    """Return the server of a URL; raise `ConfigError` if it is not one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "chdb") or (parts.scheme != "chdb" and not parts.hostname):
        raise unusable("url must be like https://user:password@host:8443/database")
    named = unquote(parts.path.strip("/")) if parts.scheme != "chdb" else ""
    database = database or named
    if not database:
        raise unusable("the destination names no database", hint="Set database, or append it to url.")
    if parts.scheme != "chdb":
        # The database may not exist yet, and the server would refuse every request that names it.
        url = urlunsplit(parts._replace(path=""))
    return Server(url, database, user, password)


def quote(name: str) -> str:
    """Quote a name for ClickHouse."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def literal(text: str) -> str:
    """Quote text for ClickHouse."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


class _Clients(threading.local):
    def __init__(self) -> None:
        self.clients: dict[tuple[int, Server], Client] = {}


_of_thread = _Clients()
