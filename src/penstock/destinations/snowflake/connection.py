"""The connection to Snowflake: parameters that pickle, sessions that every process keeps, and what their errors mean.

Messages of Snowflake can contain values of cells, so errors name the number and the SQL state only.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import snowflake.connector as connector
from cryptography.hazmat.primitives import serialization
from snowflake.connector import errors
from snowflake.connector.config_manager import CONFIG_MANAGER

from penstock.destinations.refusals import busy, out_of_reach, rejected, unusable
from penstock.errors import RESYNC, PenstockError

logger = logging.getLogger(__name__)

STAGE = "PENSTOCK_STAGE"
_PARQUET = "file_format = (type = parquet use_logical_type = true binary_as_text = false null_if = ())"
"""By default, Snowflake takes bytes for text, and a text that is a backslash and an N for NULL."""
_DENIED = frozenset({3001, 390100, 390101, 390102, 390144, 390186, 390189, 390191, 390201, 390422, 394300, 394400})
"""Numbers of refused logins and missing privileges."""
_NO_PLACE = frozenset({606, 90105, 90106})
"""There is no warehouse, database or schema, or the role may not use it."""
_LOCKED = frozenset({625, 684})
"""Another transaction holds the lock; or one was aborted to let another one go on."""
_CANCELLED = frozenset({604, 610, 630, 90073, 390111, 390112, 390114, 390195})
"""A statement was cancelled, a warehouse is not available, or a session has expired."""
_AWAY = (errors.OperationalError, errors.InterfaceError, errors.InternalServerError, errors.ServiceUnavailableError)
_NO_TABLE = frozenset({2003, 2043})
_idle: dict[tuple[int, Connection], list[Any]] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Connection:
    """Where Snowflake is and who we are there; pickles."""

    database: str
    schema: str
    parameters: tuple[tuple[str, Any], ...] = field(repr=False)
    """For the connector; with secrets."""
    timeout: float
    """Seconds until a server that does not respond counts as away."""

    @property
    def place(self) -> str:
        """The schema, for SQL."""
        return f"{quote(self.database)}.{quote(self.schema)}"

    def name(self, table: str) -> str:
        """Return the name of a table for SQL."""
        return f"{self.place}.{quote(table)}"

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Within the block, use a session; after an error it is closed, which also ends its transaction."""
        found, key = None, (os.getpid(), self)
        with _lock:
            if _idle.get(key):
                found = _idle[key].pop()
        session = Session(self, found or self._connect())
        try:
            yield session
        except BaseException:
            session.close()
            raise
        with _lock:
            _idle.setdefault(key, []).append(session.connection)

    def close(self) -> None:
        """Close the sessions that this process keeps."""
        with _lock:
            found = _idle.pop((os.getpid(), self), [])
        for each in found:
            Session(self, each).close()

    def _connect(self) -> Any:
        seconds = max(1, round(self.timeout))
        settings = {
            "TIMEZONE": "UTC",
            "QUERY_TAG": "penstock",
            # A statement whose process died must not go on holding locks.
            "ABORT_DETACHED_QUERY": True,
            "LOCK_TIMEOUT": seconds,
            "CLIENT_OUT_OF_BAND_TELEMETRY_ENABLED": False,
        }
        return connector.connect(
            **{
                **dict(self.parameters),
                "database": self.database,
                "schema": self.schema,
                "paramstyle": "qmark",
                "autocommit": False,
                "login_timeout": seconds,
                "network_timeout": seconds,
                "application": "Penstock",
                "session_parameters": settings,
            }
        )


