"""The contract of stores, over a real server."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from penstock.state import PostgresStore
from penstock.testing.stores import DurableStoreContract
from tests.conftest import Database
from tests.unit.state.machine import StoreMachine


@pytest.mark.trap(4, 14, 16, 33)
class TestPostgresStore(DurableStoreContract):
    @pytest.fixture(autouse=True)
    def _place(self, database: Database) -> None:
        self.url = database.dsn


def test_postgres_does_what_the_model_does(database: Database) -> None:
    count = iter(range(1_000_000))

    class Machine(StoreMachine):
        @staticmethod
        def openers():
            name = f"pipeline {next(count)}"
            return [lambda: PostgresStore(database.dsn, name)]

    run_state_machine_as_test(Machine, settings=settings(max_examples=10, stateful_step_count=30))
