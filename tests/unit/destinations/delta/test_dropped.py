"""Columns that are dropped: the metadata forgets them, the files keep them, and no later column gets their values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.naming import FOLDERS
from penstock.schema import Column, TableSchema
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import INT8, ORDERS
from tests.unit.destinations.delta.orders import copied, order, started
from tests.unit.destinations.delta.reading import read_rows, read_table
from tests.unit.destinations.delta.test_backfill import OPTIONS

KEY, NOTE, DUE = ORDERS.columns
WITHOUT_NOTE = replace(ORDERS, columns=(KEY, DUE))


def due(number: int) -> dict[str, Any]:
    return {name: cell for name, cell in order(number).items() if name != "note"}


def failure(destination: Any, source: ScriptedSource, begin: Any) -> Exception | None:
    return destination.write_events(source.batch(begin, source.position)).result().of(ORDERS.table_id).error


def drop(destination: Any, source: ScriptedSource) -> None:
    """Rows change before and after the column is dropped, in one batch."""
    begin = source.position
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "before"))
        transaction.delete(ORDERS, {"id": 2})
    with source.transaction() as transaction:
        transaction.update(WITHOUT_NOTE, due(3))
        transaction.insert(WITHOUT_NOTE, due(30))
    assert failure(destination, source, begin) is None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_column_is_gone_for_readers_and_the_rows_are_right(tmp_path: Path, options: dict[str, Any]) -> None:
    source = ScriptedSource(tmp_path / "segments")
    destination = copied(tmp_path / "lake", source, **options)
    drop(destination, source)
    expected = [due(number) for number in (0, 1, 3, 4, 5, 6, 7, 8, 9, 30)]
    assert sorted(read_rows(tmp_path / "lake", WITHOUT_NOTE) or [], key=lambda row: row["id"]) == expected
    columns = [field.name for field in DeltaTable(tmp_path / "lake" / FOLDERS.table(ORDERS)).schema().fields]
    assert columns == ["id", "due", *(["_deleted_at"] if options.get("mode") == "soft_delete" else [])]


def test_a_dropped_column_stays_if_asked(tmp_path: Path) -> None:
    """Also where files are rewritten for another column, or the table is copied again."""
    source, lake = ScriptedSource(tmp_path / "segments"), tmp_path / "lake"
    copied(lake, source).shutdown()
    destination = DeltaDestination(lake, maintenance=False)
    destination.startup(replace(make_context(), keeps_dropped_columns=lambda _: True))
    renamed = replace(WITHOUT_NOTE, columns=(KEY, replace(DUE, name="until")))
    back = replace(renamed, columns=(*renamed.columns, Column("note", 4, INT8)))
    rows = [(WITHOUT_NOTE, due(30)), (renamed, {"id": 31, "until": None}), (back, {"id": 32, "until": None, "note": 5})]
    for schema, row in rows:
        with source.transaction() as transaction:
            transaction.insert(schema, row)
        assert destination.write_events(source.batch()).result().tables == {}
    table = read_table(lake, ORDERS)
    assert table is not None
    assert set(table.column_names) == {"id", "until", "note", "note_2"}
    found = {row["id"]: (row["note"], row["note_2"]) for row in table.to_pylist()}
    assert found == dict.fromkeys(range(10), ("n", None)) | {30: (None, None), 31: (None, None), 32: (None, 5)}
    destination.drop_table_for_copy(renamed, "attempt-2")
    destination.write_table_rows(renamed, source.copy(renamed, [{"id": 1, "until": None}], attempt="attempt-2"))
    table = read_table(lake, ORDERS)
    assert table is not None
    assert table.to_pylist() == [{"id": 1, "until": None, "note": None, "note_2": None}]


def test_a_dropped_column_stays_also_after_a_rename_with_column_mapping(tmp_path: Path) -> None:
    source, lake = ScriptedSource(tmp_path / "segments"), tmp_path / "lake"
    copied(lake, source).shutdown()
    destination = DeltaDestination(lake, maintenance=False, column_mapping=True)
    destination.startup(replace(make_context(), keeps_dropped_columns=lambda _: True))
    until = replace(DUE, name="until")
    rows = [((KEY, NOTE, until), {"id": 33, "note": "x", "until": None}), ((KEY, until), {"id": 32, "until": None})]
    for columns, row in rows:
        with source.transaction() as transaction:
            transaction.insert(replace(ORDERS, columns=columns), row)
        assert destination.write_events(source.batch()).result().tables == {}
    table = read_table(lake, ORDERS)
    assert table is not None
    found = {row["id"]: row["note"] for row in table.to_pylist()}
    assert found == dict.fromkeys(range(10), "n") | {33: "x", 32: None}


@pytest.mark.parametrize("name", ["note", "Note"])
def test_a_column_of_the_same_name_does_not_get_the_old_values(tmp_path: Path, name: str) -> None:
    source = ScriptedSource(tmp_path / "segments")
    destination = copied(tmp_path / "lake", source)
    drop(destination, source)
    destination.shutdown()
    destination = started(tmp_path / "lake")
    again: TableSchema = replace(ORDERS, columns=(KEY, DUE, Column(name, 4, INT8)))
    begin = source.position
    with source.transaction() as transaction:
        transaction.insert(again, due(31) | {name: 5})
    assert failure(destination, source, begin) is None
    rows = read_rows(tmp_path / "lake", again) or []
    assert {row["id"]: row[name] for row in rows} == dict.fromkeys((0, 1, 3, 4, 5, 6, 7, 8, 9, 30)) | {31: 5}
