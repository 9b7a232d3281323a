"""What the tests of the clickhouse destination share: copying and writing."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.changes.batch import EventBatch
from penstock.changes.events import Row
from penstock.destinations.clickhouse import ClickHouseDestination
from penstock.schema import TableSchema
from penstock.testing.destinations import ScriptedSource

SECONDS = 60.0


def copy(
    destination: ClickHouseDestination,
    source: ScriptedSource,
    schema: TableSchema,
    rows: Sequence[Row],
    *,
    attempt: str = "attempt-1",
    ranges: int = 1,
) -> None:
    destination.drop_table_for_copy(schema, attempt)
    destination.write_table_rows(schema, source.copy(schema, rows, attempt=attempt, ranges=ranges))


def write(destination: ClickHouseDestination, batch: EventBatch) -> None:
    """Write a batch; raise the error of the first table that failed."""
    for result in destination.write_events(batch).result(SECONDS).tables.values():
        if result.error is not None:
            raise result.error
