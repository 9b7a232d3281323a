"""The columns of tables in DuckDB: names, types, and how they follow the source's schema.

A name is that of the column in segments, since DuckDB ignores case, too. A value that its type cannot hold is NULL, and
its text is in the map `_unrepresentable`, which a table gets when it is first needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.columns import constant_of
from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNCHANGED,
    UNREPRESENTABLE,
    XID,
    field_names,
)
from penstock.destinations.duckdb.database import Session
from penstock.destinations.refusals import not_followed, rejected
from penstock.destinations.table_layout import DELETED_AT, Layout, Mode, Target, require_followable
from penstock.schema import Column, TableSchema, fold_case, quote_identifier, quote_literal

TEXTS_TYPE = "map(varchar, varchar)"
OWN_COLUMNS: Mapping[Mode, Mapping[str, str]] = {
    Mode.MIRROR: {},
    Mode.SOFT_DELETE: {DELETED_AT: "timestamptz"},
    Mode.HISTORY: {
        OP: "varchar",
        COMMIT_LSN: "bigint",
        ORDINAL: "bigint",
        COMMIT_TIME: "timestamptz",
        XID: "bigint",
        SCHEMA_VERSION: "integer",
        UNCHANGED: "varchar[]",
        OLD: "varchar",
    },
}
"""Columns that Penstock adds, with their types."""
_TYPES = {
    pa.int8(): "tinyint",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.bool_(): "boolean",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
}
_ROW_ID = "rowid"
"""DuckDB's name for the number of a row."""


def column_type(arrow: pa.DataType) -> str:
    """Return the type of a column, which holds every value of the segments' type."""
    if arrow in _TYPES:
        return _TYPES[arrow]
    if pa.types.is_decimal(arrow):
        return f"decimal({arrow.precision}, {arrow.scale})"
    if pa.types.is_timestamp(arrow):
        return "timestamp" if arrow.tz is None else "timestamptz"
    if pa.types.is_time(arrow):
        return "time"
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow):
        return "blob"
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return f"{column_type(arrow.value_type)}[]"
    return "varchar"


def may_not_fit(type_: str) -> bool:
    """Return True if the source may have a value that a column of this type cannot hold."""
    return type_.endswith("[]") or type_.startswith(("decimal", "date", "time"))


def sorted_texts(maps: str) -> str:
    """Return an expression for maps of texts that is the same for the same texts: they have no order."""
    return f"coalesce(list_sort(map_entries({maps})), [])"


def new_layout(source: TableSchema, arrow: pa.Schema, mode: Mode) -> Layout:
    """Return the layout of a table that is copied; `arrow` has its columns as in segments."""
    if not source.columns:
        raise rejected(str(source), "DuckDB has no tables without columns")
    return Layout(source, mode, _names(source, mode), types=_types(source, arrow))


def definition(layout: Layout) -> str:
    """Return the columns for CREATE TABLE."""
    texts = {UNREPRESENTABLE: TEXTS_TYPE} if layout.has_texts else {}
    return layout.definition({**OWN_COLUMNS[layout.mode], **texts})


def with_texts(session: Session, target: Target, layout: Layout) -> Layout:
    """Give a table the column for values that its types cannot hold."""
    if layout.has_texts:
        return layout
    session.run(f"alter table {session.name(target)} add column {UNREPRESENTABLE} {TEXTS_TYPE}")
    return replace(layout, has_texts=True)


def follow(
    session: Session,
    target: Target,
    before: Layout,
    schema: TableSchema,
    arrow: pa.Schema,
    *,
    keeps_dropped: bool,
    records_ddl: bool,
    is_lake: bool,
) -> Layout:
    """Change the columns of a table as the source did; return its new layout.

    Raise `SchemaNotFollowed` if only a new copy has the right rows.
    """
    if before.source == schema or before.source.has_columns_of(schema):
        return replace(before, source=schema)
    if before.mode is Mode.HISTORY:
        return extend(session, target, before, schema, arrow)
    require_followable(before.source, schema, records_ddl=records_ddl)
    now = {column.attnum for column in schema.columns}
    if not now & before.names.keys():
        raise not_followed(str(schema), "all of its columns are new")
    types = _types(schema, arrow)
    gone = {attnum: name for attnum, name in before.names.items() if attnum not in now}
    known = {*OWN_COLUMNS[before.mode], UNREPRESENTABLE, *before.names.values()}
    others = [name for name in _present(session, target) if name not in known]
    names = _names(schema, before.mode, [*others, *(gone.values() if keeps_dropped else ())])
    renamed = {before.names[attnum]: names[attnum] for attnum in now & before.names.keys()}
    renamed = {old: new for old, new in renamed.items() if old != new}
    if before.has_texts:
        _rename_texts(session, target, renamed, () if keeps_dropped else gone.values())
    for name in () if keeps_dropped else gone.values():
        _alter(session, target, f"drop column {quote_identifier(name)}")
    # Columns may have exchanged their names.
    for number, old in enumerate(renamed):
        _alter(session, target, f"rename column {quote_identifier(old)} to penstock_renamed_{number}")
    for number, new in enumerate(renamed.values()):
        _alter(session, target, f"rename column penstock_renamed_{number} to {quote_identifier(new)}")
    for column in schema.columns:
        name, type_ = quote_identifier(names[column.attnum]), types[column.attnum]
        if column.attnum not in before.names:
            default = _default(schema, column, arrow)
            _alter(session, target, f"add column {name} {type_}{f' default {default}' if default else ''}")
            if default:
                _alter(session, target, f"alter column {name} drop default")
        elif type_ != before.types[column.attnum]:
            if is_lake:
                raise not_followed(str(schema), f"the type of column {column.name!r} changed")
            _alter(session, target, f"alter column {name} set data type {type_}")
    return replace(before, source=schema, names=names, types=types)


