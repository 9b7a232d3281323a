"""Transforms of columns and rows: the same for rows of a copy and for changes, and nothing hidden is left over."""

from __future__ import annotations

import hmac
import pickle
import random
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from penstock.changes.column_rules import ColumnRule
from penstock.changes.conditions import parse_filter
from penstock.changes.events import Unchanged, _convert
from penstock.changes.segment import OLD, UNREPRESENTABLE, segment_layout
from penstock.changes.transform import TableRules, TableTransform, Transforms, resolve_rules
from penstock.errors import ConfigError
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.values import OutOfRange, TypeSettings

KEY = b"a key of at least 16 bytes"
TEXT, INT, DATE = PostgresType(25, "text"), PostgresType(23, "int4"), PostgresType(1082, "date")
CHAR = PostgresType(1042, "bpchar")


def schema(identity: ReplicaIdentity = ReplicaIdentity.DEFAULT) -> TableSchema:
    full = identity is ReplicaIdentity.FULL
    types = {"id": INT, "email": TEXT, "born": DATE, "code": CHAR, "note": TEXT, "country": TEXT}
    return TableSchema(
        1,
        "public",
        "users",
        tuple(
            Column(name, at, type_, identity=full or name == "id", primary_key_position=1 if name == "id" else None)
            for at, (name, type_) in enumerate(types.items(), 1)
        ),
        identity,
    )


def rules(where: str | None = None, **columns: ColumnRule) -> TableRules:
    return TableRules(tuple(columns.items()), where, None if where is None else parse_filter(where), KEY)


def resolved(
    where: str | None = None, identity: ReplicaIdentity = ReplicaIdentity.DEFAULT, **columns: ColumnRule
) -> TableTransform:
    return resolve_rules(rules(where, **columns), schema(identity), TypeSettings())


def digest(text: str) -> str:
    return hmac.digest(KEY, text.encode(), "sha256").hex()


ROWS = [
    {"id": 1, "email": "a@x", "born": None, "code": "ab  ", "note": "secret", "country": "DE"},
    {"id": 2, "email": None, "born": None, "code": None, "note": None, "country": "FR"},
]


def copied(transform: TableTransform) -> pa.RecordBatch:
    """Rows as a copy reads them: without excluded columns; the first has a date that Arrow cannot hold."""
    read = transform.for_copy()
    layout = segment_layout(read.source)
    rows = pa.Table.from_pylist(
        ROWS, schema=pa.schema([layout.arrow_schema.field(each.field_name) for each in layout.columns])
    )
    texts = pa.array([[("born", "infinity")], None], pa.map_(pa.string(), pa.string()))
    rows = rows.append_column(UNREPRESENTABLE, texts)
    return read.rows(rows.to_batches()[0])


def test_rows_of_a_copy():
    transform = resolved(
        email=ColumnRule(hash=True, rename="email_hash"),
        born=ColumnRule(hash=True),
        code=ColumnRule(hash=True),
        note=ColumnRule(exclude=True),
        country=ColumnRule(mask="some"),
    )
    found = copied(pickle.loads(pickle.dumps(transform)))
    assert found.schema.names == ["id", "email_hash", "born", "code", "country", UNREPRESENTABLE]
    assert found.to_pylist() == [
        {
            "id": 1,
            "email_hash": digest("a@x"),
            "born": digest("infinity"),
            "code": digest("ab"),
            "country": "some",
            UNREPRESENTABLE: None,
        },
        {"id": 2, "email_hash": None, "born": None, "code": None, "country": "some", UNREPRESENTABLE: None},
    ]
    assert [(each.name, each.attnum, str(each.type)) for each in transform.output.columns] == [
        ("id", 1, "int4"),
        ("email_hash", 2, "text"),
        ("born", 3, "text"),
        ("code", 4, "text"),
        ("country", 6, "text"),
    ]


def test_masks():
    transform = resolved(
        email=ColumnRule(keep_last=2),
        born=ColumnRule(null=True),
        code=ColumnRule(keep_last=2),
        note=ColumnRule(mask=""),
    )
    found = copied(transform).to_pylist()
    assert [found[0][name] for name in ("email", "born", "code", "note")] == ["***@x", None, "***", ""]
    assert [found[1][name] for name in ("email", "born", "code", "note")] == [None, None, None, None]
    assert found[0][UNREPRESENTABLE] is None
    assert str(transform.output.columns[2].type) == "date"


