"""Columns that are renamed or widened, and names that come back: the batch writes files again, in its own commit."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from penstock.changes.events import Unrepresentable
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.compaction import CompactionSettings, compact
from penstock.destinations.delta.storage import LocalStorage
from penstock.destinations.naming import FOLDERS
from penstock.errors import SchemaNotFollowed, TakesLong
from penstock.schema import Column, PostgresType, ReplicaIdentity, TableSchema
from penstock.testing.destinations import LocalTasks, ScriptedSource
from penstock.testing.destinations.contract import INT8, ORDERS
from tests.unit.destinations.delta.orders import assert_durable, copied, order, started, update, write
from tests.unit.destinations.delta.reading import read_rows, read_state
from tests.unit.destinations.delta.test_backfill import OPTIONS, InterruptedTasks

KEY, NOTE, DUE = ORDERS.columns
NUMERIC = PostgresType(1700, "numeric")


def numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale) + 4


def renamed(**names: str) -> TableSchema:
    return replace(
        ORDERS, columns=tuple(replace(each, name=names.get(each.name, each.name)) for each in ORDERS.columns)
    )


REMARK = renamed(note="remark")


def remark(number: int, text: str = "n") -> dict[str, Any]:
    return {"id": number, "remark": text, "due": None}


def rename(source: ScriptedSource) -> Any:
    """Rows that are changed, deleted and inserted before and after the rename, in one batch."""
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "before"))
        transaction.update(ORDERS, order(2, "before"))
        transaction.delete(ORDERS, {"id": 3})
        transaction.insert(ORDERS, order(20, "before"))
    with source.transaction() as transaction:
        transaction.update(REMARK, remark(2, "after"))
        transaction.delete(REMARK, {"id": 4})
        transaction.insert(REMARK, remark(30, "after"))
    return source.batch()


EXPECTED = {**dict.fromkeys((0, 5, 6, 7, 8, 9), "n"), 1: "before", 2: "after", 20: "before", 30: "after"}


def texts(lake: Path, schema: TableSchema, name: str) -> dict[int, Any]:
    rows = read_rows(lake, schema) or []
    found = {row["id"]: row[name] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_renamed_column_has_its_values_under_the_new_name(
    lake: Path, source: ScriptedSource, options: dict[str, Any]
) -> None:
    destination = copied(lake, source, **options)
    assert_durable(write(destination, update(source, 8, 9, note="n")))
    batch = rename(source)
    assert_durable(write(destination, batch))
    assert texts(lake, REMARK, "remark") == EXPECTED
    # Again, by another process; what follows finds the rows in the new files.
    destination = started(lake, **options)
    assert_durable(write(destination, batch))
    with source.transaction() as transaction:
        transaction.update(REMARK, remark(0, "last"))
        transaction.delete(REMARK, {"id": 5})
    assert_durable(write(destination, source.batch()))
    assert texts(lake, REMARK, "remark") == {key: each for key, each in EXPECTED.items() if key != 5} | {0: "last"}


def test_the_key_can_be_renamed(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    schema = renamed(id="number")
    with source.transaction() as transaction:
        transaction.update(schema, {"number": 1, "note": "new", "due": None})
        transaction.delete(schema, {"number": 2})
    assert_durable(write(destination, source.batch()))
    rows = read_rows(lake, schema) or []
    assert {row["number"]: row["note"] for row in rows} == {0: "n", 1: "new"} | dict.fromkeys(range(3, 10), "n")


def test_columns_can_exchange_their_names(lake: Path, source: ScriptedSource) -> None:
    before = replace(ORDERS, columns=(KEY, NOTE, replace(NOTE, name="other", attnum=3)))
    after = replace(ORDERS, columns=(KEY, replace(NOTE, name="other"), replace(NOTE, attnum=3)))
    destination = started(lake, records_ddl=True)
    destination.drop_table_for_copy(before, "attempt-1")
    rows = [{"id": number, "note": f"n{number}", "other": f"o{number}"} for number in range(4)]
    destination.write_table_rows(before, source.copy(before, rows))
    with source.transaction() as transaction:
        transaction.update(before, {"id": 1, "note": "n", "other": "o"})
    with source.transaction() as transaction:
        transaction.insert(after, {"id": 9, "note": "x", "other": "y"})
    assert_durable(write(destination, source.batch()))
    found = {row["id"]: (row["note"], row["other"]) for row in read_rows(lake, after) or []}
    assert found == {0: ("o0", "n0"), 1: ("o", "n"), 2: ("o2", "n2"), 3: ("o3", "n3"), 9: ("x", "y")}


@pytest.mark.parametrize("at_once", [True, False])
def test_a_name_that_comes_back_does_not_bring_old_values(lake: Path, source: ScriptedSource, at_once: bool) -> None:
    destination = copied(lake, source, records_ddl=at_once)
    without = replace(ORDERS, columns=(KEY, DUE))
    again = replace(ORDERS, columns=(KEY, DUE, replace(NOTE, attnum=4, missing="new", backfilled=True)))
    with source.transaction() as transaction:
        transaction.insert(without, {"id": 20, "due": None})
    if not at_once:
        assert_durable(write(destination, source.batch()))
        assert read_state(lake, ORDERS).layout.retired == {"note"}  # pyright: ignore[reportOptionalMemberAccess]
    with source.transaction() as transaction:
        transaction.insert(again, order(30, "mine"))
    assert_durable(write(destination, source.batch()))
    assert texts(lake, again, "note") == dict.fromkeys([*range(10), 20], "new") | {30: "mine"}
    assert read_state(lake, ORDERS).layout.retired == frozenset()  # pyright: ignore[reportOptionalMemberAccess]


def test_a_name_that_moves_to_another_column_needs_a_copy_unless_ddl_is_recorded(
    lake: Path, source: ScriptedSource
) -> None:
    """The catalog names the columns of rows that may be older."""
    destination = copied(lake, source)
    with source.transaction() as transaction:
        again = replace(ORDERS, columns=(KEY, DUE, replace(NOTE, attnum=4)))
        transaction.insert(again, order(30))
    error = write(destination, source.batch()).error
    assert isinstance(error, SchemaNotFollowed)
    assert "the name of another column was given to column 'note'" in str(error)


def test_a_name_that_is_given_and_taken_back_rewrites_nothing(lake: Path, source: ScriptedSource) -> None:
    tasks = LocalTasks()
    destination = copied(lake, source, tasks)
    for schema, row in ((REMARK, remark(20)), (ORDERS, order(21))):
        with source.transaction() as transaction:
            transaction.insert(schema, row)
    jobs = len(tasks.jobs)
    assert_durable(write(destination, source.batch()))
    assert len(tasks.jobs) == jobs + 1
    assert texts(lake, ORDERS, "note") == dict.fromkeys([*range(10), 20, 21], "n")


def test_a_wider_decimal_keeps_its_values(lake: Path, source: ScriptedSource) -> None:
    narrow = replace(ORDERS, columns=(KEY, NOTE, Column("price", 3, NUMERIC, numeric(6, 2))))
    wide = replace(ORDERS, columns=(KEY, NOTE, Column("price", 3, NUMERIC, numeric(20, 2))))
    destination = started(lake)
    destination.drop_table_for_copy(narrow, "attempt-1")
    rows = [{"id": number, "note": "n", "price": Decimal(f"{number}.25")} for number in range(4)]
    destination.write_table_rows(narrow, source.copy(narrow, rows))
    with source.transaction() as transaction:
        transaction.update(narrow, {"id": 1, "note": "n", "price": Decimal("9999.99")})
    with source.transaction() as transaction:
        transaction.insert(wide, {"id": 9, "note": "n", "price": Decimal("123456789012345678.50")})
    assert_durable(write(destination, source.batch()))
    expected = {0: "0.25", 1: "9999.99", 2: "2.25", 3: "3.25", 9: "123456789012345678.50"}
    assert texts(lake, wide, "price") == {key: Decimal(text) for key, text in expected.items()}
    frame = pl.read_delta(str(lake / FOLDERS.table(ORDERS)))
    assert frame.schema["price"] == pl.Decimal(20, 2)
    assert {key: str(value) for key, value in frame.select("id", "price").rows()} == expected


def test_a_decimal_that_becomes_text_or_loses_digits_needs_a_copy(lake: Path, source: ScriptedSource) -> None:
    narrow = replace(ORDERS, columns=(KEY, Column("price", 2, NUMERIC, numeric(6, 2))))
    destination = started(lake)
    destination.drop_table_for_copy(narrow, "attempt-1")
    destination.write_table_rows(narrow, source.copy(narrow, [{"id": 1, "price": Decimal("1.25")}]))
    begin = source.position
    for modifier in (-1, numeric(8, 1), numeric(5, 2)):
        with source.transaction() as transaction:
            other = replace(ORDERS, columns=(KEY, Column("price", 2, NUMERIC, modifier)))
            transaction.insert(other, {"id": 2, "price": None})
        assert isinstance(write(destination, source.batch(begin, source.position)).error, SchemaNotFollowed)


def test_texts_of_cells_follow_the_name_of_their_column(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1) | {"due": Unrepresentable("infinity")})
    assert_durable(write(destination, source.batch()))
    schema = renamed(due="until")
    with source.transaction() as transaction:
        transaction.insert(schema, {"id": 20, "note": "n", "until": Unrepresentable("-infinity")})
    assert_durable(write(destination, source.batch()))
    expected = dict.fromkeys(range(10)) | {1: Unrepresentable("infinity"), 20: Unrepresentable("-infinity")}
    assert texts(lake, schema, "until") == expected
    without = replace(schema, columns=(KEY, NOTE))
    with source.transaction() as transaction:
        transaction.update(without, {"id": 2, "note": "last"})
    assert_durable(write(destination, source.batch()))
    assert texts(lake, without, "note") == dict.fromkeys([*range(10), 20], "n") | {2: "last"}


def test_rows_of_a_table_without_a_key_are_found_in_the_new_files(lake: Path, source: ScriptedSource) -> None:
    before = replace(
        ORDERS,
        replica_identity=ReplicaIdentity.FULL,
        columns=tuple(replace(each, identity=True, primary_key_position=None) for each in ORDERS.columns),
    )
    after = replace(before, columns=(before.columns[0], replace(before.columns[1], name="remark"), before.columns[2]))
    destination = started(lake)
    destination.drop_table_for_copy(before, "attempt-1")
    destination.write_table_rows(before, source.copy(before, [order(1), order(1), order(2), order(3)]))
    with source.transaction() as transaction:
        transaction.delete(before, order(1))
        transaction.update(before, order(2, "before"), old=order(2))
    with source.transaction() as transaction:
        transaction.delete(after, remark(3))
        transaction.update(after, remark(2, "after"), old=remark(2, "before"))
    assert_durable(write(destination, source.batch()))
    rows = read_rows(lake, after) or []
    assert sorted((row["id"], row["remark"]) for row in rows) == [(1, "n"), (2, "after")]


@pytest.mark.trap(37)
def test_a_compaction_in_between_costs_only_the_files_that_it_wrote(lake: Path, source: ScriptedSource) -> None:
    tasks = InterruptedTasks()
    destination = copied(lake, source, tasks)
    for number in range(3):
        assert_durable(write(destination, update(source, 7 + number, note="n")))
    log = DeltaLog(LocalStorage(lake / FOLDERS.table(ORDERS)))

    def exchange_files() -> None:
        # Only the small files of the batches; those of the copy stay.
        assert compact(log, LocalTasks(), CompactionSettings(min_files=2, dead_fraction=2.0)) is not None

    tasks.interruption = exchange_files
    assert_durable(write(destination, rename(source)))
    assert texts(lake, REMARK, "remark") == EXPECTED


def test_a_large_table_is_rewritten_only_in_a_batch_of_its_own(
    lake: Path, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tables of the batch would have to wait."""
    monkeypatch.setattr("penstock.destinations.delta.planner.REWRITE_BYTES", 10)
    destination = copied(lake, source)
    batch = rename(source)
    error = write(destination, batch).error
    assert isinstance(error, TakesLong)
    assert str(error).startswith("public.orders: its columns changed, so ")
    assert texts(lake, ORDERS, "note") == dict.fromkeys(range(10), "n")
    assert_durable(write(destination, replace(batch, alone=True)))
    assert texts(lake, REMARK, "remark") == EXPECTED


def test_a_large_transaction_is_written_only_in_a_batch_of_its_own(
    lake: Path, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.destinations.delta.planner.SHARED_ROWS", 1)
    destination = copied(lake, source)
    with source.transaction() as transaction:
        transaction.update(ORDERS, order(1, "first"))
        transaction.update(ORDERS, order(2, "second"))
    batch = source.batch()
    error = write(destination, batch).error
    assert isinstance(error, TakesLong)
    assert str(error) == "public.orders: a transaction has 2 changes"
    assert_durable(write(destination, replace(batch, alone=True)))
    assert texts(lake, ORDERS, "note") == dict.fromkeys(range(10), "n") | {1: "first", 2: "second"}


def test_another_type_needs_a_copy(lake: Path, source: ScriptedSource) -> None:
    destination = copied(lake, source)
    other = replace(ORDERS, columns=(KEY, replace(NOTE, type=INT8), DUE))
    with source.transaction() as transaction:
        transaction.insert(other, {"id": 30, "note": 1, "due": None})
    assert isinstance(write(destination, source.batch()).error, SchemaNotFollowed)
