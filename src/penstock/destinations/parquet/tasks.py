"""The work of tasks: reading segments or ranges, and writing files that readers ignore until a manifest names them.

A task may run twice, even at the same time: each run writes its own file. Errors of changes are values, so that one bad
table does not fail the job of all tables. A copy is the job of one table; its first error ends it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.changes.batch import Rows
from penstock.changes.segment import (
    COMMIT_LSN,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNREPRESENTABLE,
    UNREPRESENTABLE_TYPE,
)
from penstock.destinations.base import CopyRange, RangeReader
from penstock.destinations.batch_events import read_segment
from penstock.destinations.parquet.folder import DataFile
from penstock.destinations.refusals import unexpected
from penstock.destinations.row_groups import group_batches, worth_a_dictionary
from penstock.durable import sync_folder
from penstock.errors import PenstockError
from penstock.lsn import Lsn

COPIED = 0
"""`_op` of a copied row."""
BEFORE_ALL = -1
"""`_ordinal` of a copied row, which precedes the changes at the copy's position."""
_GROUP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ChangesItem:
    """Segments of one step that become one file."""

    table_id: int
    step: int
    """The step's number in the table's part of the batch."""
    rows: Rows
    folder: str
    number: int
    """Number of the manifest that the file is meant for."""
    version: int
    """The version of the schema."""
    compression: str


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where the ranges of a copy go."""

    table: str
    folder: str
    position: Lsn
    arrow_schema: pa.Schema
    version: int
    compression: str


def write_changes(item: ChangesItem) -> DataFile | PenstockError | None:
    """Write the changes of one item; None if there is nothing to write."""
    try:
        # Written together: a row group of a few rows costs as much as one of thousands, to write and to read.
        groups = group_batches(_segments(item.rows), _GROUP_BYTES)
        tables = (_versioned(pa.concat_tables(group), item.version) for group in groups)
        return _write(item.folder, f"{item.number:012d}-{item.step:03d}", tables, item.compression)
    except Exception as error:
        return unexpected(str(item.rows.schema), error)


def write_range(reader: RangeReader, target: CopyTarget, part: CopyRange) -> DataFile | None:
    """Write one range of a copy; None if it has no rows."""
    try:
        tables = (_copied(batches, target) for batches in group_batches(reader.read(part), _GROUP_BYTES))
        return _write(target.folder, f"{0:012d}-copy-{part.index:06d}", tables, target.compression)
    except Exception as error:
        raise unexpected(target.table, error) from None


def _segments(rows: Rows) -> Iterator[pa.Table]:
    """Yield the segments' rows with the same columns in each: only some have `_unrepresentable`."""
    has_texts = any(UNREPRESENTABLE in segment.arrow_schema().names for segment in rows.segments)
    for segment in rows.segments:
        table = read_segment(segment)
        if has_texts and UNREPRESENTABLE not in table.column_names:
            nothing = pa.nulls(table.num_rows, UNREPRESENTABLE_TYPE)
            table = table.append_column(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE), nothing)
        yield table


def _copied(batches: list[pa.RecordBatch], target: CopyTarget) -> pa.Table:
    """Return the rows of a copy in the form of changes, before all others at its position."""
    table = pa.Table.from_batches(batches, schema=target.arrow_schema)
    count = table.num_rows
    head = {
        OP: pa.repeat(pa.scalar(COPIED, pa.int8()), count),
        COMMIT_LSN: pa.repeat(pa.scalar(int(target.position), pa.int64()), count),
        ORDINAL: pa.repeat(pa.scalar(BEFORE_ALL, pa.int64()), count),
    }
    fields = [pa.field(name, array.type, nullable=False) for name, array in head.items()]
    copied = pa.Table.from_arrays([*head.values(), *table.columns], schema=pa.schema([*fields, *table.schema]))
    return _versioned(copied, target.version)


def _versioned(rows: pa.Table, version: int) -> pa.Table:
    column = pa.repeat(pa.scalar(version, pa.int32()), rows.num_rows)
    return rows.add_column(rows.schema.get_field_index(ORDINAL) + 1, SCHEMA_VERSION, column)


def _write(folder: str, name: str, tables: Iterable[pa.Table], compression: str) -> DataFile | None:
    """Write tables into a new file, durably; None and no file if they have no rows."""
    path = Path(folder) / f"{name}-{uuid.uuid4().hex}.parquet"
    writer: pq.ParquetWriter | None = None
    count = 0
    try:
        for table in tables:
            if table.num_rows == 0:
                continue
            if writer is None:
                writer = pq.ParquetWriter(
                    path, table.schema, compression=compression, use_dictionary=cast("bool", worth_a_dictionary(table))
                )
            writer.write_table(table)
            count += table.num_rows
    except BaseException:
        if writer is not None:
            writer.close()
            path.unlink(missing_ok=True)
        raise
    if writer is None:
        return None
    writer.close()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return DataFile(path.name, count, path.stat().st_size)
