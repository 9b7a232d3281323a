"""Types whose Postgres text *is* the value in the lake, and `bytea`.

The former are strings, and all that has no exact counterpart in Arrow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.schema import PostgresType, TypeKind
from penstock.values.cells import blank, layout, matches, merge, require_narrow, tidy
from penstock.values.codec import Codec, Decoded, register, register_extension, register_kind
from penstock.values.settings import TypeSettings, UnknownTypes

STRINGS = ("text", "varchar", "bpchar", "name", "char", "cstring", "unknown")
DOCUMENTS = ("json", "jsonb", "jsonpath", "xml", "tsvector", "tsquery")
NETWORK = ("inet", "cidr", "macaddr", "macaddr8")
GEOMETRIC = ("point", "line", "lseg", "box", "path", "polygon", "circle")
MEASURES = ("interval", "timetz", "money", "bit", "varbit", "uuid")
# xid8 exceeds int64; the vectors are written as "1 2 3" and never dimensioned.
SYSTEM = (
    *("pg_lsn", "xid8", "tid", "pg_snapshot", "txid_snapshot", "int2vector", "oidvector", "aclitem", "refcursor"),
    *("regclass", "regcollation", "regconfig", "regdatabase", "regdictionary", "regnamespace", "regoper"),
    *("regoperator", "regproc", "regprocedure", "regrole", "regtype"),
)


@dataclass(frozen=True, slots=True)
class TextCodec:
    """Keeps the text, as `string` or as the `binary` of its UTF-8 bytes."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        try:
            return Decoded(pc.cast(text, self.arrow_type), None)
        except pa.ArrowInvalid:
            return Decoded(_narrow_offsets(text, self.arrow_type), None)


def _narrow_offsets(text: pa.LargeStringArray, arrow_type: pa.DataType) -> pa.Array:
    """For a column that Arrow considers too large: a slice of a big buffer may fit if its offsets start at 0."""
    offsets, data = layout(text)
    require_narrow(data)
    validity = text.is_valid().buffers()[1] if text.null_count else None
    buffers = [validity, pa.py_buffer(offsets.astype("int32")), pa.py_buffer(data)]
    return pa.Array.from_buffers(arrow_type, len(text), buffers)


def text_codec(type_: PostgresType, modifier: int, settings: TypeSettings) -> Codec:
    """Text, unchanged."""
    return TextCodec(pa.string())


def unknown_codec(type_: PostgresType, modifier: int, settings: TypeSettings) -> Codec:
    """Text or its bytes, as configured for unknown types."""
    return TextCodec(pa.binary() if settings.unknown_types is UnknownTypes.BYTES else pa.string())


register(*STRINGS, *DOCUMENTS, *NETWORK, *GEOMETRIC, *MEASURES, *SYSTEM, factory=text_codec)
register_extension("citext", factory=text_codec)
register_kind(TypeKind.ENUM, TypeKind.RANGE, TypeKind.MULTIRANGE, TypeKind.COMPOSITE, factory=text_codec)
# A domain or array gets here only if the catalog did not return its base type.
register_kind(TypeKind.BASE, TypeKind.PSEUDO, TypeKind.DOMAIN, factory=unknown_codec)


_PATTERN = r"\A\\x(?:[0-9a-fA-F]{2})*\z"
_INVALID, _PREFIX = -1, -2


def _pair_table() -> NDArray[np.int16]:
    """The value of two hex digits, by their bytes as one native 16-bit number."""
    table = np.full(65_536, _INVALID, np.int16)
    digits = np.frombuffer(b"0123456789abcdefABCDEF", np.uint8)
    nibbles = np.array([*range(16), *range(10, 16)], np.int16)
    pairs = np.stack([np.repeat(digits, len(digits)), np.tile(digits, len(digits))], axis=1)
    table[np.ascontiguousarray(pairs).view(np.uint16).ravel()] = (nibbles[:, None] * 16 + nibbles).ravel()
    table[np.frombuffer(rb"\x", np.uint16)] = _PREFIX
    return table


_PAIRS = _pair_table()


@dataclass(frozen=True, slots=True)
class ByteaCodec:
    """Two hex digits per byte; one table decodes the whole column."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        text = tidy(text)
        array = self._decode_exact(text)
        if array is not None:
            return Decoded(array, None)
        unwanted = ~matches(text, _PATTERN)
        array = self._decode_exact(blank(text, unwanted))
        if array is None:
            raise AssertionError("a column of nothing but hex cells")
        return Decoded(array, merge(unwanted, None))

    def _decode_exact(self, text: pa.LargeStringArray) -> pa.Array | None:
        """The column, or None if any cell is not in the hex format."""
        offsets, data = layout(text)
        require_narrow(data)
        if len(data) % 2 or (offsets & 1).any():
            return None
        pairs = _PAIRS[np.frombuffer(np.ascontiguousarray(data), np.uint16)]
        cell_starts = offsets >> 1
        not_null = cell_starts[1:] > cell_starts[:-1]
        prefixes = cell_starts[:-1][not_null]
        if len(prefixes) != len(text) - text.null_count or (pairs[prefixes] != _PREFIX).any():
            return None
        wanted = np.ones(len(pairs), np.bool_)
        wanted[prefixes] = False
        values = pairs[wanted]
        if len(values) and values.min() < 0:
            return None
        ends = np.zeros(len(offsets), np.int32)
        np.cumsum(np.diff(cell_starts) - not_null, out=ends[1:])
        validity = text.is_valid().buffers()[1] if text.null_count else None
        buffers = [validity, pa.py_buffer(ends), pa.py_buffer(values.astype(np.uint8))]
        return pa.Array.from_buffers(self.arrow_type, len(text), buffers)


register("bytea", factory=lambda type_, modifier, settings: ByteaCodec(pa.binary()))
