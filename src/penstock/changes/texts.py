"""Cells that their type cannot hold: the map of texts beside a row, taken apart by column and put together again.

In files a row has all its texts in one map (`penstock.changes.segment`). Where cells of one row come from several,
each text has to follow its cell: so here is an array of texts for each column that has some, NULL elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE

Texts = Mapping[str, pa.Array]
"""Column → texts of its cells; columns without any are left out."""


def split_texts(rows: pa.Table) -> Texts:
    """The texts of a table's rows, by the name that stands in the map."""
    if UNREPRESENTABLE not in rows.column_names:
        return {}
    maps: pa.Array = rows.column(UNREPRESENTABLE).combine_chunks()
    if isinstance(maps, pa.ChunkedArray):
        maps = maps.chunk(0) if maps.num_chunks else pa.nulls(0, UNREPRESENTABLE_TYPE)
    if maps.null_count == len(maps):
        return {}
    entries = pc.list_flatten(maps.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())]))))
    counts = pc.fill_null(pc.list_value_length(maps.cast(pa.list_(entries.type))), 0).to_numpy(zero_copy_only=False)
    owners = np.repeat(np.arange(len(maps)), counts)
    names, values = pc.struct_field(entries, 0), pc.struct_field(entries, 1)
    found: dict[str, pa.Array] = {}
    for name in names.unique().to_pylist():
        where = np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False))
        at = np.full(len(maps), -1, np.int64)
        at[owners[where]] = where
        found[name] = values.take(pa.array(at, mask=at < 0))
    return found


def join_texts(texts: Texts, row_count: int) -> pa.Array | None:
    """The maps of rows; None if there is no text at all."""
    present = {name: column for name, column in texts.items() if column.null_count < len(column)}
    if not present:
        return None
    wheres = [np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)) for column in present.values()]
    owners = np.concatenate(wheres)
    order = np.argsort(owners, kind="stable")
    names = pa.array(np.repeat(np.array(list(present), object), [len(where) for where in wheres]), pa.string())
    values = pa.concat_arrays([column.drop_null().cast(pa.string()) for column in present.values()])
    counts = np.bincount(owners, minlength=row_count)
    borders = np.zeros(row_count + 1, np.int32)
    np.cumsum(counts, out=borders[1:])
    # A row without texts has no map: an offset that is NULL says so.
    offsets = pa.array(borders, mask=np.append(counts == 0, False))
    taken = pa.array(order)
    return pa.MapArray.from_arrays(offsets, names.take(taken), values.take(taken))
