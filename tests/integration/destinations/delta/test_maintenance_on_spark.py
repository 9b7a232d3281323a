"""Maintenance in Spark tasks, beside a writer that does not stop."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.maintenance.schedule import Maintenance, MaintenanceSettings
from penstock.destinations.delta.storage import LocalStorage
from penstock.spark.tasks import SparkTasks
from tests.unit.destinations.delta.lake import LakeTable


@pytest.mark.trap(37, 50, 51)
def test_a_writer_goes_on_while_spark_tasks_keep_its_tables_in_shape(spark: Any, tmp_path: Path) -> None:
    tables = {name: LakeTable(LocalStorage(tmp_path / name)) for name in ("one", "two")}
    for table in tables.values():
        table.create(range(200))
        for number in range(8):
            table.append(range(1000 + 10 * number, 1010 + 10 * number))
    maintained = {name: table.storage for name, table in tables.items()}
    maintenance = Maintenance(lambda: maintained, SparkTasks(spark), MaintenanceSettings(checkpoint_commits=5))
    finished = threading.Event()

    def maintain() -> None:
        while not finished.is_set():
            maintenance.run_once(clean_up=True)

    thread = threading.Thread(target=maintain)
    thread.start()
    gone = list(range(0, 200, 7))
    for each in gone:
        for table in tables.values():
            table.delete([each])
    finished.set()
    thread.join(120)
    maintenance.run_once(clean_up=True)
    assert maintenance.counts.failures == 0
    assert maintenance.counts.compactions >= 2
    assert maintenance.counts.checkpoints >= 2
    for table in tables.values():
        assert table.ids() == [*(each for each in range(200) if each % 7), *range(1000, 1080)]
        assert len(table.snapshot.files) < 9
