"""What runs in tasks: loading a range of a copy, and appending a table's part of a batch.

A mirror gets the net effect of its changes, in slices. Each row has the order key at which its slice ends as its
sequence number: it says that the row is the state of its key at that moment. So a repeated batch, with the same
boundaries or with others, changes nothing, and neither does a late one: the newest state wins.

A bag or a history gets every change, at explicit offsets of a committed stream. The driver knows how many rows of the
stream belong to the recorded position, and how many come after it, so the task leaves those out that are already there.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from google.api_core import exceptions
from google.cloud import bigquery
from google.cloud.bigquery.format_options import ParquetOptions
from numpy.typing import NDArray

from penstock.changes.batch import Rows
from penstock.changes.columns import ChangeColumns, concatenate_texts, read_changes
from penstock.changes.compaction import KnownRows, NetChanges, compact, keys_of, touched_keys
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    Operation,
    Texts,
    field_names,
    split_texts,
    unsent_cells,
)
from penstock.changes.steps import Truncation
from penstock.destinations.base import CopyRange, RangeReader, SourceRows
from penstock.destinations.batch_events import read_segment
from penstock.destinations.bigquery.append import append_changes, append_rows
from penstock.destinations.bigquery.connection import Connection, failure, translated
from penstock.destinations.bigquery.control import CHANGE_SEQUENCE, CHANGE_TYPE, DELETE, UPSERT
from penstock.destinations.bigquery.layout import HAS_OLD, ROW, WEIGHT, Kind, Layout, fields_of, old_name, split_rows
from penstock.destinations.omitted import complete_rows, fetch_rows
from penstock.destinations.refusals import rejected, unexpected, unreadable
from penstock.destinations.row_groups import group_batches
from penstock.errors import RESYNC, PenstockError, ValuesNotSent
from penstock.lsn import Lsn
from penstock.observe.reports import may_end_here

logger = logging.getLogger(__name__)

LOAD_BYTES = 128 << 20
"""Rows of a load job; BigQuery allows 1,500 of them for a table and day."""
SLICE_BYTES = 64 << 20
_COPIED, _TRUNCATED = "copy", "truncate"
_BEFORE_ALL = -1
_OPERATIONS = pa.array([None, *(each.name.lower() for each in Operation)], pa.string())


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """What all ranges of a copy share."""

    connection: Connection
    generation: str
    layout: Layout
    position: Lsn


@dataclass(frozen=True, slots=True)
class Work:
    """A table's part of a batch."""

    table_id: int
    table: str
    connection: Connection
    generation: str
    layout: Layout
    """After the batch."""
    steps: tuple[Rows | Truncation, ...]
    is_new: bool
    """A truncate made the generation in this batch, so no row is in it."""
    is_reshaped: bool
    """The batch has added columns to it, which not all servers of BigQuery know at once."""
    is_fresh: bool
    """Queries return the newest rows, so that omitted values can be taken from them."""
    source: SourceRows | None
    stream: str | None
    offset: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Written:
    """How many rows a task appended, and how many it left out because they were there already."""

    appended: int
    left_out: int


def load_range(reader: RangeReader, target: CopyTarget, part: CopyRange) -> int:
    """Load a range by jobs whose names follow from it, so that a second run of the task loads nothing twice."""
    table, layout, connection = str(target.layout.schema), target.layout, target.connection
    config = bigquery.LoadJobConfig(
        schema=fields_of(layout.physical_schema()),
        source_format=bigquery.SourceFormat.PARQUET,
        write_disposition=bigquery.WriteDisposition.WRITE_APPEND,
        create_disposition=bigquery.CreateDisposition.CREATE_NEVER,
        parquet_options=_list_inference(),
        decimal_target_types=["NUMERIC", "BIGNUMERIC"],
    )
    count = 0
    try:
        for number, batches in enumerate(group_batches(reader.read(part), LOAD_BYTES)):
            may_end_here()
            with tempfile.TemporaryFile() as file:
                with pq.ParquetWriter(file, layout.physical_schema()) as writer:
                    for batch in batches:
                        writer.write_table(_copied(pa.Table.from_batches([batch]), target))
                        count += batch.num_rows
                job = f"penstock_{target.generation}_{part.index}_{number}"
                _load(connection, target.generation, file, config, job)
    except Exception as error:
        raise unexpected(table, failure(table, error)) from None
    return count


