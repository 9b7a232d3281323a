"""Record batches in groups of a good size: for row groups of files, and bodies of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import pyarrow as pa

_Batch = TypeVar("_Batch", pa.RecordBatch, pa.Table)


def group_batches(batches: Iterable[_Batch], limit: int) -> Iterator[list[_Batch]]:
    """Consecutive batches of about `limit` bytes together; never an empty group."""
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
