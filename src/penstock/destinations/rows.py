"""The base for destinations that are written row by row, in plain Python.

Subclass `RowDestination`, say what happens to an event, and when things are durable; `examples/custom_destination.py`
is one to copy. This is the slow path: some ten thousand rows a second, in one process. A destination that has to keep
up with a busy server implements `penstock.destinations.base.Destination` and works on columns, in tasks.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from penstock.changes.batch import EventBatch
from penstock.changes.events import Delete, Event, Insert, Relation, Row, Truncate, Update
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.batch_events import batch_events, copied_rows
from penstock.destinations.refusals import fenced_copy, unexpected
from penstock.errors import PenstockError
from penstock.lsn import Lsn, OrderKey, reaches
from penstock.schema import TableSchema

_NO_TIME = datetime.fromtimestamp(0, UTC)


class RowDestination(ABC):
    """Events one by one, in the exact order of their commits.

    `clear`, `write` and `flush` are called by one thread at a time. An error that `write` or `clear` raises stops the
    table that the event belongs to, and no other; one that `flush` raises concerns all. Raise a `PenstockError` to say
    whether to try again; anything else stops the table until a person looks.

    Changes come at least once: after a crash some come again, from an earlier point on. Whoever stores the positions
    that `flush` is given, together with the rows, and returns them from `position`, gets each change exactly once.
    """

    name = "rows"
    capabilities = Capabilities()

    def __init__(self) -> None:
        """Subclasses with a constructor of their own call this one."""
        self._lock = threading.Lock()
        self._attempts: dict[int, str] = {}

    def open(self, context: DestinationContext) -> None:  # noqa: B027
        """Called once, before anything else: connect, and refuse by an error what cannot work."""

    def claim(self, table: TableSchema) -> None:  # noqa: B027
        """A table is about to be copied: refuse by an error one that another pipeline writes."""

    @abstractmethod
    def clear(self, table: TableSchema, attempt: str) -> None:
        """Remove all rows of a table, and what is recorded about them: a copy begins. Must not fail where there are
        none. Create the table here: one that is empty gets no `write`.

        `attempt` names the copy. Where several processes may write at the same time, store it, and refuse what others
        write after it.
        """

    @abstractmethod
    def write(self, event: Event) -> None:
        """Take an event: `Insert`, `Update`, `Delete` or `Truncate`; or ignore what does not matter to you.

        `Begin` and `Commit` stand around the changes of a transaction (and may repeat), `Relation` before the first row
        of a table in a batch. Cells can be `Unchanged`, which is not None: keep what you have. Or `Unrepresentable`:
        a text that the column's type cannot hold. A `Truncate` names all tables that one statement emptied.
        """

    @abstractmethod
    def flush(self, positions: Mapping[int, Lsn]) -> None:
        """Make durable all that was written; `positions` says where each of the tables stands then."""

    def discard(self) -> None:  # noqa: B027
        """Forget what was written since the last flush: a rollback. A table failed, and the others come again without
        it. Where nothing can be taken back, nothing has to be done: then some changes are written twice.
        """

    def write_copied(self, table: TableSchema, row: Row, position: Lsn) -> None:
        """Take a row of a copy: by default as an `Insert` at the copy's position."""
        self.write(Insert(OrderKey(position, 0), _NO_TIME, 0, table, row))

    def position(self, table_id: int) -> Lsn | None:
        """The position that is stored with a table's rows, None if you store none."""
        return None

    def close(self) -> None:  # noqa: B027
        """Called once, at the end."""

    # What Penstock calls.

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self.open(context)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`: nothing is removed before the copy is about to be written."""
        with self._lock:
            self.claim(schema)
            self._attempts[schema.table_id] = attempt

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        with self._lock:
            if self._attempts.get(schema.table_id, rows.attempt) != rows.attempt:
                raise fenced_copy(str(schema), rows.attempt)
            try:
                self.clear(schema, rows.attempt)
                for batch in rows.arrow():
                    for row in copied_rows(batch, schema):
                        self.write_copied(schema, row, rows.position)
                self.flush({schema.table_id: rows.position})
            except BaseException:
                self.discard()
                raise

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        errors: dict[int, PenstockError] = {}
        with self._lock:
            while True:
                tables = tuple(table for table in batch.tables if table.table_id not in errors)
                try:
                    failed = self._write_tables(replace(batch, tables=tables))
                    if not failed:
                        ids = [table.table_id for table in tables]
                        self.flush({each: self._position_after(each, batch.end) for each in ids})
                        return completed(WriteResult.failures(errors))
                except BaseException:
                    self.discard()
                    raise
                self.discard()
                errors |= failed

    def shutdown(self) -> None:
        """See `Destination`."""
        self.close()

    def _write_tables(self, batch: EventBatch) -> dict[int, PenstockError]:
        """Write until a table fails."""
        event: Event | None = None
        try:
            for event in batch_events(batch, self.position):
                self.write(event)
                event = None
        except Exception as error:
            if isinstance(error, PenstockError) and "table_id" in error.facts:
                return {error.table_id: error}
            tables = {} if event is None else _tables_of(event)
            if not tables:
                raise
            return {table_id: unexpected(table, error) for table_id, table in tables.items()}
        return {}

    def _position_after(self, table_id: int, end: Lsn) -> Lsn:
        """A replay may end before what is recorded."""
        position = self.position(table_id)
        return end if position is None or reaches(end, position) else position


def _tables_of(event: Event) -> dict[int, str]:
    match event:
        case Insert() | Update() | Delete() | Relation():
            return {event.table.table_id: str(event.table)}
        case Truncate():
            return dict(zip(event.table_ids, event.tables, strict=True))
        case _:
            return {}
