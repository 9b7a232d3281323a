"""Arrow data as Spark's: a data frame whose partitions read ranges.

No import of Spark: a session that is passed in does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa

from penstock.changes.frames import spark_columns

_Item = TypeVar("_Item")


def exchange_type(arrow_type: pa.DataType) -> pa.DataType:
    """The Arrow type in which Spark takes values from Python: times in nanoseconds, everything else as it is."""
    if pa.types.is_time64(arrow_type):
        return pa.time64("ns")
    if pa.types.is_list(arrow_type):
        return pa.list_(exchange_type(arrow_type.value_type))
    return arrow_type


def exchange_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch in the types in which Spark takes it; the same object if it already is."""
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
    """A data frame with the rows that `read` gives for all items, read where and when the frame is computed.

    `read` and the items pickle. By default one core is left to others, whatever the number of items: the items are
    dealt out to that many partitions.
    """
    count = partitions or max(1, session.sparkContext.defaultParallelism - 1)
    shares = [list(items[number::count]) for number in range(min(count, len(items)))] or [[]]

    def read_shares(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                for item in shares[number]:
                    yield from map(exchange_batch, read(item))

    return session.range(0, len(shares), 1, len(shares)).mapInArrow(read_shares, spark_columns(schema))
