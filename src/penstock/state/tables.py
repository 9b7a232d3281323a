"""The part of a store about tables: their phases, their schemas, and which of them a publication has."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import IllegalTransition
from penstock.lsn import OrderKey
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json
from penstock.source.membership import Heap, Membership, PublicationOptions, RowVersion
from penstock.source.patterns import TableName
from penstock.source.shapes import TableShape, shape_from_json, shape_to_json
from penstock.state.core import StoreCore
from penstock.state.phases import Init, PhaseRecord, StoredPhase, TableReplicationPhase, phase_from_json, phase_to_json
from penstock.state.records import (
    RECORDS,
    ChangedCellsRecord,
    Database,
    PhaseHistoryRecord,
    PipelineRecord,
    ProgressRecord,
    PublicationRecord,
    TablePositionRecord,
    TableSchemaRecord,
    TableShapeRecord,
    TableStateRecord,
    Transaction,
)
from penstock.state.transitions import check_stored, roll_back

HISTORY_LENGTH = 50
"""Number of phases kept per table."""


@dataclass(frozen=True, slots=True)
class TableSchemaVersion:
    """A table's schema, with the order key of the first change that has it."""

    snapshot_id: OrderKey
    schema: TableSchema

    @property
    def table_id(self) -> int:
        return self.schema.table_id

    @property
    def version(self) -> str:
        """Its name in the spool (`Segment.version`)."""
        return str(self.snapshot_id)


_Versions = tuple[TableSchemaVersion, ...]
"""Of one table, oldest first."""


