"""Columns in Avro's binary encoding, a fragment for each cell, encoded by columns: nothing here loops over rows.

A cell is a union: NULL, the value, and for types whose values may not fit or be omitted, text. The types have the names
that Debezium gives them in Avro.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.destinations.kafka.json_cells import is_bytes, iso_times, plain_decimals
from penstock.destinations.postgres.encoding import Cells
from penstock.schema import PostgresType, resolve_domain
from penstock.values.cells import from_bytes, layout

BYTES = pa.large_binary()
_TEXT = pa.large_string()
_NULL, _VALUE, _AS_TEXT = (pa.scalar(each, BYTES) for each in (b"\x00", b"\x02", b"\x04"))
_EMPTY = pa.scalar(b"", BYTES)
_MOST_BYTES = 10
"""Of a number in Avro's variable-length encoding."""


def union_type(kind: pa.DataType, type_: PostgresType | None) -> list[Any]:
    """Return the Avro type of a column."""
    value, has_text = _value_type(kind, type_)
    return ["null", value, "string"] if has_text else ["null", value]


def avro_cells(cells: Cells, unavailable: tuple[NDArray[np.bool_], str] | None = None) -> pa.Array:
    """Return a column in Avro; `unavailable` says which values the server omitted, and what stands for them."""
    type_ = None if cells.type is None else resolve_domain(cells.type, -1)[0]
    _, has_text = _value_type(cells.array.type, type_)
    texts = None if cells.texts is None else pc.cast(cells.texts, _TEXT)
    if unavailable is not None:
        flags, placeholder = unavailable
        known = pa.nulls(len(cells.array), _TEXT) if texts is None else texts
        texts = pc.if_else(pa.array(flags), pa.scalar(placeholder, _TEXT), known)
    values = join(_VALUE, _payload(cells.array, type_))
    if texts is not None:
        values = pc.coalesce(join(_AS_TEXT if has_text else _VALUE, text(texts)), values)
    return pc.fill_null(values, _NULL)


def text(array: pa.Array) -> pa.Array:
    """Return text or bytes in Avro; NULL stays NULL."""
    array = pc.cast(pc.cast(array, _TEXT) if pa.types.is_string(array.type) else array, BYTES)
    sizes = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
    return join(numbers(sizes.astype(np.int64)), array)


def numbers(values: NDArray[np.int64]) -> pa.Array:
    """Return whole numbers in Avro: seven bits in a byte, small numbers first."""
    folded = ((values << 1) ^ (values >> 63)).view(np.uint64)
    sizes = np.ones(len(values), np.int64)
    for count in range(1, _MOST_BYTES):
        sizes += folded >= np.uint64(1 << (7 * count))
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    for count in range(int(sizes.max(initial=0))):
        has = sizes > count
        byte = (folded[has] >> np.uint64(7 * count)).astype(np.uint8) & np.uint8(0x7F)
        data[offsets[:-1][has] + count] = byte | ((sizes[has] > count + 1).astype(np.uint8) << np.uint8(7))
    return pc.cast(from_bytes(offsets, data).view(BYTES), BYTES)


def join(*parts: pa.Array | pa.Scalar) -> pa.Array:
    """Return the parts of each row one after the other; NULL if one of them is."""
    return pc.binary_join_element_wise(*parts, _EMPTY)


def _value_type(kind: pa.DataType, type_: PostgresType | None) -> tuple[Any, bool]:
    """Return the Avro type of values, and whether a cell may be text instead."""
    if pa.types.is_list(kind):
        element = None if type_ is None or type_.element is None else resolve_domain(type_.element, -1)[0]
        return {"type": "array", "items": union_type(kind.value_type, element)}, True
    if pa.types.is_boolean(kind):
        return "boolean", False
    if pa.types.is_integer(kind):
        return ("long" if kind.bit_width == 64 else "int"), False
    if pa.types.is_floating(kind):
        return ("double" if kind.bit_width == 64 else "float"), False
    if pa.types.is_date(kind):
        return _named("int", "Date"), True
    if pa.types.is_time(kind):
        return _named("long", "MicroTime"), True
    if pa.types.is_timestamp(kind):
        return (
            (_named("long", "MicroTimestamp"), True) if kind.tz is None else (_named("string", "ZonedTimestamp"), False)
        )
    if pa.types.is_binary(kind) and type_ is not None and type_.is_builtin and type_.name == "bytea":
        return "bytes", True
    return "string", False


def _named(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "connect.name": f"io.debezium.time.{name}"}


def _payload(array: pa.Array, type_: PostgresType | None) -> pa.Array:
    """Return values without the number of their branch; NULL stays NULL."""
    kind = array.type
    if pa.types.is_list(kind):
        return _lists(array, type_)
    if pa.types.is_boolean(kind):
        return pc.if_else(array, pa.scalar(b"\x01", BYTES), pa.scalar(b"\x00", BYTES))
    if pa.types.is_floating(kind):
        return _fixed(array)
    if pa.types.is_integer(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return _numbers(array)
    if pa.types.is_timestamp(kind):
        return _numbers(array) if kind.tz is None else text(iso_times(array))
    if pa.types.is_decimal(kind):
        return text(plain_decimals(array))
    return text(array) if is_bytes(array, type_) else text(pc.cast(array, _TEXT))


def _numbers(array: pa.Array) -> pa.Array:
    if pa.types.is_date(array.type):
        array = pc.cast(array, pa.int32())
    whole = pc.cast(array, pa.int64())
    return _where_valid(whole, numbers(pc.fill_null(whole, 0).to_numpy(zero_copy_only=False)))


def _fixed(array: pa.Array) -> pa.Array:
    width = array.type.bit_width // 8
    values = np.ascontiguousarray(pc.fill_null(array, 0).to_numpy(zero_copy_only=False))
    data = values.view(np.uint8)
    encoded = from_bytes(np.arange(len(array) + 1, dtype=np.int64) * width, data)
    return _where_valid(array, pc.cast(encoded.view(BYTES), BYTES))


def _lists(array: pa.Array, type_: PostgresType | None) -> pa.Array:
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    element = None if type_ is None else type_.element
    items = avro_cells(Cells(array.flatten(), element))
    borders = np.zeros(len(array) + 1, np.int64)
    np.cumsum(counts, out=borders[1:])
    joined = _joined(items, borders)
    end = pa.scalar(b"\x00", BYTES)
    whole = pc.if_else(pa.array(counts > 0), join(numbers(counts), joined, end), end)
    return _where_valid(array, whole)


def _joined(items: pa.Array, borders: NDArray[np.int64]) -> pa.Array:
    """Return the items of each list one after the other, which is how Arrow stores them."""
    offsets, data = layout(items)
    return pc.cast(from_bytes(np.ascontiguousarray(offsets[borders]), data).view(BYTES), BYTES)


def _where_valid(array: pa.Array, encoded: pa.Array) -> pa.Array:
    return pc.if_else(array.is_valid(), encoded, pa.scalar(None, BYTES)) if array.null_count else encoded
