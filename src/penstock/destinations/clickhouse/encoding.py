"""Rows between segments and ClickHouse, column at a time.

ClickHouse has fewer values than Postgres: dates and times only of the years 1900 to 2299, and no NULL for arrays. A
value that its column cannot hold is NULL there, and its text is in `_unrepresentable`, as for values that Arrow cannot
hold; reading turns the texts of dates and times back into values. Nothing here loops over rows, except to print dates
that are centuries away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, Texts, field_names, join_texts, split_texts
from penstock.destinations.clickhouse.layout import KEY_TEXT, NULL_ARRAYS, Layout, Mode, StoredColumn, in_range
from penstock.schema import TableSchema
from penstock.values import TypeSettings, codec_for
from penstock.values.datetimes import (
    EPOCH_DAYS,
    EPOCH_MICROSECONDS,
    TimeCodec,
    date_texts,
    print_times,
    timestamp_texts,
)

_TEXT = pa.large_string()


def encode(rows: pa.Table, texts: Texts, schema: TableSchema, layout: Layout) -> dict[str, pa.Array]:
    """Return rows that are named as in segments of `schema` as columns of a table."""
    columns: dict[str, pa.Array] = {}
    kept: dict[str, pa.Array] = {}
    null_arrays: dict[str, NDArray[np.bool_]] = {}
    for column, name in zip(schema.columns, field_names(schema), strict=True):
        to = layout.of(column.attnum)
        if to is None or name not in rows.column_names:
            continue
        cells, text = _fitting(one_array(rows.column(name)), to, texts.get(name))
        if text is not None and text.null_count < len(text):
            kept[to.stored] = text
        if to.is_list:
            null_arrays[to.stored] = cells.is_null().to_numpy(zero_copy_only=False)
        columns[to.stored] = cells
    if layout.mode is Mode.MIRROR:
        # Columns that the source has dropped, and that stay: they may have a default for older rows.
        columns |= {each.stored: pa.nulls(rows.num_rows, each.arrow) for each in layout.columns if each.attnum is None}
    for each in layout.key:
        # ClickHouse takes NULL for an empty array by itself.
        if columns[each.stored].null_count and not each.is_list:
            columns[each.stored] = _filled(columns[each.stored])
    if layout.has_texts:
        # In the order of their names: rows of a table without a key are equal if their maps are.
        maps = join_texts({name: kept[name] for name in sorted(kept)}, rows.num_rows)
        columns[UNREPRESENTABLE] = pa.nulls(rows.num_rows, UNREPRESENTABLE_TYPE) if maps is None else maps
    if layout.has_lists:
        columns[NULL_ARRAYS] = name_lists(null_arrays, rows.num_rows)
    if layout.has_key_text:
        nothing = pa.repeat(pa.scalar("", pa.string()), rows.num_rows)
        stored = [each.stored for each in layout.key]
        found = [pc.fill_null(kept[name].cast(pa.string()), "") if name in kept else nothing for name in stored]
        columns[KEY_TEXT] = pc.binary_join_element_wise(*found, "\x1f") if len(found) > 1 else found[0]
    return columns


def decode(rows: pa.Table, schema: TableSchema, layout: Layout) -> tuple[pa.Table, dict[str, pa.Array]]:
    """Return rows of a table as in segments of `schema`, and the texts of cells that their types cannot hold."""
    rows = rows.combine_chunks()
    maps = rows.column(UNREPRESENTABLE).cast(UNREPRESENTABLE_TYPE) if UNREPRESENTABLE in rows.column_names else None
    texts = {} if maps is None else dict(split_texts(pa.table({UNREPRESENTABLE: maps})))
    lists = rows.column(NULL_ARRAYS).cast(pa.list_(pa.string())) if NULL_ARRAYS in rows.column_names else None
    columns: dict[str, pa.Array] = {}
    kept: dict[str, pa.Array] = {}
    for column, name in zip(schema.columns, field_names(schema), strict=True):
        of = layout.of(column.attnum)
        if of is None or of.stored not in rows.column_names:
            continue
        cells = _cells(one_array(rows.column(of.stored)), read_type(of))
        if of.is_list and lists is not None:
            cells = _with_nulls(cells, _contains(one_array(lists), of.stored))
        text = texts.get(of.stored)
        if text is not None:
            cells = _with_nulls(cells, text.is_valid().to_numpy(zero_copy_only=False))
            decoded = codec_for(column.type, column.type_modifier, TypeSettings()).decode(pc.cast(text, _TEXT))
            if pa.types.is_temporal(of.arrow) and decoded.array.type == of.arrow:
                cells = pc.coalesce(cells, decoded.array)
                text = pc.if_else(decoded.array.is_valid(), pa.scalar(None, text.type), text)
            if text.null_count < len(text):
                kept[name] = text
        columns[name] = cells
    return pa.table(columns), kept


def read_type(column: StoredColumn) -> pa.DataType:
    """Return the type of a column that `decode` returns."""
    return _TEXT if pa.types.is_string(column.arrow) else column.arrow


def selected(column: StoredColumn) -> str:
    """Return what to select, so that Arrow has the column's values."""
    return f"toString({column.stored}) as {column.stored}" if column.type == "UUID" else column.stored


