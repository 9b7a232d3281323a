"""State in memory, lost with the process: for tests and experiments, and as the simplest example of a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from penstock.state.records import RECORDS, Record, RecordT, ResultT, Transaction, layout_of
from penstock.state.store import Store

Tables = dict[str, dict[tuple[Any, ...], Record]]


@dataclass(slots=True)
class MemoryState:
    """State that several stores of one process share, as several processes share a file."""

    pipelines: dict[str, Tables] = field(default_factory=dict[str, Tables])
    lock: threading.RLock = field(default_factory=threading.RLock)


class MemoryStore(Store):
    """A store in memory; stores over the same `MemoryState` see each other's writes."""

    def __init__(self, pipeline_id: str = "default", state: MemoryState | None = None) -> None:
        super().__init__(MemoryDatabase(pipeline_id, MemoryState() if state is None else state))


class MemoryDatabase:
    """The records of one pipeline, in dictionaries."""

    def __init__(self, pipeline_id: str, state: MemoryState) -> None:
        self.pipeline_id = pipeline_id
        self._state = state

    def run(self, work: Callable[[Transaction], ResultT], *, writing: bool = True) -> ResultT:
        """See `records.Database`."""
        with self._state.lock:
            committed = self._state.pipelines.get(self.pipeline_id, {})
            draft = {kind.table: dict(committed.get(kind.table, {})) for kind in RECORDS}
            result = work(MemoryTransaction(draft))
            if writing:
                self._state.pipelines[self.pipeline_id] = draft
            return result

    def another(self) -> MemoryDatabase:
        """See `records.Database`."""
        return MemoryDatabase(self.pipeline_id, self._state)

    def close(self) -> None:
        """Do nothing."""


class MemoryTransaction:
    """A draft that replaces the records on commit."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def now(self) -> datetime:
        """See `records.Transaction`."""
        return datetime.now(UTC)

    def rows(self, kind: type[RecordT], **values: Any) -> list[RecordT]:
        """See `records.Transaction`."""
        found = sorted(self._tables[kind.table].items(), key=lambda item: item[0])
        return [cast("RecordT", record) for _, record in found if _has(record, values)]

    def put(self, records: Iterable[Record]) -> None:
        """See `records.Transaction`."""
        for record in records:
            values = (getattr(record, name) for name in layout_of(type(record)).key)
            # Positions have no order of their own, and rows are given in the order of their keys.
            key = tuple(int(value) if isinstance(value, int) else value for value in values)
            self._tables[record.table][key] = record

    def delete(self, kind: type[Record], **values: Any) -> int:
        """See `records.Transaction`."""
        table = self._tables[kind.table]
        gone = [key for key, record in table.items() if _has(record, values)]
        for key in gone:
            del table[key]
        return len(gone)


def _has(record: Record, values: dict[str, Any]) -> bool:
    return all(getattr(record, name) == value for name, value in values.items())
