"""The columns of a table at the destination: their names and types, and how they follow the source's schema.

Columns have the source's names and types. A type that the destination's server does not have becomes the type under it
(a domain), or text. Modes other than `mirror` add columns of Penstock's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.changes.segment import (
    COMMIT_LSN,
    COMMIT_TIME,
    OLD,
    OP,
    ORDINAL,
    SCHEMA_VERSION,
    UNCHANGED,
    XID,
)
from penstock.destinations.postgres.server import Session
from penstock.destinations.table_layout import DELETED_AT, Layout, Mode, Target, require_followable
from penstock.schema import (
    Column,
    PostgresType,
    TableSchema,
    TypeKind,
    quote_identifier,
    quote_literal,
    resolve_domain,
)

_FIRST_CUSTOM_OID = 16384
_NAME_BYTES = 63
_TEXT = "text"
_LOCAL = frozenset(
    {
        *("regclass", "regcollation", "regconfig", "regdatabase", "regdictionary", "regnamespace", "regoper"),
        *("regoperator", "regproc", "regprocedure", "regrole", "regtype", "aclitem", "money"),
    }
)
"""Types whose text means something only in its own database: names of objects and roles, and amounts in its locale."""


OWN_COLUMNS: Mapping[Mode, Mapping[str, str]] = {
    Mode.MIRROR: {},
    Mode.SOFT_DELETE: {DELETED_AT: "timestamptz"},
    Mode.HISTORY: {
        OP: "text",
        COMMIT_LSN: "int8",
        ORDINAL: "int8",
        COMMIT_TIME: "timestamptz",
        XID: "int8",
        SCHEMA_VERSION: "int4",
        UNCHANGED: "text[]",
        OLD: "jsonb",
    },
}
"""Columns that Penstock adds, with their types."""


def new_layout(session: Session, source: TableSchema, mode: Mode) -> Layout:
    """Return the layout of a table that is copied."""
    names: dict[int, str] = {}
    for column in source.columns:
        names[column.attnum] = free_name(column, [*OWN_COLUMNS[mode], *names.values()])
    types = dict(zip(names, type_names(session, source.columns), strict=True))
    return Layout(source, mode, names, types=types)


def free_name(column: Column, taken: Sequence[str]) -> str:
    """Return the column's name, with its attribute number if the name is taken."""
    name, number = column.name, column.attnum
    while name in taken:
        suffix = f"_{number}"
        name = name.encode()[: _NAME_BYTES - len(suffix)].decode("utf-8", "ignore") + suffix
        number += 1
    return name


def type_names(session: Session, columns: Sequence[Column]) -> list[str]:
    """Return the types that columns get at the destination, as SQL."""
    return [_type_name(session, column.type, column.type_modifier) for column in columns]


def _type_name(session: Session, type_: PostgresType, modifier: int) -> str:
    element = type_.element if type_.kind is TypeKind.ARRAY else None
    if type_.is_builtin and (element or type_).name in _LOCAL:
        return _TEXT if element is None else f"{_TEXT}[]"
    if type_.is_builtin and type_.oid < _FIRST_CUSTOM_OID:
        ((name,),) = session.rows("select pg_catalog.format_type(%s::oid, %s)", [type_.oid, modifier])
        return name if name and "?" not in name else _TEXT
    # A type of an extension may be in another schema there.
    is_base = type_.kind is TypeKind.BASE
    found = session.rows(
        """
        select pg_catalog.format_type(t.oid, %s)
        from pg_catalog.pg_type t join pg_catalog.pg_namespace n on n.oid = t.typnamespace
        where t.typname = %s and t.typtype::text = %s and (n.nspname = %s or %s)
        order by n.nspname = %s desc, n.nspname limit 1
        """,
        [modifier, type_.name, _KINDS.get(type_.kind, "b"), type_.namespace, is_base, type_.namespace],
    )
    if found:
        return found[0][0]
    if type_.kind is TypeKind.DOMAIN and type_.base is not None:
        return _type_name(session, type_.base, type_.base_modifier)
    if element is not None:
        return f"{_type_name(session, element, modifier)}[]"
    return _TEXT


_KINDS = {
    TypeKind.ENUM: "e",
    TypeKind.DOMAIN: "d",
    TypeKind.COMPOSITE: "c",
    TypeKind.RANGE: "r",
    TypeKind.MULTIRANGE: "m",
}
"""`pg_type.typtype`; `b` for all others."""


