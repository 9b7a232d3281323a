"""The part of a store that keeps the phases of tables, and their history."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import IllegalTransition
from penstock.state.core import StoreCore
from penstock.state.phases import PhaseRecord, StoredPhase, TableReplicationPhase, phase_from_json, phase_to_json
from penstock.state.records import Database, PhaseHistoryRecord, PipelineRecord, TableStateRecord, Transaction
from penstock.state.transitions import check_stored, roll_back

HISTORY_LENGTH = 50
"""Phases that are remembered per table."""


class TableStates(StoreCore):
    """See `stores.StateStore`: the methods about phases."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.states = self.cached(_read_states)

    def get_table_replication_state(self, table_id: int) -> StoredPhase | None:
        return self.states.get().get(table_id)

    def get_table_replication_states(self) -> Mapping[int, StoredPhase]:
        return self.states.get()

    def load_table_replication_states(self) -> int:
        return len(self.states.load())

    def update_table_replication_states(self, updates: Mapping[int, TableReplicationPhase]) -> None:
        wanted = dict(updates)

        def work(transaction: Transaction) -> dict[int, StoredPhase]:
            current = _read_records(transaction, set(wanted))
            checked = {
                table_id: check_stored(_phase_of(current.get(table_id)), phase) for table_id, phase in wanted.items()
            }
            set_phases(transaction, current, checked)
            return checked

        self.write(work, self._publish)

    def update_table_replication_state(self, table_id: int, state: TableReplicationPhase) -> None:
        self.update_table_replication_states({table_id: state})

    def rollback_table_replication_state(self, table_id: int) -> StoredPhase:
        def work(transaction: Transaction) -> dict[int, StoredPhase]:
            current = _read_records(transaction, {table_id})
            phase = _phase_of(current.get(table_id))
            if phase is None:
                raise IllegalTransition(f"table {table_id} is not known", current="nothing", wanted="rollback")
            back: dict[int, StoredPhase] = {table_id: roll_back(phase)}
            set_phases(transaction, current, back)
            return back

        return self.write(work, self._publish)[table_id]

    def get_table_replication_history(self, table_id: int) -> list[PhaseRecord]:
        def work(transaction: Transaction) -> list[PhaseRecord]:
            records = sorted(transaction.rows(PhaseHistoryRecord, table_id=table_id), key=lambda each: each.sequence)
            return [PhaseRecord(phase_from_json(r.phase, r.details), r.recorded_at, r.epoch) for r in records]

        return self.database.run(work, writing=False)

    def _publish(self, changed: dict[int, StoredPhase]) -> None:
        self.states.publish(lambda states: {**states, **changed})


def set_phases(
    transaction: Transaction, current: Mapping[int, TableStateRecord], wanted: Mapping[int, StoredPhase]
) -> None:
    """Write phases with their history; what a table has already is not written again."""
    now = transaction.now()
    epoch = next(iter(transaction.rows(PipelineRecord))).epoch
    states: list[TableStateRecord] = []
    history: list[PhaseHistoryRecord] = []
    for table_id, phase in wanted.items():
        before = current.get(table_id)
        if _phase_of(before) == phase:
            continue
        sequence = 1 if before is None else before.sequence + 1
        details = phase_to_json(phase)
        states.append(TableStateRecord(table_id, sequence, phase.name, details, now))
        ring = sequence % HISTORY_LENGTH
        history.append(PhaseHistoryRecord(table_id, ring, sequence, phase.name, details, epoch, now))
    transaction.put(states)
    transaction.put(history)


def _read_states(transaction: Transaction) -> Mapping[int, StoredPhase]:
    return {r.table_id: phase_from_json(r.phase, r.details) for r in transaction.rows(TableStateRecord)}


def _read_records(transaction: Transaction, table_ids: set[int]) -> dict[int, TableStateRecord]:
    if len(table_ids) == 1:
        records = transaction.rows(TableStateRecord, table_id=next(iter(table_ids)))
    else:
        records = transaction.rows(TableStateRecord)
    return {record.table_id: record for record in records}


def _phase_of(record: TableStateRecord | None) -> StoredPhase | None:
    return None if record is None else phase_from_json(record.phase, record.details)
