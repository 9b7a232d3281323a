"""Many tables in one batch on Spark, of which one cannot be read: for destinations that write by tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.destinations.base import Destination
from penstock.schema import TableSchema
from penstock.spark.session import APPLY_POOL
from penstock.spark.tasks import group_of
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import ORDERS

TABLES, BAD = 20, 7


def check_one_bad_table(
    spark: Any, destination: Destination, folder: Path, count_rows: Callable[[TableSchema], int]
) -> None:
    """The batch is one job; the bad table has an error and no row, and all the others have theirs."""
    source = ScriptedSource(folder / "segments")
    schemas = [replace(ORDERS, table_id=30_000 + number, name=f"t{number}") for number in range(TABLES)]
    for schema in schemas:
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, [], ranges=0))
    with source.transaction() as transaction:
        for schema in schemas:
            transaction.insert(schema, {"id": 1, "note": schema.name, "due": None})
    batch = source.batch()
    bad: Any = batch.tables[BAD].steps[0]
    Path(bad.segments[0].path).write_bytes(b"not a file of changes")
    tracker = spark.sparkContext.statusTracker()
    before = len(tracker.getJobIdsForGroup(group_of(APPLY_POOL)))
    result = destination.write_events(batch).result()
    assert len(tracker.getJobIdsForGroup(group_of(APPLY_POOL))) == before + 1
    assert list(result.tables) == [schemas[BAD].table_id]
    assert result.of(schemas[BAD].table_id).error is not None
    assert [count_rows(schema) for schema in schemas] == [int(number != BAD) for number in range(TABLES)]
