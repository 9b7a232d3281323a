"""Copies a table: tasks write files of a suitable size inside the snapshot; the driver commits them once.

Files are named by the attempt and their first range. No reader sees them before the commit, which replaces all rows at
once: until then readers see the old rows, never an empty table. In the mode `soft_delete`, tasks also go through the
files before the copy, because the source no longer has the deleted rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.compaction import keys_of
from penstock.changes.segment import UNREPRESENTABLE, split_texts
from penstock.copy.plan import bytes_of
from penstock.destinations.base import CopyRange, RangeReader
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import COPY_PREFIX, LiveFile, create_data_file, dead_rows, read_rows
from penstock.destinations.delta.index import build_index, find_rows, index_folder
from penstock.destinations.delta.layout import DELETED_AT, Mode, TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.write import copied_rows, lake_rows, write_rows
from penstock.destinations.refusals import unexpected
from penstock.destinations.row_groups import group_batches
from penstock.lsn import Lsn

FILE_BYTES = 128 << 20
"""Size of the source's part that one file holds."""
FILE_RANGES = 32
"""Limit for nearly empty partitions in one file: each costs a connection to the source."""
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """Where the ranges of a copy go."""

    table: str
    storage: Storage
    layout: TableLayout
    """With a column for texts."""
    attempt: str
    position: Lsn


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file that a task wrote."""

    add: Add
    has_texts: bool
    row_count: int


@dataclass(frozen=True, slots=True)
class FormerFile:
    """A file from before a copy, which may have deleted rows."""

    file: LiveFile
    layout: TableLayout
    copied: tuple[LiveFile, ...]
    """All files of the copy."""
    moment: int
    """When rows that the copy lacks were noticed to be gone: microseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class RangeGroup:
    """Consecutive ranges that one task writes into one file."""

    ranges: tuple[CopyRange, ...]
    estimated_bytes: int
    """The scheduler of copies reads it."""


def group_ranges(ranges: Sequence[CopyRange], file_bytes: int | None = None) -> list[RangeGroup]:
    """Group consecutive ranges into files of a suitable size."""
    file_bytes = FILE_BYTES if file_bytes is None else file_bytes
    groups: list[list[CopyRange]] = []
    size = 0
    for part in ranges:
        if not groups or size + bytes_of([part]) > file_bytes or len(groups[-1]) == FILE_RANGES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += bytes_of([part])
    return [RangeGroup(tuple(group), bytes_of(group)) for group in groups]


def write_ranges(reader: RangeReader, target: CopyTarget, group: RangeGroup) -> list[CopiedFile]:
    """Write some ranges: usually one file, more if only some rows have texts, none if there are no rows."""
    try:
        return write_parts(reader, target, group.ranges, group.ranges[0].index)
    except Exception as error:
        raise unexpected(target.table, error) from None


def write_parts(
    reader: RangeReader, target: CopyTarget, parts: Iterable[CopyRange], first: int, *, only: pa.Array | None = None
) -> list[CopiedFile]:
    """Write parts of a table into files that `first` names; with `only`, the rows that have one of these keys."""
    chunks = (_chunk(batches, target) for part in parts for batches in _read(reader, part))
    if only is not None:
        chunks = (_select(chunk, target.layout, only) for chunk in chunks)
    runs = groupby((chunk for chunk in chunks if chunk.num_rows), key=lambda chunk: chunk.schema)
    return [_write(schema, run, target, first) for schema, run in runs]


def _select(rows: pa.Table, layout: TableLayout, keys: pa.Array) -> pa.Table:
    found = keys_of(rows, split_texts(rows), layout.key)
    return rows.filter(pc.is_in(found, value_set=keys))


