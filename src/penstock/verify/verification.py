"""Compares the tables of an output with their source, while both live: hold, pin, release, compare.

The pipeline that writes the output runs, here or elsewhere: it is asked through the state store. Changes wait for the
seconds in which a snapshot is taken and the destination's tables are pinned; where a destination keeps no versions,
until all is compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from penstock.copy import prepare_copy
from penstock.destinations.base import Destination, PinnedTable, ReadableDestination, Tasks
from penstock.errors import NotComparable, PenstockError, SnapshotBlocked
from penstock.lsn import Lsn
from penstock.pipeline import PipelineSettings
from penstock.schema import TableSchema
from penstock.state import PipelineStore
from penstock.verify.compare import CompareSettings, compare_table
from penstock.verify.cut import Cut, hold_at_snapshot
from penstock.verify.report import Report, TableReport

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
    """Seconds to wait for transactions that keep a snapshot from being taken."""


def verify_tables(
    settings: PipelineSettings,
    store: PipelineStore,
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
    """
    options, observer = options or VerifySettings(), observer or Observer()
    readable = require_readable(destination)
    held = _Held(observer)
    with hold_at_snapshot(settings.source, store, wait=options.wait, on_blocked=held.blocked) as cut:
        observer.held(cut.position, until_the_end=not readable.keeps_versions)
        chosen = {table_id: schema for table_id, schema in cut.tables.items() if not tables or str(schema) in tables}
        with _pinned(readable, chosen) as pins:
            if readable.keeps_versions:
                cut.release()
                observer.released(held.seconds)
            reports = [_left_out(name, why) for name, why in cut.left_out.items() if not tables or name in tables]
            for report in reports:
                observer.compared(report)
            for table_id, schema in sorted(chosen.items(), key=lambda item: str(item[1])):
                report = _compare(settings, cut, schema, pins[table_id], tasks, options.compare, observer)
                observer.compared(report)
                reports.append(report)
            cut.release()
    ordered = tuple(sorted(reports, key=lambda report: report.table))
    return Report(cut.position, ordered, options.compare.sample, held.seconds)


def require_readable(destination: Destination) -> ReadableDestination:
    """The destination, if its tables can be read back."""
    if not isinstance(destination, ReadableDestination):
        raise NotComparable(
            f"what is in {destination.name} cannot be read back, so it cannot be compared with the source",
            hint="Destinations that can be compared: delta, parquet, and your own with a method `pin`.",
        )
    return destination


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
    settings: PipelineSettings,
    cut: Cut,
    schema: TableSchema,
    pinned: PinnedTable | PenstockError,
    tasks: Tasks,
    compare: CompareSettings,
    observer: Observer,
) -> TableReport:
    table = str(schema)
    observer.comparing(table, 0.0)
    if isinstance(pinned, PenstockError):
        return TableReport(table, reason=pinned.message)
    try:
        rows = prepare_copy(
            cut.snapshot,
            settings.source,
            settings.publication,
            schema.table_id,
            types=settings.types,
            settings=settings.copy,
        )
        return compare_table(rows, pinned, tasks, compare, lambda fraction: observer.comparing(table, fraction))
    except PenstockError as error:
        logger.info("table not compared table=%s error=%s", table, error)
        return TableReport(table, reason=error.message)
    except OSError as error:
        # Of another process's making: files that were removed, a disk that is full.
        logger.info("table not compared table=%s", table, exc_info=True)
        return TableReport(table, reason=f"{table} cannot be read: {error.strerror or type(error).__name__}")


def _left_out(table: str, why: str) -> TableReport:
    return TableReport(table, reason=_REASONS.get(why, why))
