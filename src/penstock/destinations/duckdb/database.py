"""Access to a DuckDB file or a DuckLake catalog: opened for as long as it is needed, and closed again.

DuckDB lets one process open a file for writing, or several for reading. So Penstock opens it for each batch and leaves
it to readers in between; while one of them has it open, Penstock waits.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import duckdb
import pyarrow as pa

from penstock.destinations.refusals import out_of_reach, rejected, unusable
from penstock.destinations.table_layout import Target
from penstock.errors import RESYNC, DestinationUnavailable, PenstockError, TasksFailed
from penstock.schema import quote_identifier, quote_literal

LAKE = "ducklake:"
_NAME = "penstock_lake"
"""The catalog of a DuckLake in a session."""
_NAP = 0.05
_LOCKED = ("Could not set lock on file", "different configuration", "Unique file handle conflict")
_HOLDER = re.compile(r"PID (\d+)")
_locks: dict[str, Lock] = {}
"""By path. A second handle of a process on a file would release the lock of the first: the system counts locks by
process."""


@dataclass(frozen=True, slots=True)
class Database:
    """A file or a catalog; pickles."""

    path: str
    """An absolute path, or what ATTACH takes, beginning with `ducklake:`."""
    data_path: str | None = None
    memory: str = "1GB"
    lock_timeout: float = 10.0

    @classmethod
    def of(cls, path: str, data_path: str | None, memory: str, lock_timeout: float) -> Database:
        """Return the database of a path that may be relative: tasks run in folders of their own."""
        if data_path is not None and "://" not in data_path:
            data_path = os.path.abspath(data_path)
        given = cls(path, data_path, memory, lock_timeout)
        file = given.catalog_file
        return given if file is None else replace(given, path=path.removesuffix(file) + os.path.abspath(file))

    @property
    def is_lake(self) -> bool:
        return self.path.startswith(LAKE)

    @property
    def location(self) -> str:
        """The name for messages; that of a catalog server may contain a password."""
        if not self.is_lake or self.catalog_file is not None:
            return self.path
        return f"{LAKE}{self.path.removeprefix(LAKE).partition(':')[0]}"

    @property
    def catalog_file(self) -> str | None:
        """The file that has the tables or the catalog; None if a server has the catalog."""
        if not self.is_lake:
            return self.path
        rest = self.path.removeprefix(LAKE)
        kind, colon, path = rest.partition(":")
        if not colon:
            return rest
        return path if kind in ("duckdb", "sqlite") else None

    @contextmanager
    def session(self, *, read_only: bool = False, create: bool = False) -> Iterator[Session]:
        """Open the database, wait for it if another process has it open, and close it after the block."""
        with _locks.setdefault(self.path, Lock()):
            if not create and not self.is_lake and not Path(self.path).exists():
                # Not a new file in its place, which would hide the tables when the disk is mounted again.
                raise out_of_reach(self.location, "the file is missing; is the disk mounted?")
            with self.translated(), closing(self._connected(read_only)) as connection:
                yield Session(connection, self._catalog(connection))

    @contextmanager
    def transaction(self, *, create: bool = False) -> Iterator[Session]:
        """Run the block in one transaction."""
        with self.session(create=create) as session:
            session.run("begin")
            yield session
            session.run("commit")

    @contextmanager
    def translated(self, table: str | None = None) -> Iterator[None]:
        """Raise DuckDB's errors as Penstock's. Their texts are left out, because they may contain values."""
        try:
            yield
        except duckdb.Error as error:
            raise self._error(error, table) from None

    def _connected(self, read_only: bool) -> duckdb.DuckDBPyConnection:
        deadline = time.monotonic() + self.lock_timeout
        while True:
            try:
                return self._connect(read_only)
            except duckdb.Error as error:
                if not _is_locked(error):
                    raise
                if time.monotonic() > deadline:
                    raise _in_use(self, error) from None
            time.sleep(_NAP)

    def _connect(self, read_only: bool) -> duckdb.DuckDBPyConnection:
        # Without settings of one's own: other connections of this process to the file share the database then.
        connection = duckdb.connect(":memory:" if self.is_lake else self.path, read_only=read_only and not self.is_lake)
        try:
            # Without a fixed order of rows, a copy needs less memory.
            connection.execute(
                f"set memory_limit = {quote_literal(self.memory)}; set preserve_insertion_order = false; "
                "set timezone = 'UTC'"
            )
            if self.is_lake:
                _load_lake(connection)
                if self.catalog_file is not None:
                    connection.execute(f"set temp_directory = {quote_literal(f'{self.catalog_file}.tmp')}")
                options = ["read_only"] if read_only else []
                if self.data_path is not None:
                    options.append(f"data_path {quote_literal(self.data_path)}")
                given = f" ({', '.join(options)})" if options else ""
                connection.execute(f"attach {quote_literal(self.path)} as {_NAME}{given}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _catalog(self, connection: duckdb.DuckDBPyConnection) -> str:
        found = connection.execute("select current_database()").fetchall()
        return _NAME if self.is_lake else str(found[0][0])

    def _error(self, error: duckdb.Error, table: str | None) -> PenstockError:
        place, text = self.location if table is None else f"{table}: {self.location}", str(error)
        if _is_locked(error):
            return _in_use(self, error)
        if isinstance(error, duckdb.OutOfMemoryException):
            return TasksFailed(
                f"{place}: DuckDB ran out of memory",
                hint=f"Raise memory in [destination] (now {self.memory}), or lower batch.max_rows in [pipeline].",
            )
        if isinstance(error, duckdb.IOException | duckdb.HTTPException):
            if "not a valid DuckDB database" in text or "Is a directory" in text:
                return unusable(f"{place} is not a DuckDB database", hint="Choose another path in [destination].")
            if "Permission denied" in text or "read-only mode" in text:
                return unusable(f"{place} cannot be opened: permission denied", hint="Check the owner of the file.")
            if "Extension" in text or "extension" in text:
                return unusable(
                    f"{place}: DuckDB cannot load its extension ducklake",
                    hint="Run once with access to the internet: duckdb -c 'install ducklake'; or install the package "
                    "duckdb-extension-ducklake for your version of duckdb.",
                )
            reason = "no space left on the disk" if "No space left" in text else "an error of input or output"
            return DestinationUnavailable(
                f"{place}: {reason}", hint="Check that this disk has room and may be written; Penstock keeps trying."
            )
        if isinstance(error, duckdb.FatalException | duckdb.TransactionException) or "onflict" in text:
            return DestinationUnavailable(f"{place}: {type(error).__name__}; the batch is written again")
        if isinstance(error, duckdb.CatalogException) and table is not None:
            return rejected(
                table,
                f"its table in {self.location} is missing or has other columns",
                hint=f"If somebody changed it, copy the table again: {RESYNC}.",
            )
        return PenstockError(
            f"{place}: {type(error).__name__} while writing",
            hint="The text of the error is left out because it may contain data.",
        )


@dataclass(frozen=True, slots=True)
class Session:
    """A connection to the database."""

    connection: duckdb.DuckDBPyConnection
    catalog: str

    def name(self, target: Target) -> str:
        """Return the name of a table for SQL; whole, since a schema may have the name of the catalog."""
        return f"{quote_identifier(self.catalog)}.{target.sql}"

    def run(self, statement: str, values: Sequence[Any] = ()) -> int:
        """Run a statement; return how many rows it changed."""
        found = self.connection.execute(statement, list(values)).fetchall()
        return int(found[0][0]) if found and found[0] and isinstance(found[0][0], int) else 0

    def rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query that has few of them."""
        return self.connection.execute(query, list(values)).fetchall()

    def read(self, query: str, rows: int) -> pa.RecordBatchReader:
        """Return the rows of a query, in batches of so many."""
        return self.connection.sql(query).to_arrow_reader(rows)

    def exists(self, target: Target) -> bool:
        """Return True if there is a table or view of this name."""
        query = (
            "select 1 from information_schema.tables "
            "where table_catalog = ? and lower(table_schema) = lower(?) and lower(table_name) = lower(?)"
        )
        return bool(self.rows(query, [self.catalog, target.namespace, target.name]))

    @contextmanager
    def staged(self, **tables: pa.Table) -> Iterator[None]:
        """Within the block, let statements read tables of this process by name."""
        for name, table in tables.items():
            self.connection.register(name, table)
        try:
            yield
        finally:
            for name in tables:
                with suppress(duckdb.Error):
                    self.connection.unregister(name)


def _load_lake(connection: duckdb.DuckDBPyConnection) -> None:
    """Load the extension from its Python package if that is installed; otherwise ATTACH downloads it."""
    found = importlib.util.find_spec("duckdb_extension_ducklake")
    if found is None or found.submodule_search_locations is None:
        return
    folder = Path(found.submodule_search_locations[0]) / "extensions" / f"v{duckdb.__version__}"
    connection.execute(f"load {quote_literal(str(folder / 'ducklake.duckdb_extension'))}")


def _is_locked(error: duckdb.Error) -> bool:
    return any(part in str(error) for part in _LOCKED)


def _in_use(database: Database, error: duckdb.Error) -> PenstockError:
    holder = _HOLDER.search(str(error))
    who = "another process" if holder is None else f"another process (PID {holder[1]})"
    return DestinationUnavailable(
        f"{database.location} is open in {who}",
        hint="DuckDB lets one process write a file. Close that program, or let it open the file only for its query; "
        "Penstock keeps trying, and loses nothing meanwhile.",
    )
