"""The snapshot in which a copy reads: it matches a position of the WAL exactly, and does not need its slot any longer.

Only creating a logical slot yields both a snapshot and its position S: exactly the transactions before S are visible. A
slot that lived as long as the copy would retain WAL on the server. So a *keeper* session imports the snapshot into a
transaction of its own and exports it again, and the slot is dropped at once. The keeper holds back the vacuum horizon:
dead rows stay until it ends, so monitor `age`.

The keeper's session has no timeouts and runs only liveness checks: a failed statement would end its transaction, and
with it the snapshot.
"""

from __future__ import annotations

import logging
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import TracebackType
from typing import Any

import psycopg
from psycopg import pq, sql

from penstock.errors import SnapshotBlocked, SnapshotLost, SourceError
from penstock.lsn import Lsn
from penstock.schema import quote_identifier
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect, connect_replication
from penstock.source.faults import Place, from_exception, from_result
from penstock.source.lineage import identify_system
from penstock.source.slots import PLUGIN, Blocker, find_blockers, name_blockers, warn_of_blockers

SLOT_PREFIX = "penstock_snapshot"
WAIT_SECONDS = 300.0
"""How long to wait for open transactions to end."""
_REPORT_SECONDS = (2.0, 10.0)
"""When blockers are first reported, and how often after that."""
_CHECK_SECONDS = 0.5
_OPTIONS_IN_PARENTHESES_SINCE = 150000
# SQLSTATEs for a snapshot that does not exist: a malformed or unknown name, a missing file.
_UNKNOWN_SNAPSHOT = frozenset({"22023", "42704", "55000", "58P01"})

logger = logging.getLogger(__name__)

OnWait = Callable[[list[Blocker]], None]
Check = Callable[[], None]


class Snapshot:
    """A snapshot of the whole database that lasts until it is closed; any number of tables and sessions can use it.

    Other processes need only `name`, for `enter_snapshot`. Methods are thread-safe.
    """

    def __init__(
        self, settings: SourceSettings, keeper: psycopg.Connection[Any], name: str, position: Lsn, timeline: int
    ) -> None:
        self.name = name
        self.position = position
        """The boundary S: the snapshot shows exactly the transactions before it."""
        self.timeline = timeline
        """That of the server when the snapshot was taken."""
        self._settings = settings
        self._keeper = keeper
        self._since = time.monotonic()
        self._lock = threading.Lock()

    @property
    def age(self) -> float:
        """Seconds for which it has held back the vacuum horizon."""
        return time.monotonic() - self._since

    def check(self) -> None:
        """Raise `SnapshotLost` unless sessions can still enter the snapshot."""
        with self._lock:
            place = Place.of(self._keeper)
            try:
                self._keeper.execute("select 1")
            except psycopg.Error as error:
                said = from_exception(error, place, "keep the snapshot of a copy")
                raise _lost(self.name, place, said.message) from None

    @contextmanager
    def connect(
        self, role: Role = Role.COPY, *, parameters: Mapping[str, str] | None = None
    ) -> Iterator[psycopg.Connection[Any]]:
        """Open a session inside the snapshot, for example to read the catalog as of `position`; see `connect`."""
        # Closed without a commit: nothing was written, so a server that fails now loses nothing.
        with closing(connect(self._settings, role, parameters=parameters)) as connection:
            enter_snapshot(connection, self.name)
            yield connection

    def close(self) -> None:
        """Release the snapshot; sessions that have entered it keep theirs."""
        with self._lock:
            if not self._keeper.closed:
                logger.info(
                    "snapshot released snapshot=%s position=%s seconds=%.1f", self.name, self.position, self.age
                )
            self._keeper.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def take_snapshot(
    settings: SourceSettings,
    *,
    timeout: float = WAIT_SECONDS,
    on_wait: OnWait | None = None,
    check: Check = lambda: None,
) -> Snapshot:
    """Take a snapshot with its position.

    The server waits for every open transaction that has written, in any database. `on_wait` receives them regularly (by
    default they are logged as a warning). After `timeout` seconds, `SnapshotBlocked` names them. `check` is called
    about twice a second during the wait; an exception from it ends the wait. Nothing is left behind on the server.
    """
    replication = connect_replication(settings, Role.SNAPSHOT)
    try:
        keeper = connect(settings, Role.SNAPSHOT, parameters=NO_TIMEOUTS)
        try:
            timeline = identify_system(replication).timeline
            position, exported = _create_slot(replication, keeper, timeout, on_wait or warn_of_blockers, check)
            enter_snapshot(keeper, exported)
            name = export_snapshot(keeper)
        except BaseException:
            keeper.close()
            raise
    finally:
        # The temporary slot, and the WAL that it retains, ends with its session.
        replication.finish()
    logger.info("snapshot taken snapshot=%s position=%s", name, position)
    return Snapshot(settings, keeper, name, position, timeline)


