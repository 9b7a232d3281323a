"""What tasks do with changes: they write a table's part of a batch, step by step.

Everything here may happen twice, even at the same time: rows carry the order key of their change as `_version`, and the
table keeps the newest. A row that needs a value of an older row is written only if the table does not have it yet, and
takes the value only from a row of before these changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.batch import Rows, SchemaChange, TableStep
from penstock.changes.columns import ChangeColumns, read_changes
from penstock.changes.compaction import NetChanges, compact, keys_of, touched_keys
from penstock.changes.segment import COMMIT_LSN, ORDINAL, Operation, Texts, segment_layout
from penstock.changes.steps import Truncation
from penstock.destinations.base import SourceRows
from penstock.destinations.batch_events import read_segment
from penstock.destinations.clickhouse.encoding import encode, one_array, versions
from penstock.destinations.clickhouse.fill import RowsBefore, fill, names_of
from penstock.destinations.clickhouse.layout import DELETED, NUMBER, SIGN, VERSION, Layout, Shape, follow, version_of
from penstock.destinations.clickhouse.log import log_rows, log_truncate
from penstock.destinations.clickhouse.server import Server
from penstock.destinations.omitted import not_sent
from penstock.destinations.refusals import concerns_all_tables, unexpected
from penstock.destinations.row_groups import group_batches
from penstock.destinations.table_parts import divide
from penstock.errors import PenstockError
from penstock.observe.reports import may_end_here
from penstock.schema import TableSchema

SLICE_ROWS = 250_000
SLICE_BYTES = 64 << 20
"""The most that a task reads at once, in rows and in bytes of memory; more if one segment has more."""

_Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TableWork:
    """One table's part of a batch."""

    table_id: int
    table: str
    generation: str
    view: str
    layout: Layout
    floor: int
    steps: tuple[TableStep, ...]
    token: str
    """Names this part of the batch among all that were ever written."""
    keeps_dropped: bool = False

    @property
    def row_count(self) -> int:
        return sum(segment.rows for step in self.steps if isinstance(step, Rows) for segment in step.segments)


@dataclass(frozen=True, slots=True)
class Work:
    """What one task writes."""

    server: Server
    records_ddl: bool
    tables: tuple[TableWork, ...]
    source: SourceRows | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A table after its part of a batch."""

    layout: Layout
    floor: int


def apply_work(work: Work) -> list[Applied | PenstockError]:
    """Write the changes of tables; return the outcome of each. One bad table does not fail the others."""
    outcomes: list[Applied | PenstockError] = []
    for table in work.tables:
        last = outcomes[-1] if outcomes else None
        if isinstance(last, PenstockError) and concerns_all_tables(last):
            outcomes.append(last)
            continue
        try:
            outcomes.append(_apply(work, table))
        except Exception as error:
            outcomes.append(unexpected(table.table, error))
    return outcomes


def _apply(work: Work, table: TableWork) -> Applied:
    server, layout, floor = work.server, table.layout, table.floor
    for number, step in enumerate(
        divide(table.steps, keeps_all=layout.shape is Shape.LOG, rows=SLICE_ROWS, size=SLICE_BYTES)
    ):
        may_end_here()
        token = f"{table.token}/{number}"
        match step:
            case SchemaChange():
                arrow = _arrow_after(table.steps, step)
                layout, clauses = follow(
                    layout, step.new, arrow, keeps_dropped=table.keeps_dropped, records_ddl=work.records_ddl
                )
                for clause in clauses:
                    server.run(f"alter table {server.name(table.generation)} {clause}", table.table)
                server.run(layout.view(table.view, server.name(table.generation), floor), table.table)
            case Truncation() if layout.shape is Shape.LOG:
                server.insert(table.generation, log_truncate(step, layout), token, table.table)
            case Truncation():
                floor = max(floor, version_of(step.key))
                server.run(layout.view(table.view, server.name(table.generation), floor), table.table)
                # These rows are no longer visible.
                gone = f"{VERSION} <= toUInt128('{floor}')"
                server.run(f"alter table {server.name(table.generation)} delete where {gone}", table.table)
            case Rows():
                for rows in _united(_rows(work, table, layout, floor, step)):
                    server.insert(table.generation, rows, f"{token}/{_digest(rows)}", table.table)
    return Applied(layout, floor)


def _rows(work: Work, table: TableWork, layout: Layout, floor: int, step: Rows) -> Iterator[pa.Table]:
    if layout.shape is Shape.LOG:
        for segment in step.segments:
            yield log_rows(read_segment(segment), step.schema, layout)
        return
    changes = _Changes.read(step)
    if layout.shape is Shape.COUNTED:
        yield _counted(changes, layout)
    else:
        yield from _keyed(work, table, layout, floor, changes)


def _united(parts: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Unite parts as far as they are small: an insert is seen at once, such as a row that changes its key."""
    for group in group_batches((part for part in parts if part.num_rows), SLICE_BYTES):
        # A tombstone has a key and nothing else. It comes first: 0 and -0 are one key to ClickHouse, and of rows with
        # the same key and version, the last one stays.
        yield group[0] if len(group) == 1 else pa.concat_tables(reversed(group), promote_options="permissive")


