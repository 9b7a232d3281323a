"""A batch for destinations that record a row for each table: what is left of it, in which parts, by which task.

The destination's record of a table says which changes it has. What is left is divided among tasks, table by table, and
a task reads it in parts that fit its memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, TypeVar

import pyarrow as pa

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, TableStep
from penstock.changes.segment import segment_layout
from penstock.changes.steps import Truncation
from penstock.destinations.base import DestinationContext
from penstock.destinations.batch_events import leave_out
from penstock.destinations.refusals import not_copied, other_lineage, other_writer, rejected, takes_long
from penstock.errors import RESYNC
from penstock.lsn import Lsn, reaches


class RecordedTable(Protocol):
    """What a destination has recorded of a table."""

    @property
    def epoch(self) -> int: ...
    @property
    def lineage(self) -> str: ...
    @property
    def position(self) -> Lsn | None: ...
    @property
    def mode(self) -> StrEnum | None: ...
    @property
    def is_copied(self) -> bool: ...


class RecordedCopy(RecordedTable, Protocol):
    """What a destination has recorded of a table whose position it moves in the transaction of the rows."""

    @property
    def attempt(self) -> str: ...


class TableShare(Protocol):
    """One table's part of a batch."""

    @property
    def table_id(self) -> int: ...
    @property
    def table(self) -> str: ...
    @property
    def row_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TableWork:
    """One table's part of a batch."""

    table_id: int
    table: str
    attempt: str
    position: Lsn
    """The table's position before the batch."""
    end: Lsn
    """Its position after it."""
    steps: tuple[TableStep, ...]
    keeps_dropped: bool = False

    @property
    def row_count(self) -> int:
        return sum(segment.rows for step in self.steps if isinstance(step, Rows) for segment in step.segments)


_Recorded = TypeVar("_Recorded", bound=RecordedTable)
_Share = TypeVar("_Share", bound=TableShare)


def require_writable(
    changes: TableChanges, known: _Recorded | None, context: DestinationContext, mode: StrEnum
) -> tuple[_Recorded, Lsn]:
    """Return the record of a table and its position; raise the error that stops the table."""
    if known is None or not known.is_copied or known.position is None or known.mode is None:
        raise not_copied(changes.table)
    if known.epoch > context.epoch:
        raise other_writer(changes.table)
    if not context.knows(known.lineage, known.position):
        raise other_lineage(changes.table, known.lineage, context.lineage)
    if known.mode is not mode:
        raise rejected(
            changes.table,
            f"it was copied in mode {known.mode.value}, not {mode.value}",
            hint=f"Copy the table again ({RESYNC}), or set the mode back.",
        )
    return known, known.position


def is_of_this_server(known: RecordedTable, context: DestinationContext) -> bool:
    """Return False for a table of another server, which may have given its number to another table."""
    return not known.lineage or known.lineage.partition("/")[0] == context.lineage.partition("/")[0]


def left_of(batch: EventBatch, changes: TableChanges, position: Lsn, *, shared_rows: int) -> TableChanges | None:
    """Return the changes after a position; None if there are none.

    Raise `TakesLong` for more than `shared_rows`: the other tables of a batch do not wait for them.
    """
    left = leave_out(changes, position, batch.begin)
    if not left.steps:
        return None
    if left.row_count > shared_rows and not batch.alone:
        raise takes_long(changes.table, f"a transaction has {left.row_count:,} changes")
    return left


def plan_table(
    batch: EventBatch,
    changes: TableChanges,
    known: RecordedCopy | None,
    context: DestinationContext,
    mode: StrEnum,
    *,
    shared_rows: int,
) -> TableWork | None:
    """Return a table's part of the work; None if the table has all of it. Raise the error that stops the table."""
    recorded, position = require_writable(changes, known, context, mode)
    left = left_of(batch, changes, position, shared_rows=shared_rows)
    if left is None:
        return None
    end = position if reaches(position, batch.end) else batch.end
    change = left.last_schema_change
    keeps_dropped = change is not None and context.keeps_dropped_columns(change.new)
    return TableWork(changes.table_id, changes.table, recorded.attempt, position, end, left.steps, keeps_dropped)


def divide(steps: Sequence[TableStep], *, keeps_all: bool, rows: int, size: int) -> Iterator[TableStep]:
    """Yield the steps in order, with rows in parts of about so many rows and bytes of memory.

    Unless the table keeps all changes, leave out rows that a later truncate removes.
    """
    last = max((number for number, step in enumerate(steps) if isinstance(step, Truncation)), default=-1)
    for number, step in enumerate(steps):
        if isinstance(step, SchemaChange):
            yield step
        elif not keeps_all and number < last:
            continue
        elif isinstance(step, Truncation):
            yield step
        else:
            yield from _slices(step, rows, size)


def _slices(step: Rows, most_rows: int, most_bytes: int) -> Iterator[Rows]:
    first, rows, size = 0, 0, 0
    for number, segment in enumerate(step.segments):
        memory = max(segment.memory, segment.bytes)
        rows, size = rows + segment.rows, size + memory
        if number > first and (rows > most_rows or size > most_bytes):
            yield replace(step, segments=step.segments[first:number])
            first, rows, size = number, segment.rows, memory
    yield replace(step, segments=step.segments[first:])


def arrow_after(steps: Sequence[TableStep], change: SchemaChange) -> pa.Schema:
    """Return the types of the rows that follow a schema change."""
    after = steps[steps.index(change) + 1 :]
    segments = next((step.segments for step in after if isinstance(step, Rows)), None)
    return segment_layout(change.new).arrow_schema if segments is None else segments[0].arrow_schema()


def deal_out(shares: Sequence[_Share], count: int) -> list[tuple[_Share, ...]]:
    """Split tables into at most `count` groups with about the same number of changes."""
    groups: list[list[_Share]] = [[] for _ in range(max(1, count))]
    sizes = [0] * len(groups)
    for share in sorted(shares, key=lambda each: each.row_count, reverse=True):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(share)
        sizes[smallest] += share.row_count + 1
    return [tuple(sorted(group, key=lambda each: each.table_id)) for group in groups if group]


def describe_shares(batch: EventBatch, shares: Sequence[TableShare]) -> str:
    """Return the description of the job that writes a batch."""
    names = [share.table for share in shares]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"write {', '.join(names[:3])}{more} up to {batch.end}"
