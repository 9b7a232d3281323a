"""In which form each column travels in binary COPY, and how a whole column of it becomes Arrow.

The result is the same as decoding the server's text with the column's codec, value for value: that is what capture
does, and a row must not depend on which way it came. Numbers, times and uuids travel in binary, since that saves the
server from formatting and us from parsing; strings are the same bytes either way; everything else is asked for as
text. Not by a cast where the type has one of its own: `inet::text` is not what the server writes for an `inet`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import SegmentColumn
from penstock.copy.calendar import EPOCH_DAYS, EPOCH_MICROSECONDS, date_texts, timestamp_texts
from penstock.errors import DecodeError
from penstock.schema import PostgresType, TypeKind, resolve_domain
from penstock.values import Codec, Decoded
from penstock.values.datetimes import DAY, FIRST_DAY, LAST_DAY
from penstock.values.text import TextCodec

PADDING = bytes(16)
"""Behind the last row, so that reading a fixed width there stays inside."""

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]


class Buffer:
    """The bytes of many rows, readable as fixed widths at any offset; ends in `PADDING`."""

    __slots__ = ("arrow", "bytes")

    def __init__(self, raw: bytes | bytearray) -> None:
        self.bytes = np.frombuffer(raw, np.uint8)
        self.arrow = pa.py_buffer(raw)

    def read(self, kind: str, at: Positions) -> NDArray[Any]:
        """Numbers of a big-endian kind, in native order."""
        dtype = np.dtype(kind)
        # One byte apart, so that indexing reads anywhere.
        view = np.ndarray((len(self.bytes) - dtype.itemsize + 1,), dtype, self.bytes, 0, (1,))
        return view[at].astype(dtype.newbyteorder("="))


@dataclass(frozen=True, slots=True)
class Cells:
    """Where the values of one column lie."""

    buffer: Buffer
    start: Positions
    end: Positions
    null: Flags | None
    """None when there is no NULL."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, slots=True)
class WireValues:
    """A decoded column, and a way to the texts of its rejected cells."""

    decoded: Decoded
    text: Callable[[], pa.LargeStringArray]
    """The server's text of the cells, at least where they are rejected."""


class WireForm(Enum):
    """How a column travels; the value is its width in bytes, with a letter that tells it from others."""

    INT2 = "2i"
    INT4 = "4i"
    INT8 = "8i"
    OID = "4u"
    FLOAT4 = "4f"
    FLOAT8 = "8f"
    BOOL = "1b"
    DATE = "4d"
    TIME = "8t"
    TIMESTAMP = "8s"
    UUID = "16x"
    BYTES = "b"
    """`bytea`."""
    STRING = "s"
    """Types whose binary form is their text."""
    JSONB = "j"
    """Text behind a version number."""
    CAST = "c"
    """Asked for as text, by the cast that every type without one of its own has."""
    OUTPUT = "o"
    """Asked for as text, by the type's own output function."""

    @property
    def width(self) -> int | None:
        """None where it varies."""
        digits = self.value.rstrip("iufbdtsxjco")
        return int(digits) if digits else None


_NUMBERS: dict[str, tuple[WireForm, pa.DataType]] = {
    "int2": (WireForm.INT2, pa.int16()),
    "int4": (WireForm.INT4, pa.int32()),
    "int8": (WireForm.INT8, pa.int64()),
    "oid": (WireForm.OID, pa.int64()),
    "xid": (WireForm.OID, pa.int64()),
    "cid": (WireForm.OID, pa.int64()),
    "float4": (WireForm.FLOAT4, pa.float32()),
    "float8": (WireForm.FLOAT8, pa.float64()),
    "bool": (WireForm.BOOL, pa.bool_()),
    "date": (WireForm.DATE, pa.date32()),
    "time": (WireForm.TIME, pa.time64("us")),
    "timestamp": (WireForm.TIMESTAMP, pa.timestamp("us")),
    "timestamptz": (WireForm.TIMESTAMP, pa.timestamp("us", "UTC")),
    "uuid": (WireForm.UUID, pa.string()),
    "bytea": (WireForm.BYTES, pa.binary()),
}
_STRINGS = frozenset({"text", "varchar", "bpchar", "name", "json"})
# Built-in types with a cast to text that is not their output function.
_OWN_CASTS = frozenset({"bool", "char", "inet", "cidr", "xml", "bpchar", "name"})


