"""Temporary tables for the rows of a batch, and the statements that take them over into a table with a key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.destinations.postgres.layout import DELETED_AT, Layout, Mode, Target
from penstock.destinations.postgres.server import Session
from penstock.schema import TableSchema, TypeKind, quote_identifier, resolve_domain

_STAGES = 400
"""Tables whose temporary tables a connection keeps."""
_DELETED = 5_000
"""Rows that a temporary table has had before it is truncated."""
_MOVED = "(s.o0 is distinct from null)"
"""True for a staged row whose key changed. A composite value with a NULL inside is neither NULL nor NOT NULL."""
_EXACT = frozenset(
    {
        *("int2", "int4", "int8", "oid", "bool", "uuid", "bytea", "text", "varchar", "name", "char"),
        *("date", "time", "timestamp", "timestamptz", "inet", "cidr", "macaddr", "macaddr8", "pg_lsn"),
    }
)
"""Types whose values are equal only if they are the same."""


def has_exact_key(schema: TableSchema) -> bool:
    """Return False if keys can be equal without being the same, such as 1.0 and 1.00."""
    types = [resolve_domain(column.type, -1)[0] for column in schema.key]
    return all(each.kind is TypeKind.ENUM or (each.is_builtin and each.name in _EXACT) for each in types)


class Statements:
    """The statements that take temporary tables over into a table with a key."""

    def __init__(
        self, target: Target, layout: Layout, schema: TableSchema, stage: str, operators: Sequence[str]
    ) -> None:
        self._target = target.sql
        self._stage = stage
        self._names = [quote_identifier(layout.names[column.attnum]) for column in schema.columns]
        places = {column.attnum: number for number, column in enumerate(schema.columns)}
        self._key = [places[column.attnum] for column in schema.key]
        self._operators = operators
        self._is_soft = layout.mode is Mode.SOFT_DELETE
        self._is_exact = has_exact_key(schema)

    def fill(self, omitted: NDArray[np.bool_], *, moved: bool) -> str:
        """Give staged rows the omitted values of the rows that they were: those whose key changed, or the others."""
        sets = self._sets(omitted, staged=True)
        same = f"{_MOVED} and {self._same('o{}')}" if moved else f"not {_MOVED} and {self._same_key()}"
        where = f"s.omits is not null and {same}"
        return f"update {self._stage}_rows s set {sets}, omits = null from {self._target} t where {where}"

    def delete(self) -> str:
        """Delete the rows of keys that are gone."""
        return f"delete from {self._target} t using {self._stage}_keys s where {self._same('k{}')}"

    def delete_staged(self) -> str:
        """Delete the rows whose keys are staged, to insert them again."""
        return f"delete from {self._target} t using {self._stage}_rows s where {self._same_key()}"

    def forget_renamed(self) -> str:
        """Delete staged rows that are gone if a live one has an equal key, which is the same row."""
        same = " and ".join(f"l.c{at} {each} s.c{at}" for at, each in zip(self._key, self._operators, strict=True))
        rows = f"{self._stage}_rows"
        return f"delete from {rows} s using {rows} l where s.d is not null and l.d is null and {same}"

    def update_in_place(self, omitted: NDArray[np.bool_]) -> str:
        """Update rows with omitted values, which stay where they are."""
        sets = self._sets(omitted, staged=False)
        where = f"s.omits is not null and not {_MOVED} and {self._same_key()}"
        return f"update {self._target} t set {sets} from {self._stage}_rows s where {where}"

    def lost(self) -> str:
        """Find the live rows whose omitted values the table does not have."""
        live = " and s.d is null" if self._is_soft else ""
        return (
            f"select s.n from {self._stage}_rows s where s.omits is not null{live} and ({_MOVED} "
            f"or not exists (select from {self._target} t where {self._same_key()}))"
        )

    def update(self) -> str:
        """Update the other rows, if the table has them; without a column besides the key, only count them.

        A key that is equal may be another text.
        """
        fixed = self._key if self._is_exact else ()
        sets = [f"{name} = s.c{number}" for number, name in enumerate(self._names) if number not in fixed]
        sets += [f"{DELETED_AT} = s.d"] if self._is_soft else []
        where = f"s.omits is null and {self._same_key()}"
        if not sets:
            return f"select from {self._target} t, {self._stage}_rows s where {where}"
        return f"update {self._target} t set {', '.join(sets)} from {self._stage}_rows s where {where}"

    def insert(self) -> str:
        """Insert the rows that the table does not have."""
        names = [*self._names, *([DELETED_AT] if self._is_soft else [])]
        staged = [*(f"c{number}" for number in range(len(self._names))), *(["d"] if self._is_soft else [])]
        return (
            f"insert into {self._target} ({', '.join(names)}) select {', '.join(staged)} from {self._stage}_rows s "
            f"where s.omits is null and not exists (select from {self._target} t where {self._same_key()})"
        )

    def _sets(self, omitted: NDArray[np.bool_], *, staged: bool) -> str:
        """Return assignments that keep omitted values, for staged rows or those of the table."""
        columns = np.asarray(omitted.any(axis=0), np.bool_)
        sets: list[str] = []
        for number, name in enumerate(self._names):
            if columns[number]:
                kept = f"case when get_bit(s.omits, {number}) = 1 then t.{name} else s.c{number} end"
                sets.append(f"{f'c{number}' if staged else name} = {kept}")
            elif not staged:
                sets.append(f"{name} = s.c{number}")
        return ", ".join([*sets, *([f"{DELETED_AT} = s.d"] if self._is_soft and not staged else [])])

    def _same(self, pattern: str) -> str:
        """Return the condition for rows of the table whose key is in staged columns; `{}` stands for their number."""
        pairs = zip(self._key, self._operators, strict=True)
        same = (f"t.{self._names[at]} {each} s.{pattern.format(number)}" for number, (at, each) in enumerate(pairs))
        return " and ".join(same)

    def _same_key(self) -> str:
        pairs = zip(self._key, self._operators, strict=True)
        return " and ".join(f"t.{self._names[at]} {operator} s.c{at}" for at, operator in pairs)


def stage_tables(session: Session, target: Target, layout: Layout, schema: TableSchema) -> str:
    """Return the name of empty temporary tables for the rows of a table: add `_rows` or `_keys`."""
    stage = f"pg_temp.stage_{schema.table_id}"
    names = [quote_identifier(layout.names[column.attnum]) for column in schema.columns]
    key = [quote_identifier(layout.names[column.attnum]) for column in schema.key]
    wanted = (target.sql, layout.mode.value, *names, "", *key, *layout.types.values())
    tables = [f"{stage}_rows", f"{stage}_keys"]
    if session.stages.get(stage) == wanted:
        _empty(session, tables)
        return stage
    if len(session.stages) >= _STAGES:
        session.run("; ".join(f"drop table if exists {other}_rows, {other}_keys" for other in session.stages))
        session.stages.clear()
    bases = _base_types(session, target, layout, schema)
    names = [f"{name}{bases.get(name, '')}" for name in names]
    key = [f"{name}{bases.get(name, '')}" for name in key]
    columns = [f"{name} as c{number}" for number, name in enumerate(names)]
    columns += ["null::timestamptz as d"] if layout.mode is Mode.SOFT_DELETE else []
    columns += ["null::bytea as omits", "null::int8 as n", *(f"{name} as o{number}" for number, name in enumerate(key))]
    create = f"create temporary table {stage.partition('.')[2]}"
    listed = ", ".join(f"{name} as k{number}" for number, name in enumerate(key))
    session.run(
        f"drop table if exists {', '.join(tables)}; "
        f"{create}_rows as select {', '.join(columns)} from {target.sql} with no data; "
        f"{create}_keys as select {listed} from {target.sql} with no data"
    )
    session.stages[stage] = wanted
    for table in tables:
        session.filled.pop(table, None)
    return stage


def _empty(session: Session, tables: Sequence[str]) -> None:
    """Empty temporary tables. What rolls this back also forgets them.

    To truncate a table takes longer than to delete a few rows, but deleted rows leave their places behind.
    """
    filled = [table for table in tables if table in session.filled]
    if any(session.filled[table] > _DELETED for table in filled):
        session.run(f"truncate {', '.join(filled)}")
        for table in filled:
            del session.filled[table]
    elif filled:
        session.run("; ".join(f"delete from {table}" for table in filled))


def _base_types(session: Session, target: Target, layout: Layout, schema: TableSchema) -> dict[str, str]:
    """Return casts to the types under domains, by name of column: a domain may refuse the NULL of an omitted value."""
    domains = [layout.names[column.attnum] for column in schema.columns if column.type.kind is TypeKind.DOMAIN]
    if not domains:
        return {}
    found = session.rows(
        """
        with recursive types (name, type, modifier) as (
            select a.attname::text, a.atttypid, a.atttypmod from pg_catalog.pg_attribute a
            where a.attrelid = pg_catalog.to_regclass(%s) and a.attname = any(%s)
            union all
            select s.name, t.typbasetype, t.typtypmod
            from types s join pg_catalog.pg_type t on t.oid = s.type and t.typtype = 'd'
        )
        select s.name, pg_catalog.format_type(s.type, s.modifier)
        from types s join pg_catalog.pg_type t on t.oid = s.type and t.typtype <> 'd'
        """,
        [target.sql, domains],
    )
    return {quote_identifier(name): f"::{type_}" for name, type_ in found}
