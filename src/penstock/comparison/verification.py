"""Compares the tables of an output with their source while both are in use: hold, pin, release, compare.

The output's pipeline keeps running, here or elsewhere, and receives commands through the state store. Changes wait for
the few seconds in which `verify` takes a snapshot and pins the destination's tables. If a destination keeps no
versions, they wait until the comparison ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.comparison.compare import Around, CompareSettings, compare_table
from penstock.comparison.hold import hold_at_snapshot, hold_now
from penstock.comparison.report import Report, TableReport
from penstock.copy import prepare_copy
from penstock.destinations.base import Destination, PinnedTable, ReadableDestination, Tasks
from penstock.errors import NotComparable, PenstockError, SnapshotBlocked
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.source.connections import Role, connect
from penstock.source.faults import translated
from penstock.source.shapes import remembering
from penstock.source.slots import Blocker
from penstock.source.snapshots import Check, Snapshot, take_snapshot
from penstock.state import Store
from penstock.tables import TablesSettings

logger = logging.getLogger(__name__)

WAIT_SECONDS = 300.0
_REASONS = {
    "init": "it is not copied yet",
    "data_sync": "it is being copied",
    "finished_copy": "it is being copied",
    "sync_wait": "it is catching up after its copy",
    "catchup": "it is catching up after its copy",
    "just copied": "it was just copied and is ahead of the others",
    "being rewritten": "its files or partitions are being rewritten after a change of its schema",
    "errored": "it has stopped with an error: see `penstock tables`",
}


class Observer:
    """Receives the progress of a comparison; does nothing unless its methods are overridden."""

    def blocked(self, error: SnapshotBlocked) -> None:
        """Open transactions block the snapshot. `verify` tries again, and changes flow meanwhile."""

    def going_around(self, error: SnapshotBlocked) -> None:
        """Some transaction was always open: `verify` reads the destination before and after a longer wait."""

    def waiting(self, blockers: list[Blocker]) -> None:
        """`verify` waits for these transactions; changes flow meanwhile."""

    def held(self, position: Lsn, *, until_the_end: bool) -> None:
        """Source and destination are at one position; changes wait until `released` or until the comparison ends."""

    def released(self, seconds: float) -> None:
        """Changes flow again, after they waited for this long."""

    def comparing(self, table: str, fraction: float) -> None:
        """A table is being compared."""

    def compared(self, report: TableReport) -> None:
        """A table was compared."""


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How tables are compared, and how long `verify` waits."""

    compare: CompareSettings = field(default_factory=CompareSettings)
    wait: float = WAIT_SECONDS
    """Seconds to wait for transactions that block the snapshot; twice as long if some transaction is always open."""


def verify_tables(
    settings: TablesSettings,
    store: Store,
    destination: Destination,
    tasks: Tasks,
    *,
    tables: Collection[str] = (),
    options: VerifySettings | None = None,
    observer: Observer | None = None,
    check: Check = lambda: None,
) -> Report:
    """Compare these tables of a running output, or all of them if none is named.

    `destination` reads what the pipeline writes; it need not be started. Errors of single tables are in the report.
    Raises `SnapshotBlocked`, `NotComparable` and other errors that concern all tables.

    If some transaction is always open, both sides are never at one position. After `options.wait` seconds `verify`
    reads the destination before and after a snapshot that may take as long again (`Report.exact` is then false).
    """
    options, observer = options or VerifySettings(), observer or Observer()
    asked = _Asked(settings, store, require_readable(destination), tasks, frozenset(tables), options, observer, check)
    try:
        return _at_one_position(asked)
    except SnapshotBlocked as blocked:
        if not options.wait or not asked.destination.keeps_versions:
            raise
        observer.going_around(blocked)
        return _around_a_snapshot(asked)


def require_readable(destination: Destination) -> ReadableDestination:
    """Return the destination; raise if its tables cannot be read back."""
    if not isinstance(destination, ReadableDestination):
        raise NotComparable(
            f"{destination.name} destinations cannot be read back, so there is nothing to compare with the source",
            hint="Destinations that can be compared: delta, parquet, postgres, and any other with a `pin` method.",
        )
    return destination


@dataclass(frozen=True, slots=True)
class _Asked:
    """What to compare."""

    settings: TablesSettings
    store: Store
    destination: ReadableDestination
    tasks: Tasks
    tables: frozenset[str]
    """Empty for all."""
    options: VerifySettings
    observer: Observer
    check: Check
    """Raises what has ended the pipeline, if it runs in this process."""

    def chosen(self, tables: Mapping[int, TableSchema]) -> dict[int, TableSchema]:
        """Return the requested tables, sorted by name."""
        named = sorted(tables.items(), key=lambda item: str(item[1]))
        return {table_id: schema for table_id, schema in named if not self.tables or str(schema) in self.tables}

    def left_out(self, names: Mapping[str, str]) -> list[TableReport]:
        """Return the reports of tables that cannot be compared now."""
        reports = [
            TableReport(name, reason=_REASONS.get(why, why))
            for name, why in names.items()
            if not self.tables or name in self.tables
        ]
        for report in reports:
            self.observer.compared(report)
        return reports

    def report(self, position: Lsn, tables: list[TableReport], held: _Held, *, exact: bool) -> Report:
        ordered = tuple(sorted(tables, key=lambda table: table.table))
        return Report(position, ordered, self.options.compare.sample, held.seconds, exact)