class TableStore(StoreCore):
    """Phases, schemas and memberships."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._states = self.cached(_read_states)
        # All versions of all tables or nothing: "the newest version not after X" has a wrong answer wherever a version
        # is missing (trap 16). Pruning keeps them few.
        self._schemas = self.cached(_read_versions)
        self._shapes = self.cached(_read_shapes)

    # Phases

    def get_table_replication_state(self, table_id: int) -> StoredPhase | None:
        """Return a table's stored phase, or None for an unknown table. SyncWait and Catchup are never stored."""
        return self._states.get().get(table_id)

    def get_table_replication_states(self) -> Mapping[int, StoredPhase]:
        """Return the phases of all tables; the mapping does not change afterwards."""
        return self._states.get()

    def load_table_replication_states(self) -> int:
        """Read the phases from the database again; return the number of tables."""
        return len(self._states.load())

    def update_table_replication_states(self, updates: Mapping[int, TableReplicationPhase]) -> None:
        """Set several phases, all or none.

        Raises `IllegalTransition` unless each may follow the stored one (`transitions.check_stored`). Setting the
        stored phase again changes nothing, so a call may be repeated.
        """
        wanted = dict(updates)

        def work(transaction: Transaction) -> dict[int, StoredPhase]:
            current = _read_records(transaction, set(wanted))
            checked = {
                table_id: check_stored(_phase_of(current.get(table_id)), phase) for table_id, phase in wanted.items()
            }
            _set_phases(transaction, current, checked)
            return checked

        self.write(work, self._publish_states)

    def update_table_replication_state(self, table_id: int, state: TableReplicationPhase) -> None:
        """Set one phase."""
        self.update_table_replication_states({table_id: state})

    def rollback_table_replication_state(self, table_id: int) -> StoredPhase:
        """Take an Errored table back to the phase in which it failed (`transitions.roll_back`), and return that.

        Raises `IllegalTransition` for a table that is not Errored or has lost its position. Called for the command
        `rollback` and for timed retries.
        """

        def work(transaction: Transaction) -> dict[int, StoredPhase]:
            current = _read_records(transaction, {table_id})
            phase = _phase_of(current.get(table_id))
            if phase is None:
                raise IllegalTransition(f"table {table_id} is not known", current="nothing", wanted="rollback")
            back: dict[int, StoredPhase] = {table_id: roll_back(phase)}
            _set_phases(transaction, current, back)
            return back

        return self.write(work, self._publish_states)[table_id]

    def get_table_replication_history(self, table_id: int) -> list[PhaseRecord]:
        """Return the latest phases of a table, oldest first. Reads the database."""

        def work(transaction: Transaction) -> list[PhaseRecord]:
            records = sorted(transaction.rows(PhaseHistoryRecord, table_id=table_id), key=lambda each: each.sequence)
            return [PhaseRecord(phase_from_json(r.phase, r.details), r.recorded_at, r.epoch) for r in records]

        return self.read(work)

    def _publish_states(self, changed: dict[int, StoredPhase]) -> None:
        self._states.publish(lambda states: {**states, **changed})

    # Schemas

    def get_table_schema(self, table_id: int, snapshot_id: OrderKey) -> TableSchemaVersion | None:
        """Return the version with the largest key not after `snapshot_id`, or None if the table has none.

        Workers and destinations call this for every batch.
        """
        return _newest_not_after(self._schemas.get().get(table_id, ()), snapshot_id)

    def get_table_schemas(self) -> list[TableSchemaVersion]:
        """Return all versions of all tables."""
        return [version for versions in self._schemas.get().values() for version in versions]

    def load_table_schemas(self) -> int:
        """Read the schemas from the database again; return the number of versions."""
        return sum(len(versions) for versions in self._schemas.load().values())

    def store_table_schema(self, table_schema: TableSchemaVersion) -> TableSchemaVersion:
        """Store a version, replacing one with the same key.

        Table sync workers call this for the schema of the snapshot, the apply worker when a change has a new schema;
        a replay repeats the call.
        """
        table_id, key = table_schema.table_id, table_schema.snapshot_id
        record = TableSchemaRecord(table_id, key.commit_lsn, key.ordinal, schema_to_json(table_schema.schema))

        def publish(_: None) -> None:
            def add(cache: Mapping[int, _Versions]) -> Mapping[int, _Versions]:
                others = [each for each in cache.get(table_id, ()) if each.snapshot_id != key]
                return {**cache, table_id: tuple(sorted([*others, table_schema], key=lambda each: each.snapshot_id))}

            self._schemas.publish(add)

        self.write(lambda transaction: transaction.put([record]), publish)
        return table_schema

    def prune_table_schemas(self, needed: Mapping[int, OrderKey]) -> int:
        """Delete versions that ended before the key given for their table; return the number of deleted ones.

        The newest version not after the key stays, as do all newer ones. Tables that are not named keep all. The apply
        worker calls this now and then, after it has stored progress.
        """

        def work(transaction: Transaction) -> dict[int, set[OrderKey]]:
            # Only old versions go, so what the database has is read, and not what the cache believes.
            stored = _read_versions(transaction)
            outdated = {table_id: _outdated(stored.get(table_id, ()), key) for table_id, key in needed.items()}
            for table_id, keys in outdated.items():
                for key in keys:
                    transaction.delete(
                        TableSchemaRecord, table_id=table_id, commit_lsn=key.commit_lsn, ordinal=key.ordinal
                    )
            return outdated

        def publish(outdated: dict[int, set[OrderKey]]) -> None:
            if any(outdated.values()):
                self._schemas.forget()

        return sum(len(keys) for keys in self.write(work, publish).values())

    # Shapes

    def get_table_shapes(self) -> Mapping[int, TableShape]:
        """Return the shapes that were last stored, by table."""
        return self._shapes.get()

    def store_table_shapes(self, shapes: Mapping[int, TableShape]) -> None:
        """Store shapes, after everything that follows from them was stored."""
        records = [TableShapeRecord(table_id, shape_to_json(shape)) for table_id, shape in shapes.items()]
        if records:
            self.write(
                lambda transaction: transaction.put(records),
                lambda _: self._shapes.publish(lambda cache: {**cache, **shapes}),
            )

    # Counts

    def get_changed_cells(self) -> Mapping[int, int]:
        """Return how many cells `out_of_range` changed, by table. Reads the database."""

        def work(transaction: Transaction) -> Mapping[int, int]:
            return {record.table_id: record.cells for record in transaction.rows(ChangedCellsRecord)}

        return self.database.run(work, writing=False)

    def add_changed_cells(self, counts: Mapping[int, int]) -> None:
        """Add to the numbers of cells that `out_of_range` changed."""
        added = {table_id: count for table_id, count in counts.items() if count}

        def work(transaction: Transaction) -> None:
            known = {record.table_id: record.cells for record in transaction.rows(ChangedCellsRecord)}
            transaction.put(
                [ChangedCellsRecord(table_id, known.get(table_id, 0) + count) for table_id, count in added.items()]
            )

        if added:
            self.write(work, lambda _: None)

    # Publications

    def get_publication_membership(self, publication: str) -> Membership | None:
        """Return the membership of a publication as it was last stored, or None. Reads the database."""

        def work(transaction: Transaction) -> Membership | None:
            found = transaction.rows(PublicationRecord, name=publication)
            return _membership_from_json(found[0].membership) if found else None

        return self.read(work)

    def store_publication_membership(self, publication: str, membership: Membership) -> None:
        """Store the membership of a publication, after everything that follows from it was stored.

        After a restart a difference between the stored and the real membership is noticed and acted upon again.
        """
        record = PublicationRecord(publication, _membership_to_json(membership))
        self.write(lambda transaction: transaction.put([record]))

    def get_table_names(self) -> dict[int, TableName]:
        """Return the names that the tables had when the publication was last loaded. Reads the database.

        They may be newer than those in the tables' schemas: a schema is that of a table's last change.
        """

        def work(transaction: Transaction) -> dict[int, TableName]:
            stored = [_membership_from_json(each.membership) for each in transaction.rows(PublicationRecord)]
            return {table_id: name for each in stored for table_id, name in each.table_names().items()}

        return self.read(work)

    # Deleting

    def clear_table_copy_state(self, table_id: int) -> None:
        """Delete a table's schema versions, position and counts; the phase and the shape stay.

        Table sync workers call this before each copy, after `drop_table_for_copy` has succeeded.
        """
        self.write(lambda transaction: _clear_copy(transaction, table_id), lambda _: self.forget())

    def delete_table_pipeline_state(self, table_id: int) -> None:
        """Delete everything about a table that left the publication; the destination's data is not touched."""

        def work(transaction: Transaction) -> None:
            _clear_copy(transaction, table_id)
            transaction.delete(TableShapeRecord, table_id=table_id)
            transaction.delete(TableStateRecord, table_id=table_id)
            transaction.delete(PhaseHistoryRecord, table_id=table_id)

        self.write(work, lambda _: self.forget())

    def reset_replication(self) -> None:
        """Set all tables to Init and delete all progress and positions, in one transaction.

        Called when the slot was lost or the server was replaced. Schemas stay until each copy clears them.
        """

        def work(transaction: Transaction) -> None:
            current = {record.table_id: record for record in transaction.rows(TableStateRecord)}
            _set_phases(transaction, current, {table_id: Init() for table_id in current})
            transaction.delete(ProgressRecord)
            transaction.delete(TablePositionRecord)

        self.write(work, lambda _: self.forget())

    def delete_pipeline_state(self) -> None:
        """Delete everything but the lease; for `teardown`."""

        def work(transaction: Transaction) -> None:
            for kind in RECORDS:
                if kind is not PipelineRecord:  # the epoch must not start over while a process may carry an old one
                    transaction.delete(kind)

        self.write(work, lambda _: self.forget())


