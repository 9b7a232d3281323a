"""Changes by polling, for servers without logical decoding.

Each poll reads, in one snapshot, the rows of every table that were added or changed since the last one. A table tells
them apart in one of two ways:

- `xmin`: the number of the transaction that wrote the row, which every row has. Each poll reads again the rows of the
  oldest transaction that was still open at the last poll, and of all later ones, so a late commit is never missed. It
  reads the whole table each time, because no index has this number.
- a column such as `updated_at`, which can be indexed. A transaction that began before the last poll may commit after it
  with an older time, so each poll goes back to the start of the oldest open transaction, and further by `overlap`: for
  application clocks that are late, and for sessions whose start the server does not show to this role.

While the process lives, row versions that were delivered are not delivered again.

**What polling cannot see.** Deleted rows: their documents, and the documents that embed them, stay as they were until
something else changes them; mark rows as deleted instead (`soft_delete`), or compare with `index diff` and rebuild.
States of a row between two polls; so if a row moves to another parent and back, a document of that parent that was
built just then keeps it. A changed primary key: the new row is seen, the old one counts as deleted. A
truncated table. With a column: changes that do not set it, and rows in which it is null or infinite.

The relation map supplies the old parents of moved rows, whatever the replica identity: give the resolver the catalog
that `polled_catalog` returns. Where polling left off is part of the state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from penstock.changes.segment import Operation
from penstock.documents.base import Acks, Change, ChangeCapture, SnapshotTable
from penstock.documents.catalog import SourceCatalog, SourceTable
from penstock.documents.expressions import column, rows_of
from penstock.documents.images import Cells, Changes, RowChanges, WantedColumns
from penstock.documents.snapshot import read_snapshot, read_texts, row_images, texts_of
from penstock.documents.statements import as_literal, run_statement
from penstock.errors import ConfigError, Retry, SourceError
from penstock.retry import Backoff
from penstock.schema import ReplicaIdentity
from penstock.source.connections import NO_TIMEOUTS, Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.source.patterns import TableName
from penstock.state import open_store
from penstock.state.records import Database, PollPositionRecord

__all__ = ["XMIN", "PollSettings", "PolledTable", "PollingCapture", "polled_catalog", "polled_tables"]

DEFAULT_CHUNK = 10_000

logger = logging.getLogger(__name__)

# The start of the oldest transaction that can still commit with that time; at the latest that of this one. The server
# shows only when a prepared one was prepared.
_OLDEST = """
    select (extract(epoch from least(pg_catalog.transaction_timestamp(), pg_catalog.min(b.began)))
            * 1000000)::int8, coalesce(pg_catalog.bool_or(b.is_prepared), false)
    from (select xact_start, false from pg_catalog.pg_stat_activity
          union all select prepared, true from pg_catalog.pg_prepared_xacts
          where database = pg_catalog.current_database()) b (began, is_prepared)
"""
_SNAPSHOT = """
    select pg_catalog.pg_snapshot_xmin(s)::text::int8, pg_catalog.pg_snapshot_xmax(s)::text::int8,
           (extract(epoch from pg_catalog.clock_timestamp()) * 1000000)::int8
    from pg_catalog.pg_current_snapshot() s
