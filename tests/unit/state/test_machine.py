"""Memory and SQLite against the model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from penstock.state import MemoryState, MemoryStore, SqliteStore
from tests.support.examples import examples
from tests.unit.state.machine import StoreMachine


def test_memory_and_sqlite_do_what_the_model_does() -> None:
    with tempfile.TemporaryDirectory() as folder:
        count = iter(range(1_000_000))

        class Machine(StoreMachine):
            @staticmethod
            def openers():
                state, path = MemoryState(), Path(folder) / f"{next(count)}.db"
                return [lambda: MemoryStore("p", state), lambda: SqliteStore(path, "p")]

        run_state_machine_as_test(Machine, settings=settings(max_examples=examples(10), stateful_step_count=30))
