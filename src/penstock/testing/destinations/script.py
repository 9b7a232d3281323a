"""A source without a database: script transactions, and get the batches that Penstock would make of them.

    source = ScriptedSource(folder)
    with source.transaction() as transaction:
        transaction.insert(ORDERS, {"id": 1, "note": "first"})
    batch = source.batch()

Segments are real files. Each commit starts exactly where the previous one ended, as on a busy server; careless
comparisons of positions fail on that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.batch import EventBatch, build_batch
from penstock.changes.events import Row, Unchanged, Unrepresentable
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
    XID,
    Operation,
    field_names,
    segment_layout,
)
from penstock.changes.steps import Entry, Segment, Step, Truncation
from penstock.copy.resume import ResumableCopy
from penstock.destinations.base import DestinationContext, Tasks
from penstock.errors import PenstockError
from penstock.lsn import Lsn, OrderKey, is_in
from penstock.schema import TableSchema
from penstock.source.lineage import Ancestry, Lineage
from penstock.state import MemoryStore

_START = 0x1000
_COMMIT_BYTES = 0x30
_TIME = 1_700_000_000_000_000

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class LocalTasks:
    """Runs tasks in this process after pickling them, as if they were sent to a worker."""

    jobs: list[str] = field(default_factory=list[str])
    """The descriptions of the jobs that ran."""
    elsewhere: bool = False
    """See `Tasks`; True lets destinations check that all machines see the same place."""
    parallel: int = 1
    """See `Tasks`; a destination may split the work of one table over this number of tasks."""

    def run(self, items: Sequence[_Item], function: Callable[[_Item], _Result], *, description: str) -> list[_Result]:
        """See `Tasks`."""
        self.jobs.append(description)
        sent = pickle.loads(pickle.dumps(function))
        return [pickle.loads(pickle.dumps(sent(pickle.loads(pickle.dumps(item))))) for item in items]

    def copying(self) -> AbstractContextManager[None]:
        """See `Tasks`; there is only one thread."""
        return nullcontext()


ANCESTRY = Ancestry(Lineage("server-1", 1, "shop", "slot"))
"""The server of scripted changes."""


def make_context(
    pipeline_id: str = "contract",
    *,
    ancestry: Ancestry = ANCESTRY,
    tasks: Tasks | None = None,
    records_ddl: bool = False,
) -> DestinationContext:
    """Return the context that a destination is started with."""
    tasks = LocalTasks() if tasks is None else tasks
    store = MemoryStore(pipeline_id)
    store.use_lineage(ancestry)
    return DestinationContext(pipeline_id, store, tasks, records_ddl=records_ddl)


@dataclass(frozen=True, slots=True)
class ScriptedRange:
    """A range whose rows are in memory."""

    index: int
    batches: tuple[pa.RecordBatch, ...]


@dataclass(frozen=True, slots=True)
class ScriptedReader:
    """Reads ranges; reading the one called `broken` fails at its end."""

    broken: int | None = None

    def read(self, part: ScriptedRange, /) -> Iterator[pa.RecordBatch]:
        """See `RangeReader`."""
        yield from part.batches
        if part.index == self.broken:
            raise PenstockError("the snapshot is gone")


@dataclass(frozen=True, slots=True)
class ScriptedCopy:
    """Rows of a copy, in memory. Satisfies `CopyRows`."""

    schema: TableSchema
    attempt: str
    position: Lsn
    arrow_schema: pa.Schema
    ranges: tuple[ScriptedRange, ...]
    reader: ScriptedReader = ScriptedReader()
    resumable: ResumableCopy | None = None

    def arrow(self) -> Iterator[pa.RecordBatch]:
        """See `CopyRows`."""
        for part in self.ranges:
            yield from self.reader.read(part)


@dataclass(frozen=True, slots=True)
class _Change:
    key: OrderKey
    schema: TableSchema
    version: str
    operation: Operation | None
    """None for a truncate."""
    row: Row
    old: Row | None


@dataclass(slots=True)
class ScriptedTransaction:
    """Changes of one transaction."""

    commit_lsn: Lsn
    version_of: Callable[[TableSchema], str]
    changes: list[_Change] = field(default_factory=list[_Change])

    def insert(self, schema: TableSchema, row: Row) -> None:
        """Insert a row; cells can be `Unchanged` or `Unrepresentable`."""
        self._add(schema, Operation.INSERT, row)

    def update(self, schema: TableSchema, row: Row, *, old: Row | None = None) -> None:
        """Update a row; `old` is what the server would send: a changed key, or with FULL the whole row."""
        self._add(schema, Operation.UPDATE, row, old)

    def delete(self, schema: TableSchema, old: Row) -> None:
        """Delete a row, given its identity."""
        absent = {column.name: Unchanged for column in schema.columns if column.name not in old}
        self._add(schema, Operation.DELETE, {**old, **absent})

    def truncate(self, *schemas: TableSchema) -> None:
        """Truncate tables with one statement."""
        key = OrderKey(self.commit_lsn, self._ordinal())
        self.changes += [_Change(key, schema, self.version_of(schema), None, {}, None) for schema in schemas]

    def _add(self, schema: TableSchema, operation: Operation, row: Row, old: Row | None = None) -> None:
        key = OrderKey(self.commit_lsn, self._ordinal())
        self.changes.append(_Change(key, schema, self.version_of(schema), operation, row, old))

    def _ordinal(self) -> int:
        """Return the next ordinal; a truncate of several tables has one."""
        return self.changes[-1].key.ordinal + 1 if self.changes else 0


class ScriptedSource:
    """Transactions in commit order, and batches between any two boundaries."""

    def __init__(
        self,
        folder: Path,
        *,
        start: Lsn = Lsn(_START),  # noqa: B008 (immutable)
        segment_rows: int | None = None,
    ) -> None:
        """`start` is the position of the first commit, `segment_rows` the most changes in a segment."""
        self._folder = folder
        self._segment_rows = segment_rows
        self._start = self._position = start
        self._pending: list[ScriptedTransaction] = []
        self._entries: list[Entry] = []
        self._schemas: dict[tuple[int, str], TableSchema] = {}
        self._began: dict[int, list[tuple[Lsn, str]]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def position(self) -> Lsn:
        """The boundary after the last transaction."""
        return self._position

    @contextmanager
    def transaction(self) -> Iterator[ScriptedTransaction]:
        """Add the next transaction; transactions between two batches share segments."""
        transaction = ScriptedTransaction(self._position, self._version)
        yield transaction
        self._position = Lsn(self._position + _COMMIT_BYTES)
        self._pending.append(transaction)

    def copy(
        self, schema: TableSchema, rows: Sequence[Row], *, attempt: str = "attempt-1", ranges: int = 1
    ) -> ScriptedCopy:
        """Return a copy of a table at the current position, with its rows dealt out to ranges."""
        self._version(schema)
        dealt = [list(rows[number::ranges]) for number in range(ranges)]
        parts = [ScriptedRange(index, (_copied(schema, part),) if part else ()) for index, part in enumerate(dealt)]
        return ScriptedCopy(schema, attempt, self._position, _copied(schema, []).schema, tuple(parts))

    def batch(
        self, begin: Lsn | None = None, end: Lsn | None = None, *, positions: Mapping[int, Lsn] | None = None
    ) -> EventBatch:
        """Return the changes between two boundaries; by default those since the last batch."""
        self._write_entry()
        last = self._entries[-1]
        begin = last.begin if begin is None else begin
        tables = {table_id for table_id, _ in self._schemas}
        return build_batch(
            self._entries,
            begin=begin,
            end=last.end if end is None else end,
            positions=dict.fromkeys(tables, begin) if positions is None else positions,
            schemas={table_id: self._schema_at(table_id, begin) for table_id in tables},
            schema_of=lambda table_id, version: self._schemas[table_id, version],
        )

    def _version(self, schema: TableSchema) -> str:
        began = self._began.setdefault(schema.table_id, [])
        if began and self._schemas[schema.table_id, began[-1][1]] == schema:
            return began[-1][1]
        version = f"{int(self._position):016X}-{len(began):08X}"
        began.append((self._position, version))
        self._schemas[schema.table_id, version] = schema
        return version

    def _schema_at(self, table_id: int, boundary: Lsn) -> TableSchema:
        began = self._began[table_id]
        before = [version for lsn, version in began if is_in(lsn, boundary)]
        return self._schemas[table_id, before[-1] if before else began[0][1]]

    def _write_entry(self) -> None:
        if not self._pending:
            return
        changes = [change for transaction in self._pending for change in transaction.changes]
        steps: list[Step] = []
        for table_id in dict.fromkeys(change.schema.table_id for change in changes):
            run: list[_Change] = []
            for change in (change for change in changes if change.schema.table_id == table_id):
                is_full = len(run) == self._segment_rows
                if run and (is_full or change.operation is None or change.version != run[-1].version):
                    steps.append(self._write_segment(run))
                    run = []
                if change.operation is None:
                    steps.append(Truncation(table_id, str(change.schema), change.key, _TIME, 7, False, False))
                else:
                    run.append(change)
            if run:
                steps.append(self._write_segment(run))
        begin = self._entries[-1].end if self._entries else self._start
        self._entries.append(
            Entry(len(self._entries), begin, self._position, len(self._pending), _TIME, _TIME, tuple(steps))
        )
        self._pending = []

    def _write_segment(self, run: list[_Change]) -> Segment:
        schema = run[0].schema
        table = _segment_table(schema, run)
        path = self._folder / f"{len(list(self._folder.iterdir())):06d}.parquet"
        pq.write_table(table, path)
        first, last = run[0].key, run[-1].key
        return Segment(
            schema.table_id, str(schema), run[0].version, str(path), len(run), path.stat().st_size, first, last,
            unrepresentable=table.num_rows - table.column(UNREPRESENTABLE).null_count
            if UNREPRESENTABLE in table.column_names
            else 0,
            memory=table.nbytes,
        )  # fmt: skip


def _segment_table(schema: TableSchema, run: list[_Change]) -> pa.Table:
    layout = segment_layout(schema)
    columns: dict[str, list[Any]] = {
        OP: [int(change.operation or 0) for change in run],
        COMMIT_LSN: [int(change.key.commit_lsn) for change in run],
        ORDINAL: [change.key.ordinal for change in run],
        COMMIT_TIME: [datetime.fromtimestamp(_TIME / 1e6, UTC)] * len(run),
        XID: [7] * len(run),
        UNCHANGED: [_bitmap(schema, change.row) for change in run],
    }
    if layout.old_columns:
        columns[OLD] = [
            None
            if change.old is None
            else {column.field_name: _cell(change.old[column.column.name]) for column in layout.old_columns}
            for change in run
        ]
    for column in layout.columns:
        columns[column.field_name] = [_cell(change.row[column.column.name]) for change in run]
    table = pa.table(columns, schema=layout.arrow_schema)
    return _with_texts(table, [_texts(schema, change.row) + _texts(schema, change.old, f"{OLD}.") for change in run])


def _copied(schema: TableSchema, rows: Sequence[Row]) -> pa.RecordBatch:
    layout = segment_layout(schema)
    fields = [layout.arrow_schema.field(column.field_name) for column in layout.columns]
    arrays = [
        pa.array([_cell(row[column.column.name]) for row in rows], column.codec.arrow_type) for column in layout.columns
    ]
    arrays.append(pa.array([_texts(schema, row) or None for row in rows], UNREPRESENTABLE_TYPE))
    fields.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE))
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _with_texts(table: pa.Table, texts: list[list[tuple[str, str]]]) -> pa.Table:
    if not any(texts):
        return table
    column = pa.array([each or None for each in texts], UNREPRESENTABLE_TYPE)
    return table.append_column(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE), column)


def _texts(schema: TableSchema, row: Row | None, prefix: str = "") -> list[tuple[str, str]]:
    names = zip(field_names(schema), (column.name for column in schema.columns), strict=True)
    cells = [(field_name, (row or {}).get(name)) for field_name, name in names]
    return [(prefix + field_name, cell.text) for field_name, cell in cells if isinstance(cell, Unrepresentable)]


def _cell(value: Any) -> Any:
    return None if value is Unchanged or isinstance(value, Unrepresentable) else value


def _bitmap(schema: TableSchema, row: Row) -> bytes | None:
    bits = [row[column.name] is Unchanged for column in schema.columns]
    if not any(bits):
        return None
    content = bytearray((len(bits) + 7) // 8)
    for index, bit in enumerate(bits):
        content[index >> 3] |= bit << (index & 7)
    return bytes(content)
