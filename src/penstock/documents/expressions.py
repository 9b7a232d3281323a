"""Pieces of SQL: names, comparisons, conditions, keys as text, and values in the form that an index takes.

Nothing relies on `search_path`: tables, types and operators have their schema. Two columns are compared by the equality
of their own type, which for types like `citext` is not the one of `pg_catalog`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from psycopg import sql

from penstock.documents.catalog import SourceColumn, SourceTable
from penstock.documents.statements import as_literal
from penstock.schema import PostgresType, TypeKind
from penstock.source.patterns import TableName
from penstock.specification.tree import Filter, Geo, Scalar, ScalarType, SoftDelete, Transform

Sql = sql.Composable

TRUE = sql.SQL("true")
_TEXTS = (ScalarType.TEXT, ScalarType.IDENTIFIER, ScalarType.KEYWORD, ScalarType.ENUM, ScalarType.UUID)
_OPERATORS = {"eq": "=", "neq": "<>", "lt": "<", "lte": "<=", "gt": ">", "gte": ">=", "like": "~~", "ilike": "~~*"}

KEY_TYPES = frozenset(
    {
        *("int2", "int4", "int8", "oid", "numeric", "bool", "uuid", "bytea"),
        *("text", "varchar", "bpchar", "citext", "name", "date", "timestamp", "timestamptz"),
    }
)
"""Types whose equal values have one canonical text, as enums do. Only these can identify a document."""

VECTOR_TYPES = frozenset({"vector", "halfvec"})
"""Types of pgvector."""

_COLLATED = ("text", "varchar", "bpchar")
_BASE64 = sql.SQL(r"pg_catalog.translate(pg_catalog.encode({}, 'base64'), E'\n', '')")
_AS_TEXT = sql.SQL("{}::pg_catalog.text")
_CANONICAL = {
    "numeric": sql.SQL("pg_catalog.trim_scale({})::pg_catalog.text"),
    "citext": sql.SQL("pg_catalog.lower({}::pg_catalog.text)"),
    "bytea": sql.SQL(r"('\x' || pg_catalog.encode({}, 'hex'))"),
}
"""Types whose equal values can have different texts, with the canonical text of each."""


def table_name(table: TableName) -> Sql:
    return sql.Identifier(table.namespace, table.name)


def type_name(type_: PostgresType) -> Sql:
    return sql.Identifier(type_.namespace, type_.name)


def column(alias: str, name: str) -> Sql:
    return sql.Identifier(alias, name)


def conjunction(conditions: Sequence[Sql]) -> Sql:
    """Join conditions with `and`; true if there are none."""
    return sql.SQL(" and ").join(conditions) if conditions else TRUE


def compare(operator: str, left: Sql, right: Sql, left_type: PostgresType, right_type: PostgresType) -> Sql:
    """Return `left operator right`, with the operator of the type's own schema if both have the same type."""
    own = left_type.oid == right_type.oid and left_type.kind is TypeKind.BASE
    namespace = left_type.namespace if own else "pg_catalog"
    return sql.SQL("({} operator({}.{}) {})").format(
        left, sql.Identifier(namespace), sql.SQL(as_literal(operator)), right
    )


def equal_columns(
    left: str, left_columns: Sequence[SourceColumn], right: str, right_columns: Sequence[SourceColumn]
) -> Sql:
    """Compare columns of one alias with those of another, pair by pair."""
    return conjunction(
        [
            compare("=", column(left, one.name), column(right, other.name), one.base, other.base)
            for one, other in zip(left_columns, right_columns, strict=True)
        ]
    )


def canonical(value: Sql, source: SourceColumn) -> Sql:
    """Return the canonical text of a key's value: equal values have one text, and casting it returns the value.

    For sessions with pinned settings (`penstock.source.connections`). This is the only place that decides it: resolved
    keys, relation maps and the ids of documents all use it.
    """
    return _CANONICAL.get(source.base.name, _AS_TEXT).format(value)


