"""The contract of destinations, on a real server, in the modes that hold the rows of the source."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.testing.destinations import DestinationContract
from tests.integration.destinations.postgres.writing import PostgresHarness


class TestMirror(DestinationContract):
    @pytest.fixture
    def harness(self, any_database: Any) -> PostgresHarness:
        return PostgresHarness(any_database, {})


class TestBatchesInOneTransaction(DestinationContract):
    @pytest.fixture
    def harness(self, database: Any) -> PostgresHarness:
        return PostgresHarness(database, {"transactional": "batch"})


class TestSoftDelete(DestinationContract):
    @pytest.fixture
    def harness(self, database: Any) -> PostgresHarness:
        return PostgresHarness(database, {"mode": "soft_delete"})
