"""The comparison in Spark tasks: the same findings, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.comparison.compare import compare_table
from penstock.comparison.report import Counts
from penstock.copy import CopySettings
from penstock.spark.tasks import SparkTasks
from tests.integration.comparison.support import Place
from tests.integration.copy.conftest import PUBLICATION, Source


@pytest.fixture
def source(database: Any) -> Iterator[Source]:
    made = Source(database)
    yield made
    made.close()


def test_tasks_find_the_same_and_tell_how_far_they_are(source: Source, spark: Any, tmp_path: Path) -> None:
    source.execute("create table t (id int primary key, note text)")
    source.execute("insert into t select i, md5(i::text) from generate_series(1, 20000) i; analyze t")
    source.execute(f"create publication {PUBLICATION} for table t")
    rows = source.prepare(settings=CopySettings(range_bytes=256 << 10))
    assert len(rows.ranges) > 4
    place = Place("delta", tmp_path)
    place.copy(rows)
    tasks = SparkTasks(spark, copy_tasks=2)
    progress: list[float] = []
    pinned = place.open().pin(rows.schema)
    assert compare_table(rows, pinned, tasks, on_progress=progress.append).counts == Counts(equal=20_000)
    pinned.close()
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    place.plant(rows, lambda plant: plant.delete(rows.schema, {"id": 77}))
    pinned = place.open().pin(rows.schema)
    report = compare_table(rows, pinned, tasks)
    pinned.close()
    assert report.counts == Counts(equal=19_999, missing=1)
    assert [each.key for each in report.differences] == [{"id": 77}]
