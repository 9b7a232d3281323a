"""Changes by asking again and again, for servers without logical decoding.

Each poll reads, in one snapshot, the rows of every table that came or changed since the last one. How a table tells:

- `xmin`: the number of the transaction that wrote the row, which every row has. Rows of the oldest transaction that was
  still open at the last poll, and of all after it, are read again: one that commits late is not missed, however late.
  The whole table is read each time: no index has this number.
- a column such as `updated_at`, which an index can have. A transaction that began before the last poll may commit
  after it with an older time, so each poll goes back to when the oldest open transaction began, and further by
  `overlap`: for clocks of applications that are late, and for sessions whose beginning the server does not tell this
  role.

Row versions that were delivered already are not delivered again while this process lives.

**What polling cannot see.** Rows that are deleted: their documents, and what they were part of, stay as they were until
something else changes them; mark rows as deleted instead (`soft_delete`), or compare by `index diff` and rebuild. What
a row was between two polls. A changed primary key: the new row is seen, the old one counts as deleted. An emptied
table. With a column: rows that change without it being set, and rows in which it is null or infinite.

Old parents of moved rows come from the map of relations, whatever the replica identity: give the resolver the catalog
that `polled_catalog` makes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from penstock.changes.segment import Operation
from penstock.documents.base import Change, ChangeCapture, SnapshotTable
from penstock.documents.expressions import table_name
from penstock.documents.images import Changes, RowChanges
from penstock.documents.polling_positions import PollPosition, PollPositions
from penstock.documents.polling_rows import (
    XMIN,
    Delivered,
    PolledTable,
    cells_of,
    changed_query,
    polled_catalog,
    polled_tables,
    row_images,
    texts_of,
)
from penstock.documents.statements import run_statement
from penstock.errors import ConfigError, Retry, SourceError
from penstock.retry import Backoff
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.faults import translated

__all__ = ["XMIN", "PollSettings", "PolledTable", "PollingCapture", "polled_catalog", "polled_tables"]

DEFAULT_CHUNK = 10_000

logger = logging.getLogger(__name__)

# When the oldest transaction began that can still commit with that time; this one began no later than now.
_OLDEST = """
    select (extract(epoch from least(pg_catalog.transaction_timestamp(), pg_catalog.min(b.began)))
            * 1000000)::int8
    from (select xact_start from pg_catalog.pg_stat_activity
          union all select prepared from pg_catalog.pg_prepared_xacts) b (began)
"""
_SNAPSHOT = """
    select pg_catalog.pg_snapshot_xmin(s)::text::int8, pg_catalog.pg_snapshot_xmax(s)::text::int8,
           (extract(epoch from pg_catalog.clock_timestamp()) * 1000000)::int8
    from pg_catalog.pg_current_snapshot() s
