"""Rows as the text of COPY, column at a time: Arrow columns become what the server reads for each type.

Every type is sent as text, because the server then reads each value exactly as it once wrote it, also those that Arrow
cannot hold (`infinity`, years before Christ, arrays with bounds), whose texts are kept beside the columns.

Nothing here loops over rows: Arrow prints, escapes and joins whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.segment import Texts, field_names
from penstock.schema import PostgresType, TableSchema, resolve_domain
from penstock.values.cells import from_bytes, large_text, layout

PIECE_BYTES = 8 << 20
"""About how much text is in memory at once."""
_ESCAPES = (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
_TEXT = pa.large_string()
_PLAIN = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean)
"""Types whose text needs neither quotes nor escapes."""
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)


@dataclass(frozen=True, slots=True)
class Cells:
    """A column to send."""

    array: pa.Array
    type: PostgresType | None = None
    """The type of the source's column; None for a column of Penstock's own."""
    texts: pa.Array | None = None
    """The texts of cells that `array` cannot hold, NULL elsewhere."""

    def take(self, index: pa.Array) -> Cells:
        """Return the cells at some places; NULL where the index is NULL."""
        return Cells(self.array.take(index), self.type, None if self.texts is None else self.texts.take(index))


def cells_of(rows: pa.Table, texts: Texts, schema: TableSchema) -> list[Cells]:
    """Return the columns of rows that are named as in segments of `schema`."""
    return [
        Cells(_array(rows.column(name)), column.type, texts.get(name))
        for name, column in zip(field_names(schema), schema.columns, strict=True)
    ]


def copy_text(columns: Sequence[Cells], count: int) -> Iterator[memoryview]:
    """Yield the text of `count` rows, in pieces of whole rows."""
    size = sum(each.array.nbytes + (0 if each.texts is None else each.texts.nbytes) for each in columns)
    step = max(1, count * PIECE_BYTES // max(size, 1))
    for start in range(0, count, step):
        length = min(step, count - start)
        yield _joined([_escaped(_slice(each, start, length)) for each in columns], length)


def _joined(columns: list[pa.Array], count: int) -> memoryview:
    if not columns:
        return memoryview(b"\n" * count)
    ended = pc.binary_join_element_wise(
        columns[-1], large_text(""), large_text("\n"), null_handling="replace", null_replacement="\\N"
    )
    lines = pc.binary_join_element_wise(
        *columns[:-1], ended, large_text("\t"), null_handling="replace", null_replacement="\\N"
    )
    return layout(lines)[1].data


def _slice(cells: Cells, start: int, length: int) -> Cells:
    texts = None if cells.texts is None else cells.texts.slice(start, length)
    return Cells(cells.array.slice(start, length), cells.type, texts)


def _escaped(cells: Cells) -> pa.Array:
    """Return the cells as fields of COPY, NULL for NULL."""
    text = printed(cells)
    if cells.texts is None and any(is_plain(cells.array.type) for is_plain in _PLAIN):
        return text
    _, data = layout(text)
    for character, escape in _ESCAPES:
        if (data == ord(character)).any():
            text = pc.replace_substring(text, character, escape)
    return text


def printed(cells: Cells) -> pa.Array:
    """Return the cells as text that the server reads as their type."""
    type_ = None if cells.type is None else resolve_domain(cells.type, -1)[0]
    text = _print(cells.array, type_)
    return text if cells.texts is None else pc.coalesce(pc.cast(cells.texts, _TEXT), text)


def _print(array: pa.Array, type_: PostgresType | None) -> pa.Array:
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _print_lists(array, None if type_ is None else type_.element)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        array = pc.cast(array, pa.large_binary())
        # The values of a type that Penstock does not know may be the bytes of their text.
        is_bytea = type_ is None or (type_.is_builtin and type_.name == "bytea")
        return _hex(array) if is_bytea else pc.cast(array, _TEXT)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # The cast prints a Z for UTC. The session's time zone is UTC, too.
        return pc.cast(pc.cast(array, pa.timestamp("us")), _TEXT)
    return pc.cast(array, _TEXT)


def _hex(array: pa.Array) -> pa.Array:
    """Return bytes as `\\x` and two digits for each."""
    offsets, data = layout(array)
    nulls = None if not array.null_count else array.is_null().to_numpy(zero_copy_only=False)
    digits = from_bytes(offsets * 2, _HEX[data].view(np.uint8), nulls)
    return pc.binary_join_element_wise(large_text("\\x"), digits, large_text(""))


def _print_lists(array: pa.Array, element: PostgresType | None) -> pa.Array:
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    values = array.flatten()
    element = None if element is None else resolve_domain(element, -1)[0]
    text = _print(values, element)
    if not any(is_plain(values.type) for is_plain in _PLAIN):
        _, data = layout(text)
        for character in ("\\", '"'):
            if (data == ord(character)).any():
                text = pc.replace_substring(text, character, f"\\{character}")
        text = pc.binary_join_element_wise(large_text('"'), text, large_text('"'), large_text(""))
    borders: NDArray[np.int64] = np.zeros(len(array) + 1, np.int64)
    np.cumsum(counts, out=borders[1:])
    lists = pa.ListArray.from_arrays(pa.array(borders, pa.int32()), pc.fill_null(text, "NULL"))
    inside = pc.binary_join(lists, large_text("," if element is None else element.delimiter))
    whole = pc.binary_join_element_wise(large_text("{"), inside, large_text("}"), large_text(""))
    return pc.if_else(array.is_valid(), whole, pa.scalar(None, _TEXT)) if array.null_count else whole


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
