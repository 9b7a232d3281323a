"""The bigquery destination under the contract, on the emulator with the fake for change types and offsets."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.changes.events import Unchanged, Unrepresentable
from penstock.destinations.base import Destination
from penstock.destinations.bigquery import BigQueryDestination
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.naming import IDENTIFIERS
from penstock.schema import TableSchema
from penstock.testing.bigquery import EmulatedBigQuery
from penstock.testing.destinations import DestinationContract


class BigQueryHarness:
    def __init__(self, server: EmulatedBigQuery, dataset: str, **options: Any) -> None:
        self.server = server
        self.dataset = dataset
        self.options = options

    def open(self) -> Destination:
        return BigQueryDestination(
            self.server.project,
            self.dataset,
            endpoint=self.server.endpoint,
            storage_endpoint=self.server.storage_endpoint,
            **self.options,
        )

    def view(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        name = f"{self.server.project}.{self.dataset}.{IDENTIFIERS.table(schema)}"
        try:
            return self.server.rows(f"select * from `{name}`")
        except Exception as error:
            if "not found" in str(error).lower() or "does not exist" in str(error).lower():
                return None
            raise

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        found = self.view(schema)
        if found is None:
            return None
        for row in found:
            for cell in row.pop("_unrepresentable"):
                row[cell["name"]] = Unrepresentable(cell["text"])
        return found


class HistoryHarness(BigQueryHarness):
    """Computes the rows that result from a history."""

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        found = self.view(schema)
        if found is None:
            return None
        names = [column.name for column in schema.columns]
        mirror = MirrorTable(schema)
        for row in sorted(found, key=lambda each: (each["_commit_lsn"], each["_ordinal"])):
            values = {name: row[name] for name in names}
            old = dict(row["_old"] or {})
            for cell in row["_unrepresentable"]:
                name = cell["name"]
                (old if name.startswith("_old.") else values)[name.removeprefix("_old.")] = Unrepresentable(
                    cell["text"]
                )
            values |= dict.fromkeys(row["_unchanged"], Unchanged)
            _apply(mirror, row["_op"], values, old)
        return mirror.rows()


def _apply(mirror: MirrorTable, operation: str, values: dict[str, Any], old: dict[str, Any]) -> None:
    match operation:
        case "copy" | "insert":
            mirror.insert(values)
        case "truncate":
            mirror.clear()
        case "delete":
            mirror._take(values)
        case _:
            before = mirror._take({**values, **old})
            mirror.insert({name: before[name] if value is Unchanged else value for name, value in values.items()})


class TestMirror(DestinationContract):
    @pytest.fixture
    def harness(self, server: EmulatedBigQuery, dataset: str) -> BigQueryHarness:
        return BigQueryHarness(server, dataset, max_staleness="0s")


class TestHistory(DestinationContract):
    @pytest.fixture
    def harness(self, server: EmulatedBigQuery, dataset: str) -> HistoryHarness:
        return HistoryHarness(server, dataset, mode="history")
