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
