"""Plans a batch: a table's part becomes one item of one job, and the driver decides everything that it can.

The driver reads steps, schemas and the log; it opens no data file. It decides which changes the table already has,
which columns the table has afterwards, and which schema changes stop the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pyarrow as pa

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, TableStep
from penstock.changes.columns import constant_of
from penstock.changes.segment import field_names
from penstock.changes.steps import Truncation
from penstock.destinations.base import SourceRows
from penstock.destinations.batch_events import leave_out
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import LiveFile
from penstock.destinations.delta.layout import Mode, TableLayout, TableState
from penstock.destinations.delta.table import LakeTable, Version
from penstock.destinations.delta.tasks import SLICE_ROWS, Rewrite, TableWork, rewrites
from penstock.destinations.refusals import not_followed, rejected, takes_long, unreadable
from penstock.errors import RESYNC
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema
from penstock.schema.table import moved_names

REWRITE_BYTES = 32 << 20
"""The largest table whose files are rewritten within a batch that other tables share."""
SHARED_ROWS = 4 * SLICE_ROWS
"""The most changes of a table in such a batch; only a large transaction has more."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One table's part of a batch, without the changes that the table already has."""

    table: LakeTable
    version: Version
    state: TableState
    """After the batch."""
    end: Lsn
    work: TableWork
    rewrites: tuple[Rewrite, ...] = ()
    """Work to do first: one item for each file."""
    exchanged: Mapping[str, Add | None] = field(default_factory=dict[str, Add | None])
    """The files that were rewritten, by path; None if no row was live. The work uses the new files."""

    def rewritten(self, adds: Sequence[Add | None]) -> Plan:
        """Return the plan after `rewrites` are done; `adds` are in their order."""
        if not self.rewrites:
            return self
        paths = [each.file.path for each in self.rewrites]
        files = tuple(LiveFile.of(add) for add in adds if add is not None)
        exchanged = dict(zip(paths, adds, strict=True))
        return replace(self, work=replace(self.work, files=files), rewrites=(), exchanged=exchanged)


def plan_table(
    batch: EventBatch,
    changes: TableChanges,
    table: LakeTable,
    *,
    mode: Mode,
    deletion_vectors: bool,
    source: SourceRows | None,
    keeps_dropped: Callable[[TableSchema], bool] = lambda _: False,
    records_ddl: bool = False,
    column_mapping: bool = False,
) -> Plan | None:
    """Plan a table's part; None if the table already has all of it. Raise the error that stops the table.

    `records_ddl` as in `DestinationContext`: without it a table in which a name moved to another column is refused.
    With `column_mapping`, columns are renamed in the metadata alone, unless dropped columns are kept.
    """
    version = table.require()
    if version.state.layout.mode is not mode:
        raise rejected(
            changes.table,
            f"it was copied in mode {version.state.layout.mode.value}, not {mode.value}",
            hint=f"Copy the table again ({RESYNC}), or set the mode back.",
        )
    position = table.require_position(version)
    left = leave_out(changes, position, batch.begin)
    if not left.steps:
        return None
    if left.row_count > SHARED_ROWS and not batch.alone:
        raise takes_long(changes.table, f"a transaction has {left.row_count:,} changes")
    before = version.state.layout
    after = partial(_layout_after, changes=left, records_ddl=records_ddl, keeps_dropped=keeps_dropped)
    layout, constants, stages = after(before)
    # A table that maps columns cannot keep those that the source drops.
    if column_mapping and not keeps_dropped(layout.source) and layout.needs_rewrite(before):
        layout, constants, stages = after(before.mapped())
    steps = tuple(step for step in left.steps if isinstance(step, Rows | Truncation))
    files = tuple(LiveFile.of(add) for add in version.snapshot.files.values())
    storage = table.log.storage
    work = TableWork(
        changes.table_id,
        changes.table,
        storage,
        layout,
        steps,
        files,
        deletion_vectors,
        source,
        constants,
        stages,
    )
    # A truncate leaves nothing of a mirror.
    gone = mode is Mode.MIRROR and any(isinstance(step, Truncation) for step in steps)
    again: tuple[Rewrite, ...] = ()
    if not gone and (constants or layout.needs_rewrite(before)):
        again = rewrites(changes.table, storage, before, layout, files, constants)
    size = sum(add.size for add in version.snapshot.files.values())
    if again and size > REWRITE_BYTES and not batch.alone:
        raise takes_long(changes.table, f"its columns changed, so {size:,} bytes are rewritten")
    end = position if reaches(position, batch.end) else batch.end
    return Plan(table, version, replace(version.state, layout=layout), end, work, again)


def _layout_after(
    layout: TableLayout,
    changes: TableChanges,
    *,
    records_ddl: bool,
    keeps_dropped: Callable[[TableSchema], bool],
) -> tuple[TableLayout, dict[str, pa.Scalar], tuple[TableLayout, ...]]:
    """Return the layout after all steps, and the values of existing rows in added columns, by names in segments.

    Also the layout at each step of rows and each truncate.
    """
    constants: dict[int, pa.Scalar] = {}
    stages: list[TableLayout] = []
    first = layout
    for number, step in enumerate(changes.steps):
        if isinstance(step, SchemaChange) and step.new != layout.source:
            types = _types(changes, changes.steps[number + 1 :]) or _known_types(layout, step.new)
            if layout.mode is not Mode.HISTORY:
                constants |= _constants(changes.table, layout, step.new, types)
            if layout.mode is not Mode.HISTORY and not records_ddl and (moved := moved_names(layout.source, step.new)):
                # The catalog that named the columns may be newer than the rows.
                raise not_followed(changes.table, f"the name of another column was given to column {moved[0]!r}")
            layout = layout.evolved(step.new, types, keep=keeps_dropped(step.new))
        elif isinstance(step, Rows) and step.unrepresentable:
            layout = layout.with_texts()
        if not isinstance(step, SchemaChange):
            stages.append(layout)
    # What files have follows from the layout before all steps.
    layout = layout if layout is first else layout.succeeding(first)
    names = zip(layout.source.columns, field_names(layout.source), strict=True)
    known = {name: constants[column.attnum] for column, name in names if column.attnum in constants}
    return layout, known, tuple(stages)


def _constants(table: str, before: TableLayout, schema: TableSchema, types: pa.Schema) -> dict[int, pa.Scalar]:
    """Return the values of existing rows in columns that a schema change adds, by attribute number."""
    return {
        column.attnum: constant_of(table, column, types.field(name).type)
        for column, name in zip(schema.columns, field_names(schema), strict=True)
        if column.attnum not in before.names and column.missing is not None
    }


def _known_types(layout: TableLayout, schema: TableSchema) -> pa.Schema:
    """Return the types of columns that the table has already, by their new names."""
    names = zip(schema.columns, field_names(schema), strict=True)
    new = [column.name for column in schema.columns if column.attnum not in layout.names]
    if new:
        raise not_followed(str(schema), f"the types of added columns are not known: {', '.join(new)}")
    return pa.schema([layout.schema.field(layout.names[column.attnum]).with_name(name) for column, name in names])


def _types(changes: TableChanges, steps: Sequence[TableStep]) -> pa.Schema | None:
    """Return the types of the rows that follow a schema change; None if there are none."""
    segment = next((step.segments[0] for step in steps if isinstance(step, Rows)), None)
    if segment is None:
        return None
    try:
        return segment.arrow_schema()
    except Exception as error:
        raise unreadable(changes.table, changes.table_id, error) from error
