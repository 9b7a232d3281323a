"""Columns of Postgres text as the columns of a segment: decoded, with a policy for what their types cannot hold."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.changes.segment import UNREPRESENTABLE_TYPE, SegmentColumn
from penstock.changes.texts import join_texts
from penstock.values import OutOfRange, apply_policy

TEXT = pa.large_string()
"""What is to be decoded has this type; no segment's column has."""


def settle_columns(
    columns: Sequence[SegmentColumn], cells: Sequence[pa.Array], row_count: int, policy: OutOfRange, table: str
) -> list[pa.Array]:
    """The cells in the types of segments, then `_unrepresentable`. What is no `TEXT` is a value already.

    A table without columns has rows, too.
    """
    arrays: list[pa.Array] = []
    texts: dict[str, pa.Array] = {}
    for column, array in zip(columns, cells, strict=True):
        if array.type != TEXT:
            arrays.append(array)
            continue
        settled = apply_policy(column.codec.decode(array), array, policy, table=table, column=column.column.name)
        arrays.append(settled.array)
        if settled.kept is not None:
            texts[column.field_name] = settled.kept
    maps = join_texts(texts, row_count)
    arrays.append(pa.nulls(row_count, UNREPRESENTABLE_TYPE) if maps is None else maps)
    return arrays
