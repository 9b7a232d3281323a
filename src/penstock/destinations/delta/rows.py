"""Reading what is in the lake already: some rows of a data file, some columns of them, and which rows are dead.

A worker process lives through many batches, so vectors that it has read or written stay at hand; they never change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from penstock.changes.compaction import keys_of
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE
from penstock.changes.texts import split_texts
from penstock.destinations.delta.actions import Add, VectorDescriptor
from penstock.destinations.delta.schema import fit
from penstock.destinations.delta.storage import Storage
from penstock.destinations.delta.vectors import Vector, read_vector

_REMEMBERED_ROWS = 8_000_000
"""Dead rows in vectors that are kept at hand; two bytes each, mostly less."""


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of the table, as a task needs to know it."""

    path: str
    """As the log has it."""
    file: str
    """Below the table's folder."""
    vector: VectorDescriptor | None

    @classmethod
    def of(cls, add: Add) -> LiveFile:
        return cls(add.path, add.file, add.vector)


def read_rows(
    storage: Storage, file: str, schema: pa.Schema, columns: Sequence[str], rows: NDArray[np.int64] | None = None
) -> pa.Table:
    """Columns of some rows of a file, dead or not, by ascending row number; of all of them without `rows`.

    Only the row groups that have such rows are read. A column that the file does not have is NULL.
    """
    wanted = pa.schema([schema.field(name) for name in columns])
    with storage.open(file) as source:
        parquet = pq.ParquetFile(source)
        present = [name for name in columns if name in parquet.schema_arrow.names]
        # Without any column there would be no rows to count.
        present = present or parquet.schema_arrow.names[:1]
        if rows is None:
            return fit(parquet.read(columns=present), wanted)
        counts = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
        starts = np.cumsum([0, *counts])
        groups = np.searchsorted(starts, rows, "right") - 1
        parts = [
            parquet.read_row_group(int(group), columns=present).take(pa.array(rows[groups == group] - starts[group]))
            for group in np.unique(groups)
        ]
    if not parts:
        return wanted.empty_table()
    return fit(pa.concat_tables(parts), wanted)


def read_keys(
    storage: Storage, file: str, schema: pa.Schema, columns: Sequence[str], rows: NDArray[np.int64] | None = None
) -> pa.Array:
    """The keys of rows, made of these columns."""
    wanted = schema if UNREPRESENTABLE in schema.names else schema.append(_TEXTS)
    table = read_rows(storage, file, wanted, [*columns, UNREPRESENTABLE], rows).combine_chunks()
    return keys_of(table, split_texts(table), columns)


def dead_rows(storage: Storage, file: LiveFile) -> Vector:
    """The rows of a file that are no longer part of the table."""
    if file.vector is None:
        return Vector.EMPTY
    known = _vectors.get(storage.url, file.vector)
    if known is None:
        known = read_vector(storage, file.vector)
        _vectors.put(storage.url, file.vector, known)
    return known


def remember(storage: Storage, descriptor: VectorDescriptor, vector: Vector) -> None:
    """Keep a vector that was just written at hand: the next batch most likely needs it."""
    _vectors.put(storage.url, descriptor, vector)


class _Vectors:
    """The vectors that were used last."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], Vector] = OrderedDict()
        self._rows = 0

    def get(self, url: str, descriptor: VectorDescriptor) -> Vector | None:
        found = self._known.get((url, descriptor.unique_id))
        if found is not None:
            self._known.move_to_end((url, descriptor.unique_id))
        return found

    def put(self, url: str, descriptor: VectorDescriptor, vector: Vector) -> None:
        self._known[url, descriptor.unique_id] = vector
        self._rows += len(vector)
        while self._rows > _REMEMBERED_ROWS and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._rows -= len(forgotten)


_vectors = _Vectors()
_TEXTS = pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)
