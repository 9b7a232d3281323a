"""One bad table among twenty, on Spark: it stops with its reason, the others do not, and no change is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.errors import Retry
from penstock.lsn import reaches
from penstock.spark.tasks import SparkTasks
from penstock.state import Command, CommandKind, CommandStatus, Errored, MemoryStore
from penstock.tables import TablesSettings
from penstock.values import OutOfRange, TypeSettings
from penstock.workers import ErrorHold
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, current_position, tables_alone, wait_for
from tests.e2e.test_spark_pipeline import (
    WAY,
    Shape,
    create_tables,
    job_description,
    job_ids,
    pipeline_settings,
)
from tests.support.readback import check_equal

TABLES = 20
BAD = "t07"
HOLD_BYTES = 8 << 20
STRICT = TypeSettings(out_of_range=OutOfRange.ERROR)


def shapes(count: int = TABLES) -> tuple[Shape, ...]:
    columns, rows = "id int primary key, at date, note text", "i, date '2024-01-01' + i, 'n' || i"
    return tuple(Shape(f"t{number:02}", columns, rows, count=30) for number in range(count))


@dataclass
class WatchedTasks:
    """Spark's tasks, with a list of the jobs of changes: what they were called, and whose parts they had."""

    tasks: SparkTasks
    elsewhere: ClassVar = False
    parallel: ClassVar = 1
    jobs: list[tuple[str, set[int]]] = field(default_factory=list)

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        if description.startswith("write "):
            self.jobs.append((description, {item.table_id for item in items}))
        return self.tasks.run(items, function, description=description)

    def copying(self) -> Any:
        return self.tasks.copying()


