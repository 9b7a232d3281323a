"""The mode `history`: a log of changes follows every change of the schema, and a new copy follows the log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource
from tests.unit.destinations.delta.orders import started
from tests.unit.destinations.delta.reading import read_state, read_table, replay_history

INT4, INT8, TEXT = PostgresType(23, "int4"), PostgresType(20, "int8"), PostgresType(25, "text")
ID = Column("id", 1, INT4, identity=True, primary_key_position=1)
NOTE, N = Column("note", 2, TEXT), Column("n", 3, INT4)


def table(*columns: Column, **changes: Any) -> TableSchema:
    return replace(TableSchema(7, "public", "t", columns), **changes)


FIRST = table(ID, NOTE, N)
SCHEMAS: list[tuple[TableSchema, dict[str, Any]]] = [
    (FIRST, {"note": "a", "n": 1}),
    (table(ID, replace(NOTE, name="remark"), N), {"remark": "b", "n": 2}),
    (table(ID, replace(NOTE, name="remark"), replace(N, type=INT8)), {"remark": "c", "n": 1 << 40}),
    (table(ID, replace(N, type=TEXT)), {"n": "d"}),
    (table(ID, N, Column("note", 4, TEXT)), {"n": 5, "note": "e"}),
    (table(ID, replace(N, name="note"), replace(NOTE, attnum=4, name="n")), {"note": 6, "n": "f"}),
    (table(ID, N, Column("note", 4, TEXT), replica_identity=ReplicaIdentity.FULL), {"n": 7, "note": "g"}),
    (table(ID, replace(N, identity=True), Column("note", 4, TEXT)), {"n": 8, "note": "h"}),
    (table(replace(ID, type=INT8), replace(N, identity=True), Column("note", 4, TEXT)), {"n": 9, "note": "i"}),
]
"""What the stream says one after the other: each with the cells of a row."""
LOGGED = [
    {"note": "a", "n": 1},
    {"remark": "b", "n": 2},
    {"remark": "c", "n": 1 << 40},
    {"n_2": "d"},
    {"n": 5, "note": "e"},
    {"note_2": 6, "n_2": "f"},
    {"n": 7, "note": "g"},
    {"n": 8, "note": "h"},
    {"n": 9, "note": "i"},
]
COLUMNS = ["note", "remark", "n", "n_2", "note_2"]


def copied(lake: Path, source: ScriptedSource) -> DeltaDestination:
    destination = started(lake, mode="history")
    destination.drop_table_for_copy(FIRST, "attempt-1")
    destination.write_table_rows(FIRST, source.copy(FIRST, [{"id": 0, "note": "zero", "n": 0}]))
    return destination


def cells(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in COLUMNS if row.get(name) is not None}


def check(lake: Path) -> None:
    """Read with delta-rs and Polars."""
    found = read_table(lake, FIRST)
    assert found is not None
    others = pl.read_delta(str(lake / FOLDERS.table(FIRST))).to_dicts()
    for rows in (found.to_pylist(), others):
        rows.sort(key=lambda row: (row["_commit_lsn"], row["_ordinal"]))
        assert [row["_schema_version"] for row in rows] == [1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]
        assert [cells(row) for row in rows[1::2]] == LOGGED
        assert [row["_old"]["id"] for row in rows[2::2]] == list(range(101, 110))
        assert [row["_old"]["n"] for row in rows[2::2]] == [None] * 6 + [7, 8, 9]


@pytest.mark.parametrize("at_once", [False, True], ids=["batch by batch", "in one batch"])
def test_every_change_of_the_schema_is_followed(tmp_path: Path, at_once: bool) -> None:
    source, lake = ScriptedSource(tmp_path / "segments"), tmp_path / "lake"
    destination = copied(lake, source)
    begin = source.position
    for number, (schema, row) in enumerate(SCHEMAS, 1):
        with source.transaction() as transaction:
            transaction.insert(schema, {"id": number, **row})
            transaction.update(schema, {"id": number, **row}, old={"id": 100 + number, **row})
        if not at_once:
            # Again from the first change on, by the next process, as after a crash.
            destination.shutdown()
            destination = started(lake, mode="history")
            assert destination.write_events(source.batch(begin)).result().tables == {}
    if at_once:
        assert destination.write_events(source.batch(begin)).result().tables == {}
    check(lake)
    compact(DeltaLog(LocalStorage(lake / FOLDERS.table(FIRST))), LocalTasks(), CompactionSettings(min_files=2))
    check(lake)
    state = read_state(lake, FIRST)
    assert state is not None
    assert [[each.name for each in version] for version in state.layout.versions] == [
        [column.name for column in schema.columns] for schema, _ in SCHEMAS
    ]


def test_a_new_copy_follows_the_log(tmp_path: Path) -> None:
    source, lake = ScriptedSource(tmp_path / "segments"), tmp_path / "lake"
    destination = copied(lake, source)
    with source.transaction() as transaction:
        transaction.update(FIRST, {"id": 0, "note": "one", "n": 1})
    assert destination.write_events(source.batch()).result().tables == {}
    with source.transaction() as transaction:
        transaction.delete(FIRST, {"id": 0})
    later, row = SCHEMAS[1]
    destination.drop_table_for_copy(later, "attempt-2")
    destination.write_table_rows(later, source.copy(later, [{"id": 9, **row}], attempt="attempt-2"))
    destination.write_table_rows(later, source.copy(later, [{"id": 9, **row}], attempt="attempt-2"))
    with source.transaction() as transaction:
        transaction.insert(later, {"id": 10, **row})
    assert destination.write_events(source.batch()).result().tables == {}
    found = read_table(lake, FIRST)
    assert found is not None
    rows = sorted(found.to_pylist(), key=lambda row: (row["_commit_lsn"], row["_ordinal"]))
    assert [(row["_op"], row["id"], row["_schema_version"]) for row in rows] == [
        ("copy", 0, 1),
        ("update", 0, 1),
        ("resync", None, 2),
        ("copy", 9, 2),
        ("insert", 10, 2),
    ]
    assert replay_history(lake, FIRST) == [{"id": 9, **row}, {"id": 10, **row}]
