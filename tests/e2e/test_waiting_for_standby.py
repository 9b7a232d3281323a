"""A server that sends nothing because a standby is away: `status` says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.memory import MemoryDestination
from penstock.source.connections import Role, connect
from penstock.source.slots import inspect_slot
from penstock.state import MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.conftest import Database
from tests.e2e.support import tables_alone, tables_settings, wait_for


def test_a_missing_standby_is_named_as_the_reason(make_server: Any, tmp_path: Path, caplog: Any) -> None:
    server = make_server()
    if server.major < 17:
        pytest.skip("servers before 17 do not wait for standbys")
    database = Database(server, server.create_database())
    database.execute("create table a (id int primary key)")
    settings = replace(tables_settings(database, tmp_path), failover_slot=True)
    with tables_alone(settings, MemoryStore("e2e"), MemoryDestination(), ProcessTasks()) as pipeline:
        wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"], "the copy")

        def waits() -> bool:
            with connect(settings.source, Role.CHECK) as connection:
                slot = inspect_slot(connection, settings.slot)
            assert slot is not None
            return slot.waits_for_standby

        assert not waits()
        server.execute("alter system set synchronized_standby_slots = 'gone'")
        server.execute("select pg_reload_conf()")
        database.execute("insert into a values (1)")
        wait_for(waits, "the server to wait for its standby")
        wait_for(lambda: "waits for a standby" in caplog.text, "the warning")
        server.execute("alter system reset synchronized_standby_slots")
        server.execute("select pg_reload_conf()")
        wait_for(lambda: len(pipeline.definition.destination.rows("public.a")) == 1, "the row")
        assert not waits()
    assert caplog.text.count("waits for a standby") == 1
