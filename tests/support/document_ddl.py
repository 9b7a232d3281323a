"""Random DDL under search documents: what a specification reads changes its type, values, name, key or heap.

Every action is one that an application's migrations do. A step that must not stay, such as a dropped column that a
specification names, is owed: `DocumentDdl.settle` undoes it, also after the connection was lost in between. `done`
counts what the server accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import psycopg

TEXTS = {
    "people": ("name", "team_code"),
    "teams": ("label",),
    "orders": ("status",),
    "line_notes": ("body",),
    "products": ("name",),
    "tags": ("label",),
    "profiles": ("motto",),
}
"""Columns of text that are no key."""
NUMBERS = {
    "people": ("boss_id",),
    "orders": ("person_id", "total"),
    "lines": ("qty",),
    "person_tags": ("weight",),
    "order_tags": ("order_id", "tag_id"),
    "products": ("maker_id",),
    "teams": ("lead_id",),
}
KEYED = {"teams": ("code", "label"), "products": ("sku", "name"), "profiles": ("person_id", "motto")}
"""Tables without references to them: the column of the key, and one that may join it."""
SPLIT = ("orders", "profiles", "order_tags", "line_notes")
"""Tables that may be partitioned by the first column of their key, a number."""
HEIRS = ("people", "profiles", "order_tags")
BOUNDS = (("minvalue", "3"), ("3", "20"), ("20", "maxvalue"))
LABELS = ("bad", "fine", "good", "great", "sad")

_COLUMNS = """
    select attname::text, format_type(atttypid, atttypmod) from pg_catalog.pg_attribute
    where attrelid = %s::text::regclass and attnum > 0 and not attisdropped
"""
_PARTITIONS = """
    select i.inhrelid::regclass::text, pg_catalog.pg_get_expr(c.relpartbound, c.oid)
    from pg_catalog.pg_inherits i join pg_catalog.pg_class c on c.oid = i.inhrelid
    where i.inhparent = %s::text::regclass and c.relispartition order by 1
"""
_LABELS = "select enumlabel::text from pg_catalog.pg_enum where enumtypid = 'w.mood'::regtype order by enumsortorder"


def prepare(random: Random, connection: psycopg.Connection[Any]) -> Sequence[str]:
    """Add an enum and a column that can be poisoned to the world's tables, and partition some; return those."""
    connection.execute("create type w.mood as enum ('bad', 'fine', 'good')")
    connection.execute("alter table w.people add mood w.mood, add poison int")
    split = random.sample(SPLIT, random.randint(1, 2))
    for table in split:
        _partition(connection, table)
    return split


def _partition(connection: psycopg.Connection[Any], table: str) -> None:
    """Make a table a partitioned one, with the references to it."""
    referring = connection.execute(
        "select conrelid::regclass::text, pg_catalog.pg_get_constraintdef(oid) from pg_catalog.pg_constraint"
        " where contype = 'f' and (confrelid = %(table)s::text::regclass or conrelid = %(table)s::text::regclass)",
        {"table": f"w.{table}"},
    ).fetchall()
    key = connection.execute(_COLUMNS, [f"w.{table}"]).fetchall()[0][0]
    run(
        connection,
        f"alter table w.{table} rename to former",
        f"create table w.{table} (like w.former including defaults) partition by range ({key})",
        "drop table w.former cascade",
        f"alter table w.{table} add constraint {table}_pkey primary key ({key})",
        *(_new_partition(table, number) for number in range(len(BOUNDS))),
        *(f"alter table {each.replace('w.former', f'w.{table}')} add {text.replace('w.former', f'w.{table}')}"
          for each, text in referring),
    )  # fmt: skip


def _new_partition(table: str, number: int, name: str = "") -> str:
    first, last = BOUNDS[number]
    name = name or f"{table}_{number}"
    return f"create table w.{name} partition of w.{table} for values from ({first}) to ({last})"


def run(connection: psycopg.Connection[Any], *statements: str) -> None:
    """Run statements in one transaction."""
    with connection.transaction():
        for each in statements:
            connection.execute(each.encode())