def wire_form(type_: PostgresType, codec: Codec) -> WireForm:
    """How a column of this type should travel, given what becomes of it."""
    type_, _ = resolve_domain(type_, -1)
    if type_.kind is TypeKind.ENUM:
        return WireForm.STRING
    if type_.kind is TypeKind.BASE and type_.is_builtin:
        form, arrow_type = _NUMBERS.get(type_.name, (None, None))
        # Policies can make text of what would be a number or a time.
        if form is not None and arrow_type == codec.arrow_type:
            return form
        if type_.name in _STRINGS:
            return WireForm.STRING
        if type_.name == "jsonb":
            return WireForm.JSONB
        return WireForm.OUTPUT if type_.name in _OWN_CASTS else WireForm.CAST
    element = type_.element
    if element is not None and element.kind is TypeKind.BASE and element.is_builtin:
        return WireForm.CAST
    return WireForm.OUTPUT


def select_expression(form: WireForm, identifier: str) -> str:
    """What to select, so that a column travels in this form; `identifier` is quoted."""
    if form is WireForm.CAST:
        return f"{identifier}::pg_catalog.text"
    if form is WireForm.OUTPUT:
        # format() calls the output function, and takes NULL for an empty text; num_nulls() does not look inside rows.
        return f"case when pg_catalog.num_nulls({identifier}) = 0 then pg_catalog.format('%s', {identifier}) end"
    return identifier


def decode_column(form: WireForm, cells: Cells, column: SegmentColumn, table: str) -> WireValues:
    """Decode a whole column, as its codec would have decoded the server's text."""
    match form:
        case WireForm.INT2 | WireForm.INT4 | WireForm.INT8 | WireForm.FLOAT4 | WireForm.FLOAT8 | WireForm.OID:
            return _fitting(_number(form, cells, column.codec.arrow_type))
        case WireForm.BOOL:
            flags = cells.buffer.bytes[cells.start] != 0
            return _fitting(pa.array(flags, mask=cells.null))
        case WireForm.DATE | WireForm.TIME | WireForm.TIMESTAMP:
            return _moment(form, cells, column.codec.arrow_type)
        case WireForm.UUID:
            return _fitting(_uuid(cells))
        case WireForm.BYTES:
            return _fitting(_cut(cells, pa.binary(), 0))
        case WireForm.STRING | WireForm.JSONB | WireForm.CAST | WireForm.OUTPUT:
            return _text(form, cells, column, table)


def _fitting(array: pa.Array) -> WireValues:
    return WireValues(Decoded(array, None), lambda: pa.nulls(len(array), pa.large_string()))


def _number(form: WireForm, cells: Cells, arrow_type: pa.DataType) -> pa.Array:
    kind = {"i": "i", "u": "u", "f": "f"}[form.value[-1]]
    values = cells.buffer.read(f">{kind}{form.width}", cells.start)
    if form is WireForm.OID:
        values = values.astype(np.int64)
    elif kind == "f":
        # There are many NaNs; text knows one.
        odd = np.isnan(values)
        if odd.any():
            values[odd] = np.nan
    return _from_values(values, cells.null, arrow_type)


def _from_values(values: NDArray[Any], null: Flags | None, arrow_type: pa.DataType) -> pa.Array:
    if null is None:
        return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(values)])
    values[null] = 0
    return pa.Array.from_buffers(arrow_type, len(values), [_validity(null), pa.py_buffer(values)])


