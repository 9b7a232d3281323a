"""The base class for destinations that work row by row, in plain Python.

Subclass `RowDestination` and implement `clear`, `write` and `flush`; `examples/custom_destination.py` is an example to
start from. This is the slow path: about ten thousand rows a second, in one process. To keep up with a busy server,
implement `penstock.destinations.base.Destination`, which works on columns, in tasks.
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
    """Gets events one by one, in the exact order of their commits.

    One thread at a time calls `clear`, `write` and `flush`. An error in `write` or `clear` stops the table of the event
    and no other; an error in `flush` concerns all tables. The class of a `PenstockError` says whether Penstock retries;
    any other exception stops the table until the operator resumes it. `DestinationUnavailable`, and an `OSError` that
    time heals (connection lost, time-out, disk full), makes all tables wait.

    Changes come at least once: after a crash Penstock sends some of them again. To get each change exactly once, store
    the positions that `flush` gets together with the rows, and return them from `position`.
    """

    name = "rows"
    capabilities = Capabilities()

    def __init__(self) -> None:
        """Subclasses with their own constructor must call this one."""
        self._lock = threading.Lock()
        self._attempts: dict[int, str] = {}

    def open(self, context: DestinationContext) -> None:  # noqa: B027
        """Connect; called once, first. Raise an error if the destination cannot work."""

    def claim(self, table: TableSchema) -> None:  # noqa: B027
        """Raise an error if another pipeline writes this table; called before a copy."""

    @abstractmethod
    def clear(self, table: TableSchema, attempt: str) -> None:
        """Delete all rows of a table and its stored position, because a copy starts; create the table if necessary.

        An empty table gets no `write`, so this is the place to create it. `attempt` names the copy: if several
        processes may write at the same time, store it and refuse writes of earlier attempts.
        """

    @abstractmethod
    def write(self, event: Event) -> None:
        """Handle an `Insert`, `Update`, `Delete` or `Truncate`; ignore other events that you do not need.

        `Begin` and `Commit` enclose the changes of a transaction (and may repeat); `Relation` precedes the first row of
        a table in a batch. A cell can be `Unchanged`, which is not None: keep the value you have. Or `Unrepresentable`:
        a text that the column's type cannot hold. A `Truncate` names all tables that one statement truncated.
        """

    @abstractmethod
    def flush(self, positions: Mapping[int, Lsn]) -> None:
        """Make everything written durable; `positions` has the resulting position of each table."""

    def discard(self) -> None:  # noqa: B027
        """Roll back what was written since the last flush: a table failed, and the others are written again without it.

        If your system cannot roll back, do nothing: some changes are then written twice.
        """

    def write_copied(self, table: TableSchema, row: Row, position: Lsn) -> None:
        """Handle a row of a copy; by default as an `Insert` at the position of the copy."""
        self.write(Insert(OrderKey(position, 0), _NO_TIME, 0, table, row))

    def position(self, table_id: int) -> Lsn | None:
        """Return the position stored with a table's rows, or None."""
        return None

    def close(self) -> None:  # noqa: B027
        """Disconnect; called once, last."""

    # The methods of `Destination`, which Penstock calls.

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self.open(context)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`; rows are deleted only when the copy is about to be written."""
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
        """Write events until a table fails; return its error."""
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
        """Return the position after a batch; a replay may end before the recorded one."""
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
