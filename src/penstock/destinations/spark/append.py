"""Every change as a row: by a function that gets data frames, or by `df.write` in any format.

Each call has a number. A repeated call has the same number and the same rows, so one that records the number with the
rows has every row exactly once. For this the destination notes in its checkpoint, before it writes, how far a batch
goes and what its first number is, and after it that the batch is written. After a crash it cuts the changes at the
same place, whatever the boundaries of the batch that it gets then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, TableStep
from penstock.changes.segment import OLD, UNREPRESENTABLE
from penstock.changes.steps import Truncation
from penstock.destinations.base import Capabilities, CopyRows
from penstock.destinations.batch_events import is_empty, leave_out
from penstock.destinations.refusals import (
    fenced_copy,
    foreign_table,
    not_copied,
    other_lineage,
)
from penstock.destinations.spark.checkpoint import Checkpoint
from penstock.destinations.spark.frames import (
    CHANGE_COLUMNS,
    changes_frame,
    copied_changes,
    failure,
    has_old,
    key_names,
    quote,
    truncated_changes,
)
from penstock.destinations.spark.target import Tables
from penstock.errors import RESYNC, PenstockError
from penstock.lsn import Lsn, is_in, reaches
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json, schema_to_json


@dataclass(frozen=True, slots=True)
class Batch:
    """What a data frame holds; the third argument of a function that takes three."""

    number: int
    """Grows with every call, of all tables; the same when a call is repeated."""
    kind: str
    """`copy`, `changes` or `truncate`."""
    schema: TableSchema
    """The table and its columns, as the source has them."""
    attempt: str
    """Identifies the copy that the rows belong to, or that precedes the changes."""
    until: Lsn
    """The boundary up to which the table is complete with this batch: of several with the same one, with the last."""

    @property
    def table(self) -> str:
        """Namespace and name, as in `public.orders`."""
        return str(self.schema)


WriteFrame = Callable[[Any, Batch], None]
"""Writes a data frame durably."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the checkpoint knows of a table."""

    owner: str
    attempt: str
    schema: dict[str, Any]
    lineage: str = ""
    written: str | None = None
    """The boundary up to which everything is written; None before the first copy is complete."""
    until: str | None = None
    """The end of a batch that may be partly written."""
    first: int = 0
    """The number of its first call."""
    count: int = 0

    @property
    def position(self) -> Lsn | None:
        return None if self.written is None else Lsn.parse(self.written)


@dataclass(frozen=True, slots=True)
class _Held:
    """Changes that wait until the whole of a batch that has to be repeated is there."""

    changes: TableChanges
    until: Lsn


