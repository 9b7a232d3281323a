"""Parts of a batch that are split over real Spark tasks: the lake is the same as if one task had applied them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.changes.batch import EventBatch
from penstock.changes.segment import UNREPRESENTABLE
from penstock.destinations.delta import split, tasks
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.reader import DeltaReader
from penstock.schema import TableSchema
from penstock.spark.tasks import SparkTasks
from penstock.testing.destinations import LocalTasks, ScriptedSource, make_context
from tests.unit.changes.random_changes import SCHEMAS, RandomTable
from tests.unit.destinations.delta.following import OPTIONS

TRANSACTIONS, CHANGES = 3, 40


class Counting(SparkTasks):
    """Spark's tasks, with the descriptions of their jobs."""

    def __init__(self, spark: Any) -> None:
        super().__init__(spark, copy_tasks=1)
        self.jobs: list[str] = []

    def run(self, items: Any, function: Any, *, description: str) -> list[Any]:
        self.jobs.append(description)
        return super().run(items, function, description=description)


@pytest.fixture
def running(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Parts of a few changes are large. Only the driver decides that, so workers need not know it."""
    monkeypatch.setattr(tasks, "SLICE_ROWS", 10)
    monkeypatch.setattr(split, "GROUP_BYTES", 1)
    monkeypatch.setattr(split, "PATIENCE", 0)
    monkeypatch.setattr(split, "DRIVER_BYTES", 0)
    found = Counting(spark)
    assert found.parallel > 1
    return found


def opened(lake: Path, running: Any, options: dict[str, Any]) -> DeltaDestination:
    destination = DeltaDestination(lake, maintenance=False, **options)
    destination.startup(make_context(tasks=running))
    return destination


def rows_of(lake: Path, schema: TableSchema) -> Counter[str]:
    rows = DeltaReader(lake).read_table(str(schema)).to_pylist()
    # The order in a map means nothing.
    return Counter(repr(row | {UNREPRESENTABLE: sorted(row.get(UNREPRESENTABLE) or ())}) for row in rows)


@pytest.mark.trap(25, 26, 27, 29, 32, 50, 52)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "mirror")
def test_a_split_batch_writes_what_an_unsplit_one_does(
    options: dict[str, Any], running: Counting, tmp_path: Path
) -> None:
    """All tables in one batch, so that parts of several tables share the jobs."""
    source = ScriptedSource(tmp_path / "segments", segment_rows=4)
    tables = [RandomTable(schema, Random(f"{number}{options}")) for number, schema in enumerate(SCHEMAS)]
    lakes = {tmp_path / "split": running, tmp_path / "unsplit": LocalTasks()}
    destinations = [opened(lake, each, options) for lake, each in lakes.items()]
    for table in tables:
        first = table.fill(20)
        for destination in destinations:
            destination.drop_table_for_copy(table.schema, "attempt-1")
            destination.write_table_rows(table.schema, source.copy(table.schema, first, ranges=2))
    for _ in range(TRANSACTIONS):
        for table in tables:
            table.transact(source, CHANGES)
        batch: EventBatch = source.batch()
        for destination in destinations:
            assert destination.write_events(batch).result().tables == {}
        for table in tables:
            assert rows_of(tmp_path / "split", table.schema) == rows_of(tmp_path / "unsplit", table.schema)
    writes = [job for job in running.jobs if job.startswith("write")]
    assert len(writes) == TRANSACTIONS, "one job for all parts and groups"
    if options.get("mode") != "history":
        # In mode soft_delete a part with a truncate is not split.
        assert any(job.startswith("unite") for job in running.jobs)
