"""WAL that the server retains for the slot: the warning, and letting go."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import coordinator, headroom
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.memory import MemoryDestination
from penstock.errors import SlotLost
from penstock.lsn import reaches
from penstock.spool import SpoolSettings
from penstock.state import DataSync, Errored, MemoryStore
from penstock.stream import OnLostSlot, OnRetainedWal
from penstock.testing.faults import FaultyDestination
from penstock.workers.process_tasks import ProcessTasks
from tests.conftest import Database
from tests.e2e.support import current_position, tables_alone, tables_settings, wait_for

LIMIT = 2 << 20


def test_beyond_its_limit_penstock_warns_or_drops_its_slot_and_says_so(
    database: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headroom, "GRACE_SECONDS", 1.0)
    database.execute("create table a (id int primary key); insert into a values (1)")
    store, destination = MemoryStore("wal"), MemoryDestination()
    settings = tables_settings(database, tmp_path, "wal", max_retained_wal=LIMIT)

    def made(**changes: Any) -> Any:
        return tables_alone(tables_settings(database, tmp_path, "wal", **changes), store, destination, ProcessTasks())

    def slots() -> list[Any]:
        return database.execute("select 1 from pg_replication_slots where slot_name = %s", [settings.slot])

    pipeline = made(max_retained_wal=LIMIT)
    with pipeline, psycopg.connect(database.dsn) as open_transaction, caplog.at_level(logging.WARNING):
        wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"], "the copy")
        # The server retains WAL from the beginning of the oldest open transaction on.
        open_transaction.execute("create table unfinished (id int)")
        database.execute("select pg_logical_emit_message(false, 'x', repeat('x', 1000000)) from generate_series(1, 4)")
        wait_for(lambda: (room := pipeline.coordinator.headroom.wal) is not None and room.is_short, "the warning")
        room = pipeline.coordinator.headroom.wal
        assert (room.limit, room.left) == ("max_retained_wal", 0)
        assert room.used > LIMIT
        assert sum("retains much WAL" in record.getMessage() for record in caplog.records) == 1
        assert slots()
        open_transaction.rollback()

    with psycopg.connect(database.dsn) as open_transaction:
        pipeline = made()
        with pipeline:
            open_transaction.execute("create table unfinished (id int)")
        database.execute("select pg_logical_emit_message(false, 'x', repeat('x', 1000000)) from generate_series(1, 4)")
        pipeline = made(max_retained_wal=LIMIT, on_retained_wal=OnRetainedWal.RELEASE)
        with pytest.raises(SlotLost, match="dropped slot"), pipeline:  # noqa: PT012
            wait_for(lambda: pipeline.coordinator.errors, "the release")
            pipeline.coordinator.check()
        assert not slots()
        open_transaction.rollback()

    database.execute("insert into a values (2)")
    with made(on_lost_slot=OnLostSlot.RECREATE) as pipeline:
        wait_for(lambda: len(pipeline.definition.destination.rows("public.a")) == 2, "the new copy")


@pytest.fixture
def alone(make_server: Any, monkeypatch: pytest.MonkeyPatch) -> Database:
    """A database on a server to which nobody else writes, at which Penstock looks often, without a grace."""
    monkeypatch.setattr(headroom, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(coordinator, "REFRESH_SECONDS", 0.1)
    server = make_server()
    return Database(server, server.create_database())


class _SlowCopies(DeltaDestination):
    """Copies a table only when told so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_copy = threading.Event()

    def write_table_rows(self, schema: Any, rows: Any) -> None:
        assert self.may_copy.wait(60)
        super().write_table_rows(schema, rows)


def test_a_copy_that_can_be_resumed_never_costs_the_slot(alone: Database, tmp_path: Path) -> None:
    alone.execute("create table large (id int primary key, t text)")
    alone.execute("alter table large alter t set storage external")
    alone.execute("insert into large select i, repeat('x', 10000) from generate_series(1, 1000) i")
    destination = _SlowCopies(tmp_path / "lake")
    settings = tables_settings(alone, tmp_path, "wal", max_retained_wal=LIMIT, on_retained_wal=OnRetainedWal.RELEASE)
    pipeline = tables_alone(settings, MemoryStore("wal"), destination, ProcessTasks())

    def resumption() -> Any:
        phase = pipeline.phases["public.large"]
        return phase.resumption if isinstance(phase, DataSync) else None

    with pipeline:
        wait_for(resumption, "the copy")
        try:
            _write_wal(alone, pipeline, 3 * LIMIT)
            assert resumption() is None
        finally:
            destination.may_copy.set()
        wait_for(lambda: pipeline.phases["public.large"].name == "ready", "the end of the copy")
        pipeline.coordinator.check()


def test_a_table_that_stopped_never_costs_the_slot(alone: Database, tmp_path: Path) -> None:
    alone.execute("create table a (id int primary key); create table b (id int primary key)")
    settings = tables_settings(alone, tmp_path, "wal", max_retained_wal=LIMIT, on_retained_wal=OnRetainedWal.RELEASE)
    destination = FaultyDestination(MemoryDestination())
    with tables_alone(settings, MemoryStore("wal"), destination, ProcessTasks()) as pipeline:
        wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"] * 2, "the copies")
        destination.reject("public.b")
        alone.execute("insert into b values (1)")
        wait_for(lambda: isinstance(pipeline.phases["public.b"], Errored), "the table to stop")
        assert pipeline.phases["public.b"].holds
        _write_wal(alone, pipeline, 3 * LIMIT)
        assert pipeline.phases["public.b"].position_lost
        alone.execute("insert into a values (1)")
        wait_for(lambda: len(destination.rows("public.a")) == 1, "the other table")
        pipeline.coordinator.check()


def test_a_table_that_stopped_does_not_fill_the_spool(database: Any, tmp_path: Path) -> None:
    database.execute("create table a (id int primary key, t text); create table b (id int primary key)")
    spool = SpoolSettings(tmp_path / "spool", max_bytes=LIMIT, min_free_bytes=0)
    destination = FaultyDestination(MemoryDestination())
    settings = tables_settings(database, tmp_path, "wal", spool=spool)
    with tables_alone(settings, MemoryStore("wal"), destination, ProcessTasks()) as pipeline:
        wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"] * 2, "the copies")
        destination.reject("public.b")
        database.execute("insert into b values (1)")
        wait_for(lambda: isinstance(pipeline.phases["public.b"], Errored), "the table to stop")
        for number in range(12):
            # Random, so that the spool cannot compress it.
            database.execute(
                "insert into a select %s * 4000 + i, gen_random_uuid() || gen_random_uuid()::text "
                "from generate_series(1, 4000) i",
                [number],
            )
            position = current_position(database)
            wait_for(lambda position=position: reaches(pipeline.status.applied, position), "the other table", 30)
        assert pipeline.phases["public.b"].position_lost


def _write_wal(database: Any, pipeline: Any, size: int) -> None:
    """Write WAL in small parts, each after Penstock has looked at what the server retains of the last one."""
    for _ in range(size // (LIMIT // 4)):
        database.execute("select pg_logical_emit_message(false, 'x', repeat('x', %s))", [LIMIT // 4])
        # The slot moves at such a record.
        database.execute("select pg_log_standby_snapshot()")
        position, seen = current_position(database), pipeline.coordinator.headroom
        wait_for(
            lambda position=position, seen=seen: (
                pipeline.coordinator.errors
                or (reaches(pipeline.status.applied, position) and pipeline.coordinator.headroom is not seen)
            ),
            "the next look",
        )
        pipeline.coordinator.check()
