"""Arrow data as Spark data frames: the names of types, a frame over segments, and a frame whose partitions read ranges.

Nothing here imports Spark: the caller passes a session in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from penstock.changes.segment import COMMIT_LSN
from penstock.lsn import Lsn, are_in
from penstock.values.datetimes import holds_times, print_times, times_as_text

_NAMES: dict[pa.DataType, str] = {
    pa.bool_(): "boolean",
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "int",
    pa.int64(): "bigint",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "binary",
    pa.large_binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp_ntz",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.time64("us"): "time(6)",
    pa.time64("ns"): "time(6)",
}


def spark_type_name(arrow_type: pa.DataType) -> str:
    """The Spark SQL type that holds the same values. Raises `TypeError` for types that no codec produces."""
    if arrow_type in _NAMES:
        return _NAMES[arrow_type]
    if pa.types.is_decimal128(arrow_type):
        return f"decimal({arrow_type.precision},{arrow_type.scale})"
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return f"array<{spark_type_name(arrow_type.value_type)}>"
    if pa.types.is_map(arrow_type):
        return f"map<{spark_type_name(arrow_type.key_type)},{spark_type_name(arrow_type.item_type)}>"
    if pa.types.is_struct(arrow_type):
        return f"struct<{','.join(_field(field, ':') for field in arrow_type)}>"
    raise TypeError(f"Spark has no type for {arrow_type}")


def spark_columns(schema: pa.Schema) -> str:
    """A schema in Spark SQL's notation: columns with their types."""
    return ", ".join(_field(field, " ") for field in schema)


def has_time_type(version: str) -> bool:
    """True if this Spark has a type for times of day: from 4.1 on. On 4.0 they are text in data frames."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (4, 1)


def is_local(master: str | None) -> bool:
    """True if Spark runs tasks on this machine, in the driver's JVM."""
    return master is not None and (master == "local" or master.startswith("local["))


def can_read_files(session: Any, schema: pa.Schema) -> bool:
    """True if Spark's JVM reads segments with these columns; 4.0 rejects a Parquet column of times."""
    return has_time_type(session.version) or not any(map(holds_times, schema.types))


def frame_of_files(session: Any, columns: str, paths: Sequence[str], after: Lsn | None, until: Lsn | None) -> Any:
    """The rows of segments between two boundaries, as a data frame that Spark's JVM reads.

    A column that a file does not have is NULL there.
    """
    frame = session.read.schema(columns).parquet(*paths)
    commits = frame[COMMIT_LSN]
    if after is not None:
        frame = frame.where(~are_in(commits, after))
    if until is not None:
        frame = frame.where(are_in(commits, until))
    return frame


def _field(field: pa.Field, separator: str) -> str:
    quoted = field.name.replace("`", "``")
    return f"`{quoted}`{separator}{spark_type_name(field.type)}"


_Item = TypeVar("_Item")
_Exchange = Callable[[pa.RecordBatch], pa.RecordBatch]


def exchange_with(version: str, schema: pa.Schema) -> tuple[pa.Schema, _Exchange]:
    """The columns of a data frame in this version of Spark, and what brings batches into the types that it accepts."""
    if has_time_type(version):
        return schema, exchange_batch
    return pa.schema([field.with_type(times_as_text(field.type)) for field in schema]), _print_times


def exchange_type(arrow_type: pa.DataType) -> pa.DataType:
    """The Arrow type in which Spark accepts values from Python: times in nanoseconds, other types unchanged."""
    if pa.types.is_time64(arrow_type):
        return pa.time64("ns")
    if pa.types.is_list(arrow_type):
        return pa.list_(exchange_type(arrow_type.value_type))
    if pa.types.is_struct(arrow_type):
        return pa.struct([field.with_type(exchange_type(field.type)) for field in arrow_type])
    return arrow_type


def exchange_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch in the types that Spark accepts; the same object if it already has them."""
    wanted = pa.schema([pa.field(field.name, exchange_type(field.type)) for field in batch.schema])
    return batch if wanted.types == batch.schema.types else batch.cast(wanted)


def frame_of(
    session: Any,
    schema: pa.Schema,
    items: Sequence[_Item],
    read: Callable[[_Item], Iterable[pa.RecordBatch]],
    *,
    partitions: int | None = None,
) -> Any:
    """A data frame with the rows that `read` returns for all items, read where and when the frame is computed.

    Times of day are text if this Spark has no type for them. `read` and the items pickle. By default one core is left
    to others, whatever the number of items: the items are dealt out to that many partitions.
    """
    shown, exchange = exchange_with(session.version, schema)
    columns = spark_columns(shown)
    count = partitions or max(1, session.sparkContext.defaultParallelism - 1)
    shares = [list(items[number::count]) for number in range(min(count, len(items)))] or [[]]

    def read_shares(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for item in shares[number]:
                    yield from map(exchange, read(item))

    return session.range(0, len(shares), 1, len(shares)).mapInArrow(read_shares, columns)


def _print_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([print_times(column) for column in batch.columns], names=batch.schema.names)