def _at_one_position(asked: _Asked) -> Report:
    held = _Held(asked.observer)
    wait, keeps_versions = asked.options.wait, asked.destination.keeps_versions
    with hold_at_snapshot(
        asked.settings.source, asked.store, wait=wait, on_blocked=held.blocked, check=asked.check
    ) as hold:
        asked.observer.held(hold.position, until_the_end=not keeps_versions)
        chosen = asked.chosen(hold.tables)
        with _pinned(asked.destination, chosen) as pins:
            if keeps_versions:
                hold.release()
                asked.observer.released(held.seconds)
            reports = asked.left_out(hold.left_out)
            reports += [_compare(asked, hold.snapshot, schema, pins[table_id]) for table_id, schema in chosen.items()]
            hold.release()
    return asked.report(hold.position, reports, held, exact=True)


def _around_a_snapshot(asked: _Asked) -> Report:
    """Pin the destination before the snapshot and again after it, so that only `verify` waits for open transactions."""
    held = _Held(asked.observer)
    with connect(asked.settings.source, Role.VERIFY) as connection:
        oldest, _ = _transactions(connection)
    with ExitStack() as stack:
        with hold_now(asked.store, asked.check) as before:
            chosen = asked.chosen(before.tables)
            pins = stack.enter_context(_pinned(asked.destination, chosen))
        asked.observer.released(held.seconds)
        snapshot = stack.enter_context(
            take_snapshot(asked.settings.source, timeout=asked.options.wait, on_wait=asked.observer.waiting)
        )
        with snapshot.connect(Role.VERIFY) as connection:
            _, end = _transactions(connection)
        with hold_now(asked.store, asked.check) as after:
            later = stack.enter_context(_pinned(asked.destination, asked.chosen(after.tables)))
        reports = asked.left_out({**after.left_out, **before.left_out})
        for table_id, schema in chosen.items():
            if table_id in later:
                reports.append(_compare(asked, snapshot, schema, pins[table_id], later[table_id], (oldest, end)))
        return asked.report(snapshot.position, reports, held, exact=False)


class _Held:
    """How long the last attempt held changes back."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._since = time.monotonic()
        self._released: float | None = None

    def blocked(self, error: SnapshotBlocked) -> None:
        self._observer.blocked(error)
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time until this was first read."""
        if self._released is None:
            self._released = time.monotonic() - self._since
        return self._released


@contextmanager
def _pinned(
    destination: ReadableDestination, tables: dict[int, TableSchema]
) -> Iterator[dict[int, PinnedTable | PenstockError]]:
    """Yield the tables as they are now, or the error of a table that cannot be pinned."""
    with ExitStack() as stack:
        pins: dict[int, PinnedTable | PenstockError] = {}
        for table_id, schema in tables.items():
            try:
                pinned = destination.pin(schema)
            except PenstockError as error:
                pins[table_id] = error
                continue
            if pinned is None:
                pins[table_id] = NotComparable(f"{schema} does not exist at the destination")
            else:
                stack.callback(pinned.close)
                pins[table_id] = pinned
        yield pins


def _compare(
    asked: _Asked,
    snapshot: Snapshot,
    schema: TableSchema,
    pinned: PinnedTable | PenstockError,
    later: PinnedTable | PenstockError | None = None,
    recent: tuple[int, int] = (0, 0),
) -> TableReport:
    report = _compared(asked, snapshot, schema, pinned, later, recent)
    asked.observer.compared(report)
    return report


def _compared(
    asked: _Asked,
    snapshot: Snapshot,
    schema: TableSchema,
    pinned: PinnedTable | PenstockError,
    later: PinnedTable | PenstockError | None,
    recent: tuple[int, int],
) -> TableReport:
    table, settings = str(schema), asked.settings
    asked.observer.comparing(table, 0.0)
    if isinstance(pinned, PenstockError):
        return TableReport(table, reason=pinned.message)
    if isinstance(later, PenstockError):
        return TableReport(table, reason=later.message)
    try:
        rows = prepare_copy(
            snapshot,
            settings.source,
            settings.publication,
            schema.table_id,
            types=settings.types,
            transforms=remembering(settings.transforms, asked.store.get_table_shapes()),
            settings=settings.copy,
        )
        return compare_table(
            rows,
            pinned,
            asked.tasks,
            asked.options.compare,
            lambda fraction: asked.observer.comparing(table, fraction),
            None if later is None else Around(later, recent),
        )
    except PenstockError as error:
        logger.info("table not compared table=%s error=%s", table, error)
        return TableReport(table, reason=error.message)
    except OSError as error:
        # Caused by another process: files that were removed, a full disk.
        logger.info("table not compared table=%s", table, exc_info=True)
        return TableReport(table, reason=f"{table} cannot be read: {error.strerror or type(error).__name__}")


def _transactions(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """Return the oldest transaction that is open in a session's snapshot, and the first one after the snapshot; both as
    the low 32 bits that rows store."""
    query = """
        select pg_catalog.txid_snapshot_xmin(seen) & 4294967295, pg_catalog.txid_snapshot_xmax(seen) & 4294967295
        from pg_catalog.txid_current_snapshot() seen
    """
    with translated(connection, "list open transactions"):
        row = connection.cursor(row_factory=tuple_row).execute(query).fetchone()
        assert row is not None
        return row
