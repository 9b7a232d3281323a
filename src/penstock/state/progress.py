"""The part of a store about positions: the apply worker's progress and the tables' positions, each with its lineage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.errors import LineageChanged, StateError
from penstock.lsn import Lsn, reaches
from penstock.source.lineage import Ancestry, Lineage
from penstock.state.core import StoreCore
from penstock.state.records import Database, ProgressRecord, TablePositionRecord, Transaction

_APPLY: dict[str, Any] = {"worker": "apply", "table_id": 0}
"""The key of the only record of progress."""


@dataclass(frozen=True, slots=True)
class StoredProgress:
    """A stored position with its lineage, which the server must confirm before the position is used."""

    position: Lsn
    lineage: Lineage


class ProgressStore(StoreCore):
    """Progress and positions. Neither ever moves back."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._ancestry: Ancestry | None = None
        self._progress = self.cached(_read_progress)
        self._positions = self.cached(_read_positions)

    def use_lineage(self, ancestry: Ancestry) -> None:
        """Say whose positions are read and written from now on; called at start, and when another server takes over.

        Positions of earlier timelines that are part of the server's history count for the current one from then on.
        Others stay as they are: they are not returned, and writing over them is refused.
        """

        def is_of_earlier(lineage: Lineage, position: Lsn) -> bool:
            return lineage != ancestry.current and ancestry.includes(lineage, position)

        def work(transaction: Transaction) -> None:
            current = asdict(ancestry.current)
            for kind in (ProgressRecord, TablePositionRecord):
                found = [each for each in transaction.rows(kind) if is_of_earlier(Lineage(**each.lineage), _of(each))]
                transaction.put([replace(record, lineage=current) for record in found])

        with self.lock:
            if any(is_of_earlier(each.lineage, each.position) for each in self.get_stored_positions()):
                self.write(work, lambda _: self.forget())
            self._ancestry = ancestry

    @property
    def ancestry(self) -> Ancestry:
        """Whose positions are read and written."""
        if self._ancestry is None:
            raise StateError("the store does not know to which lineage these positions belong: call use_lineage first")
        return self._ancestry

    def get_stored_positions(self) -> list[StoredProgress]:
        """Return all stored positions with their lineages; `Ancestry` decides about them."""
        return [*self._progress.get().values(), *self._positions.get().values()]

    def get_stored_progress(self) -> StoredProgress | None:
        """Return progress with its lineage, whichever that is."""
        return self._progress.get().get("apply")

    def get_replication_progress(self) -> Lsn | None:
        """Return progress in this lineage; that of another lineage is not returned."""
        return self._of_lineage(self.get_stored_progress())

    def upsert_replication_progress(self, flush_lsn: Lsn, *, table_positions: Mapping[int, Lsn] | None = None) -> Lsn:
        """Store progress, and positions of tables with it, in one transaction; return what is stored: never less.

        The apply worker calls this after everything below is durable at the destination, and before the slot is
        acknowledged. Raises `LineageChanged` over progress of another lineage, which has to be deleted first.
        """
        positions = dict(table_positions or {})

        def work(transaction: Transaction) -> tuple[Lsn, dict[int, Lsn], Lineage]:
            lineage = self.ancestry.current
            moved = _upsert_positions(transaction, positions, lineage)
            return _upsert_progress(transaction, flush_lsn, lineage), moved, lineage

        def publish(result: tuple[Lsn, dict[int, Lsn], Lineage]) -> None:
            stored, moved, lineage = result
            self._progress.publish(lambda _: {"apply": StoredProgress(stored, lineage)})
            self._publish_positions(moved, lineage)

        return self.write(work, publish)[0]

    def delete_replication_progress(self) -> None:
        """Delete progress, of whatever lineage; called *before* a new slot is created."""
        self.write(lambda transaction: transaction.delete(ProgressRecord), lambda _: self._progress.forget())

    def get_table_position(self, table_id: int) -> Lsn | None:
        """Return the stored position of a table in this lineage; a restart skips changes below it."""
        return self._of_lineage(self._positions.get().get(table_id))

    def get_table_positions(self) -> Mapping[int, Lsn]:
        """Return the stored positions of all tables in this lineage."""
        found = {table_id: self._of_lineage(value) for table_id, value in self._positions.get().items()}
        return {table_id: position for table_id, position in found.items() if position is not None}

    def upsert_table_positions(self, positions: Mapping[int, Lsn]) -> Mapping[int, Lsn]:
        """Store positions of tables, all or none; return what is stored, which never moves back."""
        wanted = dict(positions)

        def work(transaction: Transaction) -> tuple[dict[int, Lsn], Lineage]:
            lineage = self.ancestry.current
            return _upsert_positions(transaction, wanted, lineage), lineage

        return self.write(work, lambda result: self._publish_positions(*result))[0]

    def _publish_positions(self, moved: Mapping[int, Lsn], lineage: Lineage) -> None:
        new = {table_id: StoredProgress(position, lineage) for table_id, position in moved.items()}
        self._positions.publish(lambda cache: {**cache, **new})

    def _of_lineage(self, stored: StoredProgress | None) -> Lsn | None:
        return None if stored is None or stored.lineage != self.ancestry.current else stored.position


def _of(record: ProgressRecord | TablePositionRecord) -> Lsn:
    return record.flush_lsn if isinstance(record, ProgressRecord) else record.position


def _upsert_progress(transaction: Transaction, flush_lsn: Lsn, lineage: Lineage) -> Lsn:
    found = next(iter(transaction.rows(ProgressRecord, **_APPLY)), None)
    if found is not None:
        _require_same(found.lineage, lineage)
        if reaches(found.flush_lsn, flush_lsn):
            return found.flush_lsn
    transaction.put([ProgressRecord(**_APPLY, flush_lsn=flush_lsn, lineage=asdict(lineage))])
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
            _require_same(found.lineage, lineage)
        if found is not None and reaches(found.position, position):
            result[table_id] = found.position
        else:
            result[table_id] = position
            moved.append(TablePositionRecord(table_id, position, asdict(lineage)))
    transaction.put(moved)
    return result


def _require_same(stored: dict[str, Any], lineage: Lineage) -> None:
    if stored != asdict(lineage):
        raise LineageChanged(
            "the stored position belongs to another server, timeline, database or slot",
            hint="Delete stored progress before a new slot is created, and copy the tables again.",
            stored=stored,
            current=asdict(lineage),
        )


def _read_progress(transaction: Transaction) -> Mapping[str, StoredProgress]:
    records = transaction.rows(ProgressRecord, **_APPLY)
    return {each.worker: StoredProgress(each.flush_lsn, Lineage(**each.lineage)) for each in records}


def _read_positions(transaction: Transaction) -> Mapping[int, StoredProgress]:
    records = transaction.rows(TablePositionRecord)
    return {each.table_id: StoredProgress(each.position, Lineage(**each.lineage)) for each in records}
