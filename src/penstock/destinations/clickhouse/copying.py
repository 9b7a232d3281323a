"""Copies: tasks write ranges into a table of their attempt, and a new view shows it when it is complete."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from penstock.changes.segment import split_texts
from penstock.destinations.base import CopyRange, RangeReader
from penstock.destinations.clickhouse.control import Control, Known
from penstock.destinations.clickhouse.encoding import encode, versions
from penstock.destinations.clickhouse.layout import DELETED, NUMBER, SIGN, VERSION, Layout, Shape
from penstock.destinations.clickhouse.log import log_copy, log_marker
from penstock.destinations.clickhouse.server import Server, quote
from penstock.destinations.refusals import fenced_copy, unexpected
from penstock.destinations.row_groups import group_batches
from penstock.lsn import Lsn
from penstock.schema import TableSchema

_CHUNK_BYTES = 32 << 20
_RANGE_ROWS = 1 << 40
"""More rows than a range has."""


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where the ranges of a copy go."""

    server: Server
    schema: TableSchema
    attempt: str
    position: Lsn
    arrow_schema: pa.Schema
    generation: str
    layout: Layout


def write_range(reader: RangeReader, target: CopyTarget, part: CopyRange) -> int:
    """Write one range of a copy; return how many rows it has."""
    count = 0
    try:
        for batches in group_batches(reader.read(part), _CHUNK_BYTES):
            rows = pa.Table.from_batches(batches, schema=target.arrow_schema)
            # A range that is read again has the same rows, but perhaps in other chunks.
            token = f"{target.attempt}/{part.index}/{count}/{rows.num_rows}"
            target.server.insert(
                target.generation,
                _copied(rows, target, part.index * _RANGE_ROWS + count + 1),
                token,
                str(target.schema),
            )
            count += rows.num_rows
    except Exception as error:
        raise unexpected(str(target.schema), error) from None
    return count


def _copied(rows: pa.Table, target: CopyTarget, first: int) -> pa.Table:
    count = rows.num_rows
    columns = encode(rows, split_texts(rows), target.schema, target.layout)
    if target.layout.shape is Shape.LOG:
        return log_copy(columns, count, target.position, target.attempt, first, target.layout)
    # Before all changes at the copy's position, whose ordinals begin with 0.
    columns[VERSION] = versions(np.full(count, int(target.position)), np.full(count, -1))
    if target.layout.shape is Shape.KEYED:
        columns[DELETED] = pa.array(np.zeros(count, np.uint8))
    else:
        columns[SIGN] = pa.array(np.ones(count, np.int8))
        columns[NUMBER] = pa.array(np.arange(first, first + count, dtype=np.uint64))
    return pa.table(columns)


def finish_copy(control: Control, known: Known, target: CopyTarget, lineage: str, epoch: int) -> None:
    """Show readers a complete copy, and record it."""
    server, table = control.server, str(target.schema)
    generation = known.generation if appends(known, target) else target.generation
    server.run(target.layout.view(server.name(known.next_view), server.name(generation), 0), table)
    control.save(
        [
            replace(
                known,
                source=table,
                place=known.next_place,
                view=known.next_view,
                copied=target.attempt,
                generation=generation,
                lineage=lineage,
                position=target.position,
                floor=0,
                epoch=epoch,
                layout=target.layout,
            )
        ]
    )
    is_left = known.view and known.view != known.next_view
    if is_left and not any(known.view in (each.view, each.next_view) for each in control.load().values()):
        server.run(f"drop view if exists {server.name(known.view)}")
    control.drop_generations(target.schema.table_id, but=generation)


def appends(known: Known, target: CopyTarget) -> bool:
    """Return True if a copy is appended to a log of changes, which keeps what it has."""
    return target.layout.shape is Shape.LOG and bool(known.generation)


def append_copy(server: Server, known: Known, target: CopyTarget) -> None:
    """Append a copy to a log; doing it again changes nothing."""
    assert known.layout is not None
    table, generation = str(target.schema), known.generation
    for clause in target.layout.added(known.layout, {}):
        server.run(f"alter table {server.name(generation)} {clause}", table)
    server.insert(generation, log_marker(target.position, target.attempt, target.layout), target.attempt, table)
    names = ", ".join(quote(name) for name in target.layout.stored_names())
    server.run(
        f"insert into {server.name(generation)} ({names}) select {names} from {server.name(target.generation)}", table
    )


def require_begun(known: Known | None, schema: TableSchema, attempt: str) -> Known:
    """Return the record of a table whose newest attempt this is; raise for any other."""
    if known is None or known.attempt != attempt or not known.next_view:
        raise fenced_copy(str(schema), attempt)
    return known
