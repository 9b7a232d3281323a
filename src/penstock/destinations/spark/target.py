"""What the ways of writing to Spark share: the session of each table, its projection, and the contract of a target."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.changes.batch import EventBatch, TableChanges
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext
from penstock.destinations.spark.transforms import Projection, project
from penstock.errors import ConfigError, TableRejected
from penstock.lsn import Lsn
from penstock.schema import TableSchema


@dataclass(slots=True)
class Tables:
    """The tables that a destination writes, each with a Spark session of its own: views and settings are not shared.

    Calls for one table never overlap.
    """

    context: DestinationContext
    _sessions: dict[int, Any] = field(default_factory=dict[int, Any])
    _projections: dict[TableSchema, Projection] = field(default_factory=dict[TableSchema, Projection])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def session(self, table_id: int) -> Any:
        """Return the session of a table."""
        with self._lock:
            if table_id not in self._sessions:
                self._sessions[table_id] = self.context.session.newSession()
            return self._sessions[table_id]

    def projection(self, schema: TableSchema, frame: Any) -> Projection:
        """Return what the destination gets of a table; `frame` has its columns."""
        if schema not in self._projections:
            statement = self.context.transform_of(schema)
            try:
                found = project(self.session(schema.table_id), schema, frame, statement)
            except ConfigError as error:
                # The columns of one table changed: the others go on.
                raise TableRejected(error.message, hint=error.hint, table=str(schema)) from None
            self._projections[schema] = found
        return self._projections[schema]


class Target(Protocol):
    """One way of writing; the methods of `Destination`, for one table at a time. Errors of Spark may leave it as they
    are."""

    @property
    def capabilities(self) -> Capabilities: ...

    def startup(self, tables: Tables) -> None: ...

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None: ...

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None: ...

    def write_changes(self, batch: EventBatch, changes: TableChanges) -> bool:
        """Write one table's part of a batch; return True if it is durable, False if it is only accepted."""
        ...

    def finish(self, batch: EventBatch) -> dict[int, Callable[[], None]]:
        """Return what is left to do for tables with accepted changes that become durable with this batch."""
        ...

    def position(self, table_id: int) -> Lsn | None: ...