@pytest.mark.parametrize("identity", [ReplicaIdentity.DEFAULT, ReplicaIdentity.FULL])
def test_changes_keep_omitted_values_and_old_keys(identity):
    table = schema(identity)
    before = ROWS[0] | {"id": 7}
    old = before if identity is ReplicaIdentity.FULL else {"id": 7}
    rows = script_table(table, [(2, ROWS[0] | {"note": Unchanged, "email": Unchanged}, old)])
    transform = resolved(
        identity=identity,
        id=ColumnRule(hash=True),
        born=ColumnRule(exclude=True),
        email=ColumnRule(hash=True, rename="mail"),
        note=ColumnRule(mask="x"),
    )
    found = transform.segment(rows)
    assert found.schema == transform.arrow_schema(rows.schema)
    (update,) = _convert(found, transform.output)
    assert update.row["id"] == digest("1")
    assert update.row["mail"] is Unchanged
    assert update.row["note"] is Unchanged
    assert update.row["country"] == "DE"
    assert update.old["id"] == digest("7")
    assert "born" not in update.row
    assert "born" not in {each.name for each in found.schema.field(OLD).type}


@pytest.mark.parametrize(
    ("columns", "where", "problem"),
    [
        ({"mail": ColumnRule(exclude=True)}, None, "names a column that the table does not have: 'mail'"),
        ({"a": ColumnRule(hash=True), "b": ColumnRule(null=True)}, "c = 1", "columns that .* 'a', 'b', 'c'"),
        ({"id": ColumnRule(exclude=True)}, None, "hides column 'id', which identifies rows"),
        ({"id": ColumnRule(keep_last=3)}, None, "hides column 'id', which identifies rows"),
        ({"note": ColumnRule(rename="Email")}, None, "the columns 'email' and 'note' the same name"),
        ({"note": ColumnRule(rename="id2"), "code": ColumnRule(rename="id2")}, None, "'code' and 'note' the same name"),
        ({"note": ColumnRule(rename="_op")}, None, "which Penstock uses itself"),
        ({"id": ColumnRule(hash=True)}, "country = 'DE'", "hashes a column of the key"),
    ],
)
def test_rules_that_do_not_fit_are_refused(columns, where, problem):
    with pytest.raises(ConfigError, match=problem):
        resolved(where, **columns)


def test_types_whose_text_is_not_exact_are_not_hashed():
    odd = replace(schema(), columns=(*schema().columns, Column("weight", 9, PostgresType(701, "float8"))))
    with pytest.raises(ConfigError, match="cannot hash column 'weight' of type float8"):
        resolve_rules(rules(weight=ColumnRule(hash=True)), odd, TypeSettings())


def test_an_excluded_name_is_free_for_another_column():
    transform = resolved(email=ColumnRule(exclude=True), note=ColumnRule(rename="email"))
    assert [each.name for each in transform.output.columns] == ["id", "born", "code", "email", "country"]


def test_a_filter_needs_exact_values():
    for policy in (OutOfRange.NULL, OutOfRange.CLAMP, OutOfRange.TEXT):
        with pytest.raises(ConfigError, match="filters by 'born', whose values a setting in"):
            resolve_rules(rules("born > '2026-01-01'"), schema(), TypeSettings(out_of_range=policy))


def test_fingerprints_change_with_the_rules_and_the_key():
    first = rules(email=ColumnRule(hash=True))
    assert first.fingerprint == rules(email=ColumnRule(hash=True)).fingerprint
    assert first.fingerprint != replace(first, key=b"another key of 16 bytes").fingerprint
    assert first.fingerprint != rules(email=ColumnRule(null=True)).fingerprint
    assert "key" not in repr(first)
    assert rules("id = 1").fingerprint != rules("id = 2").fingerprint


def test_a_renamed_table_keeps_its_rules():
    transforms = Transforms({"public.users": rules(email=ColumnRule(hash=True))})
    assert transforms.of(1, "public.people") is None
    transforms.remember(1, "public.users", {2: "email"})
    transforms.remember(2, "public.other", {2: "email"})
    assert transforms.of(1, "public.people") is not None
    assert transforms.of(2, "public.other") is None