def enter_snapshot(connection: psycopg.Connection[Any], name: str) -> None:
    """Begin a transaction in a snapshot, on a connection in autocommit mode. Raises `SnapshotLost`."""
    place = Place.of(connection)
    try:
        connection.execute("begin transaction isolation level repeatable read, read only")
        connection.execute(sql.SQL("set transaction snapshot {}").format(sql.Literal(name)))
    except psycopg.Error as error:
        said = from_exception(error, place, "enter the snapshot of a copy")
        raise (_lost(name, place, said.message) if error.sqlstate in _UNKNOWN_SNAPSHOT else said) from None


def _create_slot(
    replication: pq.abc.PGconn, keeper: psycopg.Connection[Any], timeout: float, on_wait: OnWait, check: Check
) -> tuple[Lsn, str]:
    """Return position and name of a snapshot that lasts until the next command on the replication connection."""
    slot = f"{SLOT_PREFIX}_{secrets.token_hex(6)}"
    new_syntax = replication.server_version >= _OPTIONS_IN_PARENTHESES_SINCE
    options = "(SNAPSHOT 'export')" if new_syntax else "EXPORT_SNAPSHOT"
    command = f"CREATE_REPLICATION_SLOT {quote_identifier(slot)} TEMPORARY LOGICAL {PLUGIN} {options}"
    place, doing = Place.of(replication), "take a snapshot"
    try:
        replication.send_query(command.encode())
        try:
            ended = _wait(replication, keeper, timeout, on_wait, check)
        except BaseException:
            _cancel(replication, keeper)
            raise
        if not ended:
            raise _give_up(replication, keeper, place, timeout)
        result = replication.get_result()
    except psycopg.Error as error:
        raise from_exception(error, place, doing, slot=slot) from None
    if result is None or result.status != pq.ExecStatus.TUPLES_OK:
        raise from_result(result, place, doing, slot=slot) if result else _lost("", place, "the server did not answer")
    position, name = result.get_value(0, 1), result.get_value(0, 2)
    if position is None or name is None:
        raise _lost("", place, "the server exported no snapshot")
    return Lsn.parse(position.decode()), name.decode()


def _wait(
    connection: pq.abc.PGconn, keeper: psycopg.Connection[Any], timeout: float, on_wait: OnWait, check: Check
) -> bool:
    """Wait for the answer to a command and report blockers; return False after the timeout."""
    start = time.monotonic()
    deadline = start + timeout
    report_at = start + _REPORT_SECONDS[0]
    poll = select.poll()
    poll.register(connection.socket, select.POLLIN)
    connection.flush()
    while connection.is_busy():
        now = time.monotonic()
        if now >= deadline:
            return False
        if poll.poll(max(0.0, min(deadline, report_at, now + _CHECK_SECONDS) - now) * 1000):
            connection.consume_input()
            continue
        check()
        if time.monotonic() >= report_at:
            report_at += _REPORT_SECONDS[1]
            on_wait(find_blockers(keeper))
    return True


def _give_up(
    replication: pq.abc.PGconn, keeper: psycopg.Connection[Any], place: Place, timeout: float
) -> SnapshotBlocked:
    blockers = find_blockers(keeper)
    _cancel(replication, keeper)
    return SnapshotBlocked(
        f"cannot take a snapshot ({place.where}): open transactions did not end within {timeout:g} s: "
        f"{name_blockers(blockers)}",
        where=place.where,
        blockers=[str(blocker) for blocker in blockers],
    )


def _cancel(replication: pq.abc.PGconn, keeper: psycopg.Connection[Any]) -> None:
    """Cancel the waiting command: the server would keep waiting, and retain WAL, long after Penstock disconnects."""
    try:
        keeper.execute("select pg_catalog.pg_cancel_backend(%s)", [replication.backend_pid])
    except psycopg.Error:
        logger.warning("could not cancel the waiting session pid=%d", replication.backend_pid)


def export_snapshot(keeper: psycopg.Connection[Any]) -> str:
    """Return the name of the snapshot of a session's transaction, which others enter while that transaction lasts."""
    place = Place.of(keeper)
    try:
        row = keeper.execute("select pg_catalog.pg_export_snapshot()").fetchone()
    except psycopg.Error as error:
        raise from_exception(error, place, "export a snapshot") from None
    if row is None:
        raise _lost("", place, "the server exported no snapshot")
    return row[0]


def _lost(name: str, place: Place, said: str) -> SourceError:
    return SnapshotLost(f"snapshot {name!r} is gone ({place.where}): {said}", where=place.where, snapshot=name)
