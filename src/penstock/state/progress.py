"""The part of a store that keeps positions: of workers and of tables, monotone, each tied to its lineage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from penstock.errors import LineageChanged, StateError
from penstock.lsn import Lsn, reaches
from penstock.source.lineage import Lineage
from penstock.state.core import StoreCore
from penstock.state.metadata import StoredProgress, WorkerKind, WorkerType
from penstock.state.records import Database, ProgressRecord, TablePositionRecord, Transaction

_APPLY = WorkerType.apply()


class Progress(StoreCore):
    """See `stores.StateStore`: the methods about progress, positions and lineage."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._lineage: Lineage | None = None
        self.progress = self.cached(_read_progress)
        self.positions = self.cached(_read_positions)

    def use_lineage(self, lineage: Lineage, *, continues: Lineage | None = None) -> None:
        if continues is not None and continues != lineage:
            _check_continues(continues, lineage)

            def work(transaction: Transaction) -> None:
                old, new = asdict(continues), asdict(lineage)
                for kind in (ProgressRecord, TablePositionRecord):
                    found = [record for record in transaction.rows(kind) if record.lineage == old]
                    transaction.put([replace(record, lineage=new) for record in found])

            self.write(work, lambda _: self._forget_positions())
        self._lineage = lineage

    def get_stored_progress(self) -> StoredProgress | None:
        return self.progress.get().get(_APPLY)

    def get_replication_progress(self, worker_type: WorkerType) -> Lsn | None:
        return self._of_lineage(self.progress.get().get(worker_type))

    def upsert_replication_progress(
        self, worker_type: WorkerType, flush_lsn: Lsn, *, table_positions: Mapping[int, Lsn] | None = None
    ) -> Lsn:
        lineage, positions = self._lineage_in_use(), dict(table_positions or {})

        def work(transaction: Transaction) -> tuple[Lsn, dict[int, Lsn]]:
            moved = _upsert_positions(transaction, positions, lineage)
            return _upsert_progress(transaction, worker_type, flush_lsn, lineage), moved

        def publish(result: tuple[Lsn, dict[int, Lsn]]) -> None:
            stored, moved = result
            self.progress.publish(lambda cache: {**cache, worker_type: StoredProgress(stored, lineage)})
            self._publish_positions(moved, lineage)

        return self.write(work, publish)[0]

    def delete_replication_progress(self, worker_type: WorkerType) -> None:
        def work(transaction: Transaction) -> None:
            transaction.delete(ProgressRecord, **_key(worker_type))

        def publish(_: None) -> None:
            self.progress.publish(lambda cache: {each: value for each, value in cache.items() if each != worker_type})

        self.write(work, publish)

    def get_table_position(self, table_id: int) -> Lsn | None:
        return self._of_lineage(self.positions.get().get(table_id))

    def get_table_positions(self) -> Mapping[int, Lsn]:
        found = {table_id: self._of_lineage(value) for table_id, value in self.positions.get().items()}
        return {table_id: position for table_id, position in found.items() if position is not None}

    def upsert_table_positions(self, positions: Mapping[int, Lsn]) -> Mapping[int, Lsn]:
        lineage, wanted = self._lineage_in_use(), dict(positions)
        return self.write(
            lambda transaction: _upsert_positions(transaction, wanted, lineage),
            lambda moved: self._publish_positions(moved, lineage),
        )

    def _publish_positions(self, moved: Mapping[int, Lsn], lineage: Lineage) -> None:
        new = {table_id: StoredProgress(position, lineage) for table_id, position in moved.items()}
        self.positions.publish(lambda cache: {**cache, **new})

    def _forget_positions(self) -> None:
        self.progress.forget()
        self.positions.forget()

    def _of_lineage(self, stored: StoredProgress | None) -> Lsn | None:
        return None if stored is None or stored.lineage != self._lineage_in_use() else stored.position

    def _lineage_in_use(self) -> Lineage:
        if self._lineage is None:
            raise StateError("positions mean nothing before the store knows whose they are: call use_lineage first")
        return self._lineage


def _upsert_progress(transaction: Transaction, worker_type: WorkerType, flush_lsn: Lsn, lineage: Lineage) -> Lsn:
    key = _key(worker_type)
    found = next(iter(transaction.rows(ProgressRecord, **key)), None)
    if found is not None:
        _check_same(found.lineage, lineage)
        if reaches(found.flush_lsn, flush_lsn):
            return found.flush_lsn
    transaction.put([ProgressRecord(**key, flush_lsn=flush_lsn, lineage=asdict(lineage))])
    return flush_lsn


def _upsert_positions(transaction: Transaction, wanted: Mapping[int, Lsn], lineage: Lineage) -> dict[int, Lsn]:
    if not wanted:
        return {}
    stored = {record.table_id: record for record in transaction.rows(TablePositionRecord)}
    result: dict[int, Lsn] = {}
    moved: list[TablePositionRecord] = []
    for table_id, position in wanted.items():
        found = stored.get(table_id)
        if found is not None:
            _check_same(found.lineage, lineage)
        if found is not None and reaches(found.position, position):
            result[table_id] = found.position
        else:
            result[table_id] = position
            moved.append(TablePositionRecord(table_id, position, asdict(lineage)))
    transaction.put(moved)
    return result


def _key(worker_type: WorkerType) -> dict[str, Any]:
    return {"worker": worker_type.kind.value, "table_id": worker_type.table_id or 0}


def _check_same(stored: dict[str, Any], lineage: Lineage) -> None:
    if stored != asdict(lineage):
        raise LineageChanged(
            "the stored position belongs to another server, timeline, database or slot",
            hint="Delete stored progress before a new slot is created, and copy the tables again.",
            stored=stored,
            current=asdict(lineage),
        )


def _check_continues(old: Lineage, new: Lineage) -> None:
    if replace(old, timeline=new.timeline) != new:
        raise LineageChanged(
            "only another timeline of the same server, database and slot continues a lineage",
            stored=asdict(old),
            current=asdict(new),
        )


def _read_progress(transaction: Transaction) -> Mapping[WorkerType, StoredProgress]:
    def worker(record: ProgressRecord) -> WorkerType:
        kind = WorkerKind(record.worker)
        return WorkerType(kind, None if kind is WorkerKind.APPLY else record.table_id)

    records = transaction.rows(ProgressRecord)
    return {worker(record): StoredProgress(record.flush_lsn, Lineage(**record.lineage)) for record in records}


def _read_positions(transaction: Transaction) -> Mapping[int, StoredProgress]:
    records = transaction.rows(TablePositionRecord)
    return {record.table_id: StoredProgress(record.position, Lineage(**record.lineage)) for record in records}
