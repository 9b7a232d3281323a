"""Data files: writing one with its statistics, reading one without its dead rows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.destinations.delta.actions import Add
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.statistics import collect_statistics
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, read_vector

_ROW_GROUP_ROWS = 1 << 20


def write_data_file(
    storage: Storage,
    data: pa.Table,
    *,
    prefix: str = "part",
    compression: str = "snappy",
    statistics_columns: Sequence[str] | None = None,
    data_change: bool = True,
) -> Add:
    """Write rows as a new file, durably; gives the action by which a commit makes it part of the table.

    `prefix` consists of letters that need no encoding in a URL: it is what a person sees first when looking around.
    """
    name = f"{prefix}-{uuid.uuid4()}.parquet"
    with storage.create(name) as sink:
        pq.write_table(data, sink, compression=compression, row_group_size=_ROW_GROUP_ROWS, store_schema=False)
        size = sink.tell()
    statistics = collect_statistics(data, statistics_columns)
    return Add(name, size, now_milliseconds(), data_change, statistics)


def read_data_file(
    storage: Storage, add: Add, schema: pa.Schema, columns: Sequence[str] | None = None, *, live_only: bool = True
) -> pa.Table:
    """The rows of a file, without the dead ones, in the types of `schema`; a column that it does not have is NULL."""
    wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
    with storage.open(add.file) as source:
        file = pq.ParquetFile(source)
        present = [name for name in wanted.names if name in file.schema_arrow.names]
        # Without any column there would be no rows to count.
        found = file.read(columns=present or file.schema_arrow.names[:1])
    data = fit(found, wanted)
    if live_only and add.vector is not None:
        data = data.filter(pa.array(read_vector(storage, add.vector).alive(data.num_rows)))
    return data


def vector_of(storage: Storage, add: Add) -> Vector:
    """The dead rows of a live file."""
    return Vector.EMPTY if add.vector is None else read_vector(storage, add.vector)


def now_milliseconds() -> int:
    """The time as actions have it."""
    return time.time_ns() // 1_000_000