class Site:
    """Tables, a lake, and a pipeline between them that can be started again."""

    def __init__(self, database: Any, folder: Path, tables: int = TABLES) -> None:
        self.database = database
        self.shapes = shapes(tables)
        self.lake = folder / "lake"
        self.store = MemoryStore("spark")
        hold = ErrorHold(time=timedelta(hours=1), bytes=HOLD_BYTES)
        self.settings: TablesSettings = replace(pipeline_settings(database, folder), error_hold=hold)
        self.pipeline: Alone | None = None
        create_tables(database, self.shapes)
        self.ids = {shape.name: database.execute(f"select '{shape.name}'::regclass::oid::int8")[0][0]
                    for shape in self.shapes}  # fmt: skip

    def start(self, tasks: Any, session: Any = None, *, types: TypeSettings = STRICT) -> Alone:
        self.stop()
        settings = replace(self.settings, types=types)
        self.pipeline = tables_alone(settings, self.store, ParquetDestination(self.lake), tasks, session)
        self.pipeline.start()
        return self.pipeline

    def stop(self) -> None:
        if self.pipeline is not None:
            self.pipeline.shutdown()

    def change_all(self, *, bad: str = "date '2025-01-01'") -> None:
        """One transaction that changes every table; the bad one gets this value."""
        with self.database.connect() as connection, connection.transaction():
            for shape in self.shapes:
                value = bad if shape.name == BAD else "date '2025-01-01'"
                connection.execute(f"insert into {shape.name} select max(id) + 1, {value}, 'new' from {shape.name}")
                connection.execute(f"update {shape.name} set note = note || '+' where id % 3 = 0")

    def outgrow_the_hold(self) -> None:
        """More than an errored table may hold back, of another table."""
        self.database.execute(
            "update t00 set note = (select string_agg(md5(random()::text), '') from generate_series(1, %s))",
            [HOLD_BYTES // 32 // 30 * 2],
        )

    @property
    def running(self) -> Alone:
        assert self.pipeline is not None
        self.pipeline.wait(0)
        return self.pipeline

    def wait_ready(self, *, without: str | None = None) -> None:
        wanted = {f"public.{shape.name}" for shape in self.shapes if shape.name != without}
        wait_for(
            lambda: {name for name, phase in self.running.phases.items() if phase.name == "ready"} == wanted,
            "tables to be ready",
        )

    def wait_applied(self) -> None:
        end = current_position(self.database)
        wait_for(lambda: reaches(self.running.status.applied, end), "apply to reach the end")

    def wait_errored(self, wanted: Callable[[Errored], bool] = lambda phase: True) -> Errored:
        def look() -> Errored | None:
            phase = self.running.phases[f"public.{BAD}"]
            return phase if isinstance(phase, Errored) and wanted(phase) else None

        return wait_for(look, "the bad table to stop")

    def ask(self, kind: CommandKind) -> Command:
        number = self.store.add_command(kind, tables=(f"public.{BAD}",)).number

        def answer() -> Command | None:
            return next((each for each in self.store.get_commands() if each.number == number and each.answered), None)

        return wait_for(answer, "an answer")

    def history(self, table: str = BAD) -> list[str]:
        return [record.phase.name for record in self.store.get_table_replication_history(self.ids[table])]

    def check(self) -> None:
        """Everything is equal, and nobody but the bad table ever stopped."""
        self.wait_ready()
        self.wait_applied()
        check_equal(self.database.dsn, ParquetReader(self.lake), list(self.ids))
        for table in self.ids.keys() - {BAD}:
            assert self.history(table) == WAY, table


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Iterator[Site]:
    made = Site(database, tmp_path)
    yield made
    made.stop()


def check_stopped_alone(site: Site, tasks: WatchedTasks, spark: Any, bad: str) -> Errored:
    """Change every table in one transaction, so in one batch: one job has the parts of all, and one of them fails."""
    jobs = job_ids(spark)
    tasks.jobs.clear()
    site.change_all(bad=bad)
    failed = site.wait_errored()
    site.wait_ready(without=BAD)
    site.wait_applied()
    assert [tables for _, tables in tasks.jobs] == [set(site.ids.values())]
    # The next batch is without it, and one job too.
    site.change_all()
    site.wait_applied()
    described = [description for description, _ in tasks.jobs]
    assert [job_description(spark, job) for job in sorted(job_ids(spark) - jobs)] == described
    assert {frozenset(tables) for _, tables in tasks.jobs[1:]} == {frozenset(site.ids.values()) - {site.ids[BAD]}}
    # It holds what is acknowledged, and nothing else.
    status = site.running.status
    assert failed.position is not None
    assert reaches(failed.position, status.acknowledged)
    assert reaches(status.applied, failed.position)
    assert not reaches(failed.position, status.applied)
    assert failed.retry_policy.retry is Retry.OPERATOR
    return failed


@pytest.mark.trap(31, 33, 51)
def test_a_poison_value_stops_its_table_and_no_other(site: Site, spark: Any) -> None:
    tasks = WatchedTasks(SparkTasks(spark))
    site.start(tasks, spark)
    site.wait_ready()
    failed = check_stopped_alone(site, tasks, spark, "'infinity'")
    assert failed.reason == f"public.{BAD} has values that the types of these columns cannot hold: at"
    assert failed.solution is not None
    assert "out_of_range" in failed.solution
    # Rolled back as it is, it stops again where it was, and its hold goes on.
    assert site.ask(CommandKind.ROLLBACK).status is CommandStatus.DONE
    again = site.wait_errored(lambda phase: phase.attempts == 1)
    assert (again.position, again.since) == (failed.position, failed.since)
    # Under a policy that takes the value it goes on there: all changes since, and no new copy.
    site.start(tasks, spark, types=TypeSettings(out_of_range=OutOfRange.KEEP))
    assert site.ask(CommandKind.ROLLBACK).status is CommandStatus.DONE
    site.check()
    assert site.history() == [*WAY, "errored", "sync_done", "errored", "sync_done", "ready"]


@pytest.mark.trap(33, 51)
def test_a_table_that_the_destination_rejects_goes_on_within_its_hold_and_is_copied_after_it(
    site: Site, spark: Any
) -> None:
    tasks = WatchedTasks(SparkTasks(spark))
    site.start(tasks, spark)
    site.wait_ready()
    # The first batch of a table takes it over, on the driver.
    site.change_all()
    site.wait_applied()
    with obstructed(site.lake):
        failed = check_stopped_alone(site, tasks, spark, "null")
        assert BAD in failed.reason
    assert site.ask(CommandKind.ROLLBACK).status is CommandStatus.DONE
    site.check()
    assert site.history() == [*WAY, "errored", "sync_done", "ready"]
    with obstructed(site.lake):
        site.change_all()
        held = site.wait_errored()
        assert held.holds
        site.outgrow_the_hold()
        lost = site.wait_errored(lambda phase: phase.position_lost)
        assert lost.position == held.position
        assert lost.solution is not None
        assert "penstock resync" in lost.solution
        assert "roll" not in lost.solution
        # Nothing waits for it any more.
        end = current_position(site.database)
        wait_for(lambda: reaches(site.running.status.acknowledged, end), "progress to pass")
        refused = site.ask(CommandKind.ROLLBACK)
        assert refused.status is CommandStatus.REFUSED
        assert refused.reason is not None
        assert "would leave a gap" in refused.reason
        assert "penstock resync" in refused.reason
    assert site.ask(CommandKind.RESYNC).status is CommandStatus.DONE
    site.check()
    assert site.history()[-6:] == ["errored", *WAY]


@pytest.mark.trap(31, 33)
def test_a_poison_value_that_outlived_its_hold_needs_a_new_copy(database: Any, tmp_path: Path) -> None:
    site = Site(database, tmp_path, tables=8)
    try:
        site.start(ProcessTasks())
        site.wait_ready()
        site.change_all(bad="'-infinity'")
        site.wait_errored()
        site.outgrow_the_hold()
        site.wait_errored(lambda phase: phase.position_lost)
        assert site.ask(CommandKind.ROLLBACK).status is CommandStatus.REFUSED
        # The value is still there: the new copy stops too, and has nothing to hold.
        assert site.ask(CommandKind.RESYNC).status is CommandStatus.DONE
        copying = site.wait_errored(lambda phase: phase.position is None)
        assert f"public.{BAD}.at" in copying.reason
        site.database.execute(f"update {BAD} set at = '2026-01-01' where at = '-infinity'")
        assert site.ask(CommandKind.RESYNC).status is CommandStatus.DONE
        site.change_all()
        site.check()
    finally:
        site.stop()


class obstructed:  # noqa: N801 (reads as a statement)
    """Inside, nobody can write into the bad table's folders: there are files of their names."""

    def __init__(self, lake: Path) -> None:
        self._folders = [path for path in lake.rglob("data") if path.is_dir() and BAD in str(path.relative_to(lake))]
        assert self._folders

    def __enter__(self) -> None:
        for folder in self._folders:
            folder.rename(folder.with_name("away"))
            folder.touch()

    def __exit__(self, *exception: object) -> None:
        for folder in self._folders:
            folder.unlink()
            folder.with_name("away").rename(folder)
