"""Columns that are renamed in the metadata alone: `column_mapping = true`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock.changes.events import Unrepresentable
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.schema import TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource
from penstock.testing.destinations.contract import ORDERS
from tests.unit.destinations.delta.orders import assert_durable, copied, order, started, update, write
from tests.unit.destinations.delta.test_rewrites import DUE, EXPECTED, KEY, NOTE, REMARK, remark, rename, renamed


def seen(lake: Path, name: str) -> dict[int, Any]:
    """What delta-rs reads."""
    table = DeltaTable(str(lake / FOLDERS.table(ORDERS)))
    found = QueryBuilder().register("t", table).execute(f'select id, "{name}" as x from t').read_all()
    rows = pa.table(found).to_pylist()
    assert len(rows) == len({row["id"] for row in rows})
    return {row["id"]: row["x"] for row in rows}


def own(lake: Path, schema: TableSchema, name: str) -> dict[int, Any]:
    """What Penstock reads."""
    rows = DeltaReader(lake).read_table(str(schema)).to_pylist()
    return {row["id"]: row[name] for row in rows}


def columns(lake: Path) -> list[str]:
    return [field.name for field in DeltaTable(str(lake / FOLDERS.table(ORDERS))).schema().fields]


@pytest.mark.parametrize("options", [{}, {"deletion_vectors": False}, {"mode": "soft_delete"}], ids=str)
def test_a_rename_writes_no_file_again(lake: Path, source: ScriptedSource, options: dict[str, Any]) -> None:
    tasks = LocalTasks()
    destination = copied(lake, source, tasks, column_mapping=True, **options)
    assert DeltaTable(str(lake / FOLDERS.table(ORDERS))).protocol().reader_features != ["columnMapping"]
    jobs = len(tasks.jobs)
    assert_durable(write(destination, rename(source)))
    assert len(tasks.jobs) == jobs + 1
    expected = EXPECTED if "mode" not in options else EXPECTED | {3: "n", 4: "n"}
    assert seen(lake, "remark") == expected
    assert own(lake, REMARK, "remark") == EXPECTED
    assert columns(lake)[:3] == ["id", "remark", "due"]
    # Another process, another rename, and rows that are found by their key.
    destination = started(lake, column_mapping=True, **options)
    again = renamed(note="comment", id="number")
    with source.transaction() as transaction:
        transaction.update(again, {"number": 0, "comment": "last", "due": None})
    assert_durable(write(destination, source.batch()))
    assert columns(lake)[:3] == ["number", "comment", "due"]
    assert {
        row["number"]: row["comment"] for row in DeltaReader(lake).read_table(str(again)).to_pylist()
    } == EXPECTED | {0: "last"}


def test_names_can_come_back_and_move(lake: Path, source: ScriptedSource) -> None:
    tasks = LocalTasks()
    destination = copied(lake, source, tasks, column_mapping=True, records_ddl=True)
    jobs = len(tasks.jobs)
    moved = replace(ORDERS, columns=(KEY, replace(NOTE, name="old"), DUE, replace(NOTE, attnum=4)))
    with source.transaction() as transaction:
        transaction.insert(moved, {"id": 20, "old": "o", "due": None, "note": "new"})
    assert_durable(write(destination, source.batch()))
    assert seen(lake, "old") == dict.fromkeys(range(10), "n") | {20: "o"}
    assert seen(lake, "note") == dict.fromkeys(range(10)) | {20: "new"}
    without = replace(ORDERS, columns=(KEY, DUE, replace(NOTE, attnum=4)))
    back = replace(ORDERS, columns=(*without.columns, replace(NOTE, name="old", attnum=5)))
    for schema, row in ((without, {"id": 21, "due": None, "note": "x"}), (back, order(22, "y") | {"old": "again"})):
        with source.transaction() as transaction:
            transaction.insert(schema, row)
        assert_durable(write(destination, source.batch()))
    assert len(tasks.jobs) == jobs + 3
    assert seen(lake, "old") == dict.fromkeys([*range(10), 20, 21]) | {22: "again"}
    assert own(lake, back, "old") == seen(lake, "old")


def test_compaction_and_a_new_copy_keep_the_names(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source, column_mapping=True)
    assert_durable(write(destination, update(source, 8, 9, note="n")))
    assert_durable(write(destination, rename(source)))
    log = DeltaLog(LocalStorage(lake / FOLDERS.table(ORDERS)))
    assert compact(log, LocalTasks(), CompactionSettings(min_files=2)) is not None
    assert seen(lake, "remark") == EXPECTED
    # Without the setting, too: a table cannot go back.
    destination = started(lake)
    destination.drop_table_for_copy(REMARK, "attempt-2")
    destination.write_table_rows(REMARK, source.copy(REMARK, [remark(1, "new copy")], attempt="attempt-2"))
    assert seen(lake, "remark") == {1: "new copy"}
    assert own(lake, REMARK, "remark") == {1: "new copy"}
    with source.transaction() as transaction:
        transaction.insert(renamed(note="third"), {"id": 2, "third": "x", "due": None})
    assert_durable(write(destination, source.batch()))
    assert seen(lake, "third") == {1: "new copy", 2: "x"}


def test_texts_of_cells_have_the_new_name(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source, column_mapping=True)
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1) | {"due": Unrepresentable("infinity")})
    assert_durable(write(destination, source.batch()))
    with source.transaction() as transaction:
        transaction.insert(renamed(due="until"), {"id": 20, "note": "n", "until": Unrepresentable("-infinity")})
    assert_durable(write(destination, source.batch()))
    table = DeltaTable(str(lake / FOLDERS.table(ORDERS)))
    found = QueryBuilder().register("t", table).execute("select id, _unrepresentable as x from t").read_all()
    texts = {row["id"]: dict(row["x"]) for row in pa.table(found).to_pylist() if row["x"]}
    assert texts == {1: {"until": "infinity"}, 20: {"until": "-infinity"}}


def test_the_setting_is_true_or_false(lake: Path) -> None:
    with pytest.raises(Exception, match="column_mapping must be true or false"):
        DeltaDestination(lake, column_mapping="yes")  # pyright: ignore[reportArgumentType]
