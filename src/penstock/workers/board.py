"""The phases and positions of all tables, shared by the apply worker, table sync workers and the coordinator.

One lock guards the phases, the tables' positions and the apply worker's own position. A persisted phase is stored
before it is shown, and the rules in `penstock.state.transitions` reject illegal steps. Threads wait on the board for a
phase to change.

A table sync worker claims its table under the name of its attempt. If another thread sets the table's phase meanwhile
(the table left the publication, or must be copied again), the claim ends, and the worker's next call raises
`Superseded`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from penstock import failpoints
from penstock.errors import IllegalTransition, for_table
from penstock.lsn import Lsn, earliest, furthest, reaches
from penstock.spool import Stopping
from penstock.state import (
    Catchup,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Ready,
    Resumption,
    Store,
    StoredPhase,
    SyncDone,
    SyncWait,
    TableReplicationPhase,
)
from penstock.state.phases import is_persisted, stored_form
from penstock.state.positions import followed_from, progress, table_start
from penstock.state.transitions import (
    after_crash,
    become_ready,
    give_up_resuming,
    hand_over,
    may_be_ready,
    resync,
    retry_is_due,
    roll_back,
    start_copy,
    wait_for_apply,
)

logger = logging.getLogger(__name__)


class Superseded(Stopping):
    """The table is no longer claimed by the calling worker."""


class Board:
    """Phases, positions, P (`applied`) and A (`acknowledged`: the highest position ever stored)."""

    def __init__(
        self,
        store: Store,
        start: Lsn,
        recorded: Callable[[int], Lsn | None],
        name_of: Callable[[int], str] = str,
    ) -> None:
        """`start` is where replication starts; `recorded` returns the position that a table has at its destination."""
        self._store = store
        self.name_of = name_of
        """Returns the name of a table."""
        self._changed = threading.Condition(threading.RLock())
        self._phases: dict[int, TableReplicationPhase] = {
            table_id: after_crash(phase, start) for table_id, phase in store.get_table_replication_states().items()
        }
        self._positions: dict[int, Lsn] = {}
        self._snapshots: dict[int, Lsn] = {}
        self._attempts: dict[int, str] = {}
        self._in_batch: frozenset[int] = frozenset()
        self._written_alone: frozenset[int] = frozenset()
        self._applied = start
        self._acknowledged = start
        for table_id, phase in self._phases.items():
            if isinstance(phase, Ready | SyncDone):
                # Everything before the hand-over is durable, even if its position was not recorded.
                self._positions[table_id] = followed_from(phase, table_start(start, recorded(table_id)))

    @property
    def applied(self) -> Lsn:
        """P: the apply worker has written everything before it."""
        return self._applied

    @property
    def acknowledged(self) -> Lsn:
        return self._acknowledged

    def phases(self) -> Mapping[int, TableReplicationPhase]:
        """Return a copy of all phases."""
        with self._changed:
            return dict(self._phases)

    def phase(self, table_id: int) -> TableReplicationPhase | None:
        with self._changed:
            return self._phases.get(table_id)

    def positions(self) -> Mapping[int, Lsn]:
        """Return how far the tables that the apply worker follows are durable."""
        with self._changed:
            return {
                table_id: followed_from(phase, self._positions.get(table_id, self._applied))
                for table_id, phase in self._phases.items()
                if isinstance(phase, SyncDone | Ready)
            }

    def to_copy(self) -> list[int]:
        """Return the tables that wait for a table sync worker, without those of the current batch.

        A table may be reset at any time, but its copy must not start while the apply worker still writes its changes.
        """
        with self._changed:
            return [
                table_id
                for table_id, phase in self._phases.items()
                if isinstance(phase, Init | DataSync | FinishedCopy)
                and table_id not in self._in_batch | self._written_alone
            ]

    def keep_from_copies(self, table_ids: frozenset[int]) -> None:
        """Set the tables that are written by themselves: none of them can be copied."""
        with self._changed:
            self._written_alone = table_ids

    def set_phase(self, table_id: int, phase: TableReplicationPhase, *, position: Lsn | None = None) -> None:
        """Store a phase if it is a persisted one, then show it. `position` is how far the table is durable."""
        with self._changed:
            self._set_phase(table_id, phase, position)
            self._attempts.pop(table_id, None)

    def resync(self, table_ids: Collection[int]) -> None:
        """Reset tables to be copied again: all of them, or none if one is being copied now."""
        with self._changed:
            copying = [self.name_of(table_id) for table_id in table_ids if table_id in self._attempts]
            if copying:
                raise IllegalTransition(f"being copied now: {', '.join(copying)}")
            self._set_phases({table_id: resync() for table_id in table_ids})

    def roll_back(self, table_ids: Collection[int]) -> None:
        """Resume errored tables from where they stopped: all of them, or none if one cannot."""
        with self._changed:
            resumed: dict[int, StoredPhase] = {}
            for table_id in table_ids:
                try:
                    resumed[table_id] = roll_back(self._phases.get(table_id) or Init())
                except IllegalTransition as error:
                    name = self.name_of(table_id)
                    raise IllegalTransition(
                        f"{name}: {error}", hint=for_table(error.hint, name), **error.facts
                    ) from None
            self._set_phases(resumed)

    def remove(self, table_id: int) -> None:
        """Forget a table that has left the publication."""
        with self._changed:
            self._store.delete_table_pipeline_state(table_id)
            for known in (self._phases, self._positions, self._snapshots, self._attempts):
                known.pop(table_id, None)
            self._changed.notify_all()

    # For table sync workers

    def claim(self, table_id: int, attempt: str) -> None:
        """Claim the table for an attempt to copy it."""
        with self._changed:
            if table_id not in self._phases:
                raise Superseded
            self._attempts[table_id] = attempt

    def advance(
        self,
        table_id: int,
        attempt: str,
        transition: Callable[[TableReplicationPhase], TableReplicationPhase],
        *,
        position: Lsn | None = None,
    ) -> None:
        """Change the phase of a claimed table by `transition`. The claim ends with SyncDone or Errored."""
        with self._changed:
            phase = transition(self._claimed(table_id, attempt))
            self._set_phase(table_id, phase, position)
            if isinstance(phase, SyncDone | Errored):
                del self._attempts[table_id]

    def start_copy(self, table_id: int, attempt: str, *, resumable: bool) -> Resumption | None:
        """Start the copy of a claimed table; return what it resumes from, or what its next attempt can resume from.

        A new copy can be resumed from A: progress is held there from now on, and its snapshot will be after it.
        """
        with self._changed:
            phase = self._claimed(table_id, attempt)
            known = phase.resumption if isinstance(phase, DataSync) else None
            resumption = (known or Resumption(attempt, self._acknowledged)) if resumable else None
            self._set_phase(table_id, start_copy(phase, resumption), None)
            return resumption

    def give_up_resuming(self, table_id: int) -> None:
        """Let progress pass the changes that resuming a copy would need. A running copy keeps its claim."""
        with self._changed:
            phase = self._phases.get(table_id)
            given_up = None if phase is None else give_up_resuming(phase)
            if given_up is not None:
                self._set_phase(table_id, given_up, None)

    def check_claim(self, table_id: int, attempt: str) -> None:
        """Raise `Superseded` unless the attempt still holds the claim."""
        with self._changed:
            self._claimed(table_id, attempt)

    def move(self, table_id: int, attempt: str, position: Lsn) -> None:
        """Record how far the worker has brought its table."""
        with self._changed:
            self._claimed(table_id, attempt)
            self._positions[table_id] = position

    def wait_to_hand_over(
        self, table_id: int, attempt: str, snapshot: Lsn, position: Lsn, timeout: float
    ) -> Catchup | None:
        """Show that the worker is close, and wait until the apply worker names the boundary; None on timeout."""
        deadline = time.monotonic() + timeout
        with self._changed:
            phase = self._claimed(table_id, attempt)
            if not isinstance(phase, SyncWait | Catchup):
                self._snapshots[table_id] = snapshot
                self._show(table_id, wait_for_apply(phase), position)
            while isinstance(phase := self._claimed(table_id, attempt), SyncWait):
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            return phase if isinstance(phase, Catchup) else None

    def leave(self, table_id: int, attempt: str) -> None:
        """End the claim of a worker that has ended; a phase that existed only in memory reverts to the stored one."""
        with self._changed:
            if self._attempts.get(table_id) != attempt:
                return
            phase = self._phases[table_id]
            if not is_persisted(phase):
                # The store may be ahead of the worker, if its answer was lost. If the store is unreachable, the claim
                # stays, and the call can be repeated.
                stored = self._store.get_table_replication_state(table_id) or stored_form(phase)
                self._show(table_id, stored, stored.lsn if isinstance(stored, SyncDone) else None)
            del self._attempts[table_id]

    # For the apply worker

    @contextmanager
    def batch(self) -> Iterator[Mapping[int, Lsn]]:
        """Write a batch inside the block; yields the followed tables with their positions."""
        with self._changed:
            positions = self.positions()
            self._in_batch = frozenset(positions)
        try:
            yield positions
        finally:
            with self._changed:
                self._in_batch = frozenset()

    def alter(
        self, table_id: int, transition: Callable[[TableReplicationPhase], TableReplicationPhase | None]
    ) -> TableReplicationPhase | None:
        """Change the phase of a table by `transition`; None if the table is gone or `transition` returns None."""
        with self._changed:
            phase = self._phases.get(table_id)
            new = None if phase is None else transition(phase)
            if new is not None:
                self._set_phase(table_id, new, None)
                self._attempts.pop(table_id, None)
            return new

    def retry_due(self, now: datetime) -> dict[int, Errored]:
        """Roll back errored tables whose retry is due; return the errors they had."""
        with self._changed:
            due = {
                table_id: phase
                for table_id, phase in self._phases.items()
                if isinstance(phase, Errored) and retry_is_due(phase, now)
            }
            if due:
                failpoints.reach("before_rollback")
                self.roll_back(due)
                failpoints.reach("after_rollback")
            return due

    def record_progress(self, applied: Lsn, durable: Mapping[int, Lsn]) -> Lsn:
        """Record that the apply worker is at a boundary: positions, progress, hand-overs. Return the position that may
        be acknowledged.

        This is one critical section: P and A must not change between choosing max(S, P, A) for a table and showing it,
        or neither worker would write the changes in between.
        """
        with self._changed:
            self._applied = furthest(self._applied, applied)
            for table_id, position in durable.items():
                if self._is_followed(table_id):
                    self._positions[table_id] = furthest(self._positions.get(table_id, position), position)
            tables = [(phase, self._positions.get(table_id)) for table_id, phase in self._phases.items()]
            reached = progress(self._applied, tables)
            ahead = {
                table_id: position
                for table_id, position in durable.items()
                if self._is_followed(table_id) and not reaches(reached, position)
            }
            if not reaches(self._acknowledged, reached) or ahead:
                failpoints.reach("before_progress")
                self._acknowledged = self._store.upsert_replication_progress(
                    furthest(self._acknowledged, reached), table_positions=ahead
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
                logger.info("table handed over table=%s position=%s", self.name_of(table_id), target.lsn)
                self._phases[table_id] = target
                failpoints.reach("after_hand_over")
        self._changed.notify_all()

    def _promote(self) -> None:
        ready: dict[int, StoredPhase] = {}
        for table_id, phase in self._phases.items():
            durable = earliest(self._applied, self._positions.get(table_id, Lsn(0)))
            if may_be_ready(phase, durable):
                ready[table_id] = become_ready(phase, durable)
        if ready:
            self._store.update_table_replication_states(ready)
            failpoints.reach("after_ready")
            for table_id, phase in ready.items():
                self._show(table_id, phase, None)

    def _is_followed(self, table_id: int) -> bool:
        """False for a table that was reset or removed while its changes were being written."""
        return isinstance(self._phases.get(table_id), SyncDone | Ready)

    def _claimed(self, table_id: int, attempt: str) -> TableReplicationPhase:
        if self._attempts.get(table_id) != attempt:
            raise Superseded
        return self._phases[table_id]

    def _set_phase(self, table_id: int, phase: TableReplicationPhase, position: Lsn | None) -> None:
        if is_persisted(phase):
            self._store.update_table_replication_state(table_id, phase)
        self._show(table_id, phase, position)

    def _set_phases(self, phases: Mapping[int, StoredPhase]) -> None:
        """Store several phases in one transaction, then show them."""
        if phases:
            self._store.update_table_replication_states(phases)
        for table_id, phase in phases.items():
            self._show(table_id, phase, phase.lsn if isinstance(phase, SyncDone) else None)
            self._attempts.pop(table_id, None)

    def _show(self, table_id: int, phase: TableReplicationPhase, position: Lsn | None) -> None:
        self._phases[table_id] = phase
        if position is not None:
            self._positions[table_id] = position
        elif isinstance(phase, Errored) or not isinstance(phase, SyncWait | Catchup | SyncDone | Ready):
            self._positions.pop(table_id, None)
        self._changed.notify_all()
