"""Batches: what a destination is given. Whole transactions, by table, in order.

An `EventBatch` covers the changes between two boundaries. For each table it has an ordered list of steps: rows (files,
nothing is read yet), truncates, changes of the schema. Batches and all they hold pickle, so that tasks can read rows
where they run. A batch may arrive again after a crash, with other boundaries: a destination that records positions
skips the changes that it already has, by `_commit_lsn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.changes.frames import can_read_files, frame_of, frame_of_files, spark_columns
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, Settled
from penstock.changes.steps import Entry, Message, Segment, Truncation
from penstock.changes.transform import TableTransform
from penstock.lsn import Lsn, furthest, is_in, reaches
from penstock.schema import TableSchema


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive changes of a table in one schema version; columns as in `penstock.changes.segment`."""

    schema: TableSchema
    version: str
    segments: tuple[Segment, ...]

    @property
    def unrepresentable(self) -> int:
        """Rows with unrepresentable values, in all of the files."""
        return sum(segment.unrepresentable for segment in self.segments)

    def arrow(self) -> Iterator[pa.Table]:
        """Read the segments, one at a time."""
        for segment in self.segments:
            yield segment.read()

    def frame(self, session: Any) -> Any:
        """All rows as a data frame of the given Spark session, read when the frame is computed: by Spark's JVM, or by
        Python on a cluster, for a table that the config transforms, and for one with times of day on Spark 4.0, which
        has no type for them; they are text there.

        Columns as in `arrow`, with `_unrepresentable` if some segment has it. The order of a frame means nothing: sort
        by `_commit_lsn` and `_ordinal`. It can be computed until the result of the batch is known. Raises
        `ValueOutOfRange` if a cell is refused.
        """
        for segment in self.segments:
            if segment.refuses and segment.unrepresentable:
                # Rare, and one narrow column: here, because Spark would say it as an error of its own.
                segment.read([])
        schema = self._arrow_schema()
        in_python = any(segment.transform or segment.settled or segment.origin for segment in self.segments)
        if in_python or not can_read_files(session, schema):
            return frame_of(session, schema, self.segments, partial(_read_columns, schema))
        # Segments with the same boundaries are one scan: in most batches there is one, or two.
        parts: dict[tuple[Lsn | None, Lsn | None], list[str]] = {}
        for segment in self.segments:
            parts.setdefault((segment.after, segment.until), []).append(Path(segment.path).absolute().as_uri())
        columns = spark_columns(schema)
        frames = [frame_of_files(session, columns, paths, *boundaries) for boundaries, paths in parts.items()]
        return reduce(lambda one, other: one.unionAll(other), frames)

    def _arrow_schema(self) -> pa.Schema:
        """The schema of the first segment, with `_unrepresentable` if any segment has it."""
        schemas = [segment.arrow_schema() for segment in self.segments]
        with_texts = [schema for schema in schemas if UNREPRESENTABLE in schema.names]
        return (with_texts or schemas)[0]


def _read_columns(schema: pa.Schema, segment: Segment) -> Iterator[pa.RecordBatch]:
    rows = segment.read()
    if UNREPRESENTABLE in schema.names and UNREPRESENTABLE not in rows.column_names:
        rows = rows.append_column(UNREPRESENTABLE, pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE))
    yield from rows.select(schema.names).to_batches()


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """The rows that follow have another schema than the rows before, or than the table at the destination."""

    old: TableSchema | None
    """None if nothing is known about the table."""
    new: TableSchema
    version: str
    """Of the new schema: the order key from which it is valid."""


TableStep = Rows | Truncation | SchemaChange


