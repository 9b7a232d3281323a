"""The source is away: what was captured before is applied all the same, and the rest when it is back."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import coordinator
from penstock.destinations.memory import MemoryDestination
from penstock.lsn import reaches
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolReader
from penstock.state import MemoryStore
from penstock.testing.faults import FaultyDestination
from penstock.workers.process_tasks import ProcessTasks
from tests.conftest import Database
from tests.e2e.support import current_position, tables_alone, tables_settings, wait_for


def test_what_is_in_the_spool_is_applied_while_the_server_is_away(
    make_server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In every round, so that each of them meets a server that does not answer.
    monkeypatch.setattr(coordinator, "REFRESH_SECONDS", 0.0)
    server = make_server()
    database = Database(server, server.create_database())
    database.execute("create table t (id int primary key)")
    settings = tables_settings(
        database, tmp_path, "away", source=SourceSettings(database.dsn, connect_timeout=5), slot="away"
    )
    destination = FaultyDestination(MemoryDestination())

    def rows() -> list[int]:
        return sorted(row["id"] for row in destination.rows("public.t"))

    def is_captured(position: Any) -> bool:
        captured = SpoolReader(settings.spool.path).captured
        return captured is not None and reaches(captured, position)

    with tables_alone(settings, MemoryStore("away"), destination, ProcessTasks()) as pipeline:
        wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"], "the table to be ready")
        with destination.hold("write_events") as hold:
            database.execute("insert into t values (1)")
            hold.wait_until_reached()
            database.execute("insert into t values (2)")
            end = current_position(database)
            database.execute("insert into t values (3)")
            wait_for(lambda: is_captured(end), "capture")
            server.stop()
        wait_for(lambda: pipeline.wait(0) or rows()[:2] == [1, 2], "what was captured")
        server.start()
        database.execute("insert into t values (4)")
        wait_for(lambda: pipeline.wait(0) or rows() == [1, 2, 3, 4], "what came after")
