"""A table sync worker: copies one table, catches up with its changes, and hands it over to the apply worker.

    drop (fence) → DataSync → hold its changes → snapshot S → copy → FinishedCopy
    → catch up → SyncWait → Catchup → SyncDone

If anything fails before SyncDone, the next attempt starts under another name, and the destination ignores what this one
still writes. It starts from the beginning, unless the copy can be resumed (`penstock.copy.resume`): then progress has
stayed where it was when the first attempt began, and the ranges that were read are not read again.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock import failpoints
from penstock.changes.batch import Rows, SchemaChange, build_batch
from penstock.changes.steps import Entry, Segment
from penstock.changes.transform import Transforms
from penstock.copy import CopyRows, CopySettings, prepare_copy
from penstock.copy.progress import CopyCounter, CopyProgress
from penstock.copy.resume import Resuming, finds_rows_again
from penstock.destinations.base import Destination, ResumingDestination, Tasks
from penstock.errors import (
    RESYNC,
    DestinationUnavailable,
    IllegalTransition,
    LeaseLost,
    PenstockError,
    PublicationChanged,
    QueryFailed,
    Retry,
    SchemaNotFollowed,
    SnapshotLost,
    TableRewritten,
)
from penstock.lsn import Lsn, OrderKey, earliest, reaches
from penstock.observe.reports import listening
from penstock.observe.tally import Tally
from penstock.retry import Backoff
from penstock.schema import TableSchema
from penstock.source.catalog import load_table, load_types, schema_from_catalog
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.faults import is_lock_timeout, translated
from penstock.source.slots import Blocker, warn_of_blockers
from penstock.source.snapshots import Snapshot, take_snapshot
from penstock.spool import Holds, Stopping
from penstock.spool.folder import SpoolFolder
from penstock.state import Init, Resumption, Store, StoredProgress, TableSchemaVersion
from penstock.state.transitions import finish_catchup, finish_copy
from penstock.values import TypeSettings
from penstock.workers.batches import BatchSettings, BatchWriter, require_exact_filter
from penstock.workers.board import Board
from penstock.workers.copies import SMALL_TABLE_BYTES, OnWait, SharedSnapshots, SyncPool
from penstock.workers.failures import SchemaChanges

logger = logging.getLogger(__name__)

HOLD_SECONDS = 60.0
"""Capture answers within a tenth of a second, unless it is restarting."""
_SIZE_SECONDS = 0.5
"""How long to wait for DDL on a table before its size counts as unknown."""
_TABLE_BYTES = """
    select pg_catalog.pg_table_size(%s::oid)
        + coalesce((select sum(pg_catalog.pg_table_size(relid)) from pg_catalog.pg_partition_tree(%s::oid)), 0)
