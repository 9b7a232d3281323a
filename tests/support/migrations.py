"""Migration histories of applications: their statements in order, and rows for whatever tables they make.

A history is a folder of SQL files, in the order of their paths. Files that undo a step, or that are for other servers,
are left out. Rows are generated from the catalog, so any history can be run.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

_OTHERS = re.compile(r"down\.sql$|rollback|\.(mysql|sqlite3?|cockroach(db)?)\.", re.IGNORECASE)
_NAMED = re.compile(r"\.(postgres|postgresql|psql)\b")
_TOKEN = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|\$(\w*)\$.*?\$\1\$|;|[^-/'\"$;]+|.", re.DOTALL
)
_CONTROL = re.compile(r"(begin|start transaction|commit|end|rollback)( work| transaction)?$", re.IGNORECASE)

_TABLES = """
    select c.oid::int8, n.nspname, c.relname,
        (select pg_catalog.string_agg(a::text, ' ' order by attnum) from pg_catalog.pg_attribute a
         where attrelid = c.oid and attnum > 0),
        c.relreplident <> 'd' or exists (
            select from pg_catalog.pg_index i where indrelid = c.oid and indisprimary and indimmediate)
    from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence = 'p'
    and n.nspname not in ('pg_catalog', 'information_schema') and n.nspname !~ '^(pg_|penstock)'
    and exists (select from pg_catalog.pg_attribute a where attrelid = c.oid and attnum > 0 and not attisdropped)
    order by n.nspname, c.relname
"""
_COLUMNS = """
    select attname, atttypid::int8, format_type(atttypid, atttypmod), attnotnull, attgenerated <> '',
        attidentity::text, atthasdef,
        (select array_agg(enumlabel::text) from pg_catalog.pg_enum
         where enumtypid = coalesce(nullif(typbasetype, 0), t.oid))
    from pg_catalog.pg_attribute a join pg_catalog.pg_type t on t.oid = atttypid
    where attrelid = %s::oid and attnum > 0 and not attisdropped order by attnum
"""


class Table(NamedTuple):
    """A table that a history has made."""

    oid: int
    namespace: str
    name: str
    columns: str
    """Another text after any change of its columns."""
    has_identity: bool

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.namespace, self.name)

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True)
class Step:
    """One file of a history."""

    name: str
    statements: tuple[str, ...]


def read_history(folder: Path) -> list[Step]:
    """Return the steps of a history, in their order."""
    # Some tools write the time in a name with dashes and without.
    files = sorted(folder.rglob("*.sql"), key=lambda path: str(path).replace("-", ""))
    files = [path for path in files if not _OTHERS.search(path.name)]
    # A file for Postgres stands for the one for all servers.
    named = {_NAMED.sub("", str(path)) for path in files if _NAMED.search(path.name)}
    files = [path for path in files if str(path) not in named]
    steps = (Step(str(path.relative_to(folder)), tuple(split_statements(path.read_text()))) for path in files)
    return [step for step in steps if step.statements]


def split_statements(text: str) -> Iterator[str]:
    """Yield the statements of a script, without comments and without BEGIN and COMMIT."""
    statement = ""
    for found in _TOKEN.finditer(f"{text};"):
        token = found[0]
        if token == ";":
            if statement.strip() and not _CONTROL.match(statement.strip()):
                yield statement.strip()
            statement = ""
        elif not token.startswith(("--", "/*")):
            statement += token


def load_tables(connection: psycopg.Connection[Any]) -> dict[str, Table]:
    """Return the tables that exist, by name."""
    tables = (Table(*row) for row in connection.execute(_TABLES).fetchall())
    return {str(table): table for table in tables}


class Writer:
    """Inserts, updates and deletes rows of any table, as far as its constraints allow."""

    def __init__(self, connection: psycopg.Connection[Any], random: Random) -> None:
        self._connection = connection
        self._random = random
        self._number = 0
        self.written = 0
        # Foreign keys and triggers of the application are not checked.
        connection.execute("set session_replication_role = replica")

    def write(self, table: Table) -> bool:
        """Write some rows; False if the table took none."""
        columns = self._connection.execute(_COLUMNS, [table.oid]).fetchall()
        before = self.written
        for _ in range(2):
            self._insert(table, columns)
        self._update(table, columns)
        if self._random.random() < 0.4:
            self._try(sql.SQL("delete from {} where ctid = {}").format(table.identifier, self._any_row(table)))
        return self.written > before

    def _insert(self, table: Table, columns: list[Any]) -> None:
        cells: dict[str, Any] = {}
        for name, _, type_, required, generated, identity, has_default, labels in columns:
            if generated or identity == "a" or (has_default and self._random.random() < 0.5):
                continue
            if required or self._random.random() < 0.7:
                cells[name] = self._value(type_, labels)
        names = sql.SQL(", ").join(map(sql.Identifier, cells))
        values = sql.SQL(", ").join(sql.SQL("{}").format(value) for value in cells.values())
        self._try(sql.SQL("insert into {} ({}) values ({})").format(table.identifier, names, values))

    def _update(self, table: Table, columns: list[Any]) -> None:
        usable = [each for each in columns if not each[4] and each[5] != "a"]
        if not usable:
            return
        name, _, type_, _, _, _, _, labels = self._random.choice(usable)
        statement = sql.SQL("update {} set {} = {} where ctid = {}")
        value = self._value(type_, labels)
        self._try(statement.format(table.identifier, sql.Identifier(name), value, self._any_row(table)))

    def _any_row(self, table: Table) -> sql.Composable:
        return sql.SQL("(select ctid from {} order by random() limit 1)").format(table.identifier)

    def _value(self, type_: str, labels: list[str] | None) -> sql.Composable:
        """Return a value of any type; one that the type refuses only loses a row."""
        self._number += 1
        number = self._number
        base = type_.partition("(")[0].removesuffix("[]")
        texts = {
            "boolean": "ft"[number % 2],
            "date": f"20{number % 90 + 10}-02-{number % 28 + 1:02d}",
            "json": f'{{"n": {number}, "a": [1, null]}}',
            "jsonb": f'{{"n": {number}, "a": [1, null]}}',
            "uuid": f"00000000-0000-4000-8000-{number:012d}",
            "bytea": f"\\x{number:08x}00ff",
            "inet": f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}",
            "cidr": f"10.{number >> 8 & 255}.{number & 255}.0/24",
            "interval": f"{number} seconds",
            "tsvector": f"w{number} 'two words':3",
            "semver_triple": f"({number},0,1)",
        }
        if labels:
            text = self._random.choice(labels)
        elif base in texts:
            text = texts[base]
        elif base.startswith("time"):
            text = "12:00:00" if base.startswith("time ") or base == "time" else f"2024-02-29 12:00:00.{number:06d}"
        elif re.match(r"smallint|integer|bigint|numeric|double|real", base):
            text = str(number % 30_000)
        else:
            text = (
                f"v{number}"
                if number % 9
                else "x" * 30 + f" ü🚰 {number} " + "long " * (600 if "(" not in type_ else 0)
            )
            limit = re.search(r"\((\d+)\)", type_)
            text = text[: int(limit[1])] if limit else text
        if type_.endswith("[]"):
            text = (
                "{"
                + ",".join('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for _ in range(number % 3))
                + "}"
            )
        return sql.Literal(text)

    def _try(self, statement: sql.Composed) -> None:
        # Constraints refuse some rows.
        with contextlib.suppress(psycopg.Error), self._connection.transaction():
            self.written += self._connection.execute(statement).rowcount