"""
_SEES_SESSIONS = "select pg_catalog.pg_has_role('pg_read_all_stats', 'usage')"
XMIN = "xmin"
_TIME_TYPES = ("timestamptz", "timestamp")
_VERSIONS = pa.schema([pa.field(name, pa.int64()) for name in ("mark", "place", "writer")])

# The full id of a row's transaction: of those with these 32 bits, the nearest to the server's current one.
_WHOLE_XID = "($2::int8 + ((r.xmin::text::int8 - $2::int8 % 4294967296) + 6442450944) % 4294967296 - 2147483648)"
_VERSION = (
    "(((r.ctid::text::point)[0])::int8 << 16) + ((r.ctid::text::point)[1])::int8,"
    " (r.tableoid::int8 << 32) + r.xmin::text::int8"
)


@dataclass(frozen=True, slots=True)
class PollSettings:
    """How often to poll, and how far back."""

    interval: float = 1.0
    """Seconds between two polls."""
    overlap: float = 60.0
    """Seconds to go back, for late clocks."""
    chunk: int = DEFAULT_CHUNK


@dataclass(frozen=True, slots=True)
class PolledTable:
    """A table, the columns to read, and the cursor that marks changed rows."""

    table: SourceTable
    columns: tuple[str, ...]
    cursor: str = XMIN
    """`xmin`, or a column with the time of the last change."""


def polled_catalog(catalog: SourceCatalog) -> SourceCatalog:
    """Return the catalog for polling: of a changed row, only the primary key is known from before."""
    return SourceCatalog(
        {
            name: replace(
                table,
                identity=ReplicaIdentity.DEFAULT,
                identity_columns=frozenset(table.primary_key),
                leaves=(),
                members={oid: member for oid, member in table.members.items() if member == name},
            )
            for name, table in catalog.tables.items()
        }
    )


def polled_tables(
    catalog: SourceCatalog,
    wanted: Mapping[TableName, WantedColumns],
    cursors: Mapping[TableName, str] | None = None,
    default: str = XMIN,
) -> list[PolledTable]:
    """Return the tables to poll, for a resolver's wanted columns; `cursors` names the columns of some tables."""
    found: list[PolledTable] = []
    for name in sorted(wanted):
        table = catalog.table(name)
        cursor = (cursors or {}).get(name, default)
        problem = why_unpollable(table, cursor)
        if problem is not None:
            raise ConfigError(problem[0], hint=problem[1])
        found.append(PolledTable(table, wanted[name].columns, cursor))
    return found


def changed_query(table: PolledTable) -> sql.Composed:
    """Return the query for mark, place, writer and columns of rows from a mark on; takes the mark and the next xid."""
    if table.cursor == XMIN:
        mark, where = _WHOLE_XID, f"{_WHOLE_XID} >= $1 and {_WHOLE_XID} < $2"
    else:
        stamp = column("r", table.cursor).as_string(None)
        zone = " at time zone 'UTC'" if table.table.column(table.cursor).base.name == "timestamp" else ""
        mark = f"(extract(epoch from {stamp}) * 1000000)::int8"
        where = f"{stamp} >= pg_catalog.to_timestamp($1::float8 / 1000000){zone} and isfinite({stamp}) and $2::int8 > 0"
    return sql.SQL("select {}, {}, {} from {} r where {}").format(
        sql.SQL(as_literal(mark)),
        sql.SQL(as_literal(_VERSION)),
        texts_of(table.columns),
        rows_of(table.table),
        sql.SQL(as_literal(where)),
    )


