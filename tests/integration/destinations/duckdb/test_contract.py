"""The contract of destinations, on the real engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.testing.destinations import DestinationContract
from tests.support.duckdb import Duck


class TestFile(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Duck:
        return Duck(str(tmp_path / "lake.db"))


class TestLake(DestinationContract):
    """A DuckLake whose catalog is a DuckDB file; with `make ducklake`, which installs the extension."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Duck:
        pytest.importorskip("duckdb_extension_ducklake")
        return Duck(f"ducklake:{tmp_path}/lake.ducklake", {"data_path": f"{tmp_path}/data"})
