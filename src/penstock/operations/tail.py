"""Following a publication: capture in its child process, a spool in a temporary folder, events passed to a function.

Unlike a pipeline it leaves nothing behind: a temporary slot ends with it, a named slot does not move unless asked to,
and the folder is always removed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from psycopg.rows import tuple_row

from penstock.capture import CaptureProcess, CaptureSettings, CaptureStatus, Reading
from penstock.changes.events import Begin, Commit, Event, Message, Relation, Truncate, iterate_events
from penstock.changes.steps import Segment, Truncation
from penstock.config.units import count_of
from penstock.errors import (
    ConfigError,
    PenstockError,
    PositionAhead,
    PublicationMissing,
    SlotInUse,
    SlotMissing,
    SlotUnusable,
)
from penstock.lsn import Lsn, reaches
from penstock.source import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.source.identity import quote_if_needed
from penstock.source.patterns import TableName, TablePattern
from penstock.source.publications import ensure_publication, find_tables, inspect_publication, published_tables
from penstock.source.slots import find_blockers, inspect_slot, require_usable
from penstock.spool import Entry, SpoolReader, SpoolSettings

READER = "tail"
SPOOL_BYTES = 256 << 20
"""How much may wait for a slow terminal; capture pauses beyond it."""
FOLDER_PREFIX = "penstock-tail-"
SLOT_PREFIX = "penstock_tail_"

_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 2.0
_POSITION = """
    select case when pg_catalog.pg_is_in_recovery() then pg_catalog.pg_last_wal_replay_lsn()
                else pg_catalog.pg_current_wal_flush_lsn() end::text
"""


@dataclass(frozen=True, slots=True)
class Follow:
    """What to follow, and for how long."""

    source: SourceSettings
    publication: str
    slot: str | None = None
    """None for a temporary slot."""
    start: Lsn | None = None
    """A boundary; None for the slot's own position."""
    tables: tuple[str, ...] = ()
    """Patterns; empty for all tables."""
    acknowledge: bool = False
    """Advance the named slot past the transactions that were delivered completely."""
    limit: int | None = None
    """Stop after this many changes."""
    seconds: float | None = None
    """Stop after this time, counted from when the slot delivers."""