def _digest(rows: pa.Table) -> str:
    """Return what tells these rows from others of the same step: a repeated step may lack some that were written."""
    found = hashlib.sha256()
    for name in (VERSION, DELETED, SIGN, COMMIT_LSN, ORDINAL):
        if name in rows.column_names:
            cells = one_array(rows.column(name))
            width = cells.type.bit_width // 8
            found.update(memoryview(cells.buffers()[1])[cells.offset * width : (cells.offset + len(cells)) * width])
    return found.hexdigest()[:32]


def _arrow_after(steps: Sequence[TableStep], change: SchemaChange) -> pa.Schema:
    """Return the types of the rows that follow a schema change."""
    after = steps[steps.index(change) + 1 :]
    segments = next((step.segments for step in after if isinstance(step, Rows)), None)
    return segment_layout(change.new).arrow_schema if segments is None else segments[0].arrow_schema()


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes with their order keys."""

    columns: ChangeColumns
    commits: _Numbers
    ordinals: _Numbers

    @classmethod
    def read(cls, step: Rows) -> _Changes:
        keys = pa.concat_tables([read_segment(segment, [COMMIT_LSN, ORDINAL]) for segment in step.segments])
        return cls(
            read_changes([step], step.schema), keys.column(COMMIT_LSN).to_numpy(), keys.column(ORDINAL).to_numpy()
        )

    def versions(self, changes: _Numbers) -> pa.Array:
        return versions(self.commits[changes], self.ordinals[changes])


def _counted(changes: _Changes, layout: Layout) -> pa.Table:
    """Return the rows that came and went, of a table without a key."""
    columns = changes.columns
    names = list(columns.rows.column_names)
    if columns.not_sent:
        raise not_sent(str(columns.schema))
    came = np.flatnonzero(columns.operations != Operation.DELETE)
    went = np.flatnonzero(columns.operations == Operation.DELETE)
    updated = np.flatnonzero(columns.operations[columns.old_at] == Operation.UPDATE)
    parts = [_encoded(columns.rows, columns.texts, columns.schema, layout)]
    if len(updated):
        old = columns.old.select(names).cast(columns.rows.schema)
        parts.append(_encoded(old, columns.old_texts, columns.schema, layout))
    rows = pa.concat_tables(parts, promote_options="permissive")
    taken = np.concatenate([came, went, columns.count + updated])
    of = np.concatenate([came, went, columns.old_at[updated]])
    signs = np.where(np.arange(len(taken)) < len(came), 1, -1).astype(np.int8)
    rows = rows.take(pa.array(taken)).append_column(VERSION, changes.versions(of))
    return rows.append_column(SIGN, pa.array(signs)).append_column(NUMBER, pa.array(np.zeros(len(taken), np.uint64)))


def _keyed(work: Work, table: TableWork, layout: Layout, floor: int, changes: _Changes) -> Iterator[pa.Table]:
    """Yield the net effect of changes: rows that need older values, other new rows, then tombstones.

    In this order, what is interrupted can be repeated: the older values are there until the rows have them.
    """
    columns, schema = changes.columns, changes.columns.schema
    key = names_of(schema, schema.key)
    net = compact(columns, key)
    gone = np.ones(len(net.touched), np.bool_)
    gone[net.keys] = False
    keys = _touched(columns, net, key)
    if net.origins:
        first = (int(changes.commits[0]), int(changes.ordinals[0]))
        before = RowsBefore(work.server, table.generation, layout, first, floor, columns, net.touched, keys)
        for part in fill(net, before, (changes.commits, changes.ordinals), work.source, key):
            yield _live(part, changes, layout)
    else:
        yield _live(net, changes, layout)
    codes = np.flatnonzero(gone)
    cells, texts = keys
    taken = pa.array(codes)
    buried = _encoded(cells.take(taken), {name: text.take(taken) for name, text in texts.items()}, schema, layout)
    last = _last_changes(columns, net.touched, key)[codes]
    flags = pa.array(np.ones(len(codes), np.uint8))
    yield buried.append_column(VERSION, changes.versions(last)).append_column(DELETED, flags)


def _live(net: NetChanges, changes: _Changes, layout: Layout) -> pa.Table:
    rows, texts = net.rows()
    encoded = _encoded(rows, texts, changes.columns.schema, layout)
    flags = pa.array(np.zeros(rows.num_rows, np.uint8))
    return encoded.append_column(VERSION, changes.versions(net.images)).append_column(DELETED, flags)


def _encoded(rows: pa.Table, texts: Texts, schema: TableSchema, layout: Layout) -> pa.Table:
    return pa.table(encode(rows, texts, schema, layout))


def _touched(changes: ChangeColumns, net: NetChanges, key: Sequence[str]) -> tuple[pa.Table, Texts]:
    """Return the cells of the touched keys, in the order of `net.touched`."""
    if pa.types.is_integer(net.touched.type):
        return pa.table({key[0]: net.touched}).cast(pa.schema([changes.rows.schema.field(key[0])])), {}
    _, cells, texts = touched_keys(changes, key)
    return cells, texts


def _last_changes(changes: ChangeColumns, touched: pa.Array, key: Sequence[str]) -> _Numbers:
    """Return for each touched key the last change that gave it a row or took it away."""
    found = np.full(len(touched), -1, np.int64)
    own = pc.index_in(keys_of(changes.rows, changes.texts, key), value_set=touched).to_numpy()
    np.maximum.at(found, own, np.arange(changes.count))
    if len(changes.old_at):
        old = pc.index_in(keys_of(changes.old, changes.old_texts, key), value_set=touched).to_numpy()
        np.maximum.at(found, old, changes.old_at)
    return found
