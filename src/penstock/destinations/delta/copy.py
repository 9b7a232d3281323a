"""Copies a table: tasks write files of a suitable size inside the snapshot; the driver commits them once.

Files are named by the attempt and their first range. No reader sees them before the commit, which replaces all rows at
once: until then readers see the old rows, never an empty table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa

from penstock.changes.compaction import keys_of
from penstock.changes.segment import UNREPRESENTABLE, split_texts
from penstock.copy.plan import bytes_of
from penstock.destinations.base import CopyRange, RangeReader
from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.files import COPY_PREFIX, create_data_file
from penstock.destinations.delta.index import build_index, index_folder
from penstock.destinations.delta.layout import Mode, TableLayout
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.write import copied_rows, lake_rows
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
class RangeGroup:
    """Consecutive ranges that one task writes into one file."""

    ranges: tuple[CopyRange, ...]
    estimated_bytes: int
    """The scheduler of copies reads it."""


def group_ranges(ranges: Sequence[CopyRange], file_bytes: int = FILE_BYTES) -> list[RangeGroup]:
    """Group consecutive ranges into files of a suitable size."""
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
        chunks = (_chunk(batches, target) for part in group.ranges for batches in _read(reader, part))
        runs = groupby((chunk for chunk in chunks if chunk.num_rows), key=lambda chunk: chunk.schema)
        return [_write(schema, run, target, group.ranges[0].index) for schema, run in runs]
    except Exception as error:
        raise unexpected(target.table, error) from None


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
        rows = copied_rows(rows, target.position)
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
