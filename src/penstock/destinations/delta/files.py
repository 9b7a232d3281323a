"""Data files: writes them with their statistics, and reads rows, columns or keys, with or without dead rows.

A worker process lives through many batches, so it caches the vectors that it has read or written; they never change.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.changes.compaction import keys_of
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, split_texts
from penstock.destinations.delta.actions import Add, VectorDescriptor
from penstock.destinations.delta.layout import TableLayout
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.statistics import StatisticsCollector
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, read_vector
from penstock.destinations.row_groups import worth_a_dictionary

_Value = TypeVar("_Value")

_COMPRESSION = "snappy"
COPY_PREFIX = "copy-"
"""Prefix of the names of files that a copy wrote."""
_ROW_GROUP_ROWS = 1 << 20
_WIDE_ROW_BYTES = 1 << 10
_WIDE_GROUP_BYTES = 2 << 20
"""Size of a row group of large rows, whose single cells are read again when an update omits them."""
_BATCH_ROWS = 1 << 17
_CACHED_ROWS = 8_000_000
"""Dead rows in cached vectors; at most two bytes each."""
_TEXTS = pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)


class DataFile:
    """A new file of a table, written in pieces; `create_data_file` creates it."""

    def __init__(self, name: str, schema: pa.Schema, sink: Any) -> None:
        self.name = name
        self.schema = schema
        self.rows = 0
        self.bytes = 0
        """Size of the complete file."""
        self._sink = sink
        self._writer: pq.ParquetWriter | None = None
        self._statistics = StatisticsCollector(schema)

    def write(self, data: pa.Table) -> None:
        """Append rows, which have the file's schema, as one or more row groups."""
        if self._writer is None:
            self._writer = self._open(worth_a_dictionary(data))
        self._writer.write_table(data, _row_group_rows(data))
        self._statistics.add(data)
        self.rows += data.num_rows

    def finish(self) -> None:
        """Write the end of the file."""
        writer = self._writer or self._open([])
        writer.close()
        self.bytes = self._sink.tell()

    def _open(self, dictionary: list[str]) -> pq.ParquetWriter:
        return pq.ParquetWriter(
            self._sink,
            self.schema,
            compression=_COMPRESSION,
            use_dictionary=cast("bool", dictionary),
            store_schema=False,
        )

    def action(self, *, data_change: bool = True) -> Add:
        """Return the action by which a commit makes the complete file part of the table."""
        return Add(self.name, self.bytes, now_milliseconds(), data_change, self._statistics.result())


@contextmanager
def create_data_file(
    storage: Storage,
    schema: pa.Schema,
    *,
    prefix: str = "part",
) -> Iterator[DataFile]:
    """Create a file with a new name; it is complete and durable after the block, and absent if the block fails.

    `prefix` consists of letters that need no encoding in a URL; people see it first when they list the folder.
    """
    name = f"{prefix}-{uuid.uuid4()}.parquet"
    with storage.create(name) as sink:
        file = DataFile(name, schema, sink)
        try:
            yield file
        finally:
            # An unused file, too, must be closed before its sink.
            file.finish()


def write_data_file(storage: Storage, data: pa.Table) -> Add:
    """Write rows as a new file, durably; return the action by which a commit adds it to the table."""
    with create_data_file(storage, data.schema) as file:
        file.write(data)
    return file.action()


def iterate_data_file(
    storage: Storage, add: Add | LiveFile, schema: pa.Schema, vector: Vector | None = None
) -> Iterator[pa.Table]:
    """Yield the live rows of a file in the types of `schema`; a column that it lacks is NULL.

    `vector` replaces the one that the log names.
    """
    dead = vector_of(storage, add) if vector is None else vector
    with storage.open(add.file) as source:
        file = pq.ParquetFile(source)
        present = [name for name in schema.names if name in file.schema_arrow.names]
        alive = pa.array(dead.alive(file.metadata.num_rows)) if len(dead) else None
        start = 0
        # By row group: a batch across groups of large rows could have gigabytes.
        for group in range(file.num_row_groups):
            # Without any column there would be no rows to count.
            columns = present or file.schema_arrow.names[:1]
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                data = fit(pa.Table.from_batches([batch]), schema)
                yield data if alive is None else data.filter(alive.slice(start, batch.num_rows))
                start += batch.num_rows


