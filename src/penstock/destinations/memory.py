"""Tables in memory, equal to the source's: for tests, and the shortest example of a destination that mirrors.

Everything is applied in the driver, row by row. Positions are kept with the rows, so that replays change nothing.
`MemoryTables` can outlive the destination: pass it to the next one to simulate a disk that survives a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.changes.batch import EventBatch, TableChanges
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.batch_events import copied_rows, table_events
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.refusals import fenced_copy, foreign_table, not_copied, unexpected
from penstock.errors import PenstockError
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema


@dataclass(slots=True)
class MemoryTable:
    """One table, with its recorded position."""

    table: str
    owner: str
    attempt: str
    """The attempt of the copy that may write."""
    lineage: str = ""
    position: Lsn | None = None
    """None while there is no complete copy."""
    mirror: MirrorTable | None = None


@dataclass(slots=True)
class MemoryTables:
    """The tables that survive a destination; several destinations may share them, as they would share a folder."""

    tables: dict[int, MemoryTable] = field(default_factory=dict[int, MemoryTable])
    lock: threading.RLock = field(default_factory=threading.RLock)

    def find(self, table: str) -> MirrorTable:
        """Return a table by namespace and name."""
        with self.lock:
            for each in self.tables.values():
                if each.mirror is not None and each.table == table:
                    return each.mirror
        raise KeyError(table)


@dataclass(frozen=True, slots=True)
class PinnedRows:
    """The rows at one moment; the reader of a `PinnedMemory`."""

    rows: pa.Table

    def read(self, part: int, /) -> Iterator[pa.RecordBatch]:
        """Yield all rows: there is one part."""
        yield from self.rows.to_batches()


@dataclass(frozen=True, slots=True)
class PinnedMemory:
    """See `penstock.destinations.base.PinnedTable`."""

    schema: TableSchema
    reader: PinnedRows
    parts: Sequence[int] = (0,)

    @property
    def arrow_schema(self) -> pa.Schema:
        """Return the names and types of the rows."""
        return self.reader.rows.schema

    def close(self) -> None:
        """Do nothing: no resource is held."""


class MemoryDestination:
    """`type = "memory"`: tables in the process, for tests and experiments."""

    name = "memory"
    capabilities = Capabilities(
        records_position=True, updates_rows=True, keeps_old_rows_while_copying=True, loses_nothing_by_a_copy=True
    )

    def __init__(self, tables: MemoryTables | None = None) -> None:
        self.storage = MemoryTables() if tables is None else tables
        self._context: DestinationContext | None = None

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table (`"public.orders"`); raise `KeyError` if it does not exist."""
        with self.storage.lock:
            return self.storage.find(table).rows()

    def arrow(self, table: str) -> pa.Table:
        """Return the rows as an Arrow table."""
        with self.storage.lock:
            return self.storage.find(table).arrow()

    def tables(self) -> list[str]:
        """Return namespace and name of all tables that have a complete copy."""
        with self.storage.lock:
            return sorted(each.table for each in self.storage.tables.values() if each.mirror is not None)

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        with self.storage.lock:
            found = self._owned(schema)
            if found is None:
                self.storage.tables[schema.table_id] = MemoryTable(str(schema), self._started.pipeline_id, attempt)
            elif found.attempt != attempt:
                # The rows stay readable; without a position they take no changes.
                found.attempt, found.position = attempt, None

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        mirror = MirrorTable(schema)
        for batch in rows.arrow():
            for row in copied_rows(batch, schema):
                mirror.insert(row)
        with self.storage.lock:
            found = self._owned(schema)
            if found is None or found.attempt != rows.attempt:
                raise fenced_copy(str(schema), rows.attempt)
            if found.position is None:
                found.mirror, found.position, found.lineage = mirror, rows.position, self._started.lineage
                found.table = str(schema)
                # A table that was dropped and created again has the name, and another number. A table that only lost
                # its name to this one is still the pipeline's.
                known = self._started.store.get_table_replication_states()
                for table_id, other in list(self.storage.tables.items()):
                    if other is found or other.table != found.table:
                        continue
                    if table_id in known:
                        other.table = f"oid {table_id}"  # until its next change says what it is called now
                    else:
                        del self.storage.tables[table_id]

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        errors: dict[int, PenstockError] = {}
        for table in batch.tables:
            try:
                self._apply(batch, table)
            except Exception as error:
                errors[table.table_id] = unexpected(table.table, error)
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        with self.storage.lock:
            found = self.storage.tables.get(table_id)
            if found is None or found.owner != self._started.pipeline_id or found.position is None:
                return None
            return found.position if self._started.knows(found.lineage, found.position) else None

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`."""
        return True

    def pin(self, schema: TableSchema) -> PinnedMemory | None:
        """See `ReadableDestination`; from this process only."""
        with self.storage.lock:
            found = self.storage.tables.get(schema.table_id)
            mirror = None if found is None else found.mirror
            return None if mirror is None else PinnedMemory(mirror.schema, PinnedRows(mirror.arrow()))

    def shutdown(self) -> None:
        """Do nothing: the tables stay."""

    def _apply(self, batch: EventBatch, table: TableChanges) -> None:
        with self.storage.lock:
            found = self.storage.tables.get(table.table_id)
            position = self.position(table.table_id)
            if found is None or found.mirror is None or position is None:
                raise not_copied(table.table)
            # Readers see all of a batch or nothing, even if it fails in the middle.
            mirror = found.mirror.copy()
            for event in table_events(batch, table, position):
                mirror.apply(event)
            found.mirror, found.lineage, found.table = mirror, self._started.lineage, str(mirror.schema)
            found.position = position if reaches(position, batch.end) else batch.end

    def _owned(self, schema: TableSchema) -> MemoryTable | None:
        for table_id, other in self.storage.tables.items():
            if (table_id == schema.table_id or other.table == str(schema)) and other.owner != self._started.pipeline_id:
                raise foreign_table(str(schema), other.owner, self._started.pipeline_id)
        return self.storage.tables.get(schema.table_id)

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context
