"""The part of a store that keeps the versions of tables' schemas."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from penstock.lsn import OrderKey
from penstock.schema.json import schema_from_json, schema_to_json
from penstock.state.core import StoreCore
from penstock.state.metadata import TableSchemaRetention, TableSchemaVersion
from penstock.state.records import Database, TableSchemaRecord, Transaction

Versions = tuple[TableSchemaVersion, ...]
"""Of one table, oldest first."""


class TableSchemas(StoreCore):
    """See `stores.SchemaStore`.

    The cache has all versions of all tables, or it is empty and fills itself: "the newest version not after X" has a
    wrong answer wherever a version is missing (trap 16). Pruning keeps them few.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.schemas = self.cached(_read_versions)

    def get_table_schema(self, table_id: int, snapshot_id: OrderKey) -> TableSchemaVersion | None:
        return newest_not_after(self.schemas.get().get(table_id, ()), snapshot_id)

    def get_table_schemas(self) -> list[TableSchemaVersion]:
        return [version for versions in self.schemas.get().values() for version in versions]

    def load_table_schemas(self) -> int:
        return sum(len(versions) for versions in self.schemas.load().values())

    def store_table_schema(self, table_schema: TableSchemaVersion) -> TableSchemaVersion:
        table_id, key = table_schema.table_id, table_schema.snapshot_id
        record = TableSchemaRecord(table_id, key.commit_lsn, key.ordinal, schema_to_json(table_schema.schema))

        def publish(_: None) -> None:
            def add(cache: Mapping[int, Versions]) -> Mapping[int, Versions]:
                others = [each for each in cache.get(table_id, ()) if each.snapshot_id != key]
                return {**cache, table_id: tuple(sorted([*others, table_schema], key=lambda each: each.snapshot_id))}

            self.schemas.publish(add)

        self.write(lambda transaction: transaction.put([record]), publish)
        return table_schema

    def prune_table_schemas(self, table_schema_retentions: Mapping[int, TableSchemaRetention]) -> int:
        retentions = dict(table_schema_retentions)

        def work(transaction: Transaction) -> dict[int, set[OrderKey]]:
            # Only old versions go, so what the database has is read, and not what the cache believes.
            stored = _read_versions(transaction)
            gone = {table_id: _outdated(stored.get(table_id, ()), kept) for table_id, kept in retentions.items()}
            for table_id, keys in gone.items():
                for key in keys:
                    transaction.delete(
                        TableSchemaRecord, table_id=table_id, commit_lsn=key.commit_lsn, ordinal=key.ordinal
                    )
            return gone

        def publish(gone: dict[int, set[OrderKey]]) -> None:
            def remove(cache: Mapping[int, Versions]) -> Mapping[int, Versions]:
                return {
                    table_id: tuple(each for each in versions if each.snapshot_id not in gone.get(table_id, ()))
                    for table_id, versions in cache.items()
                }

            self.schemas.publish(remove)

        return sum(len(keys) for keys in self.write(work, publish).values())


def newest_not_after(versions: Versions, snapshot_id: OrderKey) -> TableSchemaVersion | None:
    """The version that holds at a key; None if all begin later."""
    position = bisect_right(versions, snapshot_id, key=lambda each: each.snapshot_id)
    return versions[position - 1] if position else None


def _outdated(versions: Versions, retention: TableSchemaRetention) -> set[OrderKey]:
    kept = newest_not_after(versions, retention.snapshot_id)
    return set() if kept is None else {each.snapshot_id for each in versions if each.snapshot_id < kept.snapshot_id}


def _read_versions(transaction: Transaction) -> Mapping[int, Versions]:
    found: dict[int, list[TableSchemaVersion]] = {}
    for record in transaction.rows(TableSchemaRecord):
        key = OrderKey(record.commit_lsn, record.ordinal)
        version = TableSchemaVersion(key, schema_from_json(record.definition))
        found.setdefault(record.table_id, []).append(version)
    return {
        table_id: tuple(sorted(versions, key=lambda each: each.snapshot_id)) for table_id, versions in found.items()
    }
