"""A small world for the oracle: tables with every sort of relation, random specifications, random transactions.

What transactions do is written down by triggers, with the rows before and after, and then cut to what a server would
have sent under each table's replica identity. The result has the form of segments, as capture writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import yaml

from penstock.changes.segment import COMMIT_LSN, OLD, OP, ORDINAL, UNCHANGED, Operation
from penstock.documents.images import Changes, RowChanges, WantedColumns, row_changes
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.source.patterns import TableName
from penstock.specification import IndexSpecification, parse_specification

SCHEMA = """
create schema w;
create schema audit;
create table w.people (
    id int primary key, name text, email text unique not null, boss_id bigint, team_code text, hidden boolean,
    gone_at timestamptz
);
create table w.teams (code text primary key, label text, lead_id int);
create table w.orders (id bigint primary key, person_id bigint, status text, total numeric(8, 2));
create table w.lines (
    order_id bigint not null references w.orders on delete cascade on update cascade, no int not null, sku text,
    qty int, primary key (order_id, no)
);
create table w.line_notes (
    id int primary key, order_id bigint, line_no int, body text,
    foreign key (order_id, line_no) references w.lines on delete cascade on update cascade
);
create table w.products (sku text primary key, name text, maker_id int);
create table w.tags (id int primary key, label text);
create table w.person_tags (
    person_id int, tag_id int references w.tags on delete cascade on update cascade, weight int,
    primary key (person_id, tag_id)
);
create table w.order_tags (id int primary key, order_id bigint, tag_id int);
create table w.profiles (person_id int primary key, motto text);
create table audit.log (
    seq bigserial primary key, name text, op text, old jsonb, new jsonb
);
create function audit.note() returns trigger language plpgsql as $$
begin
    insert into audit.log (name, op, old, new) values (
        tg_table_name, tg_op,
        case when tg_level = 'ROW' and tg_op <> 'INSERT' then to_jsonb(old) end,
        case when tg_level = 'ROW' and tg_op <> 'DELETE' then to_jsonb(new) end);
    return null;
