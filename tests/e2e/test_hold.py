"""Source and destination at one position, while writers go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock.comparison.hold import hold_at_snapshot
from penstock.destinations.memory import MemoryDestination
from penstock.errors import PenstockError, SnapshotBlocked
from penstock.lsn import reaches
from penstock.state import CommandKind, MemoryStore
from penstock.testing.faults import FaultyDestination
from penstock.workers import apply_hold
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, Background, tables_alone, tables_settings, updates_of_both, wait_for


@pytest.fixture
def pipeline(database: Any, tmp_path: Any) -> Iterator[Alone]:
    """Two tables, followed."""
    database.execute("create table a (id int primary key, n int); create table b (id int primary key, n int)")
    database.execute("insert into a select i, 0 from generate_series(1, 100) i; insert into b select * from a")
    settings = tables_settings(database, tmp_path, "hold")
    made = tables_alone(settings, MemoryStore("hold"), FaultyDestination(MemoryDestination()), ProcessTasks())
    with made:
        wait_for(lambda: [phase.name for phase in made.phases.values()] == ["ready"] * 2, "the copies")
        yield made


@pytest.fixture
def busy(database: Any, pipeline: Any) -> Iterator[None]:
    """Transactions that change both tables, all the time."""
    with Background(database, updates_of_both()):
        yield


def rows(pipeline: Any, table: str) -> list[tuple[int, int]]:
    return sorted((row["id"], row["n"]) for row in pipeline.destination.rows(table))


def hold(pipeline: Any, **options: Any) -> Any:
    return hold_at_snapshot(pipeline.settings.source, pipeline.store, **options)


@pytest.mark.usefixtures("busy")
def test_tables_are_held_at_exactly_the_snapshot(pipeline: Any) -> None:
    for _ in range(3):
        with hold(pipeline) as held:
            assert sorted(str(schema) for schema in held.tables.values()) == ["public.a", "public.b"]
            assert held.left_out == {}
            with held.snapshot.connect() as connection:
                for table in ("a", "b"):
                    expected = sorted(connection.execute(f"select id, n from public.{table}".encode()).fetchall())
                    assert rows(pipeline, f"public.{table}") == expected
            assert pipeline.status is not None
            assert pipeline.status.applied == held.position
            held.release()
            wait_for(lambda: not reaches(held.position, pipeline.status.applied), "apply to go on")


@pytest.mark.usefixtures("busy")
def test_an_open_transaction_is_named_and_apply_goes_on_meanwhile(database: Any, pipeline: Any) -> None:
    blocked: list[SnapshotBlocked] = []
    with psycopg.connect(database.dsn) as blocker:
        blocker.execute("create table unfinished (id int)")
        pid = blocker.info.backend_pid

        def end_it(error: SnapshotBlocked) -> None:
            assert pipeline.status is not None
            before = pipeline.status.applied
            wait_for(lambda: not reaches(before, pipeline.status.applied), "apply to go on")
            blocked.append(error)
            blocker.rollback()

        with hold(pipeline, on_blocked=end_it) as held:
            assert set(held.tables.values())
    assert str(pid) in str(blocked[0])


def test_a_blocked_snapshot_is_an_error_in_the_end(database: Any, pipeline: Any) -> None:
    with psycopg.connect(database.dsn) as blocker:
        blocker.execute("create table unfinished (id int)")
        with pytest.raises(SnapshotBlocked), hold(pipeline, wait=0):
            pass
        database.execute("insert into a values (1000, 1)")
        wait_for(lambda: (1000, 1) in rows(pipeline, "public.a"), "apply to go on")


def test_a_table_that_stopped_is_left_out(database: Any, pipeline: Any) -> None:
    pipeline.destination.reject("public.b")
    database.execute("update b set n = 1 where id = 1")
    wait_for(lambda: pipeline.phases["public.b"].name == "errored", "the table to stop")
    with hold(pipeline) as held:
        assert [str(schema) for schema in held.tables.values()] == ["public.a"]
        assert held.left_out == {"public.b": "errored"}


def test_whoever_asks_and_dies_holds_apply_for_a_while_only(
    database: Any, pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply_hold, "PATIENCE_SECONDS", 0.5)
    command = pipeline.store.add_command(CommandKind.VERIFY, options={"step": "hold"})
    wait_for(lambda: pipeline.store.get_command(command.number).answered, "the hold")
    database.execute("insert into a values (1000, 1)")
    wait_for(lambda: (1000, 1) in rows(pipeline, "public.a"), "apply to go on")
    late = pipeline.store.add_command(CommandKind.VERIFY, options={"step": "renew"})
    wait_for(lambda: pipeline.store.get_command(late.number).answered, "an answer")
    assert "no longer held" in pipeline.store.get_command(late.number).reason


def test_a_paused_pipeline_refuses(pipeline: Any) -> None:
    pipeline.store.add_command(CommandKind.PAUSE)
    with pytest.raises(PenstockError, match="the pipeline is paused"), hold(pipeline):
        pass


def test_a_pipeline_that_has_ended_in_this_process_is_not_waited_for(pipeline: Any) -> None:
    """Its lease is still held, and nobody answers."""
    pipeline.coordinator.stop()
    wait_for(lambda: pipeline.lifecycle.stop.is_set(), "the stop")

    def check() -> None:
        raise PenstockError("capture has stopped")

    with pytest.raises(PenstockError, match="capture has stopped"), hold(pipeline, check=check):
        pass
