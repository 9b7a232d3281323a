"""Types whose Postgres text *is* the value in the lake: strings, and all that has no exact Arrow counterpart."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.schema import PostgresType, TypeKind
from penstock.values.cells import layout, require_narrow
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
    """For what Arrow calls too large: a slice from far inside a big buffer may still fit once it starts at 0."""
    offsets, data = layout(text)
    require_narrow(data)
    validity = text.is_valid().buffers()[1] if text.null_count else None
    buffers = [validity, pa.py_buffer(offsets.astype("int32")), pa.py_buffer(data)]
    return pa.Array.from_buffers(arrow_type, len(text), buffers)


def text_codec(type_: PostgresType, modifier: int, settings: TypeSettings) -> Codec:
    """Text as it is."""
    return TextCodec(pa.string())


def unknown_codec(type_: PostgresType, modifier: int, settings: TypeSettings) -> Codec:
    """Text or its bytes, as configured for types that nobody registered."""
    return TextCodec(pa.binary() if settings.unknown_types is UnknownTypes.BYTES else pa.string())


register(*STRINGS, *DOCUMENTS, *NETWORK, *GEOMETRIC, *MEASURES, *SYSTEM, factory=text_codec)
register_extension("citext", factory=text_codec)
register_kind(TypeKind.ENUM, TypeKind.RANGE, TypeKind.MULTIRANGE, TypeKind.COMPOSITE, factory=text_codec)
# A domain or an array arrives under its kind only when the catalog's answer lacked what is under it.
register_kind(TypeKind.BASE, TypeKind.PSEUDO, TypeKind.DOMAIN, factory=unknown_codec)
