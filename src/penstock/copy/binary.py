"""Binary COPY: the form in which each column travels, and how a whole column becomes Arrow.

The result equals decoding the server's text with the column's codec, value for value: capture decodes text, and a row
must not depend on the way it came. Numbers, times and UUIDs travel in binary, which saves the server from formatting
and Penstock from parsing. Strings are the same bytes either way. All other types are requested as text, but not by a
cast if the type has its own cast to text: `inet::text` differs from what the server writes for an `inet`.

A row is a count of fields, then for each field its length (-1 for NULL) and its bytes; `penstock.changes.wire` reads
whole columns of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, SegmentColumn, segment_layout
from penstock.changes.wire import Buffer, Cells, DecodedColumns, Flags, Records, pack_flags
from penstock.errors import DecodeError
from penstock.schema import PostgresType, TableSchema, TypeKind, resolve_domain
from penstock.values import Codec, Decoded, TypeSettings
from penstock.values.datetimes import (
    DAY,
    EPOCH_DAYS,
    EPOCH_MICROSECONDS,
    FIRST_DAY,
    LAST_DAY,
    date_texts,
    timestamp_texts,
)
from penstock.values.text import TextCodec

SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER_BYTES = len(SIGNATURE) + 8
TRAILER = b"\xff\xff"
_NULL_LENGTH = -1


class WireForm(Enum):
    """The form of a column on the wire; the value is its width in bytes, with a letter to make it unique."""

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
    """Text after a version number."""
    CAST = "c"
    """Text, by the generic cast of types that have no cast of their own."""
    OUTPUT = "o"
    """Text, by the type's output function."""

    @property
    def width(self) -> int | None:
        """The width in bytes; None if it varies."""
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
    """Return the form for a column of this type, given its codec."""
    type_, _ = resolve_domain(type_, -1)
    if type_.kind is TypeKind.ENUM:
        return WireForm.STRING
    if type_.kind is TypeKind.BASE and type_.is_builtin:
        form, arrow_type = _NUMBERS.get(type_.name, (None, None))
        # A policy may turn a number or a time into text.
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
    """Return the expression that selects a column in this form; `identifier` is quoted."""
    if form is WireForm.CAST:
        return f"{identifier}::pg_catalog.text"
    if form is WireForm.OUTPUT:
        # format() calls the output function, but turns NULL into an empty string; num_nulls() does not look inside
        # rows.
        return f"case when pg_catalog.num_nulls({identifier}) = 0 then pg_catalog.format('%s', {identifier}) end"
    return identifier


@dataclass(frozen=True, slots=True)
class TupleLayout:
    """A table's columns: their form on the wire, and their Arrow types."""

    table: str
    columns: tuple[SegmentColumn, ...]
    forms: tuple[WireForm, ...]
    arrow_schema: pa.Schema


def tuple_layout(schema: TableSchema, settings: TypeSettings) -> TupleLayout:
    """Choose the wire form of each column; names and types are those of segments, followed by `_unrepresentable`."""
    columns = segment_layout(schema, settings).columns
    fields = [pa.field(column.field_name, column.codec.arrow_type) for column in columns]
    return TupleLayout(
        table=str(schema),
        columns=columns,
        forms=tuple(wire_form(column.column.type, column.codec) for column in columns),
        arrow_schema=pa.schema([*fields, pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE)]),
    )


def strip_header(message: memoryview) -> memoryview:
    """Return the first message without the header."""
    if len(message) < _HEADER_BYTES or message[: len(SIGNATURE)] != SIGNATURE:
        raise DecodeError("the data is not a binary COPY", offset=0)
    extension = int.from_bytes(message[len(SIGNATURE) + 4 : _HEADER_BYTES], "big")
    return message[_HEADER_BYTES + extension :]


