"""Workers that Spark forks from our daemon: what tasks need is there, and nothing is done twice for each of them."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

from penstock.spark.session import SparkSettings
from penstock.spark.tasks import SparkTasks

NEEDED = (
    "penstock.copy.reader",
    "penstock.destinations.delta.destination",
    "penstock.destinations.parquet.destination",
    "penstock.documents.build",
)


def look(_: Any) -> tuple[list[str], int, bool]:
    """What a worker lacks when its task begins, how many archives it reads again before one, and what is frozen."""
    import gc
    import importlib
    import zipimport

    missing = [name for name in NEEDED if name not in sys.modules]
    read = 0
    original = zipimport._read_directory  # type: ignore[attr-defined]

    def count(archive: str) -> Any:
        nonlocal read
        read += 1
        return original(archive)

    zipimport._read_directory = count  # type: ignore[attr-defined]
    try:
        importlib.invalidate_caches()
    finally:
        zipimport._read_directory = original  # type: ignore[attr-defined]
    return missing, read, gc.get_freeze_count() > 0


def test_a_task_finds_everything_imported_and_reads_no_archive_again(spark: Any) -> None:
    found = SparkTasks(spark).run(range(4), look, description="look")
    assert found == [([], 0, True)] * 4


def test_an_archive_that_comes_later_is_imported_from(spark: Any, tmp_path: Path) -> None:
    tasks = SparkTasks(spark)
    assert tasks.run([2], abs, description="a worker that is warm") == [2]
    archive = tmp_path / "later.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("came_later.py", "def double(number):\n    return 2 * number\n")
    spark.sparkContext.addPyFile(str(archive))

    def double(number: int) -> int:
        import came_later  # type: ignore[import-not-found]

        return came_later.double(number)

    assert tasks.run(range(4), double, description="double") == [0, 2, 4, 6]


def test_another_daemon_can_be_chosen() -> None:
    chosen = SparkSettings(options={"spark.python.daemon.module": "pyspark.daemon"})
    assert chosen.configuration()["spark.python.daemon.module"] == "pyspark.daemon"