@dataclass(slots=True)
class Delivered:
    """Row versions above the mark from which rows are read again: their place and their writer."""

    versions: pa.Table = field(default_factory=lambda: _VERSIONS.empty_table())

    def take(self, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return the columns of rows that were not delivered yet, and mark them as delivered."""
        marks, places, writers = (pa.array(each, pa.int64()) for each in list(zip(*rows, strict=True))[:3])
        number = pa.array(np.arange(len(rows)))
        read = pa.Table.from_arrays([marks, places, writers], schema=_VERSIONS)
        new = read.append_column("number", number)
        if self.versions.num_rows:
            new = new.join(self.versions.drop_columns("mark"), ["place", "writer"], join_type="left anti")
        chosen = np.sort(new.column("number").to_numpy())
        self.versions = pa.concat_tables([self.versions, read.take(pa.array(chosen))])
        # Cold: the rows that changed between two polls.
        return [tuple(rows[index][3:]) for index in chosen]

    def forget(self, floor: int) -> None:
        """Forget rows below the mark, which are not read again."""
        if self.versions.num_rows:
            self.versions = self.versions.filter(pa.array(self.versions.column("mark").to_numpy() >= floor))


def why_unpollable(table: SourceTable, cursor: str) -> tuple[str, str] | None:
    """Return why a table cannot be polled by this cursor, and what helps; None if it can."""
    if not table.primary_key:
        return f"{table.name} has no primary key, so it cannot be polled", "Add one."
    found = table.columns.get(cursor)
    if cursor == XMIN or (found is not None and found.base.name in _TIME_TYPES):
        return None
    what = f"{table.name} has no column {cursor!r}" if found is None else f"{table.name}.{cursor} is {found.type}"
    return f"{what}; polling needs a timestamp", f'Set another column in polling.tables, or "{XMIN}".'


@dataclass(frozen=True, slots=True)
class PollPosition:
    """The marks up to which everything was seen."""

    order: int
    """Grows from poll to poll, also across restarts."""
    xid: int
    """Transactions below this id had ended and were seen."""
    times: dict[str, int] = field(default_factory=dict[str, int])
    """Microseconds since 1970, by table: rows with an earlier time were seen."""


def open_positions(state_url: str, owner: str) -> PollPositions:
    """Open the position in the state of this URL; `owner` is the output's id."""
    return PollPositions(open_store(state_url, owner).database)


class PollPositions:
    """Keeps one position, durably. The thread that confirms changes stores it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def load(self) -> PollPosition | None:
        """Return the stored position; None at the first start."""
        found = self._database.run(lambda transaction: transaction.rows(PollPositionRecord), writing=False)
        return PollPosition(**found[0].position) if found else None

    def store(self, position: PollPosition) -> None:
        """Store the position; durable when it returns."""
        self._database.run(lambda transaction: transaction.put([PollPositionRecord(asdict(position))]))

    def forget(self) -> None:
        """Delete the position: the next start counts as the first."""
        self._database.run(lambda transaction: transaction.delete(PollPositionRecord))

    def close(self) -> None:
        """Close connections and files; may be called twice."""
        self._database.close()


@dataclass(frozen=True, slots=True)
class _Marks:
    """The server's marks at one poll."""

    oldest_start: int
    has_prepared: bool
    """True if a transaction is prepared, which started earlier than the server shows."""
    oldest_xid: int
    next_xid: int
    now: int


class PollingCapture(ChangeCapture):
    """Polls until `stop` is set; waits for a server that is unavailable."""

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
        """With `once`, `live` ends when a poll finds nothing."""
        self._source = source
        self._tables = tuple(tables)
        self._positions = positions
        self._settings = settings or PollSettings()
        self._stop = stop or threading.Event()
        self._once = once
        self._delivered = {each.table.name: Delivered() for each in tables}
        self._acks: Acks[PollPosition] = Acks(self._advance)
        self._stored: PollPosition | None = None
        self._found = 0
        """The number of changes of the last poll."""

    def prepare(self) -> None:
        """See `ChangeCapture`. At the first start, existing rows count as seen: the backfill reads them."""
        if self._positions.load() is not None:
            return
        with self._connect() as connection:
            marks = _Marks(*_oldest_start(connection), *_snapshot(connection))
        self._positions.store(self._after(marks, None))

    def resumes(self) -> bool:
        return self._positions.load() is not None

    def live(self) -> Iterator[Change]:
        self.prepare()
        position = self._positions.load()
        if position is None:
            raise ConfigError("polling has lost its position", hint="Do not remove it while a pipeline runs.")
        # Changes that another run received but did not confirm have to be delivered again.
        self._delivered = {each.table.name: Delivered() for each in self._tables}
        self._acks.forget()
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
        catalog = SourceCatalog({each.table.name: each.table for each in self._tables})
        return read_snapshot(self._source, catalog, tables, self._settings.chunk)

    def _poll(self, connection: psycopg.Connection[Any], before: PollPosition) -> Generator[Change, None, PollPosition]:
        # Before the snapshot: a transaction that ends in between is covered by one of the two.
        oldest = _oldest_start(connection)
        self._found = 0
        with translated(connection, "poll for changes"), connection.transaction():
            connection.execute("set transaction isolation level repeatable read read only")
            marks = _Marks(*oldest, *_snapshot(connection))
            after = self._after(marks, before)
            for rows in self._changes(connection, before, marks, after.order):
                self._found += len(rows)
                yield Change(Changes((rows,)), self._acks.expect())
        # An interrupted poll leaves the position unchanged.
        self._acks.expect(after).confirm()
        for table in self._tables:
            self._delivered[table.table.name].forget(_floor(table, after))
        return after

    def _changes(
        self, connection: psycopg.Connection[Any], before: PollPosition, marks: _Marks, order: int
    ) -> Iterator[RowChanges]:
        ordinal = 0
        for table in self._tables:
            for rows in self._changed(connection, table, before, marks):
                images = Cells.of_rows(table.columns, rows)
                known = table.table.primary_key
                yield row_images(table.table.name, len(rows), images, known, Operation.UPDATE, order, ordinal)
                ordinal += len(rows)

    def _changed(
        self, connection: psycopg.Connection[Any], table: PolledTable, before: PollPosition, marks: _Marks
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the columns of changed rows that were not delivered yet, in pieces."""
        name = table.table.name
        marks_read = [_floor(table, before), marks.next_xid]
        for rows in read_texts(connection, changed_query(table), marks_read, self._settings.chunk, f"poll {name}"):
            fresh = self._delivered[name].take(rows)
            if fresh:
                yield fresh

    def _warn_about_hidden_sessions(self) -> None:
        if all(each.cursor == XMIN for each in self._tables):
            return
        with self._connect() as connection:
            if not sees_all_sessions(connection):
                logger.warning(
                    "this role cannot see when transactions of other sessions started, so those that take longer than"
                    " overlap=%gs can be missed remedy=%s",
                    self._settings.overlap,
                    "grant pg_read_all_stats",
                )

    def _after(self, marks: _Marks, before: PollPosition | None) -> PollPosition:
        """Return the position of the next poll: nothing below it can still become visible."""
        floor = marks.oldest_start - round(self._settings.overlap * 1_000_000)
        names = [str(each.table.name) for each in self._tables if each.cursor != XMIN]
        times = dict.fromkeys(names, floor)
        if before is not None:
            known = {name: before.times.get(name, floor) for name in names}
            # Whatever is prepared now was open at the last poll, which did not go past its start, or started later.
            times = known if marks.has_prepared else {name: max(floor, known[name]) for name in names}
        order = max(marks.now, before.order + 1 if before is not None else 0)
        return PollPosition(order, max(marks.oldest_xid, before.xid if before is not None else 0), times)

    def _advance(self, position: PollPosition) -> None:
        if position != self._stored:
            self._positions.store(position)
            self._stored = position

    def _connect(self) -> psycopg.Connection[Any]:
        return connect(self._source, Role.DOCUMENTS, parameters=NO_TIMEOUTS)


def sees_all_sessions(connection: psycopg.Connection[Any]) -> bool:
    """Return whether this role can see when transactions of other sessions began."""
    return bool(run_statement(connection, _SEES_SESSIONS, [], "check the rights of this role")[0][0])


def _oldest_start(connection: psycopg.Connection[Any]) -> tuple[int, bool]:
    oldest, has_prepared = run_statement(connection, _OLDEST, [], "find open transactions")[0]
    return oldest, has_prepared


def _snapshot(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    oldest_xid, next_xid, now = run_statement(connection, _SNAPSHOT, [], "read the server's position")[0]
    return oldest_xid, next_xid, now


def _floor(table: PolledTable, position: PollPosition) -> int:
    # A table that was not polled by its column before is read entirely.
    return position.xid if table.cursor == XMIN else position.times.get(str(table.table.name), 0)


def _closed(connection: psycopg.Connection[Any] | None) -> None:
    if connection is not None:
        connection.close()