class AppendTarget:
    """Writes changes as rows; see the module's docstring."""

    capabilities = Capabilities()

    def __init__(self, write: WriteFrame, checkpoint: Checkpoint) -> None:
        self._write = write
        self._checkpoint = checkpoint
        self._held: dict[int, _Held] = {}

    def startup(self, tables: Tables) -> None:
        self._tables = tables
        self._checkpoint.open(tables.context.store)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        known, pipeline = self._load(schema.table_id), self._tables.context.pipeline_id
        if known is not None and known.owner != pipeline:
            raise foreign_table(str(schema), known.owner, pipeline)
        self._held.pop(schema.table_id, None)
        if known is None or known.attempt != attempt:
            self._store(schema.table_id, Progress(pipeline, attempt, schema_to_json(schema)))

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        known = self._load(schema.table_id)
        if known is None or known.attempt != rows.attempt:
            raise fenced_copy(str(schema), rows.attempt)
        if known.position is not None:
            return
        session = self._tables.session(schema.table_id)
        frame = self._projected(schema, copied_changes(session, rows))
        number = self._checkpoint.numbers(1)
        self._write(frame, Batch(number, "copy", schema, rows.attempt, rows.position))
        lineage = self._tables.context.lineage
        done = replace(known, schema=schema_to_json(schema), written=str(rows.position), lineage=lineage)
        self._store(schema.table_id, done)

    def write_changes(self, batch: EventBatch, changes: TableChanges) -> bool:
        known = self._load(changes.table_id)
        context = self._tables.context
        if known is None or known.position is None:
            raise not_copied(changes.table)
        if known.owner != context.pipeline_id:
            raise foreign_table(changes.table, known.owner, context.pipeline_id)
        for boundary in (known.position, *([] if known.until is None else [Lsn.parse(known.until)])):
            if not context.knows(known.lineage, boundary):
                raise other_lineage(changes.table, known.lineage, context.lineage)
        changes = leave_out(changes, known.position, batch.begin)
        if held := self._held.pop(changes.table_id, None):
            later = leave_out(changes, held.until, batch.begin)
            changes = replace(changes, steps=(*held.changes.steps, *later.steps))
        if known.until is not None and not reaches(batch.end, Lsn.parse(known.until)):
            # A batch that was begun must be repeated as a whole.
            self._held[changes.table_id] = _Held(changes, batch.end)
            return False
        self._write_all(known, changes, batch.end)
        return True

    def finish(self, batch: EventBatch) -> dict[int, Callable[[], None]]:
        """See `Target`."""
        sent = {changes.table_id for changes in batch.tables}
        ready: dict[int, Callable[[], None]] = {}
        for table_id, held in self._held.items():
            known = self._load(table_id)
            if table_id in sent or known is None or known.until is None:
                continue
            if reaches(batch.end, Lsn.parse(known.until)):
                ready[table_id] = partial(self._write_held, known, held.changes, batch.end)
        return ready

    def position(self, table_id: int) -> Lsn | None:
        """Return None: the store has the position."""
        return None

    def _load(self, table_id: int) -> Progress | None:
        record = self._checkpoint.load(table_id)
        return None if record is None else Progress(**record)

    def _store(self, table_id: int, progress: Progress) -> None:
        self._checkpoint.store(table_id, asdict(progress))

    def _write_held(self, known: Progress, changes: TableChanges, end: Lsn) -> None:
        self._write_all(known, changes, end)
        del self._held[changes.table_id]

    def _write_all(self, known: Progress, changes: TableChanges, end: Lsn) -> None:
        if known.until is not None:
            until = Lsn.parse(known.until)
            begun, changes = _split(changes, until)
            known = self._repeat(known, begun, until)
        calls = _calls(changes)
        if not calls:
            if (last := changes.last_schema_change) is not None:
                known = replace(known, schema=schema_to_json(last.new))
            self._store(changes.table_id, self._advanced(known, end))
            return
        first = self._checkpoint.numbers(len(calls))
        lineage = self._tables.context.lineage
        known = replace(known, lineage=lineage, until=str(end), first=first, count=len(calls))
        self._store(changes.table_id, known)
        self._repeat(known, changes, end)

    def _repeat(self, known: Progress, changes: TableChanges, until: Lsn) -> Progress:
        """Write the batch that the checkpoint describes, and note that it is written."""
        calls = _calls(changes)
        if len(calls) != known.count:
            raise PenstockError(
                f"{changes.table}: batch {known.first} cannot be repeated, because its changes have other columns now",
                hint=f"Copy the table again: {RESYNC}.",
                table=changes.table,
            )
        schema = schema_from_json(known.schema)
        session = self._tables.session(changes.table_id)
        for number, step in enumerate(calls, known.first):
            if isinstance(step, Rows):
                schema = step.schema
                frame, kind = self._projected(schema, changes_frame(session, step)), "changes"
            else:
                frame, kind = truncated_changes(session, step), "truncate"
            self._write(frame, Batch(number, kind, schema, known.attempt, until))
        done = self._advanced(replace(known, schema=schema_to_json(schema)), until)
        self._store(changes.table_id, done)
        return done

    def _advanced(self, known: Progress, end: Lsn) -> Progress:
        position = known.position
        end = end if position is None or reaches(end, position) else position
        return replace(known, lineage=self._tables.context.lineage, written=str(end), until=None, first=0, count=0)

    def _projected(self, schema: TableSchema, frame: Any) -> Any:
        projection = self._tables.projection(schema, frame)
        control, session = (*CHANGE_COLUMNS, UNREPRESENTABLE), self._tables.session(schema.table_id)
        found = projection.apply(session, frame, control, key_names(schema), strict=False)
        return found.selectExpr(*map(quote, (*CHANGE_COLUMNS, *projection.names, UNREPRESENTABLE)))


def call_function(function: Callable[..., object], name: str) -> WriteFrame:
    """Return what calls a person's function: with the frame and its number, and with the `Batch` if it takes three."""
    takes = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
    ]
    with_batch = len(takes) > 2 or any(each.kind is each.VAR_POSITIONAL for each in takes)

    def write(frame: Any, batch: Batch) -> None:
        frame = frame if has_old(frame) else frame.drop(OLD)
        try:
            function(frame, batch.number, batch) if with_batch else function(frame, batch.number)
        except PenstockError:
            raise
        except Exception as error:
            found = failure(batch.table, error)
            if type(found) is PenstockError:
                found = PenstockError(
                    f"{batch.table}: {name} raised {type(error).__name__} for batch {batch.number}",
                    hint="Correct the function, restart the pipeline, then run: penstock rollback. The batch is "
                    "repeated with the same number; nothing is lost.",
                    table=batch.table,
                )
            raise found from error

    return write


def _calls(changes: TableChanges) -> list[Rows | Truncation]:
    """Return the calls that changes lead to: the same for the same changes, however they were cut into steps."""
    calls: list[Rows | Truncation] = []
    for step in changes.steps:
        last = calls[-1] if calls else None
        if isinstance(step, SchemaChange):
            continue
        if isinstance(step, Rows):
            step = replace(step, segments=tuple(each for each in step.segments if not is_empty(each)))
            if not step.segments:
                continue
        if isinstance(step, Rows) and isinstance(last, Rows) and last.schema == step.schema:
            calls[-1] = replace(last, segments=(*last.segments, *step.segments))
        else:
            calls.append(step)
    return calls


def _split(changes: TableChanges, at: Lsn) -> tuple[TableChanges, TableChanges]:
    """Split changes at a boundary."""
    before: list[TableStep] = []
    for step in changes.steps:
        if isinstance(step, Rows):
            parts = [part for segment in step.segments if (part := segment.between(None, at)) is not None]
            before += [replace(step, segments=tuple(parts))] if parts else []
        elif isinstance(step, SchemaChange) or is_in(step.key.commit_lsn, at):
            before.append(step)
    return replace(changes, steps=tuple(before)), leave_out(changes, at, Lsn(0))