class DocumentDdl:
    """What happens to the world's tables and to their publication; all choices come from `random`."""

    def __init__(
        self, random: Random, split: Sequence[str], publication: str, pause: Callable[[float], object]
    ) -> None:
        """`split` are the partitioned tables; `pause` waits, between a step and the one that undoes it."""
        self._random = random
        self._split = split
        self._publication = publication
        self._pause = pause
        self._number = 0
        self._owed: list[tuple[str, ...]] = []
        self.labels: list[str] = ["bad", "fine", "good"]
        """The labels of the enum, as far as they are known here."""
        self.done: Counter[str] = Counter()
        self._actions: dict[Callable[[psycopg.Connection[Any]], None], int] = {
            self.change_type: 3,
            self.drop_and_add_column: 3,
            self.rename_column: 2,
            self.exchange_columns: 2,
            self.rename_table: 2,
            self.replace_table: 2,
            self.change_key: 3,
            self.change_key_type: 2,
            self.rename_label: 2,
            self.add_label: 1,
            self.detach_partition: 3,
            self.drop_partition: 2,
            self.truncate_partition: 1,
            self.inherit: 2,
            self.change_identity: 2,
            self.change_unread_column: 1,
            self.rewrite: 1,
            self.leave_publication: 2,
            self.publish_less: 1,
            self.filter_rows: 1,
            self.truncate_storm: 1,
        }
        self._silent = self._random.choice(
            [
                (self.change_type, self.drop_and_add_column, self.exchange_columns, self.rename_label),
                (self.detach_partition, self.drop_partition),
                (self.replace_table, self.change_key_type),
            ]
        )

    def act(self, connection: psycopg.Connection[Any], *, silent: bool = False) -> None:
        """Do one thing, with `silent` one that the stream does not carry; the server may refuse it."""
        self.settle(connection)
        likely = {each: odds for each, odds in self._actions.items() if not silent or each in self._silent}
        action = self._random.choices([*likely], [*likely.values()])[0]
        try:
            action(connection)
            self.done[action.__name__.replace("_", " ")] += 1
        except psycopg.Error:
            if connection.broken or connection.closed:
                raise
        self.settle(connection)

    def settle(self, connection: psycopg.Connection[Any]) -> None:
        """Undo what must not stay."""
        while self._owed:
            try:
                run(connection, *self._owed[-1])
            except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                continue
            except psycopg.Error:
                # It never happened, or was undone before the connection was lost.
                if connection.broken or connection.closed:
                    raise
            self._owed.pop()

    def _for_a_while(self, connection: psycopg.Connection[Any], statements: Sequence[str], undo: Sequence[str]) -> None:
        self._owed.append(tuple(undo))
        run(connection, *statements)
        self._pause(self._random.choice([0.0, 0.0, 0.3, 1.2]))

    def _column(self, columns: dict[str, tuple[str, ...]]) -> tuple[str, str]:
        table = self._random.choice([*columns])
        return table, self._random.choice(columns[table])

    # Columns

    def change_type(self, connection: psycopg.Connection[Any]) -> None:
        """Change a type with USING, which computes values that the stream never carries."""
        if self._random.random() < 0.5:
            table, column = self._column(TEXTS)
            new = self._random.choice(["text", "varchar", "varchar(40)"])
            value = self._random.choice(["upper({0})", "left({0} || '!', 12)", "reverse({0})"])
        else:
            table, column = self._column(NUMBERS)
            new = "numeric(8, 2)" if column == "total" else self._random.choice(["int", "bigint", "numeric(12)"])
            value = "{0} % 6 + 1"
        run(connection, f"alter table w.{table} alter {column} type {new} using {value.format(column)}")

    def drop_and_add_column(self, connection: psycopg.Connection[Any]) -> None:
        table, column = self._column({**TEXTS, **{name: each for name, each in NUMBERS.items() if name not in TEXTS}})
        kind = dict(connection.execute(_COLUMNS, [f"w.{table}"]).fetchall())[column]
        letter = "c" if column == "team_code" else column[0]
        value = f"'{letter}{self._random.randint(1, 5)}'" if "char" in kind or kind == "text" else "2"
        added = f"add {column} {kind} default {value}"
        if self._random.random() < 0.5:
            run(connection, f"alter table w.{table} drop {column}, {added}")
        else:
            self._for_a_while(connection, [f"alter table w.{table} drop {column}"], [f"alter table w.{table} {added}"])

    def rename_column(self, connection: psycopg.Connection[Any]) -> None:
        table, column = self._column(self._random.choice([TEXTS, NUMBERS]))
        rename = "alter table w.{} rename {} to {}"
        self._for_a_while(connection, [rename.format(table, column, "away")], [rename.format(table, "away", column)])

    def exchange_columns(self, connection: psycopg.Connection[Any]) -> None:
        table, one, other = self._random.choice([("people", "name", "team_code"), ("order_tags", "order_id", "tag_id")])
        names = ((one, "between"), (other, one), ("between", other))
        run(connection, *(f"alter table w.{table} rename {name} to {new}" for name, new in names))

    def change_unread_column(self, connection: psycopg.Connection[Any]) -> None:
        what = self._random.choice(["add if not exists unseen int default 7", "drop if exists unseen"])
        run(connection, f"alter table w.{self._random.choice([*TEXTS])} {what}")

    def rename_label(self, connection: psycopg.Connection[Any]) -> None:
        labels = [each for (each,) in connection.execute(_LABELS).fetchall()]
        old, new = self._random.choice(labels), self._random.choice([each for each in LABELS if each not in labels])
        run(connection, f"alter type w.mood rename value '{old}' to '{new}'")
        self.labels = [new if each == old else each for each in labels]

    def add_label(self, connection: psycopg.Connection[Any]) -> None:
        if len(self.labels) == len(LABELS) - 1:
            return
        new = self._random.choice([each for each in LABELS if each not in self.labels])
        run(connection, f"alter type w.mood add value '{new}' before '{self._random.choice(self.labels)}'")
        self.labels = [*self.labels, new]

    # Keys

    def change_key(self, connection: psycopg.Connection[Any]) -> None:
        """Build the index of a key anew, take the key away, or make it wider; the last two not for long."""
        table = self._random.choice([*KEYED])
        key, other = KEYED[table]
        drop, add = f"alter table w.{table} drop constraint {table}_pkey", f"add primary key ({key})"
        once = f"add constraint {table}_once unique ({key})"
        back = f"alter table w.{table} drop constraint if exists {table}_once"
        match self._random.choice(["anew", "none", "wider"]):
            case "anew":
                run(connection, f"{drop}, {add}")
            case "none":
                self._for_a_while(connection, [f"{drop}, {once}"], [f"{back}, {add}"])
            case _:
                wider = f"{drop}, add primary key ({key}, {other}), {once}"
                free = f"alter table w.{table} alter {other} drop not null"
                self._for_a_while(connection, [wider], [drop, f"{back}, {add}", free])

    def change_key_type(self, connection: psycopg.Connection[Any]) -> None:
        table, column = self._random.choice(
            [
                ("people", "id"),
                ("products", "sku"),
                ("teams", "code"),
                ("lines", "no"),
                ("tags", "id"),
                ("orders", "id"),
            ]
        )
        new = ["text", "varchar(50)"] if column in ("sku", "code") else ["int", "bigint", "numeric(12)"]
        run(connection, f"alter table w.{table} alter {column} type {self._random.choice(new)}")

    def change_identity(self, connection: psycopg.Connection[Any]) -> None:
        table = self._random.choice(["people", "teams", "lines", "products", "tags", "person_tags"])
        run(connection, f"alter table w.{table} replica identity {self._random.choice(['full', 'default'])}")

    # Whole tables

    def rename_table(self, connection: psycopg.Connection[Any]) -> None:
        """Rename a table and back; rows are written under the other name."""
        table = self._random.choice([*TEXTS])
        column = TEXTS[table][0]
        away, back = f"alter table w.{table} rename to away", f"alter table w.away rename to {table}"
        write = f"update w.away set {column} = '{column[0]}{self._random.randint(1, 5)}'"
        if self._random.random() < 0.5:
            run(connection, away, write, back)
        else:
            self._for_a_while(connection, [away, write], [back])

    def replace_table(self, connection: psycopg.Connection[Any]) -> None:
        """Put a new table in the place of the old one, as tools for online migrations do."""
        table = self._random.choice(["teams", "products", "person_tags"])
        column = self._random.choice([*TEXTS.get(table, ()), *NUMBERS[table]])
        run(
            connection,
            f"create table w.another (like w.{table} including defaults)",
            f"insert into w.another select * from w.{table} where {column}::text not like '%3'",
            f"drop table w.{table}",
            f"alter table w.another rename to {table}",
            f"alter table w.{table} add constraint {table}_pkey primary key "
            + {"teams": "(code)", "products": "(sku)", "person_tags": "(person_id, tag_id)"}[table],
        )

    def inherit(self, connection: psycopg.Connection[Any]) -> None:
        """Create a table that inherits, with a row of its own, or let it go."""
        table = self._random.choice([each for each in HEIRS if each not in self._split])
        if connection.execute("select to_regclass(%s)", [f"w.{table}_heir"]).fetchone() != (None,):
            text = self._random.choice(["drop table w.{0}_heir", "alter table w.{0}_heir no inherit w.{0}"])
            run(connection, text.format(table), f"drop table if exists w.{table}_heir")
            return
        run(connection, f"create table w.{table}_heir (like w.{table} including all) inherits (w.{table})")
        run(connection, f"insert into w.{table}_heir select * from only w.{table} limit 3")

    def rewrite(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(f"vacuum full w.{self._random.choice([*TEXTS])}".encode())

    def truncate_storm(self, connection: psycopg.Connection[Any]) -> None:
        """Truncate a table more often than a build takes, with a row between."""
        table = self._random.choice(["profiles", "order_tags", "person_tags", "teams", "line_notes"])
        rows = connection.execute(f"select to_jsonb(t)::text from only w.{table} t limit 2".encode()).fetchall()
        for _ in range(self._random.choice([5, 20, 40])):
            run(connection, f"truncate w.{table}")
            for (row,) in rows:
                connection.execute(
                    f"insert into w.{table} select * from jsonb_populate_record(null::w.{table}, %s)".encode(), [row]
                )
            self._pause(0.03)

    # Partitions

    def _partitions(self, connection: psycopg.Connection[Any]) -> tuple[str, list[tuple[str, str]]]:
        table = self._random.choice(self._split)
        return table, connection.execute(_PARTITIONS, [f"w.{table}"]).fetchall()

    def detach_partition(self, connection: psycopg.Connection[Any]) -> None:
        """Detach a partition, change its rows, and attach it again."""
        table, found = self._partitions(connection)
        name, bound = self._random.choice(found)
        column = {"orders": "status", "profiles": "motto", "order_tags": "tag_id", "line_notes": "body"}[table]
        value = "2" if column == "tag_id" else f"'{column[0]}{self._random.randint(1, 5)}'"
        self._for_a_while(
            connection,
            [f"alter table w.{table} detach partition {name}", f"update {name} set {column} = {value}"],
            [f"alter table w.{table} attach partition {name} {bound}"],
        )

    def drop_partition(self, connection: psycopg.Connection[Any]) -> None:
        """Drop a partition, and create another for the same keys."""
        table, found = self._partitions(connection)
        name, bound = self._random.choice(found)
        self._number += 1
        new = f"create table w.{table}_new{self._number} partition of w.{table} {bound}"
        self._for_a_while(connection, [f"drop table {name}"], [new])

    def truncate_partition(self, connection: psycopg.Connection[Any]) -> None:
        _, found = self._partitions(connection)
        run(connection, f"truncate {self._random.choice(found)[0]}")

    # The publication, which Penstock manages

    def leave_publication(self, connection: psycopg.Connection[Any]) -> None:
        """Take a table out of the publication by hand; Penstock, or the next statement, puts it back."""
        table = self._random.choice([*TEXTS])
        alter = f"alter publication {self._publication} {{}} table w.{table}"
        self._for_a_while(connection, [alter.format("drop")], [alter.format("add")])

    def publish_less(self, connection: psycopg.Connection[Any]) -> None:
        alter = f"alter publication {self._publication} set (publish = '{{}}')"
        less = self._random.choice(["insert", "insert, update", "insert, update, delete", "delete, truncate"])
        self._for_a_while(connection, [alter.format(less)], [alter.format("insert, update, delete, truncate")])

    def filter_rows(self, connection: psycopg.Connection[Any]) -> None:
        alter = f"alter publication {self._publication}"
        again = [f"{alter} drop table w.tags", f"{alter} add table w.tags"]
        self._for_a_while(connection, [again[0], f"{again[1]} where (id > 3)"], again)