def _row_group_rows(data: pa.Table) -> int:
    width = data.nbytes // max(1, data.num_rows)
    return _ROW_GROUP_ROWS if width < _WIDE_ROW_BYTES else max(1, _WIDE_GROUP_BYTES // width)


def vector_of(storage: Storage, add: Add | LiveFile) -> Vector:
    """Return the dead rows of a live file."""
    return Vector.EMPTY if add.vector is None else read_vector(storage, add.vector)


def now_milliseconds() -> int:
    """Return the current time as actions store it."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of the table, as tasks need it."""

    path: str
    """As in the log."""
    file: str
    """Path below the table's folder."""
    vector: VectorDescriptor | None

    @classmethod
    def of(cls, add: Add) -> LiveFile:
        return cls(add.path, add.file, add.vector)


def read_rows(
    storage: Storage, file: str, schema: pa.Schema, columns: Sequence[str], rows: NDArray[np.int64] | None = None
) -> pa.Table:
    """Return columns of some rows of a file, dead or not, by ascending row number; of all rows if `rows` is omitted.

    Reads only the row groups that contain these rows. A column that the file lacks is NULL.
    """
    if rows is not None:
        parts = [part for _, part in iterate_rows(storage, file, schema, columns, rows)]
        wanted = pa.schema([schema.field(name) for name in columns])
        return pa.concat_tables(parts) if parts else wanted.empty_table()
    with storage.open(file) as source:
        parquet = pq.ParquetFile(source)
        wanted, present = _present(parquet, schema, columns)
        return fit(parquet.read(columns=present), wanted)


def iterate_rows(
    storage: Storage, file: str, schema: pa.Schema, columns: Sequence[str], rows: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], pa.Table]]:
    """Yield row numbers and the rows of `read_rows`, those of one row group at a time."""
    with storage.open(file) as source:
        parquet = pq.ParquetFile(source)
        wanted, present = _present(parquet, schema, columns)
        counts = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        starts = np.cumsum([0, *counts])
        groups = np.searchsorted(starts, rows, "right") - 1
        for group in np.unique(groups):
            here = rows[groups == group]
            part = parquet.read_row_group(int(group), columns=present).take(pa.array(here - starts[group]))
            yield here, fit(part, wanted)


def _present(parquet: pq.ParquetFile, schema: pa.Schema, columns: Sequence[str]) -> tuple[pa.Schema, list[str]]:
    """Return the columns as they are wanted, and those of them that a file has."""
    names = parquet.schema_arrow.names
    # Without any column there would be no rows to count.
    present = [name for name in columns if name in names] or names[:1]
    return pa.schema([schema.field(name) for name in columns]), present


def read_keys(storage: Storage, file: str, layout: TableLayout, rows: NDArray[np.int64] | None = None) -> pa.Array:
    """Return the keys by which rows are found again."""
    columns = layout.match_columns
    wanted = layout.schema if layout.has_texts else layout.schema.append(_TEXTS)
    table = read_rows(storage, file, wanted, [*columns, UNREPRESENTABLE], rows).combine_chunks()
    return keys_of(table, split_texts(table), columns, whole=not layout.key)


def dead_rows(storage: Storage, file: LiveFile) -> Vector:
    """Return the rows of a file that are no longer part of the table."""
    if file.vector is None:
        return Vector.EMPTY
    key = storage.url, file.vector.unique_id
    known = _vectors.get(key)
    if known is None:
        known = read_vector(storage, file.vector)
        _vectors.put(key, known)
    return known


def remember(storage: Storage, descriptor: VectorDescriptor, vector: Vector) -> None:
    """Cache a vector that was just written, because the next batch most likely needs it."""
    _vectors.put((storage.url, descriptor.unique_id), vector)


class RecentlyUsed(Generic[_Value]):
    """The most recently used values, up to a total weight. Thread-safe: without Spark, tasks of several tables run in
    threads."""

    def __init__(self, limit: int, weight: Callable[[_Value], int]) -> None:
        self._limit = limit
        self._weight = weight
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, ...], _Value] = OrderedDict()
        self._total = 0

    def get(self, key: tuple[str, ...]) -> _Value | None:
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def put(self, key: tuple[str, ...], value: _Value) -> None:
        with self._lock:
            before = self._known.pop(key, None)
            self._known[key] = value
            self._total += self._weight(value) - (0 if before is None else self._weight(before))
            while self._total > self._limit and len(self._known) > 1:
                _, forgotten = self._known.popitem(last=False)
                self._total -= self._weight(forgotten)

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._known.clear()
            self._total = 0


_vectors = RecentlyUsed[Vector](_CACHED_ROWS, len)