@dataclass(frozen=True, slots=True)
class Session:
    """A session at Snowflake."""

    to: Connection
    connection: Any

    def run(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run a statement; return how many rows it changed."""
        return int(self._execute(sql, values).rowcount or 0)

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._execute(sql, values).fetchall()

    def batches(self, sql: str) -> list[Any]:
        """Run a query; return its result in batches that pickle and that any process can read."""
        return list(self._execute(sql, ()).get_result_batches())

    def put(self, folder: str, name: str, rows: pa.Table) -> None:
        """Write rows to a Parquet file on the stage."""
        file = io.BytesIO()
        pq.write_table(rows, file)
        file.seek(0)
        self.connection.cursor().execute(
            f"put 'file:///{name}' @{self.to.place}.{STAGE}/{folder} "
            "auto_compress = false source_compression = none overwrite = true",
            file_stream=file,
        )

    def copy(self, table: str, folder: str, count: int) -> None:
        """Append the files of a folder on the stage to a table, named for SQL; raise unless it gets so many rows."""
        loaded = self.rows(
            f"copy into {table} from @{self.to.place}.{STAGE}/{folder}/ {_PARQUET} "
            "match_by_column_name = case_insensitive force = true"
        )
        found = sum(int(row[3]) for row in loaded if len(row) > 3)
        if found != count:
            raise rejected(table, f"Snowflake loaded {found:,} of {count:,} staged rows")

    def remove(self, folder: str) -> None:
        """Remove the files of a folder on the stage; what cannot be removed stays until the next start."""
        try:
            self.run(f"remove @{self.to.place}.{STAGE}/{folder}/")
        except errors.Error as error:
            logger.info("staged files remain folder=%s error=%s", folder, error.errno)

    @contextmanager
    def transaction(self, name: str) -> Iterator[str]:
        """Within the block, statements take effect together; yields the transaction's number.

        They must not be DDL, which commits. Somebody else may abort the transaction: the statements after that begin
        another one, because the session does not commit by itself. So the last one has to compare the number.
        """
        self.run(f"begin transaction name {name}")
        try:
            yield str(self.rows("select current_transaction()")[0][0])
        except BaseException:
            try:
                self.run("rollback")
            except Exception:
                self.close()
            raise
        self.run("commit")

    def close(self) -> None:
        """Close the session, whatever its state is."""
        try:
            self.connection.close(retry=False)
        except Exception:
            return

    def _execute(self, sql: str, values: Sequence[Any]) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(sql, list(values) or None)
        return cursor


def connect(
    database: str,
    schema: str,
    options: Mapping[str, str | None],
    *,
    connection_name: str | None,
    private_key_file: str | None,
    private_key_passphrase: str | None,
    endpoint: str | None,
    timeout: float,
) -> Connection:
    """Return a connection; read files here, because tasks may run on machines without them."""
    found: dict[str, Any] = {}
    if connection_name is not None:
        found |= _configured(connection_name)
    found |= {name: value for name, value in options.items() if value is not None}
    if private_key_file is not None:
        found["private_key"] = _private_key(private_key_file, private_key_passphrase)
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise unusable("the endpoint of a snowflake destination must start with http:// or https://")
        found |= {"protocol": parts.scheme, "host": parts.hostname, "port": parts.port or 443}
    missing = [name for name in ("account", "user") if not found.get(name)]
    if missing:
        raise unusable(
            f"a snowflake destination needs {' and '.join(missing)}",
            hint="Name them in the config, or name a connection of connections.toml with connection_name.",
        )
    return Connection(database, schema, tuple(sorted(found.items())), timeout)


def quote(name: str) -> str:
    """Return an identifier for SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text for SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def failure(table: str, error: Exception) -> Exception:
    """Return what an error of the connector means; an error that is not of the connector as it is."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, OSError) and not isinstance(error, errors.Error):
        return out_of_reach("Snowflake", type(error).__name__)
    if not isinstance(error, errors.Error):
        return error
    number = error.errno or 0
    what = f"{number:06d}" + (f", {error.sqlstate}" if error.sqlstate else "")
    if number in _DENIED:
        return unusable(
            f"Snowflake refuses access ({what})",
            hint="Check account, user, and password or private_key_file. The role needs usage on warehouse, database "
            "and schema, and create table, create view and create stage on the schema.",
        )
    if number in _NO_PLACE:
        return unusable(
            f"Snowflake has no such warehouse, database or schema for this role ({what})",
            hint="Check warehouse, database, schema and role.",
        )
    if number in _LOCKED:
        return busy(table)
    if number in _CANCELLED or (isinstance(error, _AWAY) and not isinstance(error, errors.ProgrammingError)):
        return out_of_reach("Snowflake", what)
    if is_missing(error):
        return rejected(
            table, f"Snowflake has no such table ({what})", hint=f"If it was dropped there, copy it again: {RESYNC}."
        )
    return rejected(table, f"Snowflake refused a statement ({what})")


def is_missing(error: Exception) -> bool:
    """Return True if an object does not exist."""
    return isinstance(error, errors.ProgrammingError) and error.errno in _NO_TABLE


@contextmanager
def translated(table: str) -> Iterator[None]:
    """Within the block, errors of the connector become errors of Penstock."""
    try:
        yield
    except Exception as error:
        meaning = failure(table, error)
        if meaning is error:
            raise
        raise meaning from None


def _configured(name: str) -> dict[str, Any]:
    """Return a connection of the connector's own configuration."""
    try:
        known: Any = CONFIG_MANAGER["connections"]
    except Exception as error:
        raise unusable(
            f"the connector's connections.toml cannot be read ({type(error).__name__})",
            hint="It is expected in ~/.snowflake; SNOWFLAKE_HOME names another folder.",
        ) from None
    if name not in known:
        raise unusable(f"connections.toml has no connection {name!r} (connection_name)")
    found: dict[str, Any] = dict(known[name])
    path = found.pop("private_key_file", None) or found.pop("private_key_path", None)
    if path is not None:
        found["private_key"] = _private_key(str(path), found.pop("private_key_file_pwd", None))
    return found


def _private_key(path: str, passphrase: str | None) -> bytes:
    """Return a private key as the connector takes it."""
    try:
        content = Path(path).expanduser().read_bytes()
        key = serialization.load_pem_private_key(content, None if passphrase is None else passphrase.encode())
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no PEM key, or the passphrase is wrong"
        raise unusable(
            f"{path} (private_key_file) cannot be read: {reason}",
            hint="Name a private key in PEM (PKCS 8), and private_key_passphrase if it is encrypted.",
        ) from None
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.DER, form, serialization.NoEncryption())