def extend(session: Session, target: Target, before: Layout, schema: TableSchema, arrow: pa.Schema) -> Layout:
    """Add columns to a log of changes, whose earlier rows stay as they are.

    A column of the source goes to the column with its name and type; if that has another type, to `name#3`, where 3 is
    the attribute number.
    """
    if before.source == schema or before.source.has_columns_of(schema):
        return replace(before, source=schema)
    present, types = _present(session, target), _types(schema, arrow)
    names: dict[int, str] = {}
    for column, name in zip(schema.columns, field_names(schema), strict=True):
        wanted = types[column.attnum]
        taken = [*names.values(), *(other for other, type_ in present.items() if type_ != _printed(wanted))]
        free = names[column.attnum] = _free(name, column, Mode.HISTORY, taken)
        if fold_case(free) not in map(fold_case, present):
            _alter(session, target, f"add column {quote_identifier(free)} {wanted}")
    return replace(before, source=schema, names=names, types=types, version=before.version + 1)


def _names(schema: TableSchema, mode: Mode, taken: Iterable[str] = ()) -> dict[int, str]:
    names: dict[int, str] = {}
    for column, name in zip(schema.columns, field_names(schema), strict=True):
        names[column.attnum] = _free(name, column, mode, [*taken, *names.values()])
    return names


def _free(name: str, column: Column, mode: Mode, taken: Iterable[str]) -> str:
    used = {fold_case(each) for each in (*taken, *OWN_COLUMNS[mode], UNREPRESENTABLE, _ROW_ID)}
    while fold_case(name) in used:
        name = f"{name}#{column.attnum}"
    return name


def _types(schema: TableSchema, arrow: pa.Schema) -> dict[int, str]:
    return {
        column.attnum: column_type(arrow.field(name).type)
        for column, name in zip(schema.columns, field_names(schema), strict=True)
    }


def _printed(type_: str) -> str:
    """Return a type as `information_schema` has it."""
    if type_.endswith("[]"):
        return f"{_printed(type_[:-2])}[]"
    if type_.startswith("decimal"):
        return type_.replace(" ", "").upper()
    return {"timestamptz": "TIMESTAMP WITH TIME ZONE"}.get(type_, type_.upper())


def _present(session: Session, target: Target) -> dict[str, str]:
    """Return the columns of a table, with their types."""
    query = (
        "select column_name, data_type from information_schema.columns "
        "where table_catalog = ? and table_schema = ? and table_name = ? order by ordinal_position"
    )
    return dict(session.rows(query, [session.catalog, target.namespace, target.name]))


def _default(schema: TableSchema, column: Column, arrow: pa.Schema) -> str:
    """Return what existing rows have in an added column, as a literal; empty for NULL."""
    if column.missing is None and not column.backfilled:
        return ""
    type_ = arrow.field(dict(zip(schema.columns, field_names(schema), strict=True))[column]).type
    value = constant_of(str(schema), column, type_)
    if pa.types.is_nested(type_) or column_type(type_) == "blob" or not value.is_valid:
        raise not_followed(str(schema), f"column {column.name!r} was added with a default that has no literal")
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        return quote_literal(f"{pc.cast(value.cast(pa.timestamp('us')), pa.string()).as_py()}+00")
    return quote_literal(pc.cast(value, pa.string()).as_py())


def _rename_texts(session: Session, target: Target, renamed: Mapping[str, str], dropped: Iterable[str]) -> None:
    """Let the texts of values that types cannot hold follow the names of their columns."""
    lost = ", ".join(map(quote_literal, dropped))
    cases = " ".join(f"when {quote_literal(old)} then {quote_literal(new)}" for old, new in renamed.items())
    if not lost and not cases:
        return
    entries = f"map_entries({UNREPRESENTABLE})"
    if lost:
        entries = f"list_filter({entries}, lambda e: e.key not in ({lost}))"
    if cases:
        named = f"{{'key': case e.key {cases} else e.key end, 'value': e.value}}"
        entries = f"list_transform({entries}, lambda e: {named})"
    session.run(
        f"update {session.name(target)} set {UNREPRESENTABLE} = case when len({entries}) > 0 "
        f"then map_from_entries({entries}) end where {UNREPRESENTABLE} is not null"
    )


def _alter(session: Session, target: Target, change: str) -> None:
    session.run(f"alter table {session.name(target)} {change}")
