"""State in one SQLite file, shared by the processes of one machine.

WAL mode, so that readers do not wait for the writer; every commit is synced, since positions are acknowledged to the
server after it. Keep the file on a local disk: network file systems do not lock reliably.

SQLite gives its lock for writing to whoever asks at the right moment, and lets the others try again and again. A
process has several connections to the file, one of them for the lease, which must not lose this race: the writers of
one process take turns.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from penstock.errors import StateUnavailable, StateUnusable
from penstock.lsn import Lsn
from penstock.private import private_file
from penstock.state.records import ColumnKind, ResultT, Transaction
from penstock.state.sql import Migration, SqlTransaction, check_unused, load_migrations, pending
from penstock.state.store import Store

APPLICATION_ID = 0x50454E53
"""Marks the file as ours (`PENS`)."""
BUSY_SECONDS = 10.0
_PASSING = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL),
        *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    }
)
"""Results that concern the disk or other programs, and not the file's contents."""

logger = logging.getLogger(__name__)


class SqliteStore(Store):
    """A store in a file, which is created if it does not exist; its folder must exist."""

    def __init__(self, path: str | Path, pipeline_id: str = "default", *, busy_seconds: float = BUSY_SECONDS) -> None:
        database = SqliteDatabase(Path(path), pipeline_id, busy_seconds=busy_seconds)
        database.migrate(load_migrations("sqlite"))
        super().__init__(database)


class SqliteDialect:
    """Positions as 16 digits, which sort as text; times as text in UTC."""

    prefix = ""
    placeholder = "?"

    def encode(self, kind: ColumnKind, value: Any) -> Any:
        """See `sql.Dialect`."""
        match kind:
            case ColumnKind.LSN:
                return f"{int(value):016X}"
            case ColumnKind.JSON:
                return json.dumps(value)
            case ColumnKind.TIME:
                return value.astimezone(UTC).isoformat(timespec="microseconds")
            case _:
                return value

    def decode(self, kind: ColumnKind, value: Any) -> Any:
        """See `sql.Dialect`."""
        match kind:
            case ColumnKind.LSN:
                return Lsn(int(value, 16))
            case ColumnKind.JSON:
                return json.loads(value)
            case ColumnKind.TIME:
                return datetime.fromisoformat(value)
            case _:
                return value


class SqliteDatabase:
    """One connection to the file."""

    def __init__(self, path: Path, pipeline_id: str, *, busy_seconds: float = BUSY_SECONDS) -> None:
        self.pipeline_id = pipeline_id
        self._path = path
        self._busy_seconds = busy_seconds
        self._lock = threading.RLock()
        self._dialect = SqliteDialect()
        if not path.parent.is_dir():
            raise StateUnusable(f"the folder of the state file does not exist: {path.parent.absolute()}")
        with self._translated("open"):
            self._connection: sqlite3.Connection | None = _connect(_own_file(path), busy_seconds)
        self._turns = _turns_of(path)

    def run(self, work: Callable[[Transaction], ResultT], *, writing: bool = True) -> ResultT:
        """See `records.Database`."""
        turn = self._turns.take() if writing else nullcontext()
        with self._lock, turn, self._translated("write" if writing else "read"):
            connection = self._open_connection()
            connection.execute("begin immediate" if writing else "begin")
            try:
                result = work(self._transaction(connection))
                connection.execute("commit")
                return result
            except BaseException:
                if connection.in_transaction:
                    connection.execute("rollback")
                raise

    def migrate(self, migrations: Sequence[Migration]) -> None:
        """Bring the tables up to date; called once, when a store is opened."""
        where = str(self._path)
        try:
            with self._lock, self._translated("migrate"):
                connection = self._open_connection()
                if not pending(migrations, self._version(connection), where):
                    return
                connection.execute("begin immediate")
                try:
                    version = self._version(connection)
                    missing = pending(migrations, version, where)
                    if version and missing:
                        check_unused(_holders(connection), where)
                    for migration in missing:
                        for statement in migration.statements:
                            connection.execute(statement)
                        connection.execute(f"pragma user_version = {migration.number:d}")
                    connection.execute(f"pragma application_id = {APPLICATION_ID:d}")
                    connection.execute("commit")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("rollback")
                    raise
        except BaseException:
            self.close()
            raise

    def another(self) -> SqliteDatabase:
        """See `records.Database`."""
        return SqliteDatabase(self._path, self.pipeline_id, busy_seconds=self._busy_seconds)

    def close(self) -> None:
        """See `records.Database`."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _transaction(self, connection: sqlite3.Connection) -> SqlTransaction:
        return SqlTransaction(
            self.pipeline_id,
            self._dialect,
            execute=connection.execute,
            now=lambda: datetime.now(UTC),
        )

    def _version(self, connection: sqlite3.Connection) -> int:
        version = connection.execute("pragma user_version").fetchone()[0]
        # In this order: another process may be creating the tables, and it writes the mark together with them.
        has_tables = connection.execute("select count(*) from sqlite_master").fetchone()[0] > 0
        mark = connection.execute("pragma application_id").fetchone()[0]
        if has_tables and mark != APPLICATION_ID:
            raise StateUnusable(f"{self._path} is another program's database", hint="Choose another file.")
        return version

    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StateUnusable(f"the state in {self._path} is already closed")
        return self._connection

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise unusable(f"cannot {doing} the state in {self._path}", error) from error


class Turns:
    """A lock that is given in the order in which it was asked for; the holder of a plain one can take it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        """The first one has the turn."""

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn, and have it inside the block."""
        turn = threading.Event()
        with self._lock:
            self._waiting.append(turn)
            if self._waiting[0] is turn:
                turn.set()
        try:
            turn.wait()
            yield
        finally:
            with self._lock:
                self._waiting.remove(turn)
                if self._waiting:
                    self._waiting[0].set()


_every_turns: WeakValueDictionary[tuple[int, int], Turns] = WeakValueDictionary()
"""Of the files that this process has open."""
_every_turns_lock = threading.Lock()


def _turns_of(path: Path) -> Turns:
    found = path.stat()
    with _every_turns_lock:
        return _every_turns.setdefault((found.st_dev, found.st_ino), Turns())


def unusable(what: str, error: sqlite3.Error) -> StateUnusable:
    """Return the named error; `what` failed."""
    # Errors of the sqlite3 module itself have no code. The low byte of a code is its class.
    code: int | None = getattr(error, "sqlite_errorcode", None)
    is_passing = code is not None and code & 0xFF in _PASSING
    return (StateUnavailable if is_passing else StateUnusable)(f"{what}: {error}")


def _own_file(path: Path) -> Path:
    try:
        return private_file(path)
    except OSError as error:
        raise StateUnusable(f"cannot open the state in {path}: {error.strerror}") from None


def _connect(path: Path, busy_seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    try:
        mode = connection.execute("pragma journal_mode = wal").fetchone()[0]
        if mode != "wal":
            logger.warning("the state file is not in WAL mode path=%s mode=%s", path, mode)
        connection.execute("pragma synchronous = full")
    except BaseException:
        connection.close()
        raise
    return connection


def _holders(connection: sqlite3.Connection) -> list[tuple[str, str, int, datetime]]:
    now = SqliteDialect().encode(ColumnKind.TIME, datetime.now(UTC))
    rows = connection.execute(
        "select pipeline_id, host, pid, since from pipelines where holder is not null and expires > ?", (now,)
    ).fetchall()
    return [(name, host, pid, datetime.fromisoformat(since)) for name, host, pid, since in rows]
