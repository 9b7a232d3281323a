"""Spark's filters as SQL conditions, for the server to read fewer rows.

Spark applies every filter again, so a condition may be true for more rows than its filter, but never for fewer. So only
comparisons are passed on that both sides decide alike: no order of text, which depends on the collation; no types of
which the server rejects a text that Spark compares; no equality of padded characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from psycopg import sql

from penstock.schema import Column, TableSchema, resolve_domain

_ORDERED: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int2": (int,),
    "int4": (int,),
    "int8": (int,),
    "float4": (float,),
    "float8": (float,),
    "numeric": (Decimal,),
    "date": (date,),
    "timestamp": (datetime,),
    "timestamptz": (datetime,),
}
"""Types whose values have the same order and equality in Spark, with the Python types of Spark's values."""
_EQUAL = {"text": (str,), "varchar": (str,)}


def condition(filters: Iterable[Any], schema: TableSchema) -> str | None:
    """Return what can be passed on of filters that all hold; None if nothing can."""
    columns = {column.name: column for column in schema.columns}
    found = [text for each in filters if (text := _condition(each, columns)) is not None]
    return " and ".join(found) or None


def _condition(filter_: Any, columns: Mapping[str, Column]) -> str | None:
    column = columns.get(filter_.attribute[0]) if len(getattr(filter_, "attribute", ())) == 1 else None
    write = _WRITERS.get(type(filter_).__name__)
    if column is None or write is None:
        return None
    return write(sql.Identifier(column.name).as_string(None), filter_, column)


def _compared(operator: str, types: Mapping[str, tuple[type, ...]]) -> Callable[[str, Any, Column], str | None]:
    def write(name: str, filter_: Any, column: Column) -> str | None:
        literal = _literal(filter_.value, column, types)
        return None if literal is None else f"{name} {operator} {literal}"

    return write


def _in(name: str, filter_: Any, column: Column) -> str | None:
    literals = [_literal(value, column, _ORDERED | _EQUAL) for value in filter_.value if value is not None]
    known = [literal for literal in literals if literal is not None]
    return f"{name} in ({', '.join(known)})" if known and len(known) == len(literals) else None


def _literal(value: Any, column: Column, types: Mapping[str, tuple[type, ...]]) -> str | None:
    type_, _ = resolve_domain(column.type, column.type_modifier)
    if not type_.is_builtin or type(value) not in types.get(type_.name, ()):
        return None
    if isinstance(value, str) and "\0" in value:
        return None
    if isinstance(value, datetime) and (value.tzinfo is None) is (type_.name == "timestamptz"):
        return None
    return f"{sql.Literal(_text(value)).as_string(None)}::pg_catalog.{type_.name}"


def _text(value: Any) -> str:
    return value.isoformat(sep=" ") if isinstance(value, datetime) else str(value)


_WRITERS: dict[str, Callable[[str, Any, Column], str | None]] = {
    "EqualTo": _compared("=", _ORDERED | _EQUAL),
    "GreaterThan": _compared(">", _ORDERED),
    "GreaterThanOrEqual": _compared(">=", _ORDERED),
    "LessThan": _compared("<", _ORDERED),
    "LessThanOrEqual": _compared("<=", _ORDERED),
    "In": _in,
    "IsNotNull": lambda name, filter_, column: f"{name} is not null",
}