def _set_phases(
    transaction: Transaction, current: Mapping[int, TableStateRecord], wanted: Mapping[int, StoredPhase]
) -> None:
    """Write the phases that differ from the current ones, and their history."""
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


def _clear_copy(transaction: Transaction, table_id: int) -> None:
    transaction.delete(TableSchemaRecord, table_id=table_id)
    transaction.delete(TablePositionRecord, table_id=table_id)
    transaction.delete(ChangedCellsRecord, table_id=table_id)


def _read_shapes(transaction: Transaction) -> Mapping[int, TableShape]:
    return {record.table_id: shape_from_json(record.shape) for record in transaction.rows(TableShapeRecord)}


def _read_states(transaction: Transaction) -> Mapping[int, StoredPhase]:
    return {r.table_id: phase_from_json(r.phase, r.details) for r in transaction.rows(TableStateRecord)}


def _read_records(transaction: Transaction, table_ids: set[int]) -> dict[int, TableStateRecord]:
    key = {"table_id": next(iter(table_ids))} if len(table_ids) == 1 else {}
    return {record.table_id: record for record in transaction.rows(TableStateRecord, **key)}


def _phase_of(record: TableStateRecord | None) -> StoredPhase | None:
    return None if record is None else phase_from_json(record.phase, record.details)


def _newest_not_after(versions: _Versions, snapshot_id: OrderKey) -> TableSchemaVersion | None:
    position = bisect_right(versions, snapshot_id, key=lambda each: each.snapshot_id)
    return versions[position - 1] if position else None


def _outdated(versions: _Versions, needed: OrderKey) -> set[OrderKey]:
    kept = _newest_not_after(versions, needed)
    return set() if kept is None else {each.snapshot_id for each in versions if each.snapshot_id < kept.snapshot_id}


def _read_versions(transaction: Transaction) -> Mapping[int, _Versions]:
    found: dict[int, list[TableSchemaVersion]] = {}
    for record in transaction.rows(TableSchemaRecord):
        version = TableSchemaVersion(OrderKey(record.commit_lsn, record.ordinal), schema_from_json(record.definition))
        found.setdefault(record.table_id, []).append(version)
    return {
        table_id: tuple(sorted(versions, key=lambda each: each.snapshot_id)) for table_id, versions in found.items()
    }


def _membership_to_json(membership: Membership) -> dict[str, Any]:
    def version(each: RowVersion) -> list[Any]:
        return [each.oid, each.xmin]

    return {
        "publication": version(membership.publication),
        "tables": {
            str(table_id): {
                "name": membership.names[table_id],
                "namespace": membership.namespaces.get(table_id),
                "rows": sorted(version(each) for each in rows),
            }
            for table_id, rows in membership.tables.items()
        },
        "heaps": {
            name: sorted([each.oid, each.identity] for each in heaps) for name, heaps in membership.heaps.items()
        },
        "options": membership.options,
        "generated": sorted(membership.generated),
    }


def _membership_from_json(stored: dict[str, Any]) -> Membership:
    tables = {int(table_id): table for table_id, table in stored["tables"].items()}
    return Membership(
        RowVersion(*stored["publication"]),
        {table_id: frozenset(RowVersion(*row) for row in table["rows"]) for table_id, table in tables.items()},
        {table_id: table["name"] for table_id, table in tables.items()},
        {name: frozenset(Heap(*heap) for heap in heaps) for name, heaps in stored.get("heaps", {}).items()},
        {table_id: table["namespace"] for table_id, table in tables.items() if table.get("namespace") is not None},
        _options_from_json(stored["options"]) if stored.get("options") else None,
        frozenset(stored.get("generated", ())),
    )


def _options_from_json(stored: list[Any]) -> PublicationOptions:
    operations, *rest = stored
    return PublicationOptions(tuple(operations), *rest)