def name_lists(flags: dict[str, NDArray[np.bool_]], count: int) -> pa.Array:
    """Return for each row the names of the columns whose flag is set."""
    where = np.array([flags[name] for name in flags]).reshape(len(flags), count).T
    borders = np.append(0, np.cumsum(where.sum(axis=1))).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(borders), pa.array([*flags], pa.string()).take(pa.array(where.nonzero()[1]))
    )


def versions(commits: NDArray[np.int64], ordinals: NDArray[np.int64]) -> pa.Array:
    """Return `_version` for order keys, as 128-bit numbers."""
    packed = np.empty((len(commits), 2), np.uint64)
    packed[:, 0], packed[:, 1] = ordinals + 1, commits
    return pa.Array.from_buffers(pa.binary(16), len(packed), [None, pa.py_buffer(packed)])


def order_keys(cells: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return commit positions and ordinals from `_version`."""
    packed = np.frombuffer(cells.buffers()[1] or b"", np.uint64)[2 * cells.offset : 2 * (cells.offset + len(cells))]
    packed = packed.reshape(-1, 2).astype(np.int64)
    return packed[:, 1], packed[:, 0] - 1


def literals(columns: Sequence[pa.Array]) -> pa.Array | None:
    """Return the tuples of a key as SQL; None if one of its types has no simple literal."""
    parts: list[pa.Array] = []
    for column in columns:
        kind = column.type
        if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return None
        if pa.types.is_timestamp(kind):
            column = pc.cast(column, pa.timestamp("us"))
        text = pc.cast(column, _TEXT)
        if not pa.types.is_integer(kind):
            escaped = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), "'", "\\'")
            mark = pa.scalar("'", _TEXT)
            text = pc.binary_join_element_wise(mark, escaped, mark, pa.scalar("", _TEXT))
        parts.append(text)
    joined = pc.binary_join_element_wise(*parts, pa.scalar(",", _TEXT)) if len(parts) > 1 else parts[0]
    return pc.binary_join_element_wise(pa.scalar("(", _TEXT), joined, pa.scalar(")", _TEXT), pa.scalar("", _TEXT))


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return a column as one array."""
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _fitting(cells: pa.Array, to: StoredColumn, text: pa.Array | None) -> tuple[pa.Array, pa.Array | None]:
    """Return cells that ClickHouse can hold, and the texts of the others."""
    kind = cells.type
    if pa.types.is_null(kind):
        cells, kind = pa.nulls(len(cells), to.arrow), to.arrow
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_temporal(kind.value_type) and not pa.types.is_time(kind.value_type):
            cells = pc.cast(cells, pa.list_(pa.string()))
        return print_times(cells), text
    if pa.types.is_time(kind):
        return print_times(cells), text
    if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        return cells, text
    outside = ~in_range(cells)
    if not outside.any():
        return cells, text
    at = np.flatnonzero(outside)
    numbers = pc.cast(cells, pa.int32() if pa.types.is_date(kind) else pa.int64()).take(pa.array(at)).to_numpy()
    if pa.types.is_date(kind):
        printed = date_texts(numbers - EPOCH_DAYS)
    else:
        printed = timestamp_texts(numbers - EPOCH_MICROSECONDS, zoned=kind.tz is not None)
    places = np.full(len(cells), -1, np.int64)
    places[at] = np.arange(len(at))
    added = pa.array(printed, pa.string()).take(pa.array(places, mask=places < 0))
    return _with_nulls(cells, outside), added if text is None else pc.coalesce(pc.cast(text, pa.string()), added)


def _filled(cells: pa.Array) -> pa.Array:
    """Return the cells of a key without NULL: its texts are in `_key`."""
    kind = cells.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        zero = pa.scalar(0, pa.int32() if pa.types.is_date(kind) else pa.int64()).cast(kind)
    else:
        zero = pa.scalar("0" if pa.types.is_decimal(kind) else "").cast(kind)
    return pc.fill_null(cells, zero)


def _cells(cells: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return cells as ClickHouse sends them with another type."""
    if cells.type == wanted:
        return cells
    if pa.types.is_list(wanted) or pa.types.is_large_list(wanted):
        values = _cells(cells.flatten(), wanted.value_type)
        counts = pc.fill_null(pc.list_value_length(cells), 0).to_numpy(zero_copy_only=False)
        borders = np.append(0, np.cumsum(counts)).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(borders), values).cast(wanted)
    if pa.types.is_time(wanted):
        # Arrow has no cast from text to times.
        return TimeCodec(wanted).decode(pc.cast(cells, _TEXT)).array
    if pa.types.is_temporal(wanted) and pa.types.is_binary(cells.type):
        cells = pc.cast(cells, pa.string())
    if pa.types.is_timestamp(wanted) and pa.types.is_timestamp(cells.type) and wanted.tz is None:
        return pc.cast(pc.cast(cells, pa.int64()), wanted)
    return pc.cast(cells, wanted)


def _with_nulls(cells: pa.Array, nulls: NDArray[np.bool_]) -> pa.Array:
    return pc.if_else(pa.array(~nulls), cells, pa.scalar(None, cells.type)) if nulls.any() else cells


def _contains(lists: pa.Array, name: str) -> NDArray[np.bool_]:
    """Return for each list whether it contains a text."""
    counts = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    hits = pc.equal(lists.flatten(), name).to_numpy(zero_copy_only=False)
    found = np.zeros(len(lists), np.bool_)
    found[np.repeat(np.arange(len(lists)), counts)[hits.astype(np.bool_)]] = True
    return found
