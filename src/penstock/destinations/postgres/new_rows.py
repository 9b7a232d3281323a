"""The rows that a table has after a batch, for destinations that update rows in place by SQL.

Values that the server omitted stay where they are: each new row says which of its values those are, and which key its
row had before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.columns import ChangeColumns
from penstock.changes.compaction import LIVE, NetChanges, touched_keys
from penstock.changes.segment import Texts, field_names
from penstock.destinations.postgres.encoding import Cells, cells_of
from penstock.schema import TableSchema

_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows that a table has after the changes."""

    schema: TableSchema
    cells: list[Cells]
    """Omitted values are NULL."""
    count: int
    deleted_at: pa.Array | None
    omitted: NDArray[np.bool_] | None
    """A row of flags for each new row, one per column; None if nothing is omitted."""
    previous: NDArray[np.int64]
    """For each new row, the index of the touched key whose previous row has the omitted values; -1 for none."""
    own: NDArray[np.int64]
    """For each new row, the index of its own key."""
    unknown: NDArray[np.bool_]
    """The new rows with values that are neither in the changes nor in the table."""

    @classmethod
    def of(cls, net: NetChanges, schema: TableSchema) -> NewRows:
        """Return the new rows of a net effect."""
        if net.origins:
            # A deleted row with unknown values never existed.
            lost = np.logical_or.reduce([found == net.unknown for found in net.origins.values()])
            if net.gone_at is not None:
                net = net.without(np.flatnonzero(lost & (net.gone_at != LIVE)))
        count = len(net.images)
        names = field_names(schema)
        omitted: NDArray[np.bool_] | None = None
        previous = np.full(count, -1, np.int64)
        if any((found >= net.table.num_rows).any() for found in net.origins.values()):
            omitted = np.zeros((count, len(names)), np.bool_)
            for number, name in enumerate(names):
                if name in net.origins:
                    found = net.origins[name]
                    omitted[:, number] = found >= net.table.num_rows
                    previous = np.maximum(previous, np.where(omitted[:, number], found - net.table.num_rows, -1))
        if net.origins:
            selected = net.select(np.arange(count))
            table, texts = selected.table, selected.texts
        else:
            table, texts = net.rows()
        times = None
        if net.gone_at is not None:
            times = pa.array(net.gone_at, pa.int64(), mask=net.gone_at == LIVE).cast(_TIME)
        own = np.full(count, -1, np.int64) if net.keys is None else net.keys
        unknown = previous == len(net.touched)
        return cls(schema, cells_of(table, texts, schema), count, times, omitted, previous, own, unknown)

    def take(self, numbers: NDArray[np.int64]) -> NewRows:
        """Return some of the rows."""
        index = pa.array(numbers)
        return replace(
            self,
            cells=[each.take(index) for each in self.cells],
            count=len(numbers),
            deleted_at=None if self.deleted_at is None else self.deleted_at.take(index),
            omitted=None if self.omitted is None else self.omitted[numbers],
            previous=self.previous[numbers],
            own=self.own[numbers],
            unknown=self.unknown[numbers],
        )

    def with_keys(self, keys: Sequence[Cells]) -> NewRows:
        """Return the rows with the cells of their keys, which a deleted row takes from the row that it was."""
        if self.omitted is None:
            return self
        places = {column.attnum: number for number, column in enumerate(self.schema.columns)}
        cells, omitted = list(self.cells), self.omitted.copy()
        for column, key in zip(self.schema.key, keys, strict=True):
            place = places[column.attnum]
            cells[place] = Cells(pc.cast(key.array, cells[place].array.type), key.type, key.texts)
            omitted[:, place] = False
        return replace(self, cells=cells, omitted=omitted)


def key_cells(
    changes: ChangeColumns, net: NetChanges, schema: TableSchema, key: Sequence[str]
) -> tuple[pa.Table, Texts]:
    """Return the cells of the touched keys, in the order of `net.touched`."""
    if pa.types.is_integer(net.touched.type):
        return pa.table({key[0]: net.touched}), {}
    _, cells, texts = touched_keys(changes, key)
    return cells, texts


def take_keys(keys: tuple[pa.Table, Texts], schema: TableSchema, at: NDArray[np.int64]) -> list[Cells]:
    """Return the cells of some keys; NULL for a negative index."""
    table, texts = keys
    index = pa.array(np.maximum(at, 0), mask=at < 0)
    types = dict(zip(field_names(schema), (column.type for column in schema.columns), strict=True))
    found: list[Cells] = []
    for name in table.column_names:
        column = table.column(name).take(index).combine_chunks()
        array = column if isinstance(column, pa.Array) else pa.concat_arrays(column.chunks)
        text = texts.get(name)
        found.append(Cells(array, types[name], None if text is None else text.take(index)))
    return found
