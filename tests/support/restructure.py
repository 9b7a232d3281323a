"""Random work on whole tables: partitions come and go, tables are created, renamed, moved, keyed anew, and dropped.

Every action reads the catalog in its own session, so it sees what its transaction did before. An action that has
nothing to work on does nothing; `done` counts the others.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any, LiteralString

import psycopg
from psycopg import sql

SCHEMAS = ("public", "moved")
_MOVING = ("m one", "m two", "m three", "m_four", "M_four")
_SLOTS = 8
_SLOT = 100
"""Partition number n has the ids from n * 100 on."""
_ROOT = sql.Identifier("public", "parted")
_MINE = """
    select n.nspname, c.relname from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname = any(%s) and c.relkind in ('r', 'p') and not c.relispartition and c.relname ilike %s
    order by 1, 2
"""
_LEAVES = """
    select n.nspname, c.relname, pg_catalog.pg_get_expr(c.relpartbound, c.oid)
    from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where i.inhparent = 'public.parted'::regclass order by 2
"""
_KEYS = """
    select conname, pg_catalog.pg_get_constraintdef(oid) from pg_catalog.pg_constraint
    where conrelid = %s::text::regclass and contype = 'p'
"""


class Restructuring:
    """The tables and what happens to them; all names come from `random`."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._number = 0
        self.done: Counter[str] = Counter()
        self._actions = {
            self.write_leaf: 10,
            self.write_moving: 10,
            self.create_leaf: 4,
            self.attach: 2,
            self.detach: 2,
            self.drop_leaf: 2,
            self.truncate_leaf: 1,
            self.rename: 2,
            self.exchange_names: 1,
            self.set_schema: 1,
            self.change_key: 1,
            self.change_identity: 1,
            self.create_table: 2,
            self.drop_table: 1,
        }

    def create(self, connection: psycopg.Connection[Any]) -> None:
        """Create the first tables."""
        connection.execute("create schema moved")
        columns = "(id int, n int not null default 0, note text, primary key (id))"
        connection.execute(f"create table public.parted {columns} partition by range (id)".encode())
        for _ in range(3):
            self.create_leaf(connection)
        for _ in range(3):
            self.create_table(connection)
        self.write_everywhere(connection)

    def act(self, connection: psycopg.Connection[Any]) -> None:
        """Do one thing."""
        action = self._random.choices([*self._actions], [*self._actions.values()])[0]
        if action(connection):
            self.done[action.__name__] += 1

    def write_everywhere(self, connection: psycopg.Connection[Any]) -> None:
        """Write a row into each table, so that the stream describes its current columns."""
        for schema, name in connection.execute(_MINE, [[*SCHEMAS], "m%"]).fetchall():
            self._number += 1
            table, values = sql.Identifier(schema, name), sql.SQL("({}, 0, 'last')").format(10_000 + self._number)
            self._run(connection, "insert into {} (id, n, note) values {}", table, values)
        self.write_leaf(connection)

    # Rows

    def write_leaf(self, connection: psycopg.Connection[Any]) -> bool:
        for _, _, bound in self._leaves(connection):
            first = int(bound.split("(")[1].split(")")[0].strip("'"))
            for _ in range(self._random.choice([1, 3, 20])):
                self._write(connection, _ROOT, first + self._random.randrange(_SLOT))
            return True
        return False

    def write_moving(self, connection: psycopg.Connection[Any]) -> bool:
        for table in self._moving(connection):
            self._write(connection, table, self._random.randrange(_SLOTS * _SLOT))
            return True
        return False

    def _write(self, connection: psycopg.Connection[Any], table: sql.Identifier, number: int) -> None:
        texts: list[LiteralString] = [
            "insert into {0} (id, n, note) values (%(id)s, %(n)s, %(note)s) on conflict do nothing",
            "update {0} set n = n + 1 where id = %(id)s",
            """
            update {0} set id = id + 1 where id = %(id)s and id %% 100 <> 99
            and not exists (select from {0} other where other.id = %(id)s + 1)
            """,
            "delete from {0} where id = %(id)s",
        ]
        statement = sql.SQL(self._random.choices(texts, [6, 3, 1, 1])[0]).format(table)
        note = self._random.choice(["", "short", "long" * 2000])
        connection.execute(statement, {"id": number, "n": self._random.randrange(1000), "note": note})

    # Partitions

    def create_leaf(self, connection: psycopg.Connection[Any]) -> bool:
        """Create a partition, sometimes one with partitions of its own."""
        name, bounds = self._new_leaf(), self._bounds()
        if self._random.random() < 0.7:
            self._run(connection, "create table {} partition of {} {}", name, _ROOT, bounds)
            return True
        self._run(connection, "create table {} partition of {} {} partition by hash (id)", name, _ROOT, bounds)
        for rest in (0, 1):
            text = "create table {} partition of {} for values with (modulus 2, remainder {})"
            self._run(connection, text, self._new_leaf(), name, sql.Literal(rest))
        return True

    def attach(self, connection: psycopg.Connection[Any]) -> bool:
        """Attach a table that has rows."""
        name, slot = self._new_leaf(), self._random.randrange(_SLOTS)
        self._run(connection, "create table {} (like {} including all)", name, _ROOT)
        for _ in range(self._random.choice([0, 1, 5])):
            self._write(connection, name, slot * _SLOT + self._random.randrange(_SLOT))
        self._run(connection, "alter table {} attach partition {} {}", _ROOT, name, self._bounds(slot))
        return True

    def detach(self, connection: psycopg.Connection[Any]) -> bool:
        """Detach a partition; it becomes a table of its own, is dropped, or is attached again."""
        for schema, name, bound in self._leaves(connection):
            leaf = sql.Identifier(schema, name)
            self._run(connection, "alter table {} detach partition {}", _ROOT, leaf)
            match self._random.choice(["keep", "drop", "again"]):
                case "drop":
                    self._run(connection, "drop table {}", leaf)
                case "again":
                    self._run(connection, "update {} set n = n + 1000", leaf)
                    self._run(connection, "alter table {} attach partition {} {}", _ROOT, leaf, _literally(bound))
                case _:
                    pass
            return True
        return False

    def drop_leaf(self, connection: psycopg.Connection[Any]) -> bool:
        return self._on_leaf(connection, "drop table {}")

    def truncate_leaf(self, connection: psycopg.Connection[Any]) -> bool:
        return self._on_leaf(connection, "truncate {}")

    def _on_leaf(self, connection: psycopg.Connection[Any], statement: LiteralString) -> bool:
        for schema, name, _ in self._leaves(connection):
            self._run(connection, statement, sql.Identifier(schema, name))
            return True
        return False

    def _leaves(self, connection: psycopg.Connection[Any]) -> list[tuple[str, str, str]]:
        """Return one partition, if there is any."""
        found = connection.execute(_LEAVES).fetchall()
        return self._random.sample(found, min(1, len(found)))

    def _new_leaf(self) -> sql.Identifier:
        self._number += 1
        return sql.Identifier("public", f"leaf {self._number}")

    def _bounds(self, slot: int | None = None) -> sql.Composed:
        slot = self._random.randrange(_SLOTS) if slot is None else slot
        return sql.SQL("for values from ({}) to ({})").format(slot * _SLOT, (slot + 1) * _SLOT)

    # Whole tables

    def create_table(self, connection: psycopg.Connection[Any]) -> bool:
        """Create a table, perhaps with the name of one that was dropped or renamed."""
        columns = sql.SQL("(id int primary key, n int not null default 0, note text)")
        table = self._new_name()
        self._run(connection, "create table {} {}", table, columns)
        for _ in range(self._random.choice([0, 2, 10])):
            self._write(connection, table, self._random.randrange(_SLOTS * _SLOT))
        return True

    def drop_table(self, connection: psycopg.Connection[Any]) -> bool:
        return self._on_table(connection, "drop table {}")

    def rename(self, connection: psycopg.Connection[Any]) -> bool:
        return self._on_table(connection, "alter table {} rename to {}", sql.Identifier(self._random.choice(_MOVING)))

    def set_schema(self, connection: psycopg.Connection[Any]) -> bool:
        return self._on_table(connection, "alter table {} set schema {}", sql.Identifier(self._random.choice(SCHEMAS)))

    def exchange_names(self, connection: psycopg.Connection[Any]) -> bool:
        """Exchange the names of two tables of one schema."""
        found = connection.execute(_MINE, [[self._random.choice(SCHEMAS)], "m%"]).fetchall()
        if len(found) < 2:
            return False
        (schema, one), (_, other) = self._random.sample(found, 2)
        for name, new in ((one, "between"), (other, one), ("between", other)):
            self._run(connection, "alter table {} rename to {}", sql.Identifier(schema, name), sql.Identifier(new))
        return True

    def change_key(self, connection: psycopg.Connection[Any]) -> bool:
        for table in self._moving(connection):
            ((name, definition),) = connection.execute(_KEYS, [table.as_string(connection)]).fetchall()
            key = sql.SQL("id") if "n" in definition.split("(")[1] else sql.SQL("id, n")
            text = "alter table {} drop constraint {}, add primary key ({})"
            self._run(connection, text, table, sql.Identifier(name), key)
            return True
        return False

    def change_identity(self, connection: psycopg.Connection[Any]) -> bool:
        identity = sql.SQL(self._random.choice(["full", "default"]))
        return self._on_table(connection, "alter table {} replica identity {}", identity)

    def _on_table(self, connection: psycopg.Connection[Any], statement: LiteralString, *parts: sql.Composable) -> bool:
        for table in self._moving(connection):
            self._run(connection, statement, table, *parts)
            return True
        return False

    def _moving(self, connection: psycopg.Connection[Any]) -> list[sql.Identifier]:
        """Return one table, if there is any."""
        found = connection.execute(_MINE, [[*SCHEMAS], "m%"]).fetchall()
        return [sql.Identifier(*each) for each in self._random.sample(found, min(1, len(found)))]

    def _new_name(self) -> sql.Identifier:
        return sql.Identifier(self._random.choice(SCHEMAS), self._random.choice(_MOVING))

    @staticmethod
    def _run(connection: psycopg.Connection[Any], text: LiteralString, *parts: sql.Composable) -> None:
        connection.execute(sql.SQL(text).format(*parts))


def _literally(text: str) -> sql.SQL:
    return sql.SQL(text)  # pyright: ignore[reportArgumentType]
