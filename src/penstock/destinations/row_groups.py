"""Row groups: how many record batches they contain, and which columns get a dictionary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

_SAMPLE_ROWS = 2_000
_Batch = TypeVar("_Batch", pa.RecordBatch, pa.Table)


def group_batches(batches: Iterable[_Batch], limit: int) -> Iterator[list[_Batch]]:
    """Yield consecutive batches in groups of about `limit` bytes; never an empty group."""
    group: list[_Batch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group


def worth_a_dictionary(data: pa.Table) -> list[str]:
    """Return the columns whose values repeat; for others a dictionary costs space and a third of the writing time."""
    sample = data.slice(0, _SAMPLE_ROWS)
    return [
        field.name
        for field in data.schema
        if not pa.types.is_nested(field.type) and 2 * pc.count_distinct(sample[field.name]).as_py() <= sample.num_rows
    ]
