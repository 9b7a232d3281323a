"""Record batches in groups of a good size: for row groups of files, and bodies of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa


def group_batches(batches: Iterable[pa.RecordBatch], limit: int) -> Iterator[list[pa.RecordBatch]]:
    """Consecutive batches of about `limit` bytes together; never an empty group."""
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= limit:
            yield group
            group, size = [], 0
    if group:
        yield group
