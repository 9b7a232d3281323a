"""Reads the source on a separate path, so that `verify` does not repeat a mistake that a copy made.

A copy asks for binary values and decodes them with NumPy. Here the server writes CSV. Arrow's reader splits it into
rows and cells and parses numbers, flags and texts; the codecs of `penstock.values` decode the rest. Both paths share
the code that splits a heap into ranges and locks it while it is read (`penstock.copy`).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.csv as csv

from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, XID, SegmentColumn, segment_layout
from penstock.changes.wire import TEXT, decode_columns
from penstock.copy import CopyRange
from penstock.copy.reader import RangeReader, copy_out
from penstock.errors import DecodeError
from penstock.schema import TypeKind, quote_identifier, resolve_domain
from penstock.source.connections import Role, connect
from penstock.values.text import TextCodec

_READ_BY_ARROW: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "oid": pa.int64(),
    "xid": pa.int64(),
    "cid": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
}


@dataclass(frozen=True, slots=True)
class SourceReader:
    """Reads ranges of a table; pickles."""

    heap: RangeReader
    """The reader of the same table and snapshot, used only to lock the heap."""
    with_transactions: bool = False
    """Also return `_xid`: the low 32 bits of the transaction that wrote a row."""

    @property
    def arrow_schema(self) -> pa.Schema:
        """The schema of every batch: the columns as in segments, then `_unrepresentable`."""
        return self.heap.arrow_schema

    def read(self, part: CopyRange) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range, as `penstock.copy.RangeReader.read` does."""
        columns = segment_layout(self.heap.schema, self.heap.types).columns
        parameters = self.heap.settings.session_parameters
        with closing(connect(self.heap.source, Role.VERIFY, parameters=parameters)) as connection:
            name = self.heap.lock(connection, part)
            query = self._query(columns, part, name)
            doing = f"read {self.heap.schema}"
            # These are whole rows, because every message is one row.
            for text, _ in copy_out(connection, query, self.heap.settings.chunk_bytes, doing):
                yield self._decode(text, columns)

    def _query(self, columns: tuple[SegmentColumn, ...], part: CopyRange, name: str) -> str:
        names = [quote_identifier(column.column.name) for column in columns]
        # A line must not be empty, even for a row without columns.
        selected = ", ".join([*names, "xmin"] if self.with_transactions else names) or "1"
        where = self.heap.condition(part)
        return f"copy (select {selected} from only {name}{f' where {where}' if where else ''}) to stdout (format csv)"  # noqa: S608 (quoted)

    def _decode(self, text: bytearray, columns: tuple[SegmentColumn, ...]) -> pa.RecordBatch:
        types = [_read_as(column) for column in columns]
        types += [pa.int64()] if self.with_transactions else []
        cells = parse_csv(text, types, str(self.heap.schema))
        read = [column.combine_chunks() for column in cells.columns[: len(columns)]]
        arrays = decode_columns(columns, read, cells.num_rows, str(self.heap.schema))
        fields = [pa.field(column.field_name, column.codec.arrow_type) for column in columns]
        fields.append(pa.field(UNREPRESENTABLE, UNREPRESENTABLE_TYPE))
        if self.heap.transform is not None:
            rows = self.heap.transform.rows(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))
            arrays, fields = list(rows.columns), list(rows.schema)
        if self.with_transactions:
            arrays.append(cells.column(len(columns)).combine_chunks())
            fields.append(pa.field(XID, pa.int64()))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def parse_csv(text: bytes | bytearray, types: list[pa.DataType], table: str) -> pa.Table:
    """Parse CSV as Postgres writes it into columns of these types."""
    names = [str(number) for number in range(max(1, len(types)))]
    if text.startswith(codecs.BOM_UTF8):
        # The byte order mark belongs to the first value; Arrow strips one.
        text = codecs.BOM_UTF8 + text
    try:
        return csv.read_csv(
            pa.BufferReader(text),
            csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
            csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            csv.ConvertOptions(
                column_types=dict(zip(names, types, strict=False)),
                null_values=[""],
                strings_can_be_null=True,
                # An unquoted empty field is NULL; a quoted one is the empty string.
                quoted_strings_can_be_null=False,
                true_values=["t"],
                false_values=["f"],
            ),
        )
    except pa.ArrowInvalid:
        # Arrow's message contains the cell.
        raise DecodeError(f"cannot read the CSV that the server wrote for {table}", offset=0) from None


def _read_as(column: SegmentColumn) -> pa.DataType:
    return column.codec.arrow_type if _is_final(column) else TEXT


def _is_final(column: SegmentColumn) -> bool:
    """Return True if Arrow's result needs no further decoding."""
    type_, _ = resolve_domain(column.column.type, -1)
    codec = column.codec
    if isinstance(codec, TextCodec):
        return codec.arrow_type == pa.string()
    # A policy may turn a number into something else.
    is_known = type_.kind is TypeKind.BASE and type_.is_builtin
    return is_known and _READ_BY_ARROW.get(type_.name) == codec.arrow_type
