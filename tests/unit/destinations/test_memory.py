"""The memory destination under the contract, and the mirror that it is made of."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.destinations.base import Destination
from penstock.destinations.memory import MemoryDestination, MemoryTables
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract


class MemoryHarness:
    def __init__(self) -> None:
        self.storage = MemoryTables()

    def open(self) -> Destination:
        return MemoryDestination(self.storage)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        try:
            return MemoryDestination(self.storage).rows(str(schema))
        except KeyError:
            return None


class TestMemory(DestinationContract):
    @pytest.fixture
    def harness(self) -> MemoryHarness:
        return MemoryHarness()
