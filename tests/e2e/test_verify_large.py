"""Comparing a table of two million rows on Spark while it is written all the time, and behind a transaction that is
open for a minute. Long: `make soak` runs it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.changes.events import Unchanged
from penstock.comparison.report import Counts, Kind, Report, TableReport
from penstock.comparison.verification import Observer, VerifySettings, verify_tables
from penstock.destinations.delta.destination import DeltaDestination
from penstock.errors import SnapshotBlocked
from penstock.lsn import Lsn, reaches
from penstock.spark.tasks import SparkTasks
from penstock.state import MemoryStore
from penstock.testing.destinations.script import ScriptedTransaction
from penstock.workers import BatchSettings
from tests.e2e.support import Alone, Background, tables_alone, tables_settings, wait_for
from tests.integration.comparison.support import plant_beside

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

ROWS = int(os.environ.get("PENSTOCK_SOAK_VERIFY_ROWS", "2000000"))
OPEN_SECONDS = 60.0
PATIENCE = 300.0
FEW_ROWS = 20_000
LEFT_ALONE = 100
"""Writers change no row whose id is a multiple of it: what is planted there stays."""


def writes(rows: int) -> Callable[[Any], None]:
    """A step for `Background`: a transaction with updates, inserts and deletes all over the table."""
    numbers = itertools.count()

    def step(connection: Any) -> None:
        number = next(numbers)
        ids = [1 + (number * 7919 + step * 104_729) % (rows - 1) for step in range(20)]
        ids = [each for each in ids if each % LEFT_ALONE]
        new = 10 * rows + LEFT_ALONE * number + 1
        with connection.transaction():
            connection.execute("update t set amount = amount + 1 where id = any(%s)", [ids[:10]])
            connection.execute("delete from t where id = any(%s)", [ids[10:11]])
            connection.execute("insert into t select %s + i, 'new', 1 from generate_series(0, 4) i", [new])

    return step


class Watching(Observer):
    """Notes whether changes flow while rows are compared, and who was waited for."""

    def __init__(self, pipeline: Alone) -> None:
        self._pipeline = pipeline
        self._released_at: Lsn | None = None
        self.blocked_by: list[str] = []
        self.flowed = False
        self.went_around = False

    def blocked(self, error: SnapshotBlocked) -> None:
        self.blocked_by.append(str(error))
        before = self._applied
        wait_for(lambda: not reaches(before, self._applied), "changes to flow meanwhile")

    def going_around(self, error: SnapshotBlocked) -> None:
        self.went_around = True

    def released(self, seconds: float) -> None:
        self._released_at = self._applied

    def compared(self, report: TableReport) -> None:
        self.flowed = self._released_at is not None and not reaches(self._released_at, self._applied)

    @property
    def _applied(self) -> Lsn:
        status = self._pipeline.status
        assert status is not None
        return status.applied


class Comparing:
    """A pipeline into Delta on Spark, and comparisons beside it."""

    def __init__(self, database: Any, folder: Path, spark: Any) -> None:
        self._database = database
        self._tasks = SparkTasks(spark)
        self.lake = folder / "lake"
        settings = tables_settings(database, folder, "large", batches=BatchSettings())
        self.pipeline = tables_alone(settings, MemoryStore("large"), DeltaDestination(self.lake), self._tasks, spark)

    @contextmanager
    def running(self, rows: int) -> Iterator[Background]:
        """With the table copied, and written all the time."""
        self._database.execute("create table t (id bigint primary key, note text, amount int not null)")
        self._database.execute(f"insert into t select i, md5(i::text), i % 1000 from generate_series(1, {rows}) i")
        with self.pipeline, Background(self._database, writes(rows)) as writer:
            wait_for(
                lambda: [phase.name for phase in self.pipeline.phases.values()] == ["ready"],
                "the copy",
                timeout=PATIENCE,
            )
            yield writer
            assert self.pipeline.phases["public.t"].name == "ready"

    def compare(self, observer: Observer, wait: float = PATIENCE) -> Report:
        looking = DeltaDestination(self.lake)
        options = VerifySettings(wait=wait)
        pipeline = self.pipeline
        return verify_tables(
            pipeline.settings, pipeline.store, looking, self._tasks, options=options, observer=observer
        )


@pytest.fixture
def comparing(database: Any, tmp_path: Path, spark: Any) -> Comparing:
    return Comparing(database, tmp_path, spark)


def test_a_cell_a_missing_row_and_an_extra_row_among_millions_are_found(
    comparing: Comparing, tmp_path: Path, record_property: Any
) -> None:
    with comparing.running(ROWS) as writer:
        watching = Watching(comparing.pipeline)
        report = comparing.compare(watching)
        [table] = report.tables
        assert table.counts == Counts(equal=table.counts.equal)
        assert table.counts.equal > ROWS * 0.9
        assert report.exact
        assert watching.flowed
        record_property("rows", table.counts.equal)
        record_property("seconds", round(table.seconds, 1))

        schema = comparing.pipeline.store.get_table_schemas()[-1].schema
        changed, missing, extra = (LEFT_ALONE * (ROWS // LEFT_ALONE * part // 7) for part in (2, 4, 1000))

        def faults(plant: ScriptedTransaction) -> None:
            plant.update(schema, {"id": changed, "note": Unchanged, "amount": -1})
            plant.delete(schema, {"id": missing})
            plant.insert(schema, {"id": extra, "note": "extra", "amount": 0})

        plant_beside(tmp_path, comparing.lake, "large", schema, faults)
        watching = Watching(comparing.pipeline)
        before = writer.count
        report = comparing.compare(watching)
        [table] = report.tables
        assert writer.count > before
        assert watching.flowed
        assert report.exit_code == 1
        assert (table.counts.changed, table.counts.missing, table.counts.extra) == (1, 1, 1)
        assert {(each.kind, each.key["id"], each.columns) for each in table.differences} == {
            (Kind.CHANGED, changed, ("amount",)),
            (Kind.MISSING, missing, ()),
            (Kind.EXTRA, extra, ()),
        }
        record_property("seconds with faults", round(table.seconds, 1))


@pytest.mark.parametrize(
    ("wait", "exact"), [(PATIENCE, True), (OPEN_SECONDS - 20, False)], ids=["waits", "goes around"]
)
def test_a_transaction_that_is_open_for_a_minute(comparing: Comparing, database: Any, wait: float, exact: bool) -> None:
    """It is waited for and named while changes flow; or, after a while, what did not change around a snapshot is
    judged."""
    with comparing.running(FEW_ROWS), psycopg.connect(database.dsn) as blocker:
        blocker.execute("create table unfinished (id int)")
        began = time.monotonic()
        ending = threading.Timer(OPEN_SECONDS, blocker.rollback)
        ending.start()
        watching = Watching(comparing.pipeline)
        try:
            report = comparing.compare(watching, wait)
        finally:
            ending.join()
        assert time.monotonic() - began >= OPEN_SECONDS
        assert report.exit_code == 0
        assert (report.exact, watching.went_around) == (exact, not exact)
        assert all(str(blocker.info.backend_pid) in each for each in watching.blocked_by)
        assert len(watching.blocked_by) > 1
        [table] = report.tables
        assert table.counts.equal + table.counts.unsettled > FEW_ROWS * 0.5
