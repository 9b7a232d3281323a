"""Columns as JSON, a fragment for each cell, printed by columns: nothing here loops over rows.

Values look as Debezium's converter without schemas shows them: dates are days, times and timestamps microseconds,
timestamps with time zone ISO text, bytes base64. Decimals are text, so that no digit is lost. A value that its type
cannot hold (`infinity`, a year before Christ) is the source's text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.destinations.postgres.encoding import Cells
from penstock.schema import PostgresType, resolve_domain
from penstock.values.cells import from_bytes, large_text, layout, to_numpy

TEXT = pa.large_string()
_CONTROL = 0x20
_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_PADDING = ord("=")


def json_cells(cells: Cells) -> pa.Array:
    """Return a column as JSON; NULL stays NULL."""
    type_ = None if cells.type is None else resolve_domain(cells.type, -1)[0]
    printed = _print(cells.array, type_)
    return printed if cells.texts is None else pc.coalesce(quoted(pc.cast(cells.texts, TEXT)), printed)


def json_objects(names: Sequence[str], columns: Sequence[pa.Array], count: int) -> pa.Array:
    """Return `{"name": cell, …}` for each row; NULL cells are `null`."""
    if not columns:
        return pa.array(["{}"], TEXT).take(pa.array(np.zeros(count, np.int64)))
    parts: list[pa.Array | pa.Scalar] = []
    for number, (name, column) in enumerate(zip(names, columns, strict=True)):
        parts += [large_text(f"{',' if number else '{'}{json.dumps(name, ensure_ascii=False)}:"), column]
    return join(*parts, large_text("}"))


def join(*parts: pa.Array | pa.Scalar) -> pa.Array:
    """Return the parts of each row one after the other; NULL is `null`."""
    return pc.binary_join_element_wise(*parts, large_text(""), null_handling="replace", null_replacement="null")


def quoted(text: pa.Array) -> pa.Array:
    """Return text as JSON strings."""
    _, data = layout(text)
    # Backslashes come first: later escapes contain some.
    for character in ("\\", '"', *(chr(code) for code in np.unique(data[data < _CONTROL]))):
        if character < " " or (data == ord(character)).any():
            text = pc.replace_substring(text, character, json.dumps(character)[1:-1])
    return pc.binary_join_element_wise(large_text('"'), text, large_text('"'), large_text(""))


def _print(array: pa.Array, type_: PostgresType | None) -> pa.Array:
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _print_lists(array, None if type_ is None else type_.element)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.cast(array, TEXT)
    if pa.types.is_floating(kind):
        return _print_floats(array)
    if pa.types.is_decimal(kind):
        return quoted(plain_decimals(array))
    if pa.types.is_date(kind):
        return pc.cast(pc.cast(array, pa.int32()), TEXT)
    if pa.types.is_time(kind) or (pa.types.is_timestamp(kind) and kind.tz is None):
        return pc.cast(pc.cast(array, pa.int64()), TEXT)
    if pa.types.is_timestamp(kind):
        return quoted(iso_times(array))
    if is_bytes(array, type_):
        return quoted(base64_text(pc.cast(array, pa.large_binary())))
    return quoted(pc.cast(array, TEXT))


def is_bytes(array: pa.Array, type_: PostgresType | None) -> bool:
    """Return True for a column of bytes. The values of a type that Penstock does not know are the bytes of a text."""
    kind = array.type
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return is_binary and (type_ is None or (type_.is_builtin and type_.name == "bytea"))


def iso_times(array: pa.Array) -> pa.Array:
    """Return timestamps with time zone as `2026-01-31T12:00:00.000000Z`."""
    return pc.replace_substring(pc.cast(array, TEXT), " ", "T")


def plain_decimals(array: pa.Array) -> pa.Array:
    """Return decimals as digits, without an exponent."""
    text = pc.cast(array, TEXT)
    small = pc.fill_null(pc.match_substring(text, "E"), False)
    if pc.any(small).as_py():
        # Cold: Arrow writes an exponent for numbers below a millionth, and no kernel writes them otherwise.
        plain = [format(Decimal(each), "f") for each in text.filter(small).to_pylist()]
        text = pc.replace_with_mask(text, small, pa.array(plain, TEXT))
    return text


def _print_floats(array: pa.Array) -> pa.Array:
    text = pc.cast(array, TEXT)
    minus_zero = pc.equal(text, large_text("-0"))
    if pc.any(minus_zero).as_py():
        # Most parsers read -0 as an integer, which has no sign then.
        text = pc.if_else(minus_zero, large_text("-0.0"), text)
    finite = pc.fill_null(pc.is_finite(array), True)
    if pc.all(finite).as_py() is not False:
        return text
    names = pc.if_else(pc.is_nan(array), "NaN", pc.if_else(pc.greater(array, 0), "Infinity", "-Infinity"))
    return pc.if_else(finite, text, quoted(pc.cast(names, TEXT)))


def _print_lists(array: pa.Array, element: PostgresType | None) -> pa.Array:
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    element = None if element is None else resolve_domain(element, -1)[0]
    borders: NDArray[np.int64] = np.zeros(len(array) + 1, np.int64)
    np.cumsum(counts, out=borders[1:])
    lists = pa.ListArray.from_arrays(
        pa.array(borders, pa.int32()), pc.fill_null(_print(array.flatten(), element), "null")
    )
    whole = join(large_text("["), pc.binary_join(lists, large_text(",")), large_text("]"))
    return pc.if_else(array.is_valid(), whole, pa.scalar(None, TEXT)) if array.null_count else whole


def base64_text(array: pa.Array) -> pa.Array:
    """Return bytes as base64."""
    offsets, data = layout(array)
    sizes = np.diff(offsets)
    nulls = None
    if array.null_count:
        nulls = ~to_numpy(array.is_valid())
        data = data[np.repeat(~nulls, sizes)]
        sizes = np.where(nulls, 0, sizes)
    groups = (sizes + 2) // 3
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(groups, out=starts[1:])
    padded = np.zeros(int(starts[-1]) * 3, np.uint8)
    ends = np.cumsum(sizes)
    padded[np.arange(len(data)) + np.repeat(starts[:-1] * 3 - (ends - sizes), sizes)] = data
    triples = padded.reshape(-1, 3)
    first, second, third = triples[:, 0], triples[:, 1], triples[:, 2]
    digits = np.empty((len(triples), 4), np.uint8)
    digits[:, 0] = _BASE64[first >> 2]
    digits[:, 1] = _BASE64[((first & 3) << 4) | (second >> 4)]
    digits[:, 2] = _BASE64[((second & 15) << 2) | (third >> 6)]
    digits[:, 3] = _BASE64[third & 63]
    last = starts[1:] - 1
    digits[last[sizes % 3 != 0], 3] = _PADDING
    digits[last[sizes % 3 == 1], 2] = _PADDING
    return from_bytes(starts * 4, digits.reshape(-1), nulls)
