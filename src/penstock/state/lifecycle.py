"""The part of a store that forgets: for a new copy, for a table that left, for a new slot, for good."""

from __future__ import annotations

from penstock.state.core import StoreCore
from penstock.state.metadata import WorkerKind
from penstock.state.phases import Init
from penstock.state.records import (
    RECORDS,
    DestinationTableRecord,
    PhaseHistoryRecord,
    PipelineRecord,
    ProgressRecord,
    TablePositionRecord,
    TableSchemaRecord,
    TableStateRecord,
    Transaction,
)
from penstock.state.tables import set_phases


class Lifecycle(StoreCore):
    """See `stores.TableLifecycleStore`."""

    def clear_table_copy_state(self, table_id: int) -> None:
        self.write(lambda transaction: _clear_copy(transaction, table_id), lambda _: self.forget())

    def delete_table_pipeline_state(self, table_id: int) -> None:
        def work(transaction: Transaction) -> None:
            _clear_copy(transaction, table_id)
            transaction.delete(TableStateRecord, table_id=table_id)
            transaction.delete(PhaseHistoryRecord, table_id=table_id)

        self.write(work, lambda _: self.forget())

    def reset_replication(self) -> None:
        def work(transaction: Transaction) -> None:
            current = {record.table_id: record for record in transaction.rows(TableStateRecord)}
            set_phases(transaction, current, {table_id: Init() for table_id in current})
            transaction.delete(ProgressRecord)
            transaction.delete(TablePositionRecord)

        self.write(work, lambda _: self.forget())

    def delete_pipeline_state(self) -> None:
        def work(transaction: Transaction) -> None:
            for kind in RECORDS:
                if kind is not PipelineRecord:  # the epoch must not start over while somebody may carry an old one
                    transaction.delete(kind)

        self.write(work, lambda _: self.forget())


def _clear_copy(transaction: Transaction, table_id: int) -> None:
    transaction.delete(DestinationTableRecord, table_id=table_id)
    transaction.delete(TableSchemaRecord, table_id=table_id)
    transaction.delete(ProgressRecord, worker=WorkerKind.TABLE_SYNC.value, table_id=table_id)
    transaction.delete(TablePositionRecord, table_id=table_id)
