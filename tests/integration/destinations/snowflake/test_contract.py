"""The snowflake destination under the contract, on fakesnow, by the real connector."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.changes.events import Unchanged, Unrepresentable
from penstock.destinations.mirror import MirrorTable
from penstock.destinations.naming import IDENTIFIERS
from penstock.destinations.snowflake import SnowflakeDestination
from penstock.destinations.snowflake.layout import shown_name
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract
from penstock.testing.snowflake import DATABASE, EmulatedSnowflake


class SnowflakeHarness:
    more = ""

    def __init__(self, server: EmulatedSnowflake, place: str, **options: Any) -> None:
        self.server = server
        self.place = place
        self.options = options

    def open(self) -> SnowflakeDestination:
        return SnowflakeDestination(**self.server.options(self.place, **self.options))

    def view(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        name = f'"{DATABASE}"."{self.place}"."{IDENTIFIERS.table(schema).upper()}"'
        try:
            found = self.server.rows(f"select *{self.more} from {name}")
        except Exception as error:
            if "does not exist" in str(error).lower():
                return None
            raise
        names = {shown_name(column.name, column.attnum, []): column.name for column in schema.columns}
        for row in found:
            for shown, name in names.items():
                row[name] = row.pop(shown)
            for shown, text in json.loads(row.pop("_UNREPRESENTABLE", None) or "{}").items():
                row[names.get(shown, shown)] = Unrepresentable(text)
        return found

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        return self.view(schema)


class SoftHarness(SnowflakeHarness):
    """Leaves out the deleted rows."""

    # The emulator sends the epoch for a time that is NULL.
    more = ", _DELETED_AT is null as _IS_LIVE"

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        found = self.view(schema)
        if found is None:
            return None
        live = [row for row in found if row.pop("_IS_LIVE")]
        for row in live:
            del row["_DELETED_AT"]
        return live


class HistoryHarness(SnowflakeHarness):
    """Computes the rows that result from a history."""

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        found = self.view(schema)
        if found is None:
            return None
        names = [column.name for column in schema.columns]
        mirror = MirrorTable(schema)
        for row in sorted(found, key=lambda each: (each["_COMMIT_LSN"], each["_ORDINAL"])):
            values = {name: row[name] for name in names}
            values |= dict.fromkeys(json.loads(row["_UNCHANGED"] or "[]"), Unchanged)
            old = json.loads(row["_OLD"] or "{}")
            match row["_OP"]:
                case "copy" | "insert":
                    mirror.insert(values)
                case "truncate":
                    mirror.clear()
                case "delete":
                    mirror._take(values)
                case _:
                    typed = {name: _typed(values[name], text) for name, text in old.items()}
                    before = mirror._take({**values, **typed})
                    mirror.insert(
                        {name: before[name] if value is Unchanged else value for name, value in values.items()}
                    )
        return mirror.rows()


def _typed(like: Any, text: Any) -> Any:
    return int(text) if isinstance(like, int) and text is not None else text


class TestMirror(DestinationContract):
    @pytest.fixture
    def harness(self, server: EmulatedSnowflake, place: str) -> SnowflakeHarness:
        return SnowflakeHarness(server, place)


class TestSoftDelete(DestinationContract):
    @pytest.fixture
    def harness(self, server: EmulatedSnowflake, place: str) -> SoftHarness:
        return SoftHarness(server, place, mode="soft_delete")


class TestHistory(DestinationContract):
    @pytest.fixture
    def harness(self, server: EmulatedSnowflake, place: str) -> HistoryHarness:
        return HistoryHarness(server, place, mode="history")
