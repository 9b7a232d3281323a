"""Which types of columns each type of field takes."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.documents.specification import ScalarType
from penstock.schema import PostgresType, TypeKind

_STRINGS = frozenset({"text", "varchar", "bpchar", "char", "name", "citext"})
_WHOLE = ("int2", "int4", "int8")
_TIMES = ("timestamp", "timestamptz")
_JSON = frozenset({"json", "jsonb"})
# What has no text that anybody would look for.
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
    # A time of day is no date to an index, although the public format lets it pass.
    ScalarType.TIMESTAMP: frozenset({*_TIMES, "date"}),
    ScalarType.BINARY: frozenset({"bytea"}),
    ScalarType.JSON: _JSON,
    ScalarType.MAP: _JSON,
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
    """Whether a field takes a column; `column` is without domains, and of an array its element."""
    if type_ in (ScalarType.TEXT, ScalarType.IDENTIFIER):
        return column.name in _STRINGS or column.kind is TypeKind.ENUM
    if type_ in (ScalarType.KEYWORD, ScalarType.ENUM):
        return column.kind in (TypeKind.BASE, TypeKind.ENUM) and column.name not in _NOT_WORDS
    return column.name in _ACCEPTED[type_]


def accepts_custom(names: Sequence[str], column: PostgresType) -> bool:
    """Whether one of the types that a custom field names is the column's; modifiers and `[]` are left aside."""
    plain = {name.strip().lower().split("(")[0].removesuffix("[]").strip() for name in names}
    return bool({_SQL_NAMES.get(name, name) for name in plain} & {column.name, str(column)})


def accepts_number(column: PostgresType) -> bool:
    """Whether it can be added up."""
    return column.name in _NUMBERS


def accepts_point(column: PostgresType) -> bool:
    """Whether it can hold what an index reads as a point."""
    return column.name in _STRINGS | _JSON