def decode_tuples(raw: bytes | bytearray, lengths: NDArray[np.int64], layout: TupleLayout) -> pa.RecordBatch:
    """Decode rows of these lengths, adjacent in `raw`, which ends in `penstock.changes.wire.PADDING`."""
    buffer = Buffer(raw)
    ends = np.cumsum(lengths)
    records = Records(ends - lengths, ends, "row of binary COPY")
    counts = buffer.read(">i2", records.start)
    records.require(counts == len(layout.columns), records.start, "a wrong number of fields")
    cursor = records.start + 2
    decoded = DecodedColumns(layout.table, len(lengths))
    arrays: list[pa.Array] = []
    for column, form in zip(layout.columns, layout.forms, strict=True):
        length = buffer.read(">i4", cursor)
        start = cursor + 4
        null: Flags | None = None
        if len(length) and length.min() < 0:
            null = length == _NULL_LENGTH
            length[null] = 0
        # Nothing is read beyond a row's end, and no length goes backwards.
        end = start + length
        records.require((end <= records.end) & (length >= 0), cursor, "a value longer than its row")
        if form.width is not None:
            expected = length == form.width
            records.require(expected if null is None else expected | null, cursor, "a value of the wrong width")
        arrays.append(_decode_column(form, Cells(buffer, start, end, null), column, decoded))
        cursor = end
    records.require(cursor == records.end, cursor, "bytes after the last field")
    texts = decoded.unrepresentable()
    arrays.append(pa.nulls(len(lengths), UNREPRESENTABLE_TYPE) if texts is None else texts)
    return pa.RecordBatch.from_arrays(arrays, schema=layout.arrow_schema)


def _decode_column(form: WireForm, cells: Cells, column: SegmentColumn, decoded: DecodedColumns) -> pa.Array:
    """Decode a whole column, as its codec would have decoded the server's text."""
    match form:
        case WireForm.INT2 | WireForm.INT4 | WireForm.INT8 | WireForm.FLOAT4 | WireForm.FLOAT8 | WireForm.OID:
            return _number(form, cells, column.codec.arrow_type)
        case WireForm.BOOL:
            return _boolean(cells)
        case WireForm.DATE | WireForm.TIME | WireForm.TIMESTAMP:
            return decoded.keep(column, *_moment(form, cells, column.codec.arrow_type))
        case WireForm.UUID:
            return _uuid(cells)
        case WireForm.BYTES:
            return cells.array(pa.binary())
        case WireForm.STRING | WireForm.JSONB | WireForm.CAST | WireForm.OUTPUT:
            raw = cells.array(pa.binary(), skipped=1 if form is WireForm.JSONB else 0)
            if isinstance(column.codec, TextCodec) and column.codec.arrow_type == pa.string():
                return decoded.text(column, raw, pa.string())
            return decoded.decode(column, decoded.text(column, raw, pa.large_string()))


def _boolean(cells: Cells) -> pa.Array:
    values = cells.buffer.bytes[cells.start] != 0
    validity = None if cells.null is None else _validity(cells.null)
    return pa.Array.from_buffers(pa.bool_(), len(cells), [validity, pack_flags(values)])


def _number(form: WireForm, cells: Cells, arrow_type: pa.DataType) -> pa.Array:
    kind = {"i": "i", "u": "u", "f": "f"}[form.value[-1]]
    values = cells.buffer.read(f">{kind}{form.width}", cells.start)
    if form is WireForm.OID:
        values = values.astype(np.int64)
    elif kind == "f":
        # Binary has many NaNs; text has one.
        odd = np.isnan(values)
        if odd.any():
            values[odd] = np.nan
    return _from_values(values, cells.null, arrow_type)


def _from_values(values: NDArray[Any], null: Flags | None, arrow_type: pa.DataType) -> pa.Array:
    if null is None:
        return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(values)])
    values[null] = 0
    return pa.Array.from_buffers(arrow_type, len(values), [_validity(null), pa.py_buffer(values)])


def _moment(form: WireForm, cells: Cells, arrow_type: pa.DataType) -> tuple[Decoded, Callable[[], pa.LargeStringArray]]:
    """Decode days or microseconds since 2000, with the extremes of the type as infinities; also return the texts of
    values that are out of range."""
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
    return Decoded(array, outside), lambda: _moment_texts(form, raw, outside, zoned=_is_zoned(arrow_type))


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
"""First and last byte of each group, and the offset of its text."""


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


def _validity(null: Flags) -> pa.Buffer:
    return pack_flags(~null)
