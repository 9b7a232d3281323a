"""The apply worker: batches of whole transactions from the spool to the destination, for all tables that it follows.

Each round takes the entries after P up to a limit, hands one batch to the destination, and settles: what is durable
moves the tables' positions, then stored progress, then the reader of the spool, which the slot follows. A table that
fails is Errored with its position kept; the others are not concerned. A table that is far behind P, because it was
tried again, gets batches of its own until it has caught up, so that nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from penstock import failpoints
from penstock.destinations.base import Destination
from penstock.errors import PenstockError, Retry
from penstock.lsn import Lsn, OrderKey, distance, earliest, reaches
from penstock.retry import Backoff
from penstock.spool import Entry
from penstock.state import Errored, Ready, Store, SyncDone
from penstock.state.transitions import lose_position, retry_is_due, roll_back
from penstock.values import TypeSettings
from penstock.workers.batches import BatchSettings, BatchWriter
from penstock.workers.board import Board
from penstock.workers.failures import errored

logger = logging.getLogger(__name__)

PRUNE_SECONDS = 60.0
"""How often versions of schemas that nobody needs are looked for."""


@dataclass(frozen=True, slots=True)
class ErrorHold:
    """How long an errored table may hold back progress, and how much may gather meanwhile."""

    time: timedelta = timedelta(hours=1)
    bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class ApplyStatus:
    """A look at the worker from outside."""

    applied: Lsn
    acknowledged: Lsn
    changes: int
    batches: int
    last_commit_time: int
    """Of what was applied last, Unix microseconds."""


class ApplyWorker:
    """One output's apply; `run` is its thread."""

    def __init__(
        self,
        *,
        name: str,
        spool: Path,
        board: Board,
        store: Store,
        destination: Destination,
        stop: threading.Event,
        settings: BatchSettings,
        error_hold: ErrorHold,
        types: TypeSettings | None = None,
        each_round: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` is the reader's in the spool. `each_round` runs between batches: commands, and new tables."""
        self._name = name
        self._writer = BatchWriter(spool, store, destination, settings, types)
        self._board = board
        self._store = store
        self._stop = stop
        self._settings = settings
        self._error_hold = error_hold
        self._each_round = each_round
        self._failed: dict[int, Errored] = {}
        self._changes = 0
        self._batches = 0
        self._last_commit_time = 0
        self._pruned: float | None = None
        self.limit: Lsn | None = None
        """A boundary that is not passed; set by `each_round`, for whoever compares the tables there."""
        self.paused = threading.Event()
        self.lost = threading.Event()
        """The lease is gone: another process may write already, so this one must not, not even to finish."""

    @property
    def status(self) -> ApplyStatus:
        board = self._board
        return ApplyStatus(board.applied, board.acknowledged, self._changes, self._batches, self._last_commit_time)

    def run(self) -> None:
        """Until `stop`; then one more round, so that what has arrived is not read again."""
        backoff = Backoff(first=0.5, longest=30.0)
        while True:
            stopping = self._stop.is_set()
            if self.lost.is_set():
                return
            try:
                self._each_round()
                busy = False if self.paused.is_set() else self._round()
                backoff.reset()
            except PenstockError as error:
                if error.retry is not Retry.TIMED:
                    raise
                delay = backoff.next_delay()
                logger.warning("apply tries again in=%.1fs error=%s", delay, error)
                self._stop.wait(delay)
                busy = True
            if stopping:
                return
            if not busy:
                self._stop.wait(self._settings.interval)

    def _round(self) -> bool:
        """One batch for all tables that it can bring beyond P, and one for those far behind; whether there is more."""
        self._retry_tables()
        positions = self._board.positions()
        applied = self._board.applied
        far = self._far_behind(positions, applied)
        others = {table: position for table, position in positions.items() if table not in far}
        captured = self._reachable()
        # A table that was just handed over is a little behind. It joins the batch of the others: with one of its own,
        # up to P, it would stay behind for as long as changes keep coming, at the price of a second job each time.
        begin = earliest(applied, *others.values())
        entries = self._writer.take(begin, captured) if captured is not None else []
        end = earliest(captured, entries[-1].end) if entries and captured is not None else applied
        durable = self._write(entries, begin, end, others)
        more = captured is not None and not reaches(end, captured)
        if far:
            begin = earliest(*far.values())
            entries = self._writer.take(begin, applied)
            until = earliest(applied, entries[-1].end) if entries else applied
            late = self._write(entries, begin, until, far)
            durable |= {table: position for table, position in late.items() if reaches(position, far[table])}
            more = more or not reaches(until, applied)
        failpoints.reach("after_write")
        self._lose_overdue(end)
        acknowledged = self._board.settle(end, durable)
        self._writer.reader.readers.advance(self._name, acknowledged)
        failpoints.reach("after_acknowledge")
        self._writer.reader.forget(acknowledged)
        self._prune_schemas(acknowledged)
        return more

    def _reachable(self) -> Lsn | None:
        """Up to where it may go: what is captured, and no further than the limit."""
        captured = self._writer.reader.captured
        return captured if captured is None or self.limit is None else earliest(captured, self.limit)

    def _prune_schemas(self, acknowledged: Lsn) -> None:
        """Forget versions of schemas that no position needs any more; now and then, and after progress was stored."""
        now = time.monotonic()
        if self._pruned is not None and now - self._pruned < PRUNE_SECONDS:
            return
        self._pruned = now
        count = self._store.prune_table_schemas(dict.fromkeys(self._board.phases(), OrderKey(acknowledged, 0)))
        if count:
            logger.info("versions of schemas were forgotten count=%d", count)

    def _far_behind(self, positions: Mapping[int, Lsn], applied: Lsn) -> dict[int, Lsn]:
        """The tables that one batch does not bring to P."""
        behind = {position for position in positions.values() if not reaches(position, applied)}
        reached = {position: self._writer.take(position, applied) for position in behind}
        far = {position for position, taken in reached.items() if not taken or not reaches(taken[-1].end, applied)}
        return {table: position for table, position in positions.items() if position in far}

    def _write(self, entries: Sequence[Entry], begin: Lsn, end: Lsn, positions: Mapping[int, Lsn]) -> dict[int, Lsn]:
        """Hand a batch over; up to where each of these tables is durable afterwards."""
        written = self._writer.write(entries, begin, end, positions)
        for table_id, error in written.failed.items():
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
        phase = self._board.phase(table_id)
        if not isinstance(phase, SyncDone | Ready):
            return
        failed = errored(phase, error, position=position, after=self._failed.get(table_id))
        name = self._board.name_of(table_id)
        text = "table stopped table=%s position=%s reason=%s"
        logger.error(text, name, position, failed.reason, extra={"told_as": "stopped"})
        self._failed[table_id] = failed
        failpoints.reach("before_errored")
        self._board.set_phase(table_id, failed)
        failpoints.reach("after_errored")

    def _retry_tables(self) -> None:
        """Let errored tables whose time has come go on from where they were."""
        now = datetime.now(UTC)
        for table_id, phase in self._board.phases().items():
            if isinstance(phase, Errored) and retry_is_due(phase, now):
                self._failed[table_id] = phase
                resumed = roll_back(phase)
                failpoints.reach("before_rollback")
                self._store.rollback_table_replication_state(table_id)
                failpoints.reach("after_rollback")
                position = resumed.lsn if isinstance(resumed, SyncDone) else None
                self._board.show(table_id, resumed, position=position)

    def _lose_overdue(self, end: Lsn) -> None:
        """Errored tables that have held back progress for too long: stored *before* progress passes them."""
        now = datetime.now(UTC)
        for table_id, phase in self._board.phases().items():
            if isinstance(phase, Errored) and phase.holds and phase.position is not None:
                hold = self._error_hold
                if now - phase.since > hold.time or distance(phase.position, end) > hold.bytes:
                    name = self._board.name_of(table_id)
                    logger.error("table has held back progress for too long, its changes go table=%s", name)
                    failpoints.reach("before_lose_position")
                    self._board.set_phase(table_id, lose_position(phase))
                    failpoints.reach("after_lose_position")
