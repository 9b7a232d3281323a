"""The contract of stores, over those that need no service."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.state import MemoryState, MemoryStore
from penstock.testing.stores import DurableStoreContract, StoreContract


@pytest.mark.trap(4, 14, 16, 33)
class TestMemoryStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.state = MemoryState()

    def open(self, pipeline_id: str = "contract") -> MemoryStore:
        return MemoryStore(pipeline_id, self.state)


@pytest.mark.trap(4, 14, 16, 33)
class TestSqliteStore(DurableStoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.url = f"sqlite:///{tmp_path / 'state.db'}"
