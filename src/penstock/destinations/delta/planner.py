"""What runs where: a table's part of a batch becomes one item of one job, and whatever can be decided is decided here.

The driver looks at steps, schemas and the log; it opens no data file. Decided here: which changes are in already, which
columns the table has afterwards, and which changes of the schema stop the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, TableStep, Truncate
from penstock.destinations.base import SourceRows
from penstock.destinations.batch_events import leave_out
from penstock.destinations.delta.layout import Mode, TableLayout, TableState
from penstock.destinations.delta.rows import LiveFile
from penstock.destinations.delta.table import LakeTable, Version
from penstock.destinations.delta.tasks import TableWork
from penstock.destinations.refusals import rejected, unreadable
from penstock.lsn import Lsn, reaches


@dataclass(frozen=True, slots=True)
class Plan:
    """One table's part of a batch, without what is in already."""

    table: LakeTable
    version: Version
    state: TableState
    """After the batch."""
    end: Lsn
    work: TableWork


def plan_table(
    batch: EventBatch,
    changes: TableChanges,
    table: LakeTable,
    *,
    mode: Mode,
    deletion_vectors: bool,
    source: SourceRows | None,
) -> Plan | None:
    """Plan a table's part; None if all of it is in already. Raises what stops the table."""
    version = table.require()
    if version.state.layout.mode is not mode:
        raise rejected(
            changes.table,
            f"it was copied in the mode {version.state.layout.mode.value}, not {mode.value}",
            hint="Run `penstock resync` for this table, or set the mode back.",
        )
    position = table.require_position(version)
    left = leave_out(changes, position, batch.begin)
    if not left.steps:
        return None
    layout = _layout_after(version.state.layout, left)
    steps = tuple(step for step in left.steps if isinstance(step, Rows | Truncate))
    work = TableWork(
        changes.table_id,
        changes.table,
        table.log.storage,
        layout,
        steps,
        tuple(LiveFile.of(add) for add in version.snapshot.files.values()),
        deletion_vectors,
        source,
    )
    end = position if reaches(position, batch.end) else batch.end
    return Plan(table, version, replace(version.state, layout=layout), end, work)


def _layout_after(layout: TableLayout, changes: TableChanges) -> TableLayout:
    """The layout behind all steps."""
    for number, step in enumerate(changes.steps):
        if isinstance(step, SchemaChange) and step.new != layout.source:
            layout = layout.evolved(step.new, _types(changes, changes.steps[number + 1 :]))
        elif isinstance(step, Rows) and step.unrepresentable:
            layout = layout.with_texts()
    return layout


def _types(changes: TableChanges, steps: Sequence[TableStep]) -> pa.Schema:
    """The types of the rows that follow a change of the schema."""
    path = next(step.segments[0].path for step in steps if isinstance(step, Rows))
    try:
        return pq.read_schema(path)
    except Exception as error:
        raise unreadable(changes.table, changes.table_id, error) from error