def keep_deleted(target: CopyTarget, former: FormerFile) -> CopiedFile | None:
    """Write the rows of a file that a copy lacks, as deleted rows; None if there are none.

    Without a key, or with a key that the file does not have, only rows that were deleted before are kept.
    """
    try:
        storage, layout = target.storage, target.layout
        rows = read_rows(storage, former.file.file, former.layout.schema, former.layout.schema.names)
        rows = rows.filter(pa.array(dead_rows(storage, former.file).alive(rows.num_rows))).combine_chunks()
        cells, texts = _converted(rows, former.layout, layout)
        keys = None
        if layout.key and {column.attnum for column in layout.source.key} <= former.layout.names.keys():
            keys = keys_of(cells, texts, layout.key)
            sought = keys.unique()
            matches = find_rows(storage, layout, former.copied, sought)
            found = sought.take(pa.array(np.concatenate([[], *(match.keys for match in matches)]).astype(np.int64)))
            kept = pc.invert(pc.is_in(keys, value_set=found))
        else:
            kept = rows.column(DELETED_AT).is_valid()
        moment = pa.scalar(former.moment, pa.timestamp("us", "UTC"))
        cells = cells.append_column(DELETED_AT, pc.fill_null(rows.column(DELETED_AT), moment)).filter(kept)
        if not cells.num_rows:
            return None
        texts = {name: column.filter(_array(kept)) for name, column in texts.items()}
        written = lake_rows(cells, texts, layout)
        keys = None if keys is None else keys.filter(_array(kept))
        add = write_rows(storage, layout, written, keys)
        return CopiedFile(add, UNREPRESENTABLE in written.column_names, written.num_rows)
    except Exception as error:
        raise unexpected(target.table, error) from None


def _converted(rows: pa.Table, before: TableLayout, layout: TableLayout) -> tuple[pa.Table, dict[str, pa.Array]]:
    """Return rows of another layout with the source's columns of this one; a value that its type cannot hold is a text.

    Columns are followed by their numbers; those that did not exist are NULL. Columns that the source no longer has are
    followed by their names, if they stay.
    """
    known = split_texts(rows)
    texts: dict[str, pa.Array] = {}
    columns: dict[str, pa.Array] = {}
    for column in layout.source.columns:
        name, former = layout.names[column.attnum], before.names.get(column.attnum)
        wanted = layout.schema.field(name).type
        columns[name] = pa.nulls(rows.num_rows, wanted)
        if former is None:
            continue
        cells = _array(rows.column(former))
        try:
            columns[name] = cells.cast(wanted)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            with suppress(pa.ArrowNotImplementedError):
                texts[name] = cells.cast(pa.string())
        if former in known:
            texts[name] = pc.coalesce(known[former], texts[name]) if name in texts else known[former]
    kept = (field.name for field in layout.schema if field.name in rows.column_names)
    own = {*columns, DELETED_AT, UNREPRESENTABLE}
    return pa.table(columns | {name: _array(rows.column(name)) for name in kept if name not in own}), texts


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _read(reader: RangeReader, part: CopyRange) -> Iterator[list[pa.RecordBatch]]:
    return group_batches(reader.read(part), _CHUNK_BYTES)


def _chunk(batches: list[pa.RecordBatch], target: CopyTarget) -> pa.Table:
    """Return rows of a copy with the columns of the lake."""
    rows = pa.Table.from_batches(batches).combine_chunks()
    renames = target.layout.renames
    texts = {renames[name]: column for name, column in split_texts(rows).items()}
    rows = rows.select([name for name in rows.column_names if name in renames])
    rows = rows.rename_columns([renames[name] for name in rows.column_names])
    if target.layout.mode is Mode.HISTORY:
        rows = copied_rows(rows, target.position, target.layout)
    return lake_rows(rows, texts, target.layout)


def _write(schema: pa.Schema, chunks: Iterator[pa.Table], target: CopyTarget, first: int) -> CopiedFile:
    layout = target.layout
    with_index = bool(layout.key) and layout.mode is not Mode.HISTORY
    keys: list[Any] = []
    with create_data_file(target.storage, schema, prefix=f"{COPY_PREFIX}{target.attempt[:8]}-{first:06d}") as file:
        for chunk in chunks:
            file.write(chunk)
            if with_index:
                keys.append(keys_of(chunk, split_texts(chunk), layout.key))
    if with_index:
        index_folder(target.storage, layout).write(file.name, build_index(pa.concat_arrays(keys)))
    return CopiedFile(file.action(), UNREPRESENTABLE in schema.names, file.rows)