def _moment(form: WireForm, cells: Cells, arrow_type: pa.DataType) -> WireValues:
    """Days or microseconds since 2000, with the ends of their type as infinities."""
    if form is WireForm.TIME:
        raw, shift, low, high = cells.buffer.read(">i8", cells.start), 0, 0, DAY - 1
    elif form is WireForm.DATE:
        raw, shift, low, high = cells.buffer.read(">i4", cells.start), EPOCH_DAYS, FIRST_DAY, LAST_DAY
    else:
        raw, shift = cells.buffer.read(">i8", cells.start), EPOCH_MICROSECONDS
        low, high = FIRST_DAY * DAY, (LAST_DAY + 1) * DAY - 1
    if cells.null is not None:
        raw[cells.null] = 0
    outside: Flags | None = None
    if len(raw) and (raw.min() < low - shift or raw.max() > high - shift):
        outside = (raw < low - shift) | (raw > high - shift)
    gone = outside if cells.null is None else cells.null if outside is None else cells.null | outside
    array = _from_values(
        np.where(outside, 0, raw) + shift if outside is not None else raw + raw.dtype.type(shift), gone, arrow_type
    )
    return WireValues(Decoded(array, outside), lambda: _moment_texts(form, raw, outside, zoned=_is_zoned(arrow_type)))


def _is_zoned(arrow_type: pa.DataType) -> bool:
    return pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None


def _moment_texts(form: WireForm, raw: NDArray[Any], wanted: Flags | None, *, zoned: bool) -> pa.LargeStringArray:
    if wanted is None:
        return pa.nulls(len(raw), pa.large_string())
    positions = np.flatnonzero(wanted)
    if form is WireForm.TIME:
        distinct, place = ["24:00:00"], np.zeros(len(positions), np.int64)
    else:
        values, place = np.unique(raw[positions], return_inverse=True)
        distinct = date_texts(values) if form is WireForm.DATE else timestamp_texts(values, zoned=zoned)
    index = np.zeros(len(raw), np.int64)
    index[positions] = place
    return pa.array(distinct, pa.large_string()).take(pa.array(index, mask=~wanted))


_HEX_PAIRS = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint16)
_UUID_LENGTH = 36
_UUID_GROUPS = ((0, 4, 0), (4, 6, 9), (6, 8, 14), (8, 10, 19), (10, 16, 24))
"""First and last byte of each group, and where its text begins."""


def _uuid(cells: Cells) -> pa.Array:
    count = len(cells)
    data = cells.buffer.bytes
    view = np.ndarray((len(data) - 15, 16), np.uint8, data, 0, (1, 1))
    pairs = _HEX_PAIRS[view[cells.start]].view(np.uint8)
    text = np.full((count, _UUID_LENGTH), ord("-"), np.uint8)
    for first, last, at in _UUID_GROUPS:
        text[:, at : at + 2 * (last - first)] = pairs[:, 2 * first : 2 * last]
    if cells.null is None:
        offsets = np.arange(0, (count + 1) * _UUID_LENGTH, _UUID_LENGTH, dtype=np.int32)
        return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    present = ~cells.null
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(present * np.int32(_UUID_LENGTH), out=offsets[1:])
    buffers = [_validity(cells.null), pa.py_buffer(offsets), pa.py_buffer(text[present])]
    return pa.Array.from_buffers(pa.string(), count, buffers)


def _text(form: WireForm, cells: Cells, column: SegmentColumn, table: str) -> WireValues:
    skipped = 1 if form is WireForm.JSONB else 0
    raw = _cut(cells, pa.binary(), skipped)
    plain = isinstance(column.codec, TextCodec) and column.codec.arrow_type == pa.string()
    try:
        text = raw.cast(pa.string() if plain else pa.large_string())
    except pa.ArrowInvalid:
        raise DecodeError(f"a value of {table}.{column.column.name} is not UTF-8", offset=0, table=table) from None
    return _fitting(text) if plain else WireValues(column.codec.decode(text), lambda: text)


def _cut(cells: Cells, arrow_type: pa.DataType, skipped: int) -> pa.Array:
    """Copy byte ranges into an array without an index per byte.

    The offsets start0, end0, start1, end1, … describe the ranges and the gaps between them; the even ones are ours.
    """
    count = len(cells)
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = cells.start
    offsets[1::2] = cells.end
    if skipped:
        offsets[0::2] += skipped if cells.null is None else np.where(cells.null, 0, skipped)
    buffers = [None, pa.py_buffer(offsets), cells.buffer.arrow]
    ranges = pa.Array.from_buffers(arrow_type, 2 * count - 1, buffers)
    return ranges.take(pa.array(np.arange(0, 2 * count - 1, 2), mask=cells.null))


def _validity(null: Flags) -> pa.Buffer:
    return pa.array(~null).buffers()[1]
