"""The example that people copy passes the contract, and runs by itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unrepresentable
from penstock.destinations import create_destination
from penstock.destinations.base import Destination
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract, make_context

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "custom_destination.py"


@pytest.fixture(autouse=True)
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))


class ExampleHarness:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.opened: list[Any] = []

    def open(self) -> Destination:
        destination = create_destination("custom_destination:SqliteRows", {"path": self.path})
        self.opened.append(destination)
        return destination

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        reader = self.open()
        reader.startup(make_context("reader"))
        rows = reader.rows(str(schema))
        return None if rows is None else [{name: _value(name, cell) for name, cell in row.items()} for row in rows]

    def close(self) -> None:
        for each in self.opened:
            # Whoever only looks whether it can be read does not start it.
            if hasattr(each, "_database"):
                each.shutdown()


def _value(name: str, cell: Any) -> Any:
    if isinstance(cell, dict):
        return Unrepresentable(cell["text"])
    return date.fromisoformat(cell) if name == "due" and cell is not None else cell


class TestExample(DestinationContract):
    @pytest.fixture
    def harness(self, tmp_path: Path) -> Any:
        harness = ExampleHarness(tmp_path / "replica.db")
        yield harness
        harness.close()


def test_the_example_runs_by_itself() -> None:
    finished = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True, timeout=120)
    assert finished.stdout.splitlines() == [
        "{'id': 2, 'note': 'new', 'due': None}",
        "{'id': 3, 'note': 'copied', 'due': None}",
    ]
    assert finished.stderr == ""


def test_the_example_is_short_enough_to_copy() -> None:
    assert importlib.util.find_spec("custom_destination") is not None
    assert len(EXAMPLE.read_text().splitlines()) < 220
