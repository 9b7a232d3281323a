"""WAL that the server retains for the slot: the warning, and letting go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.destinations.memory import MemoryDestination
from penstock.errors import SlotLost
from penstock.state import MemoryStore
from penstock.stream import OnLostSlot, OnRetainedWal
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import tables_alone, tables_settings, wait_for

LIMIT = 2 << 20


def test_beyond_its_limit_penstock_warns_or_drops_its_slot_and_says_so(
    database: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