def same_key(left: Sql, right: Sql, source: SourceColumn) -> Sql:
    """Compare two values of a key column: they must be equal and have the same canonical text.

    Under a nondeterministic collation, different texts can be equal. The equality stays in the condition so that an
    index can be used.
    """
    equal = compare("=", left, right, source.base, source.base)
    if source.base.name not in _COLLATED:
        return equal
    return sql.SQL('({} and {} collate pg_catalog."C" operator(pg_catalog.=) {})').format(
        equal, canonical(left, source), canonical(right, source)
    )


def document_id(parts: Sequence[Sql]) -> Sql:
    """Join a key's canonical texts to an id. Colons inside parts are escaped, so different keys have different ids."""
    if len(parts) == 1:
        return parts[0]
    escape = sql.SQL("pg_catalog.replace(pg_catalog.replace({}, '%', '%25'), ':', '%3A')")
    return sql.SQL(" || ':' || ").join([escape.format(part) for part in parts])


def values_source(alias: str, columns: Sequence[SourceColumn], parameter: int, *, ordered: bool = False) -> Sql:
    """Return arrays of texts as rows with typed columns `v0`, `v1`, …; `ordered` adds a counter `place`."""
    names = [sql.Identifier(f"v{number}") for number in range(len(columns))]
    casts = [
        sql.SQL("{}::{} as {}").format(column("u", f"v{number}"), type_name(each.base), name)
        for number, (name, each) in enumerate(zip(names, columns, strict=True))
    ]
    arrays = [sql.SQL(as_literal(f"${parameter + number}::pg_catalog.text[]")) for number in range(len(columns))]
    place = [sql.Identifier("place")] if ordered else []
    return sql.SQL("(select {} from unnest({}) {} u ({})) {}").format(
        sql.SQL(", ").join([*casts, *place]),
        sql.SQL(", ").join(arrays),
        sql.SQL("with ordinality" if ordered else ""),
        sql.SQL(", ").join([*names, *place]),
        sql.Identifier(alias),
    )


def rows_of(table: SourceTable) -> Sql:
    """Return what follows `from` to read a table, without the tables that inherit from it: their changes are theirs."""
    return sql.SQL("only {}" if table.kind == "r" else "{}").format(table_name(table.name))


def from_table(table: SourceTable, alias: str, filters: Sequence[Filter] = ()) -> Sql:
    """Return the table under an alias; raw filters are applied where only its own columns are in scope."""
    raw = raw_conditions(filters)
    if not raw:
        return sql.SQL("{} {}").format(rows_of(table), sql.Identifier(alias))
    return sql.SQL("(select * from {} where {}) {}").format(rows_of(table), conjunction(raw), sql.Identifier(alias))


def conditions(filters: Sequence[Filter], alias: str, table: SourceTable) -> list[Sql]:
    """Return every filter that is not raw SQL, on the columns of one alias."""
    return [_condition(each, column(alias, each.column), table.column(each.column)) for each in filters if not each.raw]


def raw_conditions(filters: Sequence[Filter]) -> list[Sql]:
    """Return every raw filter."""
    return [expression_sql(each.raw) for each in filters if each.raw]


def expression_sql(text: str) -> Sql:
    """Return SQL as it was written, in parentheses. The line break ends a comment in it."""
    return sql.SQL("({}\n)").format(sql.SQL(as_literal(text)))


def is_deleted(marker: SoftDelete, alias: str, table: SourceTable) -> Sql:
    """Return the condition for rows that count as deleted; never null."""
    value = column(alias, marker.column)
    if table.column(marker.column).base.name != "bool":
        value = sql.SQL("({} is not null)").format(value)
    return sql.SQL("coalesce({}, false)").format(
        conjunction([value, *conditions(marker.when, alias, table), *raw_conditions(marker.when)])
    )