@dataclass(frozen=True, slots=True)
class TableChanges:
    """The steps of one table."""

    table_id: int
    table: str
    """Namespace and name, for people."""
    steps: tuple[TableStep, ...]

    @property
    def last_schema_change(self) -> SchemaChange | None:
        """The last schema change; None if there is none."""
        return next((step for step in reversed(self.steps) if isinstance(step, SchemaChange)), None)

    @property
    def row_count(self) -> int:
        """Rows in the files; the destination may already have some of them."""
        return sum(segment.rows for step in self.steps if isinstance(step, Rows) for segment in step.segments)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Whole transactions between the boundaries `begin` and `end`."""

    begin: Lsn
    end: Lsn
    transactions: int
    first_commit_time: int
    last_commit_time: int
    """Unix microseconds, by the source's clock; zero in a batch without transactions."""
    tables: tuple[TableChanges, ...]
    alone: bool = False
    """No other table waits for this batch, so it may take long (`TakesLong`)."""

    @property
    def row_count(self) -> int:
        return sum(table.row_count for table in self.tables)


def build_batch(
    entries: Iterable[Entry],
    *,
    begin: Lsn,
    end: Lsn,
    positions: Mapping[int, Lsn],
    schemas: Mapping[int, TableSchema],
    schema_of: Callable[[int, str], TableSchema],
    refused: Callable[[TableSchema], tuple[str, ...]] | None = None,
    settled: Callable[[TableSchema], Settled] | None = None,
    transform_of: Callable[[TableSchema], TableTransform | None] | None = None,
) -> EventBatch:
    """Build the batch between two boundaries, of the tables in `positions` and from their positions on.

    `schemas` are those that tables have at the destination; where rows have another one, a change of the schema comes
    before them. `refused` gives the columns of a table for which reading a row with a cell that its type cannot hold
    raises: the batch is handed over all the same, so that this concerns its table alone, and where the data work is
    done. `settled` gives the columns in which reading changes such a cell. `transform_of` gives what reading makes of
    the rows of a table; schemas of the batch are those of the result.
    """
    entries = [entry for entry in entries if not reaches(begin, entry.end) and not reaches(entry.begin, end)]
    steps: dict[int, list[TableStep]] = {}
    names: dict[int, str] = {}
    current = dict(schemas)
    for entry in entries:
        for step in entry.steps:
            if isinstance(step, Message) or step.table_id not in positions:
                continue
            after = furthest(begin, positions[step.table_id])
            if isinstance(step, Truncation):
                if is_in(step.key.commit_lsn, after) or not is_in(step.key.commit_lsn, end):
                    continue
                steps.setdefault(step.table_id, []).append(step)
            else:
                segment = step.between(after, end)
                if segment is None:
                    continue
                schema = schema_of(segment.table_id, segment.version)
                if refused is not None and segment.unrepresentable:
                    segment = replace(segment, refuses=refused(schema))
                if settled is not None and segment.unrepresentable:
                    segment = replace(segment, settled=settled(schema))
                if transform_of is not None and (transform := transform_of(schema)) is not None:
                    segment, schema = replace(segment, transform=transform), transform.output
                _append_rows(steps.setdefault(step.table_id, []), segment, current, schema)
            names[step.table_id] = step.table
    timed = [entry for entry in entries if entry.transactions]
    return EventBatch(
        begin=begin,
        end=end,
        transactions=sum(entry.transactions for entry in entries),
        first_commit_time=min((entry.first_commit_time for entry in timed), default=0),
        last_commit_time=max((entry.last_commit_time for entry in timed), default=0),
        tables=tuple(TableChanges(table_id, names[table_id], tuple(found)) for table_id, found in steps.items()),
    )


def _append_rows(
    steps: list[TableStep],
    segment: Segment,
    current: dict[int, TableSchema],
    schema: TableSchema,
) -> None:
    known = current.get(segment.table_id)
    if known != schema:
        steps.append(SchemaChange(known, schema, segment.version))
        current[segment.table_id] = schema
    last = steps[-1] if steps else None
    if isinstance(last, Rows) and last.schema == schema:
        steps[-1] = replace(last, segments=(*last.segments, segment))
    else:
        steps.append(Rows(schema, segment.version, (segment,)))
