"""A batch's changes in pieces of bounded size, each with the transactions that it is of.

Which documents changes concern follows from each row's own values, so the rows of one transaction may be resolved in
several pieces. Every piece waits until its transactions can be seen. Emptied tables come first: what rows hung on is
forgotten before it is learnt anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow.compute as pc

from penstock.changes.batch import EventBatch, Rows, SegmentFile, Truncate
from penstock.changes.segment import XID
from penstock.documents.images import Changes, RowChanges, WantedColumns, needed_fields, row_changes
from penstock.schema import TableSchema
from penstock.source.patterns import TableName


def pieces_of(batch: EventBatch, wanted: Mapping[TableName, WantedColumns], size: int) -> Iterator[Changes]:
    """The changes of these tables, about `size` rows at a time; nothing at all if there are none."""
    truncated = _truncated(batch, wanted)
    rows: list[RowChanges] = []
    xids: set[int] = set()
    room = size
    for part, its_xids in _parts(batch, wanted, size):
        if len(part) > room and rows:
            yield Changes(tuple(rows), truncated, frozenset(xids))
            truncated, rows, xids, room = frozenset(), [], set(), size
        rows.append(part)
        xids |= its_xids
        room -= len(part)
    if rows or truncated:
        yield Changes(tuple(rows), truncated, frozenset(xids))


def _truncated(batch: EventBatch, wanted: Mapping[TableName, WantedColumns]) -> frozenset[TableName]:
    emptied = {table.table for table in batch.tables if any(isinstance(step, Truncate) for step in table.steps)}
    return frozenset(name for name in wanted if str(name) in emptied)


def _parts(
    batch: EventBatch, wanted: Mapping[TableName, WantedColumns], size: int
) -> Iterator[tuple[RowChanges, set[int]]]:
    for table in batch.tables:
        for step in table.steps:
            if isinstance(step, Rows):
                name = TableName(step.schema.namespace, step.schema.name)
                for file in step.segments if name in wanted else ():
                    yield from _read(file, step.schema, name, wanted[name], size)


def _read(
    file: SegmentFile, schema: TableSchema, name: TableName, wanted: WantedColumns, size: int
) -> Iterator[tuple[RowChanges, set[int]]]:
    segment = file.read(needed_fields(file.path, schema, wanted))
    for first in range(0, segment.num_rows, size):
        part = segment.slice(first, size).combine_chunks()
        yield row_changes(part, schema, name, wanted), set(pc.unique(part.column(XID)).to_pylist())