@dataclass(slots=True)
class Followed:
    """What has arrived so far."""

    changes: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By table and kind of change."""
    transactions: int = 0
    position: Lsn | None = None
    """The boundary after the last complete transaction; None before the slot delivers."""
    started: float = 0.0
    ended: float = 0.0

    @property
    def change_count(self) -> int:
        return self.changes.total()


def follow(
    settings: Follow,
    start: Lsn | None,
    handle: Callable[[Event], None],
    *,
    stop: threading.Event,
    notice: Callable[[str], None] = lambda text: None,
    idle: Callable[[], None] = lambda: None,
    followed: Followed | None = None,
) -> Followed:
    """Pass every event to `handle` in order, until `stop`, the limit or the end of the time.

    `start` is the result of `prepare`. `handle` and `idle` are called from this thread; an exception in them ends it.
    `notice` receives sentences for people. `followed` is kept up to date, also after an error.
    """
    followed = followed if followed is not None else Followed()
    slot = settings.slot or f"{SLOT_PREFIX}{os.getpid()}_{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        spool = Path(folder)
        reader = SpoolReader(spool)
        if start is not None:
            reader.readers.register(READER, start)
        capture_settings = CaptureSettings(
            source=settings.source,
            slot=slot,
            publication=settings.publication,
            spool=SpoolSettings(spool, max_bytes=SPOOL_BYTES),
            temporary=settings.slot is None,
            acknowledge=settings.slot is None or settings.acknowledge,
        )
        capture = CaptureProcess(capture_settings)
        follower = _Follower(settings, slot, reader, capture, followed, handle, stop, notice, idle)
        try:
            with capture:
                follower.run(start)
        finally:
            followed.ended = time.monotonic()
            if not follower.delivering and settings.slot is None:
                _end_waiting_slot(settings.source, slot)
    return followed


def prepare(settings: Follow, notice: Callable[[str], None]) -> Lsn | None:
    """Refuse what cannot work; returns where to start on a named slot, None for a temporary one."""
    patterns = [TablePattern(pattern) for pattern in settings.tables]
    with connect(settings.source, Role.TAIL) as connection:
        try:
            tables = published_tables(connection, settings.publication)
        except PublicationMissing as error:
            hint = "Create it with --create-publication, or name another one with --publication."
            raise PublicationMissing(error.message, hint=hint, **error.facts) from None
        names = [TableName(table.namespace, table.name) for table in tables]
        if not names:
            notice(f"publication {settings.publication} has no tables: nothing is shown until some are added")
        elif patterns and not any(pattern.matches(name) for pattern in patterns for name in names):
            raise ConfigError(
                f"no table of publication {settings.publication!r} matches {', '.join(settings.tables)}",
                hint=f"It has {_listed([str(name) for name in names])}.",
            )
        if settings.slot is None:
            return None
        slot = inspect_slot(connection, settings.slot)
        if slot is None:
            raise SlotMissing(
                f"replication slot {settings.slot!r} does not exist ({settings.source.location})",
                hint="Omit --slot to use a temporary slot that starts now.",
                slot=settings.slot,
            )
        slot = require_usable(slot, settings.slot, database=connection.info.dbname)
        if slot.active:
            raise SlotInUse(
                f"slot {settings.slot!r} is being read by server process {slot.active_pid}",
                hint="A slot has one reader: stop the other one, or omit --slot to use a temporary slot.",
                slot=settings.slot,
                pid=slot.active_pid,
            )
        with translated(connection, "read the server's position"):
            row = connection.execute(_POSITION).fetchone()
    server = Lsn.parse(row[0]) if row and row[0] else Lsn(0)
    return _check_start(settings, slot.confirmed_flush_lsn or Lsn(0), server)


def choose_publication(
    source: SourceSettings,
    name: str | None,
    *,
    create_for: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    notice: Callable[[str], None],
) -> str:
    """The publication to read; created, for tables that match these patterns, only if `create_for` is given."""
    if name is not None and create_for is None:
        return name
    with connect(source, Role.TAIL) as connection:
        if name is None:
            with translated(connection, "list the publications"), connection.cursor(row_factory=tuple_row) as cursor:
                rows = cursor.execute("select pubname::text from pg_catalog.pg_publication order by 1").fetchall()
            there = ", ".join(row[0] for row in rows)
            raise ConfigError(
                "tail needs a publication, which determines the tables that the server sends",
                hint=f"Use --publication; this database has: {there}."
                if there
                else "This database has none: add --publication penstock --create-publication to make one.",
            )
        if inspect_publication(connection, name) is None:
            patterns = create_for or ["*"]
            if not find_tables(connection, patterns, exclude):
                raise ConfigError(
                    f"cannot create a publication without tables: nothing matches {', '.join(patterns)}",
                    hint="Write schema.table, like public.orders or sales.*",
                )
            ensured = ensure_publication(connection, name, patterns, exclude)
            for error in (*ensured.left_out.values(), *ensured.refused.values()):
                notice(str(error))
            count = count_of(len(ensured.members), "table")
            notice(f"created publication {name} for {count}; to remove it: drop publication {quote_if_needed(name)}")
    return name


@dataclass(slots=True)
class _Follower:
    settings: Follow
    slot: str
    reader: SpoolReader
    capture: CaptureProcess
    followed: Followed
    handle: Callable[[Event], None]
    stop: threading.Event
    notice: Callable[[str], None]
    idle: Callable[[], None]
    delivering: bool = False
    _reading: Reading = Reading.CONNECTING
    _warned: bool = False
    _patterns: tuple[TablePattern, ...] = ()
    _wanted: dict[str, bool] = field(default_factory=dict[str, bool])

    def run(self, start: Lsn | None) -> None:
        """Run until one of the ends is reached."""
        self._patterns = tuple(TablePattern(pattern) for pattern in self.settings.tables)
        position = self._wait_for_slot(start)
        if position is None:
            return
        self.followed.position = position
        self.followed.started = time.monotonic()
        while not self.stop.is_set() and not self._is_over():
            self._watch(self.capture.status)
            self.idle()
            if self.reader.wait(position, _POLL_SECONDS):
                for entry in self._entries(position):
                    position = self._take(entry, position)
                    self.followed.position = position
                    self.reader.readers.advance(READER, position)
                    self.reader.forget(position)
        if self.settings.acknowledge:
            self._wait_acknowledged(position)

    def _wait_for_slot(self, start: Lsn | None) -> Lsn | None:
        """Where reading begins; None if stopped before. Errors are raised, not retried."""
        since = time.monotonic()
        while not self.stop.is_set():
            status = self.capture.status
            if status.error is not None:
                raise status.error
            begin = self.reader.begin
            if begin is not None:
                self.delivering = True
                self._reading = Reading.STREAMING
                position = self.reader.readers.register(READER, begin if start is None else start)
                self._say_where(position)
                return position
            if not self._warned and time.monotonic() - since > _PATIENCE_SECONDS:
                self._warned = True
                self._name_blockers()
            self.idle()
            self.stop.wait(0.02)
        return None

    def _entries(self, position: Lsn) -> Iterator[Entry]:
        for entry in self.reader.entries(position):
            if self.stop.is_set() or self._is_over():
                return
            yield entry

    def _take(self, entry: Entry, position: Lsn) -> Lsn:
        """Pass on the events of an entry; returns the boundary after the last complete transaction."""
        opened = position
        for event in iterate_events(self.reader, [entry], after=position, tables=self._is_wanted):
            if isinstance(event, Begin):
                opened = event.commit_lsn
            # The commit after the last wanted change is still delivered: it completes its transaction.
            if not isinstance(event, Commit) and self._is_over():
                return opened
            self.handle(event)
            self._count(event)
        return entry.end

    def _count(self, event: Event) -> None:
        match event:
            case Commit():
                self.followed.transactions += 1
            case Begin() | Relation():
                pass
            case Truncate():
                self.followed.changes[", ".join(event.tables), "truncate"] += 1
            case _:
                table = "" if isinstance(event, Message) else str(event.table)
                self.followed.changes[table, type(event).__name__.lower()] += 1

    def _is_over(self) -> bool:
        followed, settings = self.followed, self.settings
        if settings.limit is not None and followed.change_count >= settings.limit:
            return True
        return settings.seconds is not None and time.monotonic() - followed.started >= settings.seconds

    def _is_wanted(self, step: Segment | Truncation) -> bool:
        if not self._patterns:
            return True
        if step.table not in self._wanted:
            self._wanted[step.table] = any(
                pattern.matches(name) for name in TableName.possible(step.table) for pattern in self._patterns
            )
        return self._wanted[step.table]

    def _watch(self, status: CaptureStatus) -> None:
        """Report when capture is interrupted, and when it resumes."""
        # A full spool means that the reader of our output is slow; they know that.
        reading = Reading.STREAMING if status.reading is Reading.SPOOL_FULL else status.reading
        if reading is self._reading or reading is Reading.CONNECTING:
            return
        if reading is Reading.RETRYING:
            self.notice(f"capture was interrupted and is retrying: {status.error}")
        elif reading is Reading.DISK_FULL:
            self.notice(f"no space left in {tempfile.gettempdir()}: waiting for free space")
        elif reading is Reading.STREAMING:
            self.notice("capture has resumed")
        self._reading = reading

    def _say_where(self, position: Lsn) -> None:
        kind = "a temporary slot" if self.settings.slot is None else f"slot {self.slot}"
        self.notice(
            f"following publication {self.settings.publication} on {self.settings.source.location} "
            f"with {kind}, from {position}; press Ctrl-C to stop"
        )

    def _name_blockers(self) -> None:
        with contextlib.suppress(PenstockError), connect(self.settings.source, Role.TAIL) as connection:
            blockers = find_blockers(connection)
            if blockers:
                listed = ", ".join(str(blocker) for blocker in blockers[:5])
                self.notice(f"a new slot waits for open transactions to end: {listed}")

    def _wait_acknowledged(self, position: Lsn) -> None:
        """Give capture time to acknowledge to the server."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            acknowledged = self.capture.status.acknowledged
            if acknowledged is not None and reaches(acknowledged, position):
                return
            time.sleep(0.02)


def _check_start(settings: Follow, confirmed: Lsn, server: Lsn) -> Lsn:
    start = confirmed if settings.start is None else settings.start
    if not reaches(start, confirmed):
        raise SlotUnusable(
            f"slot {settings.slot!r} is already at {confirmed}: the changes from {start} up to there are gone",
            hint=f"Use --from {confirmed} or later, or omit --from.",
            slot=settings.slot,
        )
    if not reaches(server, start):
        raise PositionAhead(
            f"position {start} is ahead of the server, which is at {server}",
            hint=f"Use --from {server} or earlier, or omit --from to start at {confirmed}.",
            stored=start,
            current=server,
        )
    return start


def _end_waiting_slot(source: SourceSettings, slot: str) -> None:
    """End the server process that still waits to create our slot: it does not notice that we are gone."""
    with contextlib.suppress(PenstockError), connect(replace(source, connect_timeout=2.0), Role.TAIL) as connection:
        found = inspect_slot(connection, slot)
        if found is not None and found.active_pid is not None:
            with translated(connection, f"end the creation of slot {slot!r}"):
                connection.execute("select pg_catalog.pg_terminate_backend(%s)", [found.active_pid])


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