def scalar_value(field: Scalar, alias: str, table: SourceTable) -> Sql:
    """Return a column, or an expression over columns, in the form that the document takes."""
    if field.expression:
        # In a scope in which the row's own columns come first.
        value = sql.SQL("(select {} from (select {}.*) row)").format(
            expression_sql(field.expression), sql.Identifier(alias)
        )
        if field.type is ScalarType.BINARY:
            value = _BASE64.format(value)
    else:
        value = convert(column(alias, field.column), field.type, table.column(field.column))
    for transform in field.transforms:
        if transform is Transform.LOWERCASE:
            value = sql.SQL("pg_catalog.lower({})").format(value)
        else:
            value = sql.SQL(r"pg_catalog.btrim({}, E' \t\n\r\f\v')").format(value)
    if field.default is not None:
        value = sql.SQL("coalesce(pg_catalog.to_json({}), {})").format(value, json_literal(field.default))
    return value


def convert(value: Sql, type_: ScalarType, source: SourceColumn) -> Sql:
    """Convert values whose JSON form no index reads; other arrays than those of such values are left to JSON."""
    if source.base.kind is TypeKind.ARRAY:
        if type_ in _TEXTS or source.element.name not in ("bytea", "money"):
            return value
        element = convert(column("u", "e"), type_, replace(source, type=source.element))
        converted = sql.SQL(
            "(select coalesce(pg_catalog.json_agg({} order by u.n), '[]'::pg_catalog.json)"
            " from unnest({}) with ordinality u (e, n))"
        ).format(element, value)
        return sql.SQL("case when {} is not null then {} end").format(value, converted)
    if type_ in _TEXTS:
        return sql.SQL("{}::pg_catalog.text").format(value)
    if source.base.name in VECTOR_TYPES:
        # Its text is an array of JSON.
        return sql.SQL("{}::pg_catalog.text::pg_catalog.json").format(value)
    if source.base.name == "bytea":
        return _BASE64.format(value)
    if source.base.name == "money":
        return sql.SQL("{}::pg_catalog.numeric").format(value)
    return value


def geo_value(field: Geo, alias: str) -> Sql:
    """Return a point; null if a coordinate is."""
    if field.column:
        return column(alias, field.column)
    latitude, longitude = column(alias, field.latitude), column(alias, field.longitude)
    return sql.SQL(
        "case when {0} is not null and {1} is not null then pg_catalog.json_build_object('lat', {0}, 'lon', {1}) end"
    ).format(latitude, longitude)


def json_literal(value: Any) -> Sql:
    """Return a constant as JSON."""
    return sql.SQL("{}::pg_catalog.json").format(sql.Literal(json.dumps(value, ensure_ascii=False)))


def _condition(condition: Filter, value: Sql, source: SourceColumn) -> Sql:
    def literal(text: str) -> Sql:
        return sql.SQL("{}::{}").format(sql.Literal(text), type_name(source.base))

    def compared(operator: str, text: str) -> Sql:
        return compare(operator, value, literal(text), source.base, source.base)

    operator = condition.operator
    match operator:
        case "is_null":
            return sql.SQL("{} is null").format(value)
        case "is_not_null":
            return sql.SQL("{} is not null").format(value)
        case "in":
            either = [compared("=", each) for each in condition.values]
            return sql.SQL("({})").format(sql.SQL(" or ").join(either)) if either else sql.SQL("false")
        case "not_in":
            return conjunction([compared("<>", each) for each in condition.values])
        case "between":
            return conjunction([compared(">=", condition.values[0]), compared("<=", condition.values[1])])
        case "like" | "ilike":
            return sql.SQL("({}::pg_catalog.text operator(pg_catalog.{}) {})").format(
                value, sql.SQL(as_literal(_OPERATORS[operator])), sql.Literal(condition.values[0])
            )
        case _:
            return compared(_OPERATORS[operator], condition.values[0])