def write_changes(work: Work) -> Written | PenstockError:
    """Append a table's part of a batch; errors are values, so that one bad table does not fail the job of all."""
    try:
        may_end_here()
        with translated(work.table):
            settles = work.is_new or work.is_reshaped
            if work.layout.kind is Kind.MIRROR:
                rows = _mirror_rows(work)
                append_changes(work.connection, work.generation, rows, what=work.table, settles=settles)
                return Written(0, 0)
            assert work.stream is not None
            logged = _Logged(work)
            appended = append_rows(
                work.connection, work.stream, logged.rows(), work.offset, what=work.table, settles=settles
            )
            return Written(appended, work.ahead - logged.ahead)
    except Exception as error:
        return unexpected(work.table, error)


def _load(connection: Connection, generation: str, file: Any, config: bigquery.LoadJobConfig, job: str) -> None:
    """Run a load job, or wait for the one that has the same name."""
    client, table = connection.client, connection.reference(generation)
    for turn in range(3):
        file.seek(0)
        name = f"{job}_{turn}"
        try:
            found: Any = client.load_table_from_file(
                file, table, job_id=name, job_config=config, location=connection.location
            )
        except exceptions.Conflict:
            found = client.get_job(name, location=connection.location)
        try:
            found.result()
            return
        except exceptions.ServerError:
            # A job that failed has loaded nothing, and its name is used up.
            if turn == 2:
                raise


def _list_inference() -> Any:
    options = ParquetOptions()
    options.enable_list_inference = True
    return options


def _copied(rows: pa.Table, target: CopyTarget) -> pa.Table:
    layout, count = target.layout, rows.num_rows
    rows, texts = split_rows(rows)
    if layout.kind is Kind.BAG:
        rows = _weighed(rows, texts, layout, np.ones(count, np.int64))
    elif layout.kind is Kind.HISTORY:
        head = {OP: _COPIED, COMMIT_LSN: int(target.position), ORDINAL: _BEFORE_ALL, HAS_OLD: False}
        for name, value in head.items():
            rows = rows.append_column(name, pa.repeat(pa.scalar(value), count))
    else:
        _require_keys(layout, rows)
    return layout.physical(rows, texts)


def _mirror_rows(work: Work) -> Iterator[pa.Table]:
    """Yield upserts and deletes, one table for each slice."""
    layout, key = work.layout, work.layout.key
    for part in _slices([step for step in work.steps if isinstance(step, Rows)]):
        changes = _read(work, part)
        net = compact(changes, key)
        keys, cells, texts = touched_keys(changes, key)
        live = net.touched.take(pa.array(net.keys))
        gone = pc.invert(pc.is_in(keys, value_set=live))
        deletes = layout.physical(cells.filter(gone), {name: each.filter(gone) for name, each in texts.items()})
        net = _filled(net, work, keys, cells)
        upserts = layout.physical(*net.rows())
        _require_keys(layout, upserts.rename_columns([*layout.names, UNREPRESENTABLE]))
        rows = pa.concat_tables([deletes, upserts])
        kinds = pa.concat_arrays([pa.repeat(DELETE, deletes.num_rows), pa.repeat(UPSERT, upserts.num_rows)])
        rows = rows.append_column(CHANGE_TYPE, kinds)
        yield rows.append_column(CHANGE_SEQUENCE, pa.repeat(sequence_number(part), rows.num_rows))


def sequence_number(steps: Sequence[Rows]) -> str:
    """Return the order key at which changes end, in the form that BigQuery compares: the state after them."""
    last = steps[-1].segments[-1]
    lsn, ordinal = (int(last.last.commit_lsn), last.last.ordinal + 1) if last.until is None else (int(last.until), 0)
    return f"{lsn:X}/{ordinal:X}"


