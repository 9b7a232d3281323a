"""Where every table stands, now: the one place that workers share.

Phases and positions of all tables, and apply's own position, under one lock. A phase that is persisted is stored
first; what the rules in `penstock.state.transitions` do not allow never gets here. Whoever waits for a change of phase
waits on the board.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from penstock import failpoints
from penstock.lsn import Lsn, reaches
from penstock.state import (
    Catchup,
    Errored,
    PipelineStore,
    Ready,
    StoredPhase,
    SyncDone,
    SyncWait,
    TableReplicationPhase,
    WorkerType,
)
from penstock.state.phases import is_persisted
from penstock.state.positions import furthest, progress, table_start
from penstock.state.transitions import hand_over, may_be_ready

logger = logging.getLogger(__name__)


class Board:
    """Phases, positions, P (`applied`) and A (`acknowledged`: the highest position ever stored)."""

    def __init__(self, store: PipelineStore, start: Lsn, recorded: Callable[[int], Lsn | None]) -> None:
        """`start` is where replication starts; `recorded` is what a destination or the store has of a table."""
        self._store = store
        self._changed = threading.Condition(threading.RLock())
        self._phases: dict[int, TableReplicationPhase] = dict(store.get_table_replication_states())
        self._positions: dict[int, Lsn] = {}
        self._snapshots: dict[int, Lsn] = {}
        self._applied = start
        self._acknowledged = start
        for table_id, phase in self._phases.items():
            if isinstance(phase, Ready | SyncDone):
                self._positions[table_id] = table_start(start, recorded(table_id))

    @property
    def applied(self) -> Lsn:
        """P: all that apply has handed to the destination lies below."""
        return self._applied

    @property
    def acknowledged(self) -> Lsn:
        return self._acknowledged

    def phases(self) -> Mapping[int, TableReplicationPhase]:
        """A copy of all phases."""
        with self._changed:
            return dict(self._phases)

    def phase(self, table_id: int) -> TableReplicationPhase | None:
        with self._changed:
            return self._phases.get(table_id)

    def positions(self) -> Mapping[int, Lsn]:
        """Up to where the tables that apply follows are durable."""
        with self._changed:
            followed = [table for table, phase in self._phases.items() if isinstance(phase, SyncDone | Ready)]
            return {table_id: self._positions.get(table_id, self._applied) for table_id in followed}

    def set_phase(self, table_id: int, phase: TableReplicationPhase, *, position: Lsn | None = None) -> None:
        """Store a phase if it is one that is stored, then show it. `position`: how far the table is durable."""
        with self._changed:
            if is_persisted(phase):
                self._store.update_table_replication_state(table_id, phase)
            self._show(table_id, phase, position)

    def show(self, table_id: int, phase: StoredPhase, *, position: Lsn | None = None) -> None:
        """Show what the store has already changed itself (a rollback, a removal undone)."""
        with self._changed:
            self._show(table_id, phase, position)

    def remove(self, table_id: int) -> None:
        """The table has left the publication."""
        with self._changed:
            self._store.delete_table_pipeline_state(table_id)
            for known in (self._phases, self._positions, self._snapshots):
                known.pop(table_id, None)
            self._changed.notify_all()

    def move(self, table_id: int, position: Lsn) -> None:
        """A table sync worker has brought its table further."""
        with self._changed:
            self._positions[table_id] = position

    def wait_to_hand_over(self, table_id: int, snapshot: Lsn, position: Lsn, timeout: float) -> Catchup | None:
        """Show that the worker is close, and wait until apply names the boundary; None when it has not in time."""
        deadline = time.monotonic() + timeout
        with self._changed:
            if not isinstance(self._phases.get(table_id), SyncWait | Catchup):
                self._snapshots[table_id] = snapshot
                self._show(table_id, SyncWait(), position)
            while isinstance(phase := self._phases.get(table_id), SyncWait):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            return phase if isinstance(phase, Catchup) else None

    def settle(self, applied: Lsn, durable: Mapping[int, Lsn]) -> Lsn:
        """Apply is at a boundary: take positions, store progress, hand tables over. Gives what may be acknowledged.

        One critical section: a table that is handed over at max(S, P, A) must find P and A unchanged until its
        boundary is known, or what lies between would belong to nobody.
        """
        with self._changed:
            self._applied = furthest(self._applied, applied)
            for table_id, position in durable.items():
                if table_id in self._phases:
                    self._positions[table_id] = furthest(self._positions.get(table_id, position), position)
            tables = [(phase, self._positions.get(table_id)) for table_id, phase in self._phases.items()]
            reached = progress(self._applied, tables)
            ahead = {
                table_id: position
                for table_id, position in durable.items()
                if table_id in self._phases and not reaches(reached, position)
            }
            if not reaches(self._acknowledged, reached) or ahead:
                failpoints.reach("before_progress")
                self._acknowledged = self._store.upsert_replication_progress(
                    WorkerType.apply(), furthest(self._acknowledged, reached), table_positions=ahead
                )
                failpoints.reach("after_progress")
            self._hand_over_waiting()
            self._promote()
            return self._acknowledged

    def _hand_over_waiting(self) -> None:
        for table_id, phase in self._phases.items():
            if isinstance(phase, SyncWait):
                snapshot = self._snapshots[table_id]
                target = hand_over(phase, snapshot=snapshot, applied=self._applied, acknowledged=self._acknowledged)
                logger.info("table is handed over table_id=%d position=%s", table_id, target.lsn)
                self._phases[table_id] = target
                failpoints.reach("after_hand_over")
        self._changed.notify_all()

    def _promote(self) -> None:
        ready = {
            table_id: Ready()
            for table_id, phase in self._phases.items()
            if isinstance(phase, SyncDone)
            and reaches(self._applied, phase.lsn)
            and may_be_ready(phase, self._positions.get(table_id, Lsn(0)))
        }
        if ready:
            self._store.update_table_replication_states(ready)
            failpoints.reach("after_ready")
            for table_id, phase in ready.items():
                self._show(table_id, phase, None)

    def _show(self, table_id: int, phase: TableReplicationPhase, position: Lsn | None) -> None:
        self._phases[table_id] = phase
        if position is not None:
            self._positions[table_id] = position
        elif isinstance(phase, Errored) or not isinstance(phase, SyncWait | Catchup | SyncDone | Ready):
            self._positions.pop(table_id, None)
        self._changed.notify_all()