end $$;
"""

COLUMNS = {
    "people": ("id", "name", "email", "boss_id", "team_code", "hidden", "gone_at"),
    "teams": ("code", "label", "lead_id"),
    "orders": ("id", "person_id", "status", "total"),
    "lines": ("order_id", "no", "sku", "qty"),
    "line_notes": ("id", "order_id", "line_no", "body"),
    "products": ("sku", "name", "maker_id"),
    "tags": ("id", "label"),
    "person_tags": ("person_id", "tag_id", "weight"),
    "order_tags": ("id", "order_id", "tag_id"),
    "profiles": ("person_id", "motto"),
}
KEYS = {name: ("order_id", "no") if name == "lines" else columns[:1] for name, columns in COLUMNS.items()}
KEYS["person_tags"] = ("person_id", "tag_id")

_TYPES = {"total": "decimal", "qty": "integer", "weight": "integer", "hidden": "boolean", "gone_at": "timestamp"}
_INTEGERS = (
    "id",
    "boss_id",
    "person_id",
    "order_id",
    "no",
    "line_no",
    "lead_id",
    "maker_id",
    "tag_id",
    "qty",
    "weight",
)

_REFERENCES = ("boss_id", "person_id", "order_id", "lead_id", "maker_id", "tag_id")

# Columns that are compared with each other have values that begin with the same letter.
_LETTERS = {"team_code": "c"}

_person = {"table": "people", "primary_key": "id"}
_order = {"table": "orders", "primary_key": "id"}
_line = {"table": "lines", "primary_key": ["order_id", "no"]}
_tag = {"table": "tags", "primary_key": "id"}
RELATIONS: dict[str, list[dict[str, Any]]] = {
    "people": [
        {"kind": "belongs_to", "column": "boss_id", **_person},
        {"kind": "has_many", "foreign_key": "boss_id", **_person},
        {"kind": "belongs_to", "column": "team_code", "table": "teams", "primary_key": "code"},
        {"kind": "has_many", "foreign_key": "person_id", **_order},
        {"kind": "has_one", "foreign_key": "person_id", "table": "profiles", "primary_key": "person_id"},
        {"kind": "has_one", "foreign_key": "lead_id", "table": "teams", "primary_key": "code"},
        {
            "kind": "many_to_many",
            **_tag,
            "through": {"table": "person_tags", "left_key": "person_id", "right_key": "tag_id"},
        },
        {"kind": "has_many", "foreign_key": "maker_id", "table": "products", "primary_key": "sku"},
    ],
    "teams": [
        {"kind": "has_many", "foreign_key": "team_code", **_person},
        {"kind": "belongs_to", "column": "lead_id", **_person},
    ],
    "orders": [
        {"kind": "belongs_to", "column": "person_id", **_person},
        {"kind": "has_many", "foreign_key": "order_id", **_line},
        {
            "kind": "many_to_many",
            **_tag,
            "through": {"table": "order_tags", "left_key": "order_id", "right_key": "tag_id"},
        },
    ],
    "lines": [
        {"kind": "belongs_to", "column": "order_id", **_order},
        {"kind": "belongs_to", "column": "sku", "table": "products", "primary_key": "sku"},
        {"kind": "has_many", "foreign_key": ["order_id", "line_no"], "table": "line_notes", "primary_key": "id"},
    ],
    "line_notes": [{"kind": "belongs_to", "column": ["order_id", "line_no"], **_line}],
    "products": [
        {"kind": "belongs_to", "column": "maker_id", **_person},
        {"kind": "has_many", "foreign_key": "sku", **_line},
    ],
    "tags": [
        {
            "kind": "many_to_many",
            **_person,
            "through": {"table": "person_tags", "left_key": "tag_id", "right_key": "person_id"},
        },
        {
            "kind": "many_to_many",
            **_order,
            "through": {"table": "order_tags", "left_key": "tag_id", "right_key": "order_id"},
        },
    ],
    "profiles": [{"kind": "belongs_to", "column": "person_id", **_person}],
}


def create(connection: psycopg.Connection[Any], *, recorded: bool = True) -> None:
    """The tables, and triggers that write down what happens to them, if that is wanted."""
    connection.execute(SCHEMA)
    for name in COLUMNS if recorded else ():
        for trigger, what, level in (
            ("note", "insert or update or delete", "row"),
            ("note_truncate", "truncate", "statement"),
        ):
            connection.execute(
                f"create trigger {trigger} after {what} on w.{name} for each {level} execute function audit.note()"
            )


# Specifications


def random_specification(random: Random, name: str) -> IndexSpecification:
    """An index over any of the tables, up to three relations deep."""
    return parse_specification(random_text(random), name)


def random_text(random: Random) -> str:
    """The text of a specification."""
    table = random.choice(["people", "people", "orders", "lines", "teams", "tags", "products"])
    written: dict[str, Any] = {"version": 1, "schema": "w", "table": table, "fields": _fields(random, table, 0)}
    if random.random() < 0.7:
        written["primary_key"] = list(KEYS[table])
    if table == "people" and random.random() < 0.3:
        written["doc_id"] = "email"
    if random.random() < 0.25:
        written["filters"] = [_filter(random, table)]
    if table == "people" and random.random() < 0.4:
        written["soft_delete"] = {"column": random.choice(["hidden", "gone_at"])}
    return yaml.safe_dump(written, sort_keys=False)


def _fields(random: Random, table: str, depth: int) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = [
        {_TYPES.get(column, "keyword"): f"c_{column}", "column": column} for column in COLUMNS[table]
    ]
    fields = random.sample(fields, random.randint(1, len(fields)))
    if random.random() < 0.3:
        fields = [{"object": "grouped", "fields": fields}]
    relations = RELATIONS.get(table, [])
    if depth < 3 and relations:
        chosen = random.sample(relations, min(len(relations), random.randint(1, 3 if depth == 0 else 2)))
        for number, relation in enumerate(chosen):
            fields.append(_relation(random, relation, number, depth))
    return fields


def _relation(random: Random, relation: dict[str, Any], number: int, depth: int) -> dict[str, Any]:
    relation = dict(relation)
    kind = relation.pop("kind")
    table = relation["table"]
    if random.random() < 0.25:
        relation["filters"] = [_filter(random, table)]
    if kind != "belongs_to" and random.random() < 0.35:
        return _aggregate(random, relation, number)
    if kind != "belongs_to" and random.random() < 0.5:
        relation["order_by"] = [{"column": random.choice(COLUMNS[table]), "direction": random.choice(["asc", "desc"])}]
    if kind in ("has_many", "many_to_many") and random.random() < 0.3:
        relation["limit"] = random.randint(1, 3)
    fields = _fields(random, table, depth + 1)
    if kind == "many_to_many" and relation["through"]["table"] == "person_tags" and random.random() < 0.5:
        fields.append({"integer": "weight", "from": "junction"})
    return {kind: f"r{number}", **relation, "fields": fields}


def _aggregate(random: Random, relation: dict[str, Any], number: int) -> dict[str, Any]:
    table = relation["table"]
    del relation["primary_key"]
    numbers = [column for column in COLUMNS[table] if column in ("qty", "total", "id", "no", "person_id")]
    operation = random.choice(["count", "sum", "avg", "min", "max", "ids"])
    if operation == "ids" and len(KEYS[table]) == 1:
        return {"ids": f"a{number}", "element_type": "keyword", **relation}
    if operation in ("sum", "avg") and numbers:
        relation["column"] = random.choice(numbers)
    elif operation in ("min", "max"):
        relation["column"] = random.choice([each for each in COLUMNS[table] if each not in ("hidden",)])
    else:
        return {"count": f"a{number}", **relation}
    if operation != "avg":
        relation["value_type"] = "keyword"
    return {operation: f"a{number}", **relation}


def _filter(random: Random, table: str) -> dict[str, Any]:
    column = random.choice(COLUMNS[table])
    if column in ("hidden", "gone_at") or random.random() < 0.2:
        return {"column": column, "op": random.choice(["is_null", "is_not_null"])}
    if random.random() < 0.2:
        return {"raw": f"length({column}::text) % 2 = {random.randint(0, 1)}"}
    values = [_value(random, column) for _ in range(2)]
    operator = random.choice(["neq", "neq", "gt", "lte", "in"])
    return {"column": column, "op": operator, "value": values if operator == "in" else values[0]}


# Transactions


def fill(
    random: Random,
    connection: psycopg.Connection[Any],
    *,
    numbers: Sequence[int] = (1, 2, 3, 4, 5),
    forgiven: tuple[type[psycopg.Error], ...] = (psycopg.errors.IntegrityError,),
) -> None:
    """Rows in every table, most of which hang together; those that fail with these errors are left out.

    `numbers` are in the keys of the rows, and in most of their references.
    """
    with connection.transaction():
        for table, columns in COLUMNS.items():
            key = KEYS[table][0]
            for number in [*numbers] * (2 if len(KEYS[table]) == 2 else 1):
                values = {each: _value(random, each) for each in columns}
                if 1 not in numbers:
                    values |= {each: random.choice(numbers) for each in columns if each in _REFERENCES}
                values[key] = number if key in _INTEGERS else f"{_LETTERS.get(key, key[0])}{number}"
                if "email" in values:
                    values["email"] = f"{number}:%@example"
                _try(connection, _insertion(table), list(values.values()), forgiven)


def random_transaction(
    random: Random,
    connection: psycopg.Connection[Any],
    statements: int,
    *,
    truncates: float = 0.02,
    forgiven: tuple[type[psycopg.Error], ...] = (psycopg.errors.IntegrityError,),
) -> None:
    """Some statements on any tables, in one transaction; those that fail with these errors are left out."""
    with connection.transaction():
        for _ in range(statements):
            _try(connection, *_statement(random, truncates), forgiven)


def random_ddl(random: Random, connection: psycopg.Connection[Any]) -> None:
    """What no specification speaks of: a column comes or goes, old rows are sent as a whole or not."""
    what = random.choice(
        [
            "add column if not exists unseen int default 7",
            "drop column if exists unseen",
            "replica identity full",
            "replica identity default",
        ]
    )
    connection.execute(f"alter table w.{random.choice(list(COLUMNS))} {what}".encode())


def _statement(random: Random, truncates: float) -> tuple[Any, list[Any]]:
    table = random.choice(list(COLUMNS))
    columns = COLUMNS[table]
    what = random.random()
    if what < truncates:
        return f"truncate w.{table} cascade", []
    if what < 0.35:
        return _insertion(table), [_value(random, each) for each in columns]
    column = random.choice([KEYS[table][0], random.choice(columns)])
    if what < 0.55:
        return f"delete from w.{table} where {column} = %s", [_value(random, column)]
    changed = random.choice(columns)
    return (
        f"update w.{table} set {changed} = %s where {column} = %s",
        [_value(random, changed), _value(random, column)],
    )


def _insertion(table: str) -> Any:
    columns = COLUMNS[table]
    return f"insert into w.{table} ({', '.join(columns)}) values ({', '.join(['%s'] * len(columns))})"


def _try(
    connection: psycopg.Connection[Any],
    text: Any,
    values: list[Any],
    forgiven: tuple[type[psycopg.Error], ...] = (psycopg.errors.IntegrityError,),
) -> None:
    with suppress(*forgiven), connection.transaction():
        connection.execute(text, values)


def _value(random: Random, column: str) -> Any:
    if column == "hidden":
        return random.choice([True, False, False, None])
    if column == "gone_at":
        return random.choice(["2026-01-01 00:00:00+00", None, None, None])
    if column == "email":
        return f"{random.randint(1, 7)}:%@example"
    if column == "total":
        return random.choice(["1.50", "20", "3.10"])
    if column in ("no", "line_no"):
        return random.randint(1, 2)
    if column in _INTEGERS:
        return random.randint(1, 6)
    return f"{_LETTERS.get(column, column[0])}{random.randint(1, 5)}"


# What a server would have sent


@dataclass(frozen=True, slots=True)
class Recorded:
    """A change that a trigger saw."""

    seq: int
    table: str
    operation: str
    old: dict[str, str | None] | None
    new: dict[str, str | None] | None


def take_recorded(connection: psycopg.Connection[Any]) -> list[Recorded]:
    """What happened since the last call, in its order."""
    rows = connection.execute(
        "with taken as (delete from audit.log returning *) select seq, name, op,"
        " (select jsonb_object_agg(key, value) from jsonb_each_text(old)),"
        " (select jsonb_object_agg(key, value) from jsonb_each_text(new)) from taken order by seq"
    ).fetchall()
    return [Recorded(*row) for row in rows]


def as_sent(
    recorded: Iterable[Recorded], identities: dict[str, ReplicaIdentity], wanted: dict[TableName, WantedColumns]
) -> Changes:
    """The changes, cut to what the replica identities allow; each transaction's position is its first number."""
    by_table: dict[str, list[Recorded]] = {}
    truncated: set[TableName] = set()
    for each in recorded:
        if each.operation == "TRUNCATE":
            truncated.add(TableName("w", each.table))
        else:
            by_table.setdefault(each.table, []).append(each)
    rows = [
        _segment(changes, TableName("w", table), identities.get(table, ReplicaIdentity.DEFAULT), wanted)
        for table, changes in by_table.items()
        if TableName("w", table) in wanted
    ]
    return Changes(tuple(rows), frozenset(truncated))


