"""The apply worker: writes batches of whole transactions from the spool to the destination, for all tables it follows.

Each round takes the entries after P up to a limit, hands one batch to the destination and records progress: first the
tables' positions, then the stored progress, then the position of the spool's reader, which the slot follows. A table
that fails becomes Errored and keeps its position; the others continue. A table that is far behind P, because it was
retried, gets batches of its own until it has caught up, so that no other table waits for it. A table whose files must
be rewritten is written by a thread of its own meanwhile (`penstock.workers.solo`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeGuard

from penstock import failpoints
from penstock.changes.steps import Message
from penstock.changes.transform import Transforms
from penstock.destinations.base import Destination
from penstock.errors import DestinationUnavailable, PenstockError, PositionGone, Retry, TasksFailed
from penstock.lsn import Lsn, OrderKey, distance, earliest, reaches
from penstock.observe.tally import Tally
from penstock.retry import Backoff
from penstock.spool import Entry
from penstock.state import DataSync, Errored, Init, Ready, Store, SyncDone, TableReplicationPhase
from penstock.state.transitions import lose_position, resync
from penstock.values import TypeSettings
from penstock.workers.batches import BatchSettings, BatchWriter, Work
from penstock.workers.board import Board
from penstock.workers.failures import Recopy, SchemaChanges, as_error, errored
from penstock.workers.lifecycle import Lifecycle
from penstock.workers.solo import LongBatch, SoloWrites

logger = logging.getLogger(__name__)

JOB_FAILURES = 2
"""After this many failures in a row the tables of a batch are written one by one."""
PRUNE_SECONDS = 60.0
"""How often schema versions that are no longer needed are deleted."""
RECOPY_SECONDS = 600.0
"""A table that is copied again and again within this time waits between the copies, with back-off."""
_NEAR, _FAR = "near", "far"
"""The batch of the tables near P, and that of the tables far behind."""


@dataclass(frozen=True, slots=True)
class ErrorHold:
    """For how long an errored table may hold back progress, and how much WAL."""

    time: timedelta = timedelta(hours=1)
    bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """How much one table may hold back, copied or errored, so that the others neither wait nor lose the slot."""

    resume_bytes: int = 4 << 30
    """WAL for a copy that can be resumed."""
    spool_bytes: int = 2 << 30
    """Captured changes: when the spool is full, all tables wait."""
    wal: Callable[[], int | None] = lambda: None
    """Returns how much WAL the server may retain for the slot, None if that is not known; a table may have half."""


@dataclass(frozen=True, slots=True)
class Outage:
    """Why nothing can be written, while that is retried: usually the destination is away."""

    reason: str
    hint: str
    since: float
    """Unix time of the first failure."""


@dataclass(frozen=True, slots=True)
class ApplyStatus:
    """How far the apply worker is."""

    applied: Lsn
    acknowledged: Lsn
    changes: int
    batches: int
    last_commit_time: int
    """Of the last applied transaction, in Unix microseconds."""
    outage: Outage | None = None
    """From the second failure in a row until the next success: a single failure is no reason to look."""


class Outages:
    """The failures of a worker since its last success. One thread reports them; any thread may read `current`."""

    def __init__(self) -> None:
        self._since: float | None = None
        self.current: Outage | None = None

    def add(self, error: PenstockError) -> None:
        """Report a failure that is retried."""
        if self._since is None:
            self._since = time.time()
        else:
            self.current = Outage(error.message, error.hint, self._since)

    def end(self) -> None:
        """Report a success."""
        if self.current is not None:
            logger.warning("apply continues, it had failed for %.0fs", time.time() - self.current.since)
        self._since = self.current = None


class _CopiedAgain:
    """When one table may be copied again automatically."""

    def __init__(self) -> None:
        self._backoff = Backoff(first=1.0, longest=300.0)
        self._last = -math.inf
        self._next = -math.inf

    def is_due(self) -> bool:
        """Return True if it may be copied now; it is, then."""
        now = time.monotonic()
        if now < self._next:
            return False
        if now - self._last > RECOPY_SECONDS:
            self._backoff.reset()
        self._last, self._next = now, now + self._backoff.next_delay()
        return True


class ApplyWorker:
    """The apply worker of one output; `run` is its thread."""

    def __init__(
        self,
        *,
        name: str,
        spool: Path,
        board: Board,
        store: Store,
        destination: Destination,
        lifecycle: Lifecycle,
        settings: BatchSettings,
        error_hold: ErrorHold,
        hold_limits: HoldLimits | None = None,
        types: TypeSettings | None = None,
        transforms: Transforms | None = None,
        try_tasks: Callable[[], object],
        schema_changes: Callable[[int], SchemaChanges] = lambda _: SchemaChanges(),
        tally: Tally | None = None,
    ) -> None:
        """`name` is the reader's in the spool. `try_tasks` runs an empty task and raises if tasks cannot run.

        `schema_changes` says how a table follows changes of its schema.
        """
        self._name = name
        self._tally = counted = tally or Tally()

        def new_writer() -> BatchWriter:
            return BatchWriter(spool, store, destination, settings, types, transforms, tally=counted)

        self._writer = new_writer()
        self._solo = SoloWrites(board, new_writer)
        self._requests: dict[int, Work] = {}
        self._board = board
        self._store = store
        self._lifecycle = lifecycle
        self._try_tasks = try_tasks
        self._settings = settings
        self._error_hold = error_hold
        self._hold_limits = hold_limits or HoldLimits()
        self._schema_changes = schema_changes
        self._copied_again: dict[int, _CopiedAgain] = {}
        self._failed: dict[int, Errored] = {}
        self._job_failures = {_NEAR: 0, _FAR: 0}
        self._alone: set[int] = set()
        """Tables that have killed the job they shared with others."""
        self._changes = 0
        self._batches = 0
        self._last_commit_time = 0
        self._outages = Outages()
        self._pruned: float | None = None
        self.limit: Lsn | None = None
        """A boundary that no later batch passes; `ApplyHold` sets it while `verify` compares the tables there."""

    @property
    def status(self) -> ApplyStatus:
        board = self._board
        return ApplyStatus(
            board.applied,
            board.acknowledged,
            self._changes,
            self._batches,
            self._last_commit_time,
            self._outages.current,
        )

    def write_apart(self, table_id: int, work: Work) -> None:
        """Have a followed table written by `work`, in a thread of its own; called by the coordinator's thread."""
        self._requests[table_id] = work

    def is_apart(self, table_id: int) -> bool:
        """True if a table is written by itself, or will be."""
        return table_id in self._requests or table_id in self._solo.tables

    def run(self) -> None:
        """Apply until the output stops; then run one more round, so that the next start need not repeat it."""
        try:
            self._run()
        finally:
            self._solo.join()

    def _run(self) -> None:
        backoff = Backoff(first=0.5, longest=30.0)
        stop = self._lifecycle.stop
        while not self._lifecycle.lost.is_set():
            stopping = stop.is_set()
            try:
                with self._lifecycle.working() as may_work:
                    busy = may_work and self._round()
                backoff.reset()
                self._outages.end()
            except PenstockError as error:
                if error.retry is not Retry.TIMED:
                    raise
                self._outages.add(error)
                self._tally.count("retries", "apply", type(error).__name__)
                level, delay = backoff.log_level, backoff.next_delay()
                logger.log(level, "apply failed, retrying in=%.1fs error=%s", delay, error)
                stop.wait(delay)
                busy = True
            if stopping:
                return
            if not busy:
                stop.wait(self._settings.interval)

    def _round(self) -> bool:
        """Write one batch for the tables near P and one for those far behind; return True if there is more."""
        self._failed |= self._board.retry_due(datetime.now(UTC))
        self._take_over_solo()
        with self._board.batch() as followed:
            self._start_solo(followed)
            positions = {table: each for table, each in followed.items() if table not in self._solo.tables}
            applied = self._board.applied
            far = self._far_behind(positions, applied)
            others = {table: position for table, position in positions.items() if table not in far}
            captured = self._reachable()
            # A table that was just handed over is slightly behind P and joins the batch of the others. With a batch of
            # its own, up to P, it would stay behind while changes keep arriving, and cost a second job each time.
            begin = earliest(applied, *others.values())
            entries = self._writer.take(begin, captured) if captured is not None else []
            end = earliest(captured, entries[-1].end) if entries and captured is not None else applied
            with self._tally.batches.recorded("apply"):
                durable = self._write(entries, begin, end, others, _NEAR)
                acknowledged = self._record(end, durable)
            more = captured is not None and not reaches(end, captured)
            if far:
                # Recorded separately, so that a table far behind that keeps failing does not hold back the others.
                begin = earliest(*far.values())
                entries = self._writer.take(begin, applied)
                until = earliest(applied, entries[-1].end) if entries else applied
                with self._tally.batches.recorded("apply"):
                    late = self._write(entries, begin, until, far, _FAR)
                    durable = {table: position for table, position in late.items() if reaches(position, far[table])}
                    acknowledged = self._record(end, durable)
                more = more or not reaches(until, applied)
        self._writer.reader.readers.advance(self._name, acknowledged)
        failpoints.reach("after_acknowledge")
        self._writer.reader.forget(acknowledged)
        self._prune_schemas(acknowledged)
        return more

    def _start_solo(self, positions: Mapping[int, Lsn]) -> None:
        for table_id in list(self._requests):
            work = self._requests.pop(table_id)
            # While `verify` compares the tables, none of them may pass the boundary; the request comes again.
            may_start = self.limit is None and not self._lifecycle.stop.is_set()
            if may_start and table_id in positions and table_id not in self._solo.tables:
                self._solo.start(table_id, positions[table_id], work)

    def _take_over_solo(self) -> None:
        """Follow the tables again that were written by themselves."""
        for each in self._solo.finished():
            if each.durable is not None:
                logger.info(
                    "table was written by itself table=%s position=%s",
                    *(self._board.name_of(each.table_id), each.durable),
                )
                self._failed.pop(each.table_id, None)
                self._record(self._board.applied, {each.table_id: each.durable})
            elif isinstance(each.error, DestinationUnavailable) or each.error is None:
                # All tables wait for the destination, and then this one asks again.
                logger.warning(
                    "table could not be written by itself, retrying table=%s", self._board.name_of(each.table_id)
                )
            elif not self._lifecycle.stop.is_set():
                self._fail(each.table_id, each.error, each.position)

    def _record(self, end: Lsn, durable: Mapping[int, Lsn]) -> Lsn:
        """Record what a batch made durable; return the position that may be acknowledged."""
        failpoints.reach("after_write")
        self._lose_overdue(end)
        self._give_up_resuming(end)
        with self._tally.timed("batch_seconds", "record"):
            return self._board.record_progress(end, durable)

    def _reachable(self) -> Lsn | None:
        """Return how far this round may go: up to the captured position, and not past the limit."""
        captured = self._writer.reader.captured
        limit = self.limit  # read once: the coordinator's thread sets it
        return captured if captured is None or limit is None else earliest(captured, limit)

    def _prune_schemas(self, acknowledged: Lsn) -> None:
        """Delete schema versions that no position needs, from time to time, after progress was stored."""
        now = time.monotonic()
        if self._pruned is not None and now - self._pruned < PRUNE_SECONDS:
            return
        self._pruned = now
        count = self._store.prune_table_schemas(dict.fromkeys(self._board.phases(), OrderKey(acknowledged, 0)))
        if count:
            logger.info("schema versions deleted count=%d", count)

    def _far_behind(self, positions: Mapping[int, Lsn], applied: Lsn) -> dict[int, Lsn]:
        """Return the tables that one batch does not bring to P."""
        behind = {position for position in positions.values() if not reaches(position, applied)}
        reached = {position: self._writer.take(position, applied) for position in behind}
        far = {position for position, taken in reached.items() if not taken or not reaches(taken[-1].end, applied)}
        return {table: position for table, position in positions.items() if position in far}

    def _write(
        self, entries: Sequence[Entry], begin: Lsn, end: Lsn, positions: Mapping[int, Lsn], kind: str
    ) -> dict[int, Lsn]:
        """Write a batch; return how far each of these tables is durable afterwards.

        All tables share a job. When jobs of a `kind` fail twice in a row, a table may be killing them, so the tables
        are written one by one. A table that fails although tasks can run becomes Errored; it is written alone until it
        succeeds.
        """
        alone = self._alone & positions.keys()
        shared = {table: position for table, position in positions.items() if table not in alone}
        try:
            durable = self._write_shared(entries, begin, end, shared)
            self._job_failures[kind] = 0
        except TasksFailed as error:
            self._job_failures[kind] += 1
            if self._job_failures[kind] < JOB_FAILURES:
                raise
            self._job_failures[kind] = 0
            logger.warning("a batch failed again, writing its tables one by one error=%s", error)
            durable = self._write_one_by_one(entries, begin, end, shared)
        for table_id in sorted(alone):
            own = {table_id: positions[table_id]}
            try:
                durable |= self._write_shared(entries, begin, end, own)
                self._alone.discard(table_id)
            except TasksFailed as error:
                self._fail(table_id, error, positions[table_id])
        return durable

    def _write_one_by_one(
        self, entries: Sequence[Entry], begin: Lsn, end: Lsn, positions: Mapping[int, Lsn]
    ) -> dict[int, Lsn]:
        steps = (step for entry in entries for step in entry.steps)
        changed = {step.table_id for step in steps if not isinstance(step, Message)} & positions.keys()
        quiet = {table: position for table, position in positions.items() if table not in changed}
        durable: dict[int, Lsn] = {}
        errors: dict[int, TasksFailed] = {}
        for table_id in sorted(changed):
            try:
                durable |= self._write_shared(entries, begin, end, {table_id: positions[table_id]})
            except TasksFailed as error:
                errors[table_id] = error
        if errors and len(errors) == len(changed):
            # No table stands out. If not even an empty task runs, the cause is no table: retry the whole batch.
            self._try_tasks()
        for table_id, error in errors.items():
            self._alone.add(table_id)
            self._fail(table_id, error, positions[table_id])
        return durable | self._write_shared(entries, begin, end, quiet)

    def _write_shared(
        self, entries: Sequence[Entry], begin: Lsn, end: Lsn, positions: Mapping[int, Lsn]
    ) -> dict[int, Lsn]:
        written = self._writer.write(entries, begin, end, positions)
        for table_id, error in written.failed.items():
            if error.retry is Retry.ALONE:
                if not self._lifecycle.stop.is_set():
                    name = self._board.name_of(table_id)
                    logger.info("table is written by itself table=%s reason=%s", name, error.message)
                    self._solo.start(table_id, positions[table_id], LongBatch(table_id, end).write)
            else:
                self._fail(table_id, error, positions[table_id])
        for changes in written.batch.tables:
            if changes.table_id in written.durable:
                self._failed.pop(changes.table_id, None)
        if written.batch.tables:
            self._batches += 1
            self._changes += written.batch.row_count
            self._last_commit_time = max(self._last_commit_time, written.batch.last_commit_time)
        return written.durable

    def _fail(self, table_id: int, error: BaseException, position: Lsn) -> None:
        named = as_error(error)
        name = self._board.name_of(table_id)
        policy = self._schema_changes(table_id)
        copied = named.retry is Retry.COPY and policy.recopy is Recopy.AUTOMATIC

        def fail(phase: TableReplicationPhase) -> Init | Errored | None:
            if not isinstance(phase, SyncDone | Ready):
                return None  # it was reset while its changes were being written
            if copied and self._copied_again.setdefault(table_id, _CopiedAgain()).is_due():
                self._failed.pop(table_id, None)
                logger.warning("table is copied again table=%s reason=%s", name, named.message)
                failpoints.reach("before_recopy")
                return resync(named.message)
            failed = errored(
                phase,
                named,
                position=position,
                after=self._failed.get(table_id),
                timed=copied,
                schema_changes=policy,
            )
            self._tally.count("errors", type(named).__name__)
            text = "table stopped table=%s position=%s reason=%s"
            logger.error(text, name, position, failed.reason, extra={"reported_as": "stopped"})
            self._failed[table_id] = failed
            failpoints.reach("before_errored")
            return failed

        if self._board.alter(table_id, fail) is not None:
            failpoints.reach("after_errored")

    def _lose_overdue(self, end: Lsn) -> None:
        """Give up positions of errored tables that hold back progress too long, *before* progress passes them.

        A table whose error time heals is copied again then, as soon as it can be, if its policy allows that.
        """
        now, hold = datetime.now(UTC), self._error_hold

        def is_overdue(phase: TableReplicationPhase) -> TypeGuard[Errored]:
            if not isinstance(phase, Errored) or not phase.holds or phase.position is None:
                return False
            return now - phase.since > hold.time or self._holds_too_much(phase.position, end, hold.bytes)

        for table_id, overdue in self._board.phases().items():
            if not is_overdue(overdue):
                continue
            heals = overdue.retry_policy.retry is Retry.TIMED
            copied = heals and self._schema_changes(table_id).recopy is Recopy.AUTOMATIC

            def lose(phase: TableReplicationPhase, copied: bool = copied) -> Init | Errored | None:
                if not is_overdue(phase):
                    return None
                return resync(f"it held back progress for too long: {phase.reason}") if copied else lose_position(phase)

            name = self._board.name_of(table_id)
            what = "is copied again" if copied else "lost its position"
            logger.error("table held back progress for too long and %s table=%s", what, name)
            failpoints.reach("before_lose_position")
            if self._board.alter(table_id, lose) is not None:
                self._failed.pop(table_id, None)
            failpoints.reach("after_lose_position")

    def _give_up_resuming(self, end: Lsn) -> None:
        """Let go of copies that hold back progress too long: if they are interrupted, they start again."""
        now, most = datetime.now(UTC), self._hold_limits.resume_bytes
        for table_id, phase in self._board.phases().items():
            resumption = phase.resumption if isinstance(phase, DataSync | Errored) else None
            if resumption is None:
                continue
            is_late = isinstance(phase, Errored) and now - phase.since > self._error_hold.time
            if is_late or self._holds_too_much(resumption.since, end, most):
                text = "copy held back progress for too long: if it is interrupted, it starts again table=%s since=%s"
                logger.warning(text, self._board.name_of(table_id), resumption.since)
                failpoints.reach("before_give_up_resuming")
                self._board.give_up_resuming(table_id)

    def _holds_too_much(self, position: Lsn, end: Lsn, most: int) -> bool:
        """True if a table holds back more than `most` bytes of WAL, or so much that the others would suffer from it."""
        limits, held = self._hold_limits, distance(position, end)
        retained = limits.wal()
        if held > most or (retained is not None and held > retained // 2):
            return True
        try:
            # Later ones are not there because of this table.
            entries = (each for each in self._writer.reader.entries(position) if reaches(end, each.end))
            return sum(entry.bytes for entry in entries) > limits.spool_bytes
        except PositionGone:
            return True  # there is nothing left to wait for
