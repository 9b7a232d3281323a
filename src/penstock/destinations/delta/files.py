"""Data files: writing one with its statistics, reading one without its dead rows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.statistics import StatisticsCollector
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, read_vector
from penstock.destinations.encoding import worth_a_dictionary

COMPRESSION = "snappy"
COPY_PREFIX = "copy-"
"""Of the names of files that a copy wrote."""
_ROW_GROUP_ROWS = 1 << 20
_WIDE_ROW_BYTES = 1 << 10
_WIDE_GROUP_BYTES = 2 << 20
"""Of large rows in one row group: single cells of them are read again when an update does not send them."""
_BATCH_ROWS = 1 << 17


class DataFile:
    """A new file of a table, piece by piece; `create_data_file` makes one."""

    def __init__(
        self, name: str, schema: pa.Schema, sink: Any, compression: str, statistics: StatisticsCollector
    ) -> None:
        self.name = name
        self.schema = schema
        self.rows = 0
        self.bytes = 0
        """When it is complete."""
        self._sink = sink
        self._compression = compression
        self._writer: pq.ParquetWriter | None = None
        self._statistics = statistics

    def write(self, data: pa.Table) -> None:
        """Append rows, which have the file's schema; a row group of their own, or several."""
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
            compression=self._compression,
            use_dictionary=cast("bool", dictionary),
            store_schema=False,
        )

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
        file = DataFile(name, schema, sink, compression, StatisticsCollector(schema, statistics_columns))
        try:
            yield file
        finally:
            # Also a file that nobody will see is closed before its sink is.
            file.finish()


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


def _row_group_rows(data: pa.Table) -> int:
    width = data.nbytes // max(1, data.num_rows)
    return _ROW_GROUP_ROWS if width < _WIDE_ROW_BYTES else max(1, _WIDE_GROUP_BYTES // width)


def vector_of(storage: Storage, add: Add) -> Vector:
    """The dead rows of a live file."""
    return Vector.EMPTY if add.vector is None else read_vector(storage, add.vector)


def now_milliseconds() -> int:
    """The time as actions have it."""
    return time.time_ns() // 1_000_000