def equality(session: Session, target: Target, layout: Layout) -> list[str]:
    """Return the operators by which values of the key's columns are equal, for SQL.

    The operators of an extension are in its schema, which is not in the search path.
    """
    operators = ["="] * len(layout.key)
    for number, column in enumerate(layout.source.key):
        type_, _ = resolve_domain(column.type, -1)
        if type_.is_builtin or type_.kind is not TypeKind.BASE:
            continue
        found = session.rows(
            """
            select n.nspname, o.oprname
            from pg_catalog.pg_attribute a
            join pg_catalog.pg_type t on t.oid = a.atttypid
            join pg_catalog.pg_opclass c on c.opcintype in (t.oid, t.typbasetype) and c.opcdefault
            join pg_catalog.pg_am m on m.oid = c.opcmethod and m.amname = 'btree'
            join pg_catalog.pg_amop p on p.amopfamily = c.opcfamily and p.amopstrategy = 3
                and p.amoplefttype = c.opcintype and p.amoprighttype = c.opcintype
            join pg_catalog.pg_operator o on o.oid = p.amopopr
            join pg_catalog.pg_namespace n on n.oid = o.oprnamespace
            where a.attrelid = pg_catalog.to_regclass(%s) and a.attname = %s
            """,
            [target.sql, layout.key[number]],
        )
        if found:
            operators[number] = f"operator({quote_identifier(found[0][0])}.{found[0][1]})"
    return operators


def follow(
    session: Session, target: Target, before: Layout, schema: TableSchema, *, keeps_dropped: bool, records_ddl: bool
) -> Layout:
    """Change the columns of a table as the source did; return its new layout.

    Raise `SchemaNotFollowed` if only a new copy has the right rows.
    """
    if before.source == schema or before.source.has_columns_of(schema):
        return replace(before, source=schema)
    if before.mode is Mode.HISTORY:
        return _extend(session, target, before, schema)
    require_followable(before.source, schema, records_ddl=records_ddl)
    types = dict(zip((each.attnum for each in schema.columns), type_names(session, schema.columns), strict=True))
    now = {column.attnum for column in schema.columns}
    dropped = [] if keeps_dropped else [name for attnum, name in before.names.items() if attnum not in now]
    for name in dropped:
        _alter(session, target, f"drop column {quote_identifier(name)}")
    present = [name for name in _present(session, target) if name not in before.names.values()]
    kept = [name for attnum, name in before.names.items() if attnum not in now and name not in dropped]
    taken = [*OWN_COLUMNS[before.mode], *kept, *present]
    names: dict[int, str] = {}
    for column in schema.columns:
        names[column.attnum] = free_name(column, [*taken, *names.values()])
    renamed = [attnum for attnum in now & before.names.keys() if before.names[attnum] != names[attnum]]
    # Columns may have exchanged their names.
    for attnum in renamed:
        _rename(session, target, before.names[attnum], f"penstock_renamed_{attnum}")
    for attnum in renamed:
        _rename(session, target, f"penstock_renamed_{attnum}", names[attnum])
    for column in schema.columns:
        name, type_ = quote_identifier(names[column.attnum]), types[column.attnum]
        if column.attnum not in before.names:
            default = "" if column.missing is None else f" default {quote_literal(column.missing)}"
            _alter(session, target, f"add column {name} {type_}{default}")
            if default:
                _alter(session, target, f"alter column {name} drop default")
        elif type_ != before.types.get(column.attnum, type_):
            _alter(session, target, f"alter column {name} type {type_} using {name}::{type_}")
    return Layout(schema, before.mode, names, types=types)


def _extend(session: Session, target: Target, before: Layout, schema: TableSchema) -> Layout:
    """Add columns to a log of changes, whose earlier rows stay as they are.

    A column of the source goes to the column with its name and type; if that has another type, to `name_3`, where 3 is
    the attribute number.
    """
    present = _present(session, target)
    types = dict(zip((each.attnum for each in schema.columns), type_names(session, schema.columns), strict=True))
    names: dict[int, str] = {}
    for column in schema.columns:
        wanted = types[column.attnum]
        taken = [*OWN_COLUMNS[before.mode], *names.values()]
        taken += [name for name, type_ in present.items() if type_ != wanted]
        name = names[column.attnum] = free_name(column, taken)
        if name not in present:
            _alter(session, target, f"add column {quote_identifier(name)} {wanted}")
    return Layout(schema, before.mode, names, before.version + 1, types)


def _present(session: Session, target: Target) -> dict[str, str]:
    """Return the columns of a table, with their types."""
    found = session.rows(
        """
        select a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod)
        from pg_catalog.pg_attribute a
        where a.attrelid = pg_catalog.to_regclass(%s) and a.attnum > 0 and not a.attisdropped
        order by a.attnum
        """,
        [target.sql],
    )
    return dict(found)


def _alter(session: Session, target: Target, change: str) -> None:
    session.run(f"alter table {target.sql} {change}")


def _rename(session: Session, target: Target, name: str, to: str) -> None:
    _alter(session, target, f"rename column {quote_identifier(name)} to {quote_identifier(to)}")
