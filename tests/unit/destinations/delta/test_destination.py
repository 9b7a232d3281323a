"""The Delta destination under the contract, in all its modes; what is read is read by delta-rs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.errors import SchemaNotFollowed
from penstock.schema import Column, TableSchema
from penstock.testing.destinations import DestinationContract, ScriptedSource, make_context
from penstock.testing.destinations.contract import INT8, ORDERS
from tests.unit.destinations.delta.reading import read_rows, replay_history


class DeltaHarness:
    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.options = options

    def open(self) -> Destination:
        return DeltaDestination(self.path, maintenance=False, **self.options)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        return read_rows(self.path, schema)


class HistoryHarness(DeltaHarness):
    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        return replay_history(self.path, schema)


class TestMirror(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> DeltaHarness:
        return DeltaHarness(tmp_path / "lake")


class TestMirrorWithoutVectors(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> DeltaHarness:
        return DeltaHarness(tmp_path / "lake", deletion_vectors=False)


class TestSoftDelete(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> DeltaHarness:
        return DeltaHarness(tmp_path / "lake", mode="soft_delete")


class TestSoftDeleteWithoutVectors(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> DeltaHarness:
        return DeltaHarness(tmp_path / "lake", mode="soft_delete", deletion_vectors=False)


class TestHistory(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> DeltaHarness:
        return HistoryHarness(tmp_path / "lake", mode="history")

    @pytest.mark.trap(15)
    def test_columns_are_added_renamed_and_dropped(self, harness: DeltaHarness, tmp_path: Path) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Columns can be added; a table whose columns are renamed or dropped stops, and keeps its rows."""
        source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
        destination.startup(make_context())
        destination.drop_table_for_copy(ORDERS, "attempt-1")
        row = {"id": 1, "note": "n", "due": None}
        destination.write_table_rows(ORDERS, source.copy(ORDERS, [row]))
        key, note, due = ORDERS.columns
        added = replace(ORDERS, columns=(*ORDERS.columns, Column("amount", 4, INT8)))
        with source.transaction() as transaction:
            transaction.update(ORDERS, row | {"note": "before"})
        with source.transaction() as transaction:
            transaction.insert(added, row | {"id": 3, "amount": 30})
        batch = source.batch()
        expected = [row | {"note": "before", "amount": None}, row | {"id": 3, "amount": 30}]
        for _ in range(2):
            assert destination.write_events(batch).result().tables == {}
            assert sorted(harness.rows(added) or [], key=repr) == expected
            destination.shutdown()
            destination = harness.open()
            destination.startup(make_context())
        amount = Column("amount", 4, INT8)
        renamed = replace(ORDERS, columns=(key, replace(note, name="remark"), due, amount))
        begin = source.position
        with source.transaction() as transaction:
            transaction.insert(renamed, {"id": 4, "remark": None, "due": None, "amount": None})
        error = destination.write_events(source.batch(begin, source.position)).result().of(ORDERS.table_id).error
        assert isinstance(error, SchemaNotFollowed)
        assert "resync" in error.hint
        assert sorted(harness.rows(added) or [], key=repr) == expected