def _segment(
    changes: list[Recorded], name: TableName, identity: ReplicaIdentity, wanted: dict[TableName, WantedColumns]
) -> RowChanges:
    columns, key = COLUMNS[name.name], KEYS[name.name]
    full = identity is ReplicaIdentity.FULL
    text = PostgresType(25, "text")
    schema = TableSchema(
        1, *name, tuple(Column(each, number, text, identity=full or each in key) for number, each in enumerate(columns))
    )
    kept = columns if full else key
    images, olds, bitmaps = [], [], []
    for change in changes:
        image, old = change.new, None
        absent: set[str] = set()
        if change.operation == "DELETE":
            image, absent = {each: change.old[each] for each in kept}, set(columns) - set(kept)
        elif change.operation == "UPDATE" and (full or any(change.old[each] != change.new[each] for each in key)):
            old = {each: change.old[each] for each in kept}
        images.append(image)
        olds.append(old)
        bits = np.array([each in absent for each in columns], np.bool_)
        bitmaps.append(np.packbits(bits, bitorder="little").tobytes() if absent else None)
    numbers = [each.seq for each in changes]
    segment = pa.table(
        {
            OP: pa.array([Operation[each.operation] for each in changes], pa.int8()),
            COMMIT_LSN: pa.array(numbers, pa.int64()),
            ORDINAL: pa.array(numbers, pa.int64()),
            UNCHANGED: pa.array(bitmaps, pa.binary()),
            OLD: pa.array(olds, pa.struct([pa.field(each, pa.string()) for each in kept])),
            **{each: pa.array([image.get(each) for image in images], pa.string()) for each in columns},
        }
    )
    return row_changes(segment, schema, name, wanted[name])
