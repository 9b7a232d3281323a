"""Compares the tables of an output with their source, while both live: hold, pin, release, compare.

The pipeline that writes the output runs, here or elsewhere: it is asked through the state store. Changes wait for the
seconds in which a snapshot is taken and the destination's tables are pinned; where a destination keeps no versions,
until all is compared.
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
from penstock.comparison.cut import hold_at_snapshot, hold_now
from penstock.comparison.report import Report, TableReport
from penstock.copy import prepare_copy
from penstock.destinations.base import Destination, PinnedTable, ReadableDestination, Tasks
from penstock.errors import NotComparable, PenstockError, SnapshotBlocked
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.source.connections import Role, connect
from penstock.source.faults import translated
from penstock.source.slots import Blocker
from penstock.source.snapshots import Snapshot, take_snapshot
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
    "just copied": "it was copied just now, and is further than the others",
    "errored": "it has stopped with an error: `penstock tables` says which",
}


class Observer:
    """Told how it goes; does nothing unless its methods are overridden."""

    def blocked(self, error: SnapshotBlocked) -> None:
        """Open transactions keep the snapshot from being taken; it is tried again, and changes flow meanwhile."""

    def going_around(self, error: SnapshotBlocked) -> None:
        """Some transaction was open all the time: the destination is looked at before and after a longer wait."""

    def waiting(self, blockers: list[Blocker]) -> None:
        """These transactions are waited for; changes flow meanwhile."""

    def held(self, position: Lsn, *, until_the_end: bool) -> None:
        """Source and destination are at one position; changes wait, until `released` or until all is compared."""

    def released(self, seconds: float) -> None:
        """Changes flow again, after waiting for so long."""

    def comparing(self, table: str, fraction: float) -> None:
        """A table is being compared."""

    def compared(self, report: TableReport) -> None:
        """A table was compared."""


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How tables are compared, and what may be waited for."""

    compare: CompareSettings = field(default_factory=CompareSettings)
    wait: float = WAIT_SECONDS
    """Seconds to wait for transactions that keep a snapshot from being taken; as long again, if they never pause."""


def verify_tables(
    settings: TablesSettings,
    store: Store,
    destination: Destination,
    tasks: Tasks,
    *,
    tables: Collection[str] = (),
    options: VerifySettings | None = None,
    observer: Observer | None = None,
) -> Report:
    """Compare these tables (all if none is named) of an output whose pipeline runs.

    `destination` reads what the pipeline writes; it need not be started. What concerns one table only is in the report;
    raises `SnapshotBlocked`, `NotComparable` and what else concerns all of them.

    Where some transaction is open all the time, both sides are never at one position: after `options.wait` seconds the
    destination is looked at before and after a snapshot that may take as long again (`Report.exact` is false).
    """
    options, observer = options or VerifySettings(), observer or Observer()
    asked = _Asked(settings, store, require_readable(destination), tasks, frozenset(tables), options, observer)
    try:
        return _at_one_position(asked)
    except SnapshotBlocked as blocked:
        if not options.wait or not asked.destination.keeps_versions:
            raise
        observer.going_around(blocked)
        return _around_a_snapshot(asked)


def require_readable(destination: Destination) -> ReadableDestination:
    """The destination, if its tables can be read back."""
    if not isinstance(destination, ReadableDestination):
        raise NotComparable(
            f"what is in {destination.name} cannot be read back, so it cannot be compared with the source",
            hint="Destinations that can be compared: delta, parquet, and your own with a method `pin`.",
        )
    return destination


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be compared."""

    settings: TablesSettings
    store: Store
    destination: ReadableDestination
    tasks: Tasks
    tables: frozenset[str]
    """Empty for all."""
    options: VerifySettings
    observer: Observer

    def chosen(self, tables: Mapping[int, TableSchema]) -> dict[int, TableSchema]:
        """Those of the tables that are meant, in the order of their names."""
        named = sorted(tables.items(), key=lambda item: str(item[1]))
        return {table_id: schema for table_id, schema in named if not self.tables or str(schema) in self.tables}

    def left_out(self, names: Mapping[str, str]) -> list[TableReport]:
        """Reports of those that cannot be compared now."""
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
    with hold_at_snapshot(asked.settings.source, asked.store, wait=wait, on_blocked=held.blocked) as cut:
        asked.observer.held(cut.position, until_the_end=not keeps_versions)
        chosen = asked.chosen(cut.tables)
        with _pinned(asked.destination, chosen) as pins:
            if keeps_versions:
                cut.release()
                asked.observer.released(held.seconds)
            reports = asked.left_out(cut.left_out)
            reports += [_compare(asked, cut.snapshot, schema, pins[table_id]) for table_id, schema in chosen.items()]
            cut.release()
    return asked.report(cut.position, reports, held, exact=True)


def _around_a_snapshot(asked: _Asked) -> Report:
    """Pin what is there before the snapshot, and what is there after it; nobody waits for open transactions but we."""
    held = _Held(asked.observer)
    with connect(asked.settings.source, Role.VERIFY) as connection:
        oldest, _ = _transactions(connection)
    with ExitStack() as stack:
        with hold_now(asked.store) as before:
            chosen = asked.chosen(before.tables)
            pins = stack.enter_context(_pinned(asked.destination, chosen))
        asked.observer.released(held.seconds)
        snapshot = stack.enter_context(
            take_snapshot(asked.settings.source, timeout=asked.options.wait, on_wait=asked.observer.waiting)
        )
        with snapshot.connect(Role.VERIFY) as connection:
            _, end = _transactions(connection)
        with hold_now(asked.store) as after:
            later = stack.enter_context(_pinned(asked.destination, asked.chosen(after.tables)))
        reports = asked.left_out({**after.left_out, **before.left_out})
        for table_id, schema in chosen.items():
            if table_id in later:
                reports.append(_compare(asked, snapshot, schema, pins[table_id], later[table_id], (oldest, end)))
        return asked.report(snapshot.position, reports, held, exact=False)


class _Held:
    """For how long changes were held back, by the last attempt."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._since = time.monotonic()
        self._released: float | None = None

    def blocked(self, error: SnapshotBlocked) -> None:
        self._observer.blocked(error)
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """Until it was first asked for."""
        if self._released is None:
            self._released = time.monotonic() - self._since
        return self._released


@contextmanager
def _pinned(
    destination: ReadableDestination, tables: dict[int, TableSchema]
) -> Iterator[dict[int, PinnedTable | PenstockError]]:
    """The tables as they are now; an error where that cannot be."""
    with ExitStack() as stack:
        pins: dict[int, PinnedTable | PenstockError] = {}
        for table_id, schema in tables.items():
            try:
                pinned = destination.pin(schema)
            except PenstockError as error:
                pins[table_id] = error
                continue
            if pinned is None:
                pins[table_id] = NotComparable(f"{schema} is not there at the destination")
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
        # Of another process's making: files that were removed, a disk that is full.
        logger.info("table not compared table=%s", table, exc_info=True)
        return TableReport(table, reason=f"{table} cannot be read: {error.strerror or type(error).__name__}")


def _transactions(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """The oldest transaction that a session's snapshot knows as open, and the first one that it knows nothing of; by
    the 32 bits that rows have of them."""
    query = """
        select pg_catalog.txid_snapshot_xmin(seen) & 4294967295, pg_catalog.txid_snapshot_xmax(seen) & 4294967295
        from pg_catalog.txid_current_snapshot() seen
    """
    with translated(connection, "list open transactions"):
        row = connection.cursor(row_factory=tuple_row).execute(query).fetchone()
        assert row is not None
        return row
