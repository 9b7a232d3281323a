"""What the tests of the postgres destination share: opening it, copying, writing, and reading tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from penstock.changes.batch import EventBatch
from penstock.changes.events import Row, Unrepresentable
from penstock.destinations.base import DestinationContext
from penstock.destinations.postgres import PostgresDestination
from penstock.schema import TableSchema
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.script import make_context

SECONDS = 60.0


def started(database: Any, context: DestinationContext | None = None, **options: Any) -> PostgresDestination:
    """Return a destination that writes to the schema `mirror`, unless `schema` says otherwise."""
    destination = PostgresDestination(database.dsn, **{"schema": "mirror", **options})
    destination.startup(context or make_context())
    return destination


def copy(
    destination: PostgresDestination,
    source: ScriptedSource,
    schema: TableSchema,
    rows: Sequence[Row],
    *,
    attempt: str = "attempt-1",
    ranges: int = 1,
) -> None:
    destination.drop_table_for_copy(schema, attempt)
    destination.write_table_rows(schema, source.copy(schema, rows, attempt=attempt, ranges=ranges))


def write(destination: PostgresDestination, batch: EventBatch) -> None:
    """Write a batch; raise the error of the first table that failed."""
    for result in destination.write_events(batch).result(SECONDS).tables.values():
        if result.error is not None:
            raise result.error


@dataclass(frozen=True)
class PostgresHarness:
    """Reads tables with a client of its own, as their readers would."""

    database: Any
    options: dict[str, Any]

    def open(self) -> PostgresDestination:
        return PostgresDestination(self.database.dsn, **self.options)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        target = f'"{schema.namespace}"."{schema.name}"'
        if not self.database.execute("select 1 where to_regclass(%s) is not null", [target]):
            return None
        names = [column.name for column in schema.columns]
        listed = ", ".join(f'"{name}"::text' for name in names)
        live = " where _deleted_at is null" if self.options.get("mode") == "soft_delete" else ""
        found = self.database.execute(f"select {listed} from {target}{live}")
        types = {column.name: column.type.name for column in schema.columns}
        return [{name: _cell(text, types[name]) for name, text in zip(names, row, strict=True)} for row in found]


def _cell(text: str | None, type_: str) -> Any:
    if text is None or type_ == "text":
        return text
    if type_ == "int8":
        return int(text)
    assert type_ == "date"
    return Unrepresentable(text) if "infinity" in text or "BC" in text else date.fromisoformat(text)
