"""The part of a store that keeps what tables are at the destination."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.lsn import Lsn, OrderKey
from penstock.state.core import StoreCore
from penstock.state.metadata import (
    AppliedDestinationTableMetadata,
    DestinationTableMetadata,
    DestinationTableStatus,
    check_metadata,
)
from penstock.state.records import Database, DestinationTableRecord, Transaction


class DestinationTables(StoreCore):
    """See `stores.StateStore`: the methods about destination metadata."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.metadata = self.cached(_read_metadata)

    def get_destination_table_metadata(self, table_id: int) -> DestinationTableMetadata | None:
        return self.metadata.get().get(table_id)

    def get_applied_destination_table_metadata(self, table_id: int) -> AppliedDestinationTableMetadata | None:
        found = self.get_destination_table_metadata(table_id)
        if found is None or found.interrupted:
            return None
        return AppliedDestinationTableMetadata(found.destination_table_id, found.snapshot_id, found.replication_mask)

    def get_interrupted_destination_tables(self) -> Mapping[int, DestinationTableMetadata]:
        return {table_id: each for table_id, each in self.metadata.get().items() if each.interrupted}

    def load_destination_tables_metadata(self) -> int:
        return len(self.metadata.load())

    def store_destination_table_metadata(self, table_id: int, metadata: DestinationTableMetadata) -> None:
        def work(transaction: Transaction) -> None:
            found = next(iter(transaction.rows(DestinationTableRecord, table_id=table_id)), None)
            check_metadata(None if found is None else _from_record(found), metadata)
            transaction.put([_to_record(table_id, metadata)])

        self.write(work, lambda _: self.metadata.publish(lambda cache: {**cache, table_id: metadata}))

    def delete_destination_table_metadata(self, table_id: int) -> None:
        def work(transaction: Transaction) -> None:
            transaction.delete(DestinationTableRecord, table_id=table_id)

        def publish(_: None) -> None:
            self.metadata.publish(lambda cache: {each: value for each, value in cache.items() if each != table_id})

        self.write(work, publish)


def _read_metadata(transaction: Transaction) -> Mapping[int, DestinationTableMetadata]:
    return {record.table_id: _from_record(record) for record in transaction.rows(DestinationTableRecord)}


def _to_record(table_id: int, metadata: DestinationTableMetadata) -> DestinationTableRecord:
    previous, mask = metadata.previous_snapshot_id, metadata.previous_replication_mask
    return DestinationTableRecord(
        table_id=table_id,
        destination_table_id=metadata.destination_table_id,
        status=metadata.status.value,
        commit_lsn=metadata.snapshot_id.commit_lsn,
        ordinal=metadata.snapshot_id.ordinal,
        replication_mask=_mask_to_text(metadata.replication_mask),
        previous_commit_lsn=None if previous is None else previous.commit_lsn,
        previous_ordinal=None if previous is None else previous.ordinal,
        previous_replication_mask=None if mask is None else _mask_to_text(mask),
    )


def _from_record(record: DestinationTableRecord) -> DestinationTableMetadata:
    mask = record.previous_replication_mask
    return DestinationTableMetadata(
        destination_table_id=record.destination_table_id,
        snapshot_id=OrderKey(record.commit_lsn, record.ordinal),
        status=DestinationTableStatus(record.status),
        replication_mask=_mask_from_text(record.replication_mask),
        previous_snapshot_id=_key(record.previous_commit_lsn, record.previous_ordinal),
        previous_replication_mask=None if mask is None else _mask_from_text(mask),
    )


def _key(commit_lsn: Lsn | None, ordinal: int | None) -> OrderKey | None:
    return None if commit_lsn is None or ordinal is None else OrderKey(commit_lsn, ordinal)


def _mask_to_text(mask: tuple[bool, ...]) -> str:
    return "".join("1" if each else "0" for each in mask)


def _mask_from_text(text: str) -> tuple[bool, ...]:
    return tuple(each == "1" for each in text)