"""


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """The progress of a copy."""

    attempt: str
    progress: CopyProgress
    """How much there is to copy, and how much was read."""
    seconds: float | None = None
    """How long it took; None while it runs or if it failed."""


@dataclass(frozen=True, slots=True)
class SnapshotWait:
    """A copy that waits for open transactions before it can take its snapshot."""

    blockers: tuple[Blocker, ...]
    """As last seen, longest first; empty if the role may not see them."""
    since: datetime
    """When the wait began."""


@dataclass(slots=True, eq=False)
class TableSyncView:
    """What others see of a table sync worker. Outlives it, and is small: the worker has entries of the spool."""

    attempt: str
    waiting: SnapshotWait | None = None
    """The transactions that its snapshot waits for, while it waits."""
    counter: CopyCounter | None = None
    copy_seconds: float | None = None

    @property
    def copy_status(self) -> CopyStatus | None:
        """The progress of the copy; None until it is planned."""
        counter = self.counter
        return None if counter is None else CopyStatus(self.attempt, counter.progress, self.copy_seconds)


class TableSync:
    """One attempt to copy one table; `run` is called in a thread of the pool."""

    def __init__(
        self,
        table_id: int,
        *,
        reader: str,
        source: SourceSettings,
        publication: str,
        spool: Path,
        board: Board,
        store: Store,
        destination: Destination,
        tasks: Tasks,
        stop: threading.Event,
        batches: BatchSettings,
        copy: CopySettings,
        types: TypeSettings,
        transforms: Transforms,
        schema_changes: SchemaChanges,
        known_as: str | None,
        tally: Tally | None = None,
    ) -> None:
        """`known_as`: as in `TableShape`."""
        self._tally = tally or Tally()
        self._known_as = known_as
        self._schema_changes = schema_changes
        self._table_id = table_id
        self._reader = reader
        self._source = source
        self._publication = publication
        self._board = board
        self._store = store
        self._destination = destination
        self._tasks = tasks
        self._stop = stop
        self._copy = copy
        self._types = types
        self._transforms = transforms
        self.attempt = uuid.uuid4().hex
        self.view = TableSyncView(self.attempt)
        self._backoff = Backoff(first=0.5, longest=30.0)
        self._snapshot_at: StoredProgress | None = None
        """The position of the snapshot, with its lineage."""
        self._holds = Holds(SpoolFolder(spool))
        self._writer = BatchWriter(
            spool, store, destination, batches, types, transforms, of_copy=True, tally=self._tally
        )

    def run(self, pool: SyncPool) -> None:
        """Bring the table to SyncDone. Raises `Stopping` if the copy is no longer wanted, and any error."""
        # Between any two steps: dozens of copies run at the same time, and a stop waits for the step of each.
        self._board.claim(self._table_id, self.attempt)
        self._check_stop()
        schema, size = self._describe()
        self._check_stop()
        self._refuse_large(schema, size)
        with pool.place(size, self._check_stop):
            try:
                rows_position = self._copy_table(schema, size, pool.snapshots)
                self._catch_up(rows_position)
            finally:
                self._holds.release(self._reader, self._table_id)

    def _refuse_large(self, schema: TableSchema, size: int | None) -> None:
        """Raise if Penstock would copy the table again automatically although the config says that it is too large."""
        phase, limit = self._board.phase(self._table_id), self._schema_changes.recopy_max_bytes
        if isinstance(phase, Init) and phase.reason and limit is not None and (size is None or size > limit):
            known = "an unknown number of" if size is None else f"{size:,}"
            raise SchemaNotFollowed(
                f"{phase.reason}; the table has {known} bytes, but recopy_max_bytes is {limit:,}",
                hint=f"When the time is right, copy the table again: {RESYNC}.",
                table=str(schema),
            )

    def leave(self) -> None:
        """End the claim; called after `run`, and after its error was handled. Waits for a store that is unreachable."""
        while True:
            try:
                self._board.leave(self._table_id, self.attempt)
                return
            except PenstockError as error:
                # Without this the table would stay in Catchup, hold back progress, and never be copied again.
                if self._stop.is_set() or error.retry is not Retry.TIMED:
                    raise
                delay = self._backoff.next_delay()
                logger.warning("cannot end the claim of a copy, retrying in=%.1fs error=%s", delay, error)
                self._stop.wait(delay)

    def _copy_table(self, schema: TableSchema, size: int | None, snapshots: SharedSnapshots) -> Lsn:
        """Fence off earlier attempts, copy, and return the position of the snapshot."""
        self._destination.drop_table_for_copy(schema, self.attempt)
        failpoints.reach("after_drop")
        self._store.clear_table_copy_state(self._table_id)
        can_resume = self._can_resume(schema, size)
        resumption = self._board.start_copy(self._table_id, self.attempt, resumable=can_resume)
        failpoints.reach("after_data_sync")
        # Held before the snapshot is taken: changes committed after it must still be in the spool when the copy ends.
        self._holds.request(self._reader, self._table_id)
        held_from = self._holds.wait_confirmed(self._reader, self._table_id, HOLD_SECONDS, self._check_stop)
        resuming = None if resumption is None else self._resume(schema, resumption, held_from)
        failpoints.reach("before_snapshot")
        with self._snapshot(schema, snapshots) as snapshot:
            self._wait_for_server(snapshot)
            failpoints.reach("after_snapshot")
            self._check_stop()
            if resumption is not None and not reaches(snapshot.position, resumption.since):
                # A server without the newest changes took over.
                self._board.give_up_resuming(self._table_id)
                resuming = None
            rows = prepare_copy(
                snapshot,
                self._source,
                self._publication,
                self._table_id,
                types=self._types,
                transforms=self._transforms,
                settings=self._copy,
                attempt=self.attempt,
                resuming=resuming,
            )
            counter = self.view.counter = CopyCounter(rows)
            self._check_stop()
            with self._tasks.copying(), listening(counter.take):
                failpoints.reach("during_copy")
                self._write_rows(rows)
        failpoints.reach("after_copy")
        self._check_stop()
        self._remember_schema(rows)
        self._store.add_changed_cells({self._table_id: counter.changed_cells})
        failpoints.reach("before_finished_copy")
        self._board.advance(self._table_id, self.attempt, finish_copy)
        self.view.copy_seconds = counter.progress.seconds
        self._tally.count("copies")
        self._tally.count("copied_rows", by=counter.progress.rows_done)
        self._tally.count("copied_bytes", by=counter.progress.bytes_done)
        failpoints.reach("after_finished_copy")
        logger.info("table copied table=%s position=%s", rows.schema, rows.position)
        return rows.position

    def _write_rows(self, rows: CopyRows) -> None:
        try:
            self._destination.write_table_rows(rows.schema, rows)
        except PenstockError as error:
            is_other = isinstance(error, IllegalTransition | LeaseLost) or error.retry is Retry.TIMED
            if rows.resumable is None or not rows.resumable.finished or is_other:
                raise
            # Whatever it is, a copy from the beginning does not need what failed, or fails with the same error.
            raise TableRewritten(f"{error.message}; the copy cannot be resumed", table=str(rows.schema)) from error

    def _can_resume(self, schema: TableSchema, size: int | None) -> bool:
        """True if the copy is worth continuing, and the stream tells of every row that changes meanwhile."""
        return (
            isinstance(self._destination, ResumingDestination)
            and self._destination.capabilities.resumes_copies
            and self._copy.resume_max_bytes > 0
            and (size is None or size > SMALL_TABLE_BYTES)
            and finds_rows_again(schema)
            and self._transforms.of(self._table_id, str(schema)) is None
        )

    def _resume(self, schema: TableSchema, resumption: Resumption, held_from: Lsn) -> Resuming | None:
        """Return what is done of the copy; None if some of the changes that continuing it needs are gone."""
        assert isinstance(self._destination, ResumingDestination)
        since, reader = resumption.since, self._writer.reader
        released = reader.readers.released
        if not reaches(since, held_from) or (released is not None and not reaches(since, released)):
            logger.warning("copy starts again, changes since it began are gone table=%s since=%s", schema, since)
            self._board.give_up_resuming(self._table_id)
            return None
        finished = tuple(self._destination.finished_ranges(schema, resumption.copy))
        rows = sum(each.rows for each in finished)
        changed = sum(step.rows for entry in reader.entries(since, [self._table_id]) for step in _segments(entry))
        if changed > rows:
            # It costs less to read them again.
            finished = ()
        return Resuming(resumption.copy, partial(self._changes, since), finished)

    def _changes(self, since: Lsn, schema: TableSchema, position: Lsn) -> list[Rows]:
        """Return the table's changes from the beginning of its copy to a position, after waiting for capture."""
        reader, advanced = self._writer.reader, time.monotonic()
        while (captured := reader.captured) is None or not reaches(captured, position):
            self._check_stop()
            self._holds.confirmed(self._reader, self._table_id)
            if captured is None:
                self._stop.wait(0.1)
            elif reader.wait(captured, 0.5):
                advanced = time.monotonic()
            if time.monotonic() - advanced > HOLD_SECONDS:
                # Capture may wait for space on the disk of the spool, which this copy holds back.
                self._board.give_up_resuming(self._table_id)
        batch = build_batch(
            reader.entries(since, [self._table_id]),
            begin=since,
            end=position,
            positions={self._table_id: since},
            schemas={self._table_id: schema},
            schema_of=reader.load_schema,
        )
        steps = [step for changes in batch.tables for step in changes.steps]
        found: list[Rows] = []
        for step in steps:
            is_same = isinstance(step, SchemaChange) and _is_same(step.new, schema)
            if isinstance(step, Rows):
                found.append(step)
            elif not is_same:
                raise TableRewritten(
                    f"{schema} was truncated or altered while its copy was unfinished", table=str(schema)
                )
        return found

    @contextmanager
    def _snapshot(self, schema: TableSchema, snapshots: SharedSnapshots) -> Iterator[Snapshot]:
        """Take or share a snapshot; `view.waiting` shows the transactions that it waits for."""
        since = datetime.now(UTC)

        def wait(blockers: Sequence[Blocker]) -> None:
            self.view.waiting = SnapshotWait(tuple(blockers), since)

        def take(on_wait: OnWait) -> Snapshot:
            def warn(blockers: Sequence[Blocker]) -> None:
                warn_of_blockers(blockers, what=f"the snapshot of {schema}", extra={"reported_as": "waiting"})
                on_wait(blockers)

            return take_snapshot(self._source, on_wait=warn, check=self._check_stop)

        try:
            with snapshots.enter(take, on_wait=wait, check=self._check_stop) as snapshot:
                self.view.waiting = None
                yield snapshot
        finally:
            self.view.waiting = None

    def _catch_up(self, snapshot: Lsn) -> None:
        """Apply the changes since the snapshot: first alone, then exactly up to where the apply worker takes over."""
        position = snapshot
        while not self._is_close(position):
            position = self._write_until(position, self._board.applied)
        failpoints.reach("in_sync_wait")
        while (
            target := self._board.wait_to_hand_over(self._table_id, self.attempt, snapshot, position, timeout=0.5)
        ) is None:
            self._check_stop()
        failpoints.reach("in_catchup")
        while not reaches(position, target.lsn):
            position = self._write_until(position, target.lsn)
            self._board.move(self._table_id, self.attempt, position)
        self._require_history()
        self._store.upsert_table_positions({self._table_id: target.lsn})
        failpoints.reach("before_sync_done")
        self._board.advance(
            self._table_id, self.attempt, lambda phase: finish_catchup(phase, position), position=target.lsn
        )
        failpoints.reach("after_sync_done")

    def _wait_for_server(self, snapshot: Snapshot) -> None:
        """Wait until capture reads the server that has the snapshot, which may just have taken over from another."""
        deadline = time.monotonic() + HOLD_SECONDS
        while (lineage := self._writer.follow_server().current).timeline != snapshot.timeline:
            self._check_stop()
            if time.monotonic() > deadline:
                raise SnapshotLost("capture reads another server than the one that has the snapshot")
            self._stop.wait(0.1)
        self._snapshot_at = StoredProgress(snapshot.position, lineage)

    def _require_history(self) -> None:
        """Raise if another server took over that does not have what the snapshot shows."""
        taken = self._snapshot_at
        if taken is not None and not self._writer.follow_server().includes(taken.lineage, taken.position):
            raise SnapshotLost("another server took over, from before the snapshot of the copy")

    def _is_close(self, position: Lsn) -> bool:
        """True if one batch brings the table to the apply worker's position."""
        applied = self._board.applied
        entries = self._writer.take(position, applied, [self._table_id])
        return not entries or reaches(entries[-1].end, applied)

    def _write_until(self, position: Lsn, limit: Lsn) -> Lsn:
        """Write one batch of the table's changes, waiting for capture if needed; return the new position."""
        self._check_stop()
        self._holds.confirmed(self._reader, self._table_id)
        if not self._writer.reader.wait(position, 0.5):
            return position
        entries = self._writer.take(position, limit, [self._table_id])
        if not entries:
            return position
        end = earliest(limit, entries[-1].end)
        try:
            written = self._writer.write(entries, position, end, {self._table_id: position}, alone=True)
        except DestinationUnavailable as error:
            # The copy is complete: wait for the destination, as the apply worker does, instead of copying again.
            delay = self._backoff.next_delay()
            self._tally.count("retries", "copy", type(error).__name__)
            logger.warning("table sync failed, retrying in=%.1fs error=%s", delay, error)
            self._stop.wait(delay)
            return position
        self._backoff.reset()
        if written.failed:
            self._require_history()
            raise _for_a_copy(written.failed[self._table_id])
        durable = written.durable.get(self._table_id, position)
        self._writer.reader.forget(durable)
        return durable

    def _describe(self) -> tuple[TableSchema, int | None]:
        """Return the table's current schema, and its size if known."""
        with connect(self._source, Role.CATALOG) as connection:
            table = load_table(connection, self._table_id)
            if table is None:
                raise PublicationChanged(f"table {self._table_id} no longer exists", tables=[str(self._table_id)])
            if (problem := table.row_identity.problem) is not None:
                raise problem
            types = load_types(connection, [attribute.type_oid for attribute in table.live_attributes])
            size = self._ask_size(connection)
        schema = schema_from_catalog(table, types)
        transform = self._transforms.resolve(schema, self._types)
        if transform is not None:
            require_exact_filter(transform, self._destination)
        return schema if transform is None else transform.output, size

    def _ask_size(self, connection: psycopg.Connection[Any]) -> int | None:
        try:
            with (
                translated(connection, "read the size of a table"),
                connection.cursor(row_factory=tuple_row) as cursor,
            ):
                cursor.execute(f"set lock_timeout = {round(_SIZE_SECONDS * 1000)}".encode())
                row = cursor.execute(_TABLE_BYTES, [self._table_id, self._table_id]).fetchone()
        except QueryFailed as error:
            if not is_lock_timeout(error):
                raise
            return None
        return None if row is None or row[0] is None else int(row[0])

    def _remember_schema(self, rows: CopyRows) -> None:
        self._store.store_table_schema(TableSchemaVersion(OrderKey(rows.position, 0), rows.schema))
        if rows.shape is not None:
            self._transforms.remember(self._table_id, str(rows.schema), rows.shape.columns, copied=True)
            rules = self._transforms.in_force(self._table_id, str(rows.schema))
            self._store.store_table_shapes({self._table_id: replace(rows.shape, rules=rules, known_as=self._known_as)})

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopping
        self._board.check_claim(self._table_id, self.attempt)


def _segments(entry: Entry) -> Iterator[Segment]:
    return (step for step in entry.steps if isinstance(step, Segment))


def _is_same(one: TableSchema, other: TableSchema) -> bool:
    return one.has_columns_of(other) and one.replica_identity is other.replica_identity


def _for_a_copy(error: PenstockError) -> PenstockError:
    """Before the hand-over, an error that only a new copy resolves leads to one automatically."""
    if error.retry is Retry.COPY:
        return TableRewritten(error.message, **error.facts)
    return error