def _slices(steps: Sequence[Rows]) -> Iterator[list[Rows]]:
    """Yield the steps in parts of about `SLICE_BYTES`: a transaction may be larger than a task's memory."""
    part: list[Rows] = []
    size = 0
    for step in steps:
        for segment in step.segments:
            memory = max(segment.memory, segment.bytes)
            if part and size + memory > SLICE_BYTES:
                yield part
                part, size = [], 0
            part.append(replace(step, segments=(segment,)))
            size += memory
    if part:
        yield part


def _read(work: Work, steps: Sequence[Rows]) -> ChangeColumns:
    try:
        return read_changes(steps, work.layout.schema)
    except PenstockError:
        raise
    except Exception as error:
        raise unreadable(work.table, work.table_id, error) from error


def _require_keys(layout: Layout, rows: pa.Table) -> None:
    if any(rows.column(name).null_count for name in layout.key):
        raise rejected(
            str(layout.schema),
            "a key has a value that its type cannot hold",
            hint=f'Set out_of_range = "text" for the columns of its key, then copy the table again: {RESYNC}.',
        )


def _filled(net: NetChanges, work: Work, keys: pa.Array, cells: pa.Table) -> NetChanges:
    """Return new rows with all their values: from the rows in BigQuery, or else from the source."""
    if not net.origins:
        return net
    wanted, columns = net.wanted()
    before = KnownRows(np.zeros(0, np.int64), pa.table({}))
    if len(wanted) and work.is_fresh and not work.is_new:
        places = pc.index_in(net.touched.take(pa.array(wanted)), value_set=keys)
        before = _rows_before(work, net, wanted, cells.take(places), columns)
    fetch = partial(fetch_rows, work.source, work.layout.schema)
    return complete_rows(net.located(before), work.layout.schema, work.layout.key, fetch, list(work.layout.names))


def _rows_before(
    work: Work, net: NetChanges, wanted: NDArray[np.int64], cells: pa.Table, columns: Sequence[str]
) -> KnownRows:
    """Query the rows that have these keys now. Cold: only for updates that omit a large value."""
    layout = work.layout
    kinds = {field.name: field.field_type for field in fields_of(layout.physical_schema())}
    parameters, conditions = list[Any](), list[str]()
    for number, name in enumerate(layout.key):
        there = layout.names[name]
        values = cells.column(name).unique().to_pylist()
        parameters.append(bigquery.ArrayQueryParameter(f"k{number}", kinds[there], values))
        conditions.append(f"{there} in unnest(@k{number})")
    table = work.connection.quoted(work.generation)
    rows = work.connection.run(f"{layout.current(table)} where {' and '.join(conditions)}", parameters)
    found = rows.to_arrow(create_bqstorage_client=False).combine_chunks()
    tables = [layout.restored(batch) for batch in found.to_batches() if batch.num_rows]
    table_before = pa.Table.from_batches(tables, layout.restored_schema()).combine_chunks()
    texts = split_texts(table_before)
    at = pc.index_in(keys_of(table_before, texts, layout.key), value_set=net.touched.take(pa.array(wanted)))
    known = at.is_valid()
    kept = {name: column.filter(known) for name, column in texts.items() if name in columns}
    numbers = wanted[at.drop_null().to_numpy(zero_copy_only=False)]
    return KnownRows(numbers, table_before.filter(known).select(list(columns)).combine_chunks(), kept)


