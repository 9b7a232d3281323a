"""Which types of columns each type of field takes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.documents.expressions import VECTOR_TYPES
from penstock.schema import PostgresType, TypeKind
from penstock.specification.tree import ScalarType

_STRINGS = frozenset({"text", "varchar", "bpchar", "char", "name", "citext"})
_WHOLE = ("int2", "int4", "int8")
_TIMES = ("timestamp", "timestamptz")
_JSON = frozenset({"json", "jsonb"})
# Types without searchable text.
_NOT_WORDS = frozenset({"json", "jsonb", "bytea", "xml", "tsvector", "tsquery"})

_ACCEPTED: dict[ScalarType, frozenset[str]] = {
    ScalarType.UUID: frozenset({"uuid"}),
    ScalarType.BOOLEAN: frozenset({"bool"}),
    ScalarType.SHORT: frozenset({"int2"}),
    ScalarType.INTEGER: frozenset({"int2", "int4"}),
    ScalarType.LONG: frozenset({*_WHOLE, "oid"}),
    ScalarType.FLOAT: frozenset({"float4"}),
    ScalarType.DOUBLE: frozenset({"float4", "float8"}),
    ScalarType.DECIMAL: frozenset({"numeric", "money", *_WHOLE}),
    ScalarType.DATE: frozenset({"date"}),
    # An index does not accept a time of day as a date, although the public format does.
    ScalarType.TIMESTAMP: frozenset({*_TIMES, "date"}),
    ScalarType.BINARY: frozenset({"bytea"}),
    ScalarType.JSON: _JSON,
    ScalarType.MAP: _JSON,
    ScalarType.VECTOR: frozenset({"float4", "float8", "numeric", *VECTOR_TYPES}),
}
_NUMBERS = frozenset({*_WHOLE, "numeric", "money", "float4", "float8"})

_SQL_NAMES = {
    "smallint": "int2",
    "integer": "int4",
    "int": "int4",
    "bigint": "int8",
    "real": "float4",
    "double precision": "float8",
    "decimal": "numeric",
    "boolean": "bool",
    "character varying": "varchar",
    "character": "bpchar",
    "char": "bpchar",
    "timestamp with time zone": "timestamptz",
    "timestamp without time zone": "timestamp",
    "time with time zone": "timetz",
    "time without time zone": "time",
}


def accepts(type_: ScalarType, column: PostgresType) -> bool:
    """Return whether a field takes a column; `column` is without domains, and of an array its element."""
    if type_ in (ScalarType.TEXT, ScalarType.IDENTIFIER):
        return column.name in _STRINGS or column.kind is TypeKind.ENUM
    if type_ in (ScalarType.KEYWORD, ScalarType.ENUM):
        return column.kind in (TypeKind.BASE, TypeKind.ENUM) and column.name not in _NOT_WORDS
    return column.name in _ACCEPTED[type_]


def accepts_custom(names: Sequence[str], column: PostgresType) -> bool:
    """Return whether a custom field names the column's type; modifiers and `[]` are ignored."""
    plain = {name.strip().lower().split("(")[0].removesuffix("[]").strip() for name in names}
    return bool({_SQL_NAMES.get(name, name) for name in plain} & {column.name, str(column)})


def accepts_number(column: PostgresType) -> bool:
    """Return True if its values are numbers."""
    return column.name in _NUMBERS


def accepts_point(column: PostgresType) -> bool:
    """Return True if it can hold a value that an index reads as a point."""
    return column.name in _STRINGS | _JSON
