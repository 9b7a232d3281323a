"""The Delta destination under the contract, in all its modes; what is read is read by delta-rs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract
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
