"""Data files: writing one with its statistics, reading one without its dead rows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.statistics import StatisticsCollector
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, read_vector

COMPRESSION = "snappy"
_ROW_GROUP_ROWS = 1 << 20
_BATCH_ROWS = 1 << 17


class DataFile:
    """A new file of a table, piece by piece; `create_data_file` makes one."""

    def __init__(self, name: str, schema: pa.Schema, writer: pq.ParquetWriter, statistics: StatisticsCollector) -> None:
        self.name = name
        self.schema = schema
        self.rows = 0
        self.bytes = 0
        """When it is complete."""
        self._writer = writer
        self._statistics = statistics

    def write(self, data: pa.Table) -> None:
        """Append rows, which have the file's schema; a row group of their own."""
        self._writer.write_table(data, _ROW_GROUP_ROWS)
        self._statistics.add(data)
        self.rows += data.num_rows

    def action(self, *, data_change: bool = True) -> Add:
        """The action by which a commit makes the complete file part of the table."""
        return Add(self.name, self.bytes, now_milliseconds(), data_change, self._statistics.result())


@contextmanager
def create_data_file(
    storage: Storage,
    schema: pa.Schema,
    *,
    prefix: str = "part",
    compression: str = COMPRESSION,
    statistics_columns: Sequence[str] | None = None,
) -> Iterator[DataFile]:
    """A file of a name that nobody has; it is complete and durable after the block, and absent if that fails.

    `prefix` consists of letters that need no encoding in a URL: it is what a person sees first when looking around.
    """
    name = f"{prefix}-{uuid.uuid4()}.parquet"
    with storage.create(name) as sink:
        with pq.ParquetWriter(sink, schema, compression=compression, store_schema=False) as writer:
            file = DataFile(name, schema, writer, StatisticsCollector(schema, statistics_columns))
            yield file
        file.bytes = sink.tell()


def write_data_file(
    storage: Storage,
    data: pa.Table,
    *,
    prefix: str = "part",
    compression: str = COMPRESSION,
    statistics_columns: Sequence[str] | None = None,
    data_change: bool = True,
) -> Add:
    """Write rows as a new file, durably; gives the action by which a commit makes it part of the table."""
    with create_data_file(
        storage, data.schema, prefix=prefix, compression=compression, statistics_columns=statistics_columns
    ) as file:
        file.write(data)
    return file.action(data_change=data_change)


def read_data_file(storage: Storage, add: Add, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """The live rows of a file in the types of `schema`; a column that it does not have is NULL."""
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    return pa.concat_tables([wanted.empty_table(), *iterate_data_file(storage, add, wanted)])


def iterate_data_file(
    storage: Storage, add: Add, schema: pa.Schema, vector: Vector | None = None
) -> Iterator[pa.Table]:
    """The same, some rows at a time; without the rows of `vector`, if the one of the log is at hand already."""
    dead = vector_of(storage, add) if vector is None else vector
    with storage.open(add.file) as source:
        file = pq.ParquetFile(source)
        present = [name for name in schema.names if name in file.schema_arrow.names]
        alive = pa.array(dead.alive(file.metadata.num_rows)) if len(dead) else None
        start = 0
        # Without any column there would be no rows to count.
        for batch in file.iter_batches(_BATCH_ROWS, columns=present or file.schema_arrow.names[:1]):
            data = fit(pa.Table.from_batches([batch]), schema)
            yield data if alive is None else data.filter(alive.slice(start, batch.num_rows))
            start += batch.num_rows


def vector_of(storage: Storage, add: Add) -> Vector:
    """The dead rows of a live file."""
    return Vector.EMPTY if add.vector is None else read_vector(storage, add.vector)


def now_milliseconds() -> int:
    """The time as actions have it."""
    return time.time_ns() // 1_000_000