class _Logged:
    """The rows of a bag or a history, without those that are there already."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.ahead = work.ahead

    def rows(self) -> Iterator[pa.Table]:
        for part in self._parts():
            left_out = min(self.ahead, part.num_rows)
            self.ahead -= left_out
            if part.num_rows > left_out:
                yield part.slice(left_out)

    def _parts(self) -> Iterator[pa.Table]:
        layout = self._work.layout
        for step in self._work.steps:
            if isinstance(step, Truncation):
                yield _truncated(step, layout)
                continue
            for segment in step.segments:
                if layout.kind is Kind.BAG:
                    yield _bag(_read(self._work, [replace(step, segments=(segment,))]), layout)
                else:
                    yield _history(read_segment(segment), step, layout)


def _bag(changes: ChangeColumns, layout: Layout) -> pa.Table:
    """Return changes of a table without a key: each row that goes has the weight −1, each one that comes 1."""
    if changes.not_sent:
        raise ValuesNotSent(f"{layout.schema}: the server omitted a value of a new row", table=str(layout.schema))
    rows, texts = changes.rows, changes.texts
    weights = np.where(changes.operations == Operation.DELETE, -1, 1)
    order = 2 * np.arange(changes.count) + 1
    if len(changes.old_at):
        rows = pa.concat_tables([rows, changes.old.select(rows.column_names).cast(rows.schema)]).combine_chunks()
        texts = concatenate_texts([texts, changes.old_texts], [changes.count, len(changes.old_at)])
        # A deleted row is in the change itself.
        is_update = changes.operations[changes.old_at] == Operation.UPDATE
        weights = np.concatenate([weights, np.where(is_update, -1, 0)])
        order = np.concatenate([order, 2 * changes.old_at])
    taken = pa.array(np.argsort(order, kind="stable"))
    rows, texts = rows.take(taken).combine_chunks(), {name: each.take(taken) for name, each in texts.items()}
    return layout.physical(_weighed(rows, texts, layout, weights[taken.to_numpy()]), texts)


def _weighed(rows: pa.Table, texts: Texts, layout: Layout, weights: NDArray[Any]) -> pa.Table:
    keys = keys_of(rows, texts, list(layout.names), whole=True)
    rows = rows.append_column(ROW, keys.cast(pa.binary()))
    return rows.append_column(WEIGHT, pa.array(weights, pa.int64()))


def _history(segment: pa.Table, step: Rows, layout: Layout) -> pa.Table:
    """Return changes as rows of a history, in the layout after the batch; dropped columns are left out."""
    segment = segment.combine_chunks()
    numbers = {name: column.attnum for name, column in zip(field_names(step.schema), step.schema.columns, strict=True)}
    present = {f"c{number}": name for name, number in numbers.items()}
    names = {present[there]: name for name, there in layout.names.items() if there in present}
    columns: dict[str, Any] = {
        OP: _OPERATIONS.take(_one(segment.column(OP))),
        **{name: segment.column(name) for name in (COMMIT_LSN, ORDINAL, COMMIT_TIME, XID)},
        UNCHANGED: _unsent_names(segment, list(present)),
        **{names[name]: segment.column(name) for name in names},
    }
    texts = split_texts(segment)
    kept = {names[name]: column for name, column in texts.items() if name in names}
    columns[HAS_OLD] = pa.repeat(False, segment.num_rows)
    if OLD in segment.column_names:
        old = _one(segment.column(OLD))
        columns[HAS_OLD] = old.is_valid()
        places = {field.name: number for number, field in enumerate(old.type)}
        for name in (name for name in names if name in places and names[name] in layout.old_columns):
            there = old_name(layout, names[name])
            columns[there] = pc.struct_field(old, places[name])
            if f"{OLD}.{name}" in texts:
                kept[there] = texts[f"{OLD}.{name}"]
    return layout.physical(pa.table(columns), kept)


def _truncated(step: Truncation, layout: Layout) -> pa.Table:
    row: Mapping[str, Any] = {
        OP: [_TRUNCATED],
        COMMIT_LSN: [int(step.key.commit_lsn)],
        ORDINAL: [step.key.ordinal],
        COMMIT_TIME: pa.array([step.commit_time], pa.int64()).cast(pa.timestamp("us", "UTC")),
        XID: [step.xid],
        HAS_OLD: [False],
    }
    return layout.physical(pa.table(row), {})


def _unsent_names(segment: pa.Table, columns: Sequence[str]) -> pa.Array:
    """Return for each change the columns whose values the server omitted."""
    at, bits = unsent_cells(segment.column(UNCHANGED), _one(segment.column(OP)).to_numpy() != Operation.DELETE)
    counts = np.zeros(segment.num_rows, np.int64)
    flags = bits[:, : len(columns)].astype(np.bool_) if len(at) else np.zeros((0, len(columns)), np.bool_)
    counts[at] = flags.sum(axis=1)
    names = pa.array(columns, pa.string()).take(pa.array(np.nonzero(flags)[1]))
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)), names)


def _one(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