# Filters over changes


def script_table(table: TableSchema, changes: list[tuple[int, dict[str, Any], dict[str, Any] | None]]) -> pa.Table:
    """A segment of changes: operation, row, and old row."""
    layout = segment_layout(table)
    rows: list[dict[str, Any]] = []
    for ordinal, (operation, row, old) in enumerate(changes):
        bits = [row.get(each.name, Unchanged) is Unchanged for each in table.columns]
        bitmap = sum(bit << place for place, bit in enumerate(bits)).to_bytes(1, "little") if any(bits) else None
        cells = {name: None if value is Unchanged else value for name, value in row.items()}
        rows.append(
            {"_op": operation, "_commit_lsn": 10, "_ordinal": ordinal, "_commit_time": 0, "_xid": 1}
            | {"_unchanged": bitmap, OLD: old}
            | cells
        )
    return pa.Table.from_pylist(rows, schema=layout.arrow_schema)


LONG = "a text of more than twenty bytes"
WHERES = {
    "country = 'DE'": lambda row: row["country"] == "DE",
    "country <> 'DE' or note is null": lambda row: (
        (row["country"] is not None and row["country"] != "DE") or row["note"] is None
    ),
    "id > 3 and country in ('DE', 'FR')": lambda row: row["id"] > 3 and row["country"] in ("DE", "FR"),
    "id <= 3": lambda row: row["id"] <= 3,
    "not country = 'DE'": lambda row: row["country"] is not None and row["country"] != "DE",
}


@pytest.mark.parametrize("identity", [ReplicaIdentity.DEFAULT, ReplicaIdentity.FULL])
@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("seed", range(4))
def test_filtered_changes_lead_to_the_rows_that_pass(identity, where, seed):
    """Random changes, with large values that are left out, and changes of keys."""
    choose = random.Random(f"{seed} {where}")
    table, passes = schema(identity), WHERES[where]
    source: dict[int, dict[str, Any]] = {}
    changes: list[tuple[int, dict[str, Any], dict[str, Any] | None]] = []
    states: list[dict[int, dict[str, Any]]] = []

    def value() -> str | None:
        return choose.choice(["DE", "FR", None, LONG])

    for _ in range(200):
        number = choose.randrange(8)
        row = {"email": value(), "born": None, "code": None, "note": value(), "country": value()}
        if number not in source:
            source[number] = {"id": number} | row
            changes.append((1, source[number], None))
        elif choose.random() < 0.2:
            gone = source.pop(number)
            full = identity is ReplicaIdentity.FULL
            changes.append((3, gone if full else {"id": number}, None))
        else:
            before = source.pop(number)
            target = choose.choice([number, choose.randrange(8)])
            target = number if target in source else target
            kept = {name: before[name] for name in row if choose.random() < 0.5}
            source[target] = {"id": target} | row | kept
            sent = source[target] | {name: Unchanged for name, cell in kept.items() if cell == LONG}
            old = before if identity is ReplicaIdentity.FULL else {"id": number} if target != number else None
            changes.append((2, sent, old))
        states.append({key: dict(each) for key, each in source.items()})

    transform = resolve_rules(rules(where), table, TypeSettings())
    found = transform.segment(script_table(table, changes))
    mirror: dict[int, dict[str, Any]] = {}
    for event in _convert(found, table):
        match type(event).__name__:
            case "Insert":
                assert event.row["id"] not in mirror
                mirror[event.row["id"]] = dict(event.row)
            case "Update":
                former = mirror.pop((event.old or event.row)["id"], {})
                mirror[event.row["id"]] = {
                    name: former.get(name, Unchanged) if cell is Unchanged else cell for name, cell in event.row.items()
                }
            case _:
                mirror.pop(event.old["id"], None)
        now = states[event.key.ordinal]
        # What no change has is fetched from the source.
        for key, row in mirror.items():
            mirror[key] = {name: now[key][name] if cell is Unchanged else cell for name, cell in row.items()}
        assert mirror == {key: row for key, row in now.items() if passes(row)}
    assert mirror == {key: row for key, row in source.items() if passes(row)}