"""
_SEES_SESSIONS = "select pg_catalog.pg_has_role('pg_read_all_stats', 'usage')"


@dataclass(frozen=True, slots=True)
class PollSettings:
    """How often, and how far back."""

    interval: float = 1.0
    """Seconds between two polls."""
    overlap: float = 60.0
    """Seconds; for times that are late."""
    chunk: int = DEFAULT_CHUNK


@dataclass(frozen=True, slots=True)
class _Marks:
    """Where the server is at one poll."""

    oldest_start: int
    oldest_xid: int
    next_xid: int
    now: int


@dataclass(slots=True)
class _Poll:
    """A poll whose changes are not all confirmed yet."""

    position: PollPosition
    waiting: int = 0
    read: bool = False

    @property
    def done(self) -> bool:
        return self.read and not self.waiting


@dataclass(frozen=True, slots=True)
class _Confirmation:
    capture: PollingCapture
    poll: _Poll

    def confirm(self) -> None:
        self.capture.confirmed(self.poll)


class _Nothing:
    def confirm(self) -> None:
        pass


class PollingCapture(ChangeCapture):
    """See the module. `live` goes on until `stop` is set; a server that is away is waited for."""

    def __init__(
        self,
        source: SourceSettings,
        tables: Sequence[PolledTable],
        positions: PollPositions,
        *,
        settings: PollSettings | None = None,
        stop: threading.Event | None = None,
        once: bool = False,
    ) -> None:
        """With `once`, `live` ends when a poll has found nothing."""
        self._source = source
        self._tables = tuple(tables)
        self._positions = positions
        self._settings = settings or PollSettings()
        self._stop = stop or threading.Event()
        self._once = once
        self._delivered = {each.table.name: Delivered() for each in tables}
        self._polls: deque[_Poll] = deque()
        self._stored: PollPosition | None = None
        self._found = 0
        """Changes of the last poll."""
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """See `ChangeCapture`. At the first start, what is there now counts as seen: the backfill reads it."""
        if self._positions.load() is not None:
            return
        with self._connect() as connection:
            marks = _Marks(_oldest_start(connection), *_snapshot(connection))
        self._positions.store(self._after(marks, None))

    def live(self) -> Iterator[Change]:
        """See `ChangeCapture`."""
        position = self._positions.load()
        if position is None:
            raise ConfigError("polling has no position", hint="Call prepare() before anything is read.")
        # What was delivered to another run and not confirmed has to come again.
        self._delivered = {each.table.name: Delivered() for each in self._tables}
        self._polls.clear()
        self._warn_about_hidden_sessions()
        backoff = Backoff()
        connection: psycopg.Connection[Any] | None = None
        try:
            while not self._stop.is_set():
                try:
                    connection = connection or self._connect()
                    position = yield from self._poll(connection, position)
                except SourceError as error:
                    if error.retry is not Retry.TIMED:
                        raise
                    connection = _closed(connection)
                    self._stop.wait(backoff.next_delay())
                    continue
                backoff.reset()
                if self._once and not self._found:
                    return
                self._stop.wait(self._settings.interval)
        finally:
            _closed(connection)

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        """See `ChangeCapture`."""
        with self._connect() as connection:
            for each in tables:
                text = sql.SQL("select {} from {} r").format(texts_of(each.columns), table_name(each.table))
                for rows in self._read(connection, text, [], f"read {each.table}"):
                    images = cells_of(each.columns, rows)
                    changes = row_images(each.table, len(rows), images, (), Operation.INSERT, 0, 0)
                    yield Change(Changes((changes,), is_snapshot=True), _Nothing())

    def confirmed(self, poll: _Poll) -> None:
        """A piece of a poll is durable; the position moves when it and all before are. For acknowledgements."""
        with self._lock:
            poll.waiting -= 1
            self._advance()

    def _poll(self, connection: psycopg.Connection[Any], before: PollPosition) -> Generator[Change, None, PollPosition]:
        # Not in the snapshot but before it: a transaction that ends in between is in the one or in the other.
        oldest = _oldest_start(connection)
        poll = _Poll(before)
        self._found = 0
        with self._lock:
            self._polls.append(poll)
        try:
            with translated(connection, "poll for changes"), connection.transaction():
                connection.execute("set transaction isolation level repeatable read read only")
                marks = _Marks(oldest, *_snapshot(connection))
                after = self._after(marks, before)
                for rows in self._changes(connection, before, marks, after.order):
                    self._found += len(rows)
                    with self._lock:
                        poll.waiting += 1
                    yield Change(Changes((rows,)), _Confirmation(self, poll))
            poll.position = after
        finally:
            # A poll that was cut short leaves the position where it was.
            with self._lock:
                poll.read = True
                self._advance()
        for table in self._tables:
            self._delivered[table.table.name].forget(_floor(table, after))
        return after

    def _changes(
        self, connection: psycopg.Connection[Any], before: PollPosition, marks: _Marks, order: int
    ) -> Iterator[RowChanges]:
        ordinal = 0
        for table in self._tables:
            for rows in self._changed(connection, table, before, marks):
                images = cells_of(table.columns, rows)
                known = table.table.primary_key
                yield row_images(table.table.name, len(rows), images, known, Operation.UPDATE, order, ordinal)
                ordinal += len(rows)

    def _changed(
        self, connection: psycopg.Connection[Any], table: PolledTable, before: PollPosition, marks: _Marks
    ) -> Iterator[list[tuple[Any, ...]]]:
        """The columns of rows that changed and were not delivered, in pieces."""
        name = table.table.name
        for rows in self._read(
            connection, changed_query(table), [_floor(table, before), marks.next_xid], f"poll {name}"
        ):
            fresh = self._delivered[name].take(rows)
            if fresh:
                yield fresh

    def _read(
        self, connection: psycopg.Connection[Any], text: sql.Composed, parameters: list[Any], doing: str
    ) -> Iterator[list[tuple[Any, ...]]]:
        with (
            translated(connection, doing),
            connection.transaction(),
            psycopg.RawServerCursor(connection, "penstock_poll", row_factory=tuple_row) as cursor,
        ):
            cursor.execute(text, parameters)
            while rows := cursor.fetchmany(self._settings.chunk):
                yield rows

    def _warn_about_hidden_sessions(self) -> None:
        if all(each.cursor == XMIN for each in self._tables):
            return
        with self._connect() as connection:
            if not sees_all_sessions(connection):
                logger.warning(
                    "the server does not tell when transactions of others began, so those that take longer than"
                    " overlap=%gs can be missed remedy=%s",
                    self._settings.overlap,
                    "grant pg_read_all_stats",
                )

    def _after(self, marks: _Marks, before: PollPosition | None) -> PollPosition:
        """Where the next poll begins: nothing that can still become visible lies below it."""
        floor = marks.oldest_start - round(self._settings.overlap * 1_000_000)
        times = {
            str(each.table.name): max(floor, before.times.get(str(each.table.name), floor) if before else floor)
            for each in self._tables
            if each.cursor != XMIN
        }
        order = max(marks.now, before.order + 1 if before is not None else 0)
        return PollPosition(order, max(marks.oldest_xid, before.xid if before is not None else 0), times)

    def _advance(self) -> None:
        stored: PollPosition | None = None
        while self._polls and self._polls[0].done:
            stored = self._polls.popleft().position
        if stored is not None and stored != self._stored:
            self._positions.store(stored)
            self._stored = stored

    def _connect(self) -> psycopg.Connection[Any]:
        return connect(self._source, Role.DOCUMENTS, parameters=NO_TIMEOUTS)


def sees_all_sessions(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server tells this role when the transactions of others began."""
    return bool(run_statement(connection, _SEES_SESSIONS, [], "look at the rights of this role")[0][0])


def _oldest_start(connection: psycopg.Connection[Any]) -> int:
    return run_statement(connection, _OLDEST, [], "look for open transactions")[0][0]


def _snapshot(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    oldest_xid, next_xid, now = run_statement(connection, _SNAPSHOT, [], "look where the server is")[0]
    return oldest_xid, next_xid, now


def _floor(table: PolledTable, position: PollPosition) -> int:
    # A table that was not polled by its column before is read as a whole.
    return position.xid if table.cursor == XMIN else position.times.get(str(table.table.name), 0)


def _closed(connection: psycopg.Connection[Any] | None) -> None:
    if connection is not None:
        connection.close()
