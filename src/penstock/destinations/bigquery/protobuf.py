"""Arrow columns as protobuf rows, column by column.

BigQuery takes change types only with rows in protobuf, not in Arrow. A row is the concatenation of its fields, so each
column becomes an array of encoded fields (empty for NULL), and Arrow joins these arrays. No row exists as a Python
object.

| Arrow | protobuf |
|---|---|
| bool, integers, date32, timestamp with zone | varint: days for dates, microseconds for timestamps |
| float64 | double |
| string, binary | the same |
| decimal, time64, timestamp without zone | string |
| struct | message |
| list | repeated field |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import descriptor_pb2
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_MOST_BYTES = 10
_SEVEN = np.arange(_MOST_BYTES, dtype=np.uint64) * np.uint64(7)
_Field = descriptor_pb2.FieldDescriptorProto


def descriptor(schema: pa.Schema, name: str = "Row") -> descriptor_pb2.DescriptorProto:
    """Return the message of rows with these columns; fields are numbered from 1 in their order."""
    message = descriptor_pb2.DescriptorProto(name=name)
    for number, field in enumerate(schema, 1):
        type_: pa.DataType = field.type
        label = _Field.LABEL_OPTIONAL
        if pa.types.is_list(type_):
            type_, label = type_.value_type, _Field.LABEL_REPEATED
        added = message.field.add(name=field.name, number=number, label=label, type=_kind(type_))
        if pa.types.is_struct(type_):
            nested = f"{name}_{number}"
            message.nested_type.append(descriptor(pa.schema(list(type_)), nested))
            added.type_name = nested
    return message


def encode_rows(batch: pa.RecordBatch | pa.Table) -> pa.Array:
    """Return each row as a field of `ProtoRows`: the content of the result's buffer is that message."""
    return _prefixed(1, _message([_array(column) for column in batch.columns], batch.num_rows))


def message_of(rows: pa.Array) -> bytes:
    """Return the serialized `ProtoRows` of rows that `encode_rows` has returned."""
    _, offsets, content = rows.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(rows) + 1, rows.offset * 4)
    return bytes(memoryview(content)[bounds[0] : bounds[-1]]) if content is not None else b""


def _kind(type_: pa.DataType) -> Any:
    if pa.types.is_struct(type_):
        return _Field.TYPE_MESSAGE
    if pa.types.is_boolean(type_):
        return _Field.TYPE_BOOL
    if pa.types.is_date32(type_):
        return _Field.TYPE_INT32
    if pa.types.is_integer(type_) or (pa.types.is_timestamp(type_) and type_.tz is not None):
        return _Field.TYPE_INT64
    if pa.types.is_floating(type_):
        return _Field.TYPE_DOUBLE
    return _Field.TYPE_BYTES if pa.types.is_binary(type_) else _Field.TYPE_STRING


def _message(columns: list[pa.Array], count: int) -> pa.Array:
    """Return the messages that have these columns as their fields."""
    if not columns:
        return pa.repeat(pa.scalar(b""), count)
    fields = [_field(number, column) for number, column in enumerate(columns, 1)]
    return fields[0] if len(fields) == 1 else pc.binary_join_element_wise(*fields, b"")


def _field(number: int, column: pa.Array) -> pa.Array:
    """Return the encoded field of each row; NULL is nothing."""
    type_: pa.DataType = column.type
    if pa.types.is_list(type_):
        elements = _field(number, column.flatten())
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        _, offsets, content = elements.buffers()
        at = np.frombuffer(offsets, np.int32, len(elements) + 1, elements.offset * 4)
        return _binary(at[ends], content)
    if pa.types.is_struct(type_):
        content = _message(column.flatten(), len(column))
        return _prefixed(number, pc.if_else(column.is_valid(), content, pa.scalar(None, pa.binary())))
    kind = _kind(type_)
    if kind in (_Field.TYPE_BYTES, _Field.TYPE_STRING):
        return _prefixed(number, column.cast(pa.string()).cast(pa.binary()) if kind == _Field.TYPE_STRING else column)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if kind == _Field.TYPE_DOUBLE:
        values = pc.fill_null(column.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        words = np.ascontiguousarray(values, "<f8").view(np.uint8).reshape(-1, 8)
        return _matrix(_tag(number, _FIXED64), words, np.ones(words.shape, np.bool_), valid)
    if pa.types.is_date32(type_):
        column = column.cast(pa.int32())
    numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    words, used = _varints(numbers.astype(np.int64).view(np.uint64))
    return _matrix(_tag(number, _VARINT), words, used, valid)


def _prefixed(number: int, content: pa.Array) -> pa.Array:
    """Return bytes as a field: the tag, the length, and the bytes themselves."""
    lengths = pc.fill_null(pc.binary_length(content), 0).to_numpy(zero_copy_only=False)
    words, used = _varints(lengths.astype(np.uint64))
    valid = content.is_valid().to_numpy(zero_copy_only=False)
    heads = _matrix(_tag(number, _BYTES), words, used, valid)
    return pc.binary_join_element_wise(heads, pc.fill_null(content, b""), b"")


def _varints(values: NDArray[np.uint64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return the bytes of varints, one row for each, and which of them are used."""
    groups = values[:, None] >> _SEVEN[None, :]
    used = groups != 0
    used[:, 0] = True
    words = (groups & np.uint64(0x7F)).astype(np.uint8)
    words[:, :-1] |= np.where(used[:, 1:], np.uint8(0x80), np.uint8(0))
    return words, used


def _tag(number: int, wire: int) -> NDArray[np.uint8]:
    words, used = _varints(np.array([number << 3 | wire], np.uint64))
    return words[0][used[0]]


def _matrix(
    tag: NDArray[np.uint8], words: NDArray[np.uint8], used: NDArray[np.bool_], valid: NDArray[np.bool_]
) -> pa.Array:
    """Return the used bytes of each row behind a tag; nothing for rows that are not valid."""
    count = len(words)
    whole = np.concatenate([np.broadcast_to(tag, (count, len(tag))), words], axis=1)
    mask = np.concatenate([np.ones((count, len(tag)), np.bool_), used], axis=1) & valid[:, None]
    ends = np.concatenate([[0], np.cumsum(mask.sum(axis=1))])
    return _binary(ends, pa.py_buffer(whole[mask].tobytes()))


def _binary(offsets: NDArray[Any], content: pa.Buffer | None) -> pa.Array:
    bounds = pa.py_buffer(np.ascontiguousarray(offsets, np.int32))
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, bounds, content or pa.py_buffer(b"")])


def _array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    return column
