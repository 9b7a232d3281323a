"""How the ranges of a copy become files, and what a new copy keeps of the rows before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.copy import FILE_RANGES, group_ranges
from penstock.errors import PenstockError
from penstock.schema import ReplicaIdentity, TableSchema
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import INT8, LINES, ORDERS
from tests.unit.destinations.delta.orders import assert_durable, copied, order, started, write
from tests.unit.destinations.delta.reading import read_table


@dataclass(frozen=True)
class Range:
    index: int
    estimated_bytes: int


@dataclass(frozen=True)
class RangeOfUnknownSize:
    index: int


def test_consecutive_ranges_make_files_of_a_good_size_and_know_theirs() -> None:
    ranges = [Range(index, size) for index, size in enumerate((40, 40, 40, 90, 20, 150, 10))]
    groups = group_ranges(ranges, file_bytes=100)
    assert [[part.index for part in group.ranges] for group in groups] == [[0, 1], [2], [3], [4], [5], [6]]
    assert [group.estimated_bytes for group in groups] == [80, 40, 90, 20, 150, 10]


def test_partitions_that_are_nearly_empty_share_a_file_but_not_all_of_them() -> None:
    groups = group_ranges([Range(index, 0) for index in range(2 * FILE_RANGES + 1)])
    assert [len(group.ranges) for group in groups] == [FILE_RANGES, FILE_RANGES, 1]


def test_ranges_that_do_not_know_their_size_count_as_large() -> None:
    groups = group_ranges([RangeOfUnknownSize(index) for index in range(6)])
    assert [len(group.ranges) for group in groups] == [4, 2]


def test_a_table_without_partitions_has_no_file() -> None:
    assert group_ranges([]) == []


KEY, NOTE, DUE = ORDERS.columns


def soft_rows(lake: Path, schema: TableSchema = ORDERS) -> list[dict[str, Any]]:
    table = read_table(lake, schema)
    assert table is not None
    return sorted(table.to_pylist(), key=repr)


@pytest.mark.parametrize("deletion_vectors", [True, False])
def test_a_new_copy_keeps_deleted_rows_and_marks_those_that_are_gone(tmp_path: Path, deletion_vectors: bool) -> None:
    """Row 1 was deleted, row 2 was deleted and is back, row 3 left without a delete, row 4 was updated."""
    source, lake = ScriptedSource(tmp_path / "segments"), tmp_path / "lake"
    options: dict[str, Any] = {"mode": "soft_delete", "deletion_vectors": deletion_vectors}
    destination = copied(lake, source, **options)
    with source.transaction() as transaction:
        for number in (1, 2):
            transaction.delete(ORDERS, {"id": number})
        transaction.update(ORDERS, order(4, "7"))
    assert_durable(write(destination, source.batch()))
    (deleted,) = {row["_deleted_at"] for row in soft_rows(lake) if row["id"] in (1, 2)}
    assert deleted is not None
    changed = replace(ORDERS, columns=(KEY, replace(NOTE, name="number", type=INT8), DUE))
    rows: list[dict[str, Any]] = [{"id": number, "number": number, "due": None} for number in (0, 2, *range(4, 10))]
    for attempt in ("attempt-2", "attempt-3"):
        destination = started(lake, **options)
        destination.drop_table_for_copy(changed, attempt)
        destination.write_table_rows(changed, source.copy(changed, rows, ranges=2, attempt=attempt))
        found = {row["id"]: row for row in soft_rows(lake)}
        assert sorted(found) == list(range(10))
        assert len(soft_rows(lake)) == 10
        assert {number for number, row in found.items() if row["_deleted_at"] is None} == {0, 2, *range(4, 10)}
        assert found[1]["_deleted_at"] == deleted
        # What the new type cannot hold is there as text.
        assert [dict(found[number]["_unrepresentable"] or ()) for number in (1, 3)] == [{"number": "n"}] * 2
    with source.transaction() as transaction:
        transaction.insert(changed, {"id": 1, "number": 1, "due": None})
        transaction.delete(changed, {"id": 0})
    assert_durable(write(destination, source.batch()))
    assert [row["id"] for row in soft_rows(lake) if row["_deleted_at"] is not None] == [0, 3]


def test_without_a_key_a_new_copy_keeps_the_rows_that_were_deleted(tmp_path: Path) -> None:
    source, lake = ScriptedSource(tmp_path / "segments"), tmp_path / "lake"
    destination = started(lake, mode="soft_delete")
    rows = [{"level": number, "line": "x"} for number in (1, 1, 2, 3)]
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, rows))
    with source.transaction() as transaction:
        transaction.delete(LINES, rows[0])
    assert destination.write_events(source.batch()).result().tables == {}
    keyed = replace(LINES, replica_identity=ReplicaIdentity.DEFAULT)
    for attempt, schema in (("attempt-2", LINES), ("attempt-3", keyed)):
        destination.drop_table_for_copy(schema, attempt)
        destination.write_table_rows(schema, source.copy(schema, rows[1:3], attempt=attempt))
        found = sorted((row["level"], row["_deleted_at"] is None) for row in soft_rows(lake, LINES))
        # With a key, the deleted row is replaced by the one that has its key.
        assert found == ([(1, False), (1, True), (2, True)] if schema is LINES else [(1, True), (2, True)])


def test_a_copy_that_fails_keeps_everything(tmp_path: Path) -> None:
    source, lake = ScriptedSource(tmp_path / "segments"), tmp_path / "lake"
    destination = copied(lake, source, mode="soft_delete")
    before = soft_rows(lake)
    destination.drop_table_for_copy(ORDERS, "attempt-2")
    destination.drop_table_for_copy(ORDERS, "attempt-3")
    with pytest.raises(PenstockError):
        destination.write_table_rows(ORDERS, source.copy(ORDERS, [order(1)], attempt="attempt-2"))
    assert soft_rows(lake) == before
