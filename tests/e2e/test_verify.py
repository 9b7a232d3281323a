"""Comparing while a pipeline and writers run in this process: when changes wait, and what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.changes.events import Delete
from penstock.comparison.report import Counts, Kind, Report, TableReport
from penstock.comparison.verification import Observer, VerifySettings, verify_tables
from penstock.destinations.memory import MemoryDestination
from penstock.destinations.stdout import StdoutDestination
from penstock.errors import NotComparable, SnapshotBlocked
from penstock.lsn import Lsn, OrderKey, reaches
from penstock.state import MemoryStore
from penstock.testing.faults import FaultyDestination
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, Background, tables_alone, tables_settings, updates_of_both, wait_for

Started = Callable[[Any], Alone]


class Unversioned(MemoryDestination):
    """Says that what it pins does not stay."""

    keeps_versions = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


@pytest.fixture
def started(database: Any, tmp_path: Any) -> Iterator[Started]:
    """A pipeline of two tables into a destination, followed; writers change rows 1 to 100 of both all the time."""
    database.execute("create table a (id int primary key, n int); create table b (id int primary key, n int)")
    database.execute("insert into a select i, 0 from generate_series(1, 150) i; insert into b select * from a")
    pipelines: list[Alone] = []

    def start(destination: Any) -> Alone:
        settings = tables_settings(database, tmp_path, "verify")
        made = tables_alone(settings, MemoryStore("verify"), destination, ProcessTasks())
        pipelines.append(made)
        made.start()
        wait_for(lambda: [phase.name for phase in made.phases.values()] == ["ready"] * 2, "the copies")
        return made

    with Background(database, updates_of_both()):
        yield start
        for pipeline in pipelines:
            pipeline.shutdown()


class Watching(Observer):
    """Notes what it is told, with how far apply was."""

    def __init__(self, pipeline: Alone) -> None:
        self._pipeline = pipeline
        self.told: list[tuple[str, Any]] = []
        self.position: Lsn | None = None

    def held(self, position: Lsn, *, until_the_end: bool) -> None:
        self.position = position
        self.told.append(("held", until_the_end))

    def released(self, seconds: float) -> None:
        self.told.append(("released", seconds > 0))
        wait_for(lambda: not self.is_held, "apply to go on")

    def compared(self, report: TableReport) -> None:
        self.told.append((report.table, self.is_held))

    @property
    def is_held(self) -> bool:
        status = self._pipeline.status
        assert status is not None
        assert self.position is not None
        return reaches(self.position, status.applied)


def compare(pipeline: Alone, destination: Any, observer: Observer | None = None, **options: Any) -> Report:
    return verify_tables(pipeline.settings, pipeline.store, destination, ProcessTasks(), observer=observer, **options)


def test_changes_wait_only_until_all_is_pinned(started: Started) -> None:
    destination = MemoryDestination()
    pipeline = started(destination)
    watching = Watching(pipeline)
    report = compare(pipeline, destination, watching)
    assert [(each.table, each.counts) for each in report.tables] == [
        ("public.a", Counts(equal=150)),
        ("public.b", Counts(equal=150)),
    ]
    assert report.exit_code == 0
    assert watching.told == [("held", False), ("released", True), ("public.a", False), ("public.b", False)]


def test_without_versions_changes_wait_until_all_is_compared(started: Started) -> None:
    destination = Unversioned()
    pipeline = started(destination)
    watching = Watching(pipeline)
    assert compare(pipeline, destination, watching).exit_code == 0
    assert watching.told == [("held", True), ("public.a", True), ("public.b", True)]
    wait_for(lambda: not watching.is_held, "apply to go on")


def test_a_table_that_stopped_is_not_compared_and_the_others_are(database: Any, started: Started) -> None:
    inner = MemoryDestination()
    destination = FaultyDestination(inner)
    pipeline = started(destination)
    destination.reject("public.b")
    wait_for(lambda: pipeline.phases["public.b"].name == "errored", "the table to stop")
    report = compare(pipeline, inner)
    assert [(each.table, each.result) for each in report.tables] == [
        ("public.a", "equal"),
        ("public.b", "not compared"),
    ]
    assert report.exit_code == 2
    assert compare(pipeline, inner, tables=["public.a"]).exit_code == 0


@pytest.mark.trap(21)
def test_a_table_that_is_emptied_while_it_is_compared_is_not_compared(database: Any, started: Started) -> None:
    destination = MemoryDestination()
    pipeline = started(destination)

    class Emptying(Observer):
        def released(self, seconds: float) -> None:
            database.execute("truncate b")

    report = compare(pipeline, destination, Emptying())
    assert [(each.table, each.result) for each in report.tables] == [
        ("public.a", "equal"),
        ("public.b", "not compared"),
    ]
    assert "truncated" in (report.tables[1].reason or "")


def test_a_table_that_is_not_at_the_destination_is_said(started: Started) -> None:
    pipeline = started(MemoryDestination())
    report = compare(pipeline, MemoryDestination(), tables=["public.a"])
    assert report.tables[0].reason == "public.a does not exist at the destination"
    with pytest.raises(NotComparable):
        compare(pipeline, StdoutDestination())


def test_where_transactions_never_pause_what_did_not_change_is_judged(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = MemoryDestination()
    pipeline = started(destination)

    @contextmanager
    def blocked(*_: Any, **__: Any) -> Iterator[Any]:
        raise SnapshotBlocked("open transactions did not end")
        yield

    monkeypatch.setattr("penstock.comparison.verification.hold_at_snapshot", blocked)
    for _ in range(3):
        report = compare(pipeline, destination)
        assert not report.exact
        assert report.exit_code == (2 if any(each.counts.unsettled for each in report.tables) else 0)
        assert all(each.counts.equal + each.counts.unsettled == 150 for each in report.tables)
        assert all(each.counts.equal >= 50 for each in report.tables)
    with destination.storage.lock:
        table = destination.storage.find("public.a")
        table.insert({"id": 120, "n": 99})
        table.insert({"id": 7000, "n": 0})
        table.apply(Delete(OrderKey(Lsn(0), 0), datetime.now(UTC), 0, table.schema, {"id": 121}))
    report = compare(pipeline, destination)
    assert report.exit_code == 1
    counts = report.tables[0].counts
    assert (counts.missing, counts.extra, counts.changed) == (1, 1, 1)
    assert {(each.kind, each.key["id"], each.columns) for each in report.tables[0].differences} == {
        (Kind.CHANGED, 120, ("n",)),
        (Kind.EXTRA, 7000, ()),
        (Kind.MISSING, 121, ()),
    }
    with pytest.raises(SnapshotBlocked):
        compare(pipeline, destination, options=VerifySettings(wait=0))
