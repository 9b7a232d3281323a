"""The publication is looked at while changes flow: locks on a table and refusals of the server concern nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock import coordinator
from penstock.destinations.memory import MemoryDestination
from penstock.errors import PermissionDenied
from penstock.source.connections import SourceSettings
from penstock.state import CommandKind, MemoryStore
from penstock.tables import TablesOutput
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, tables_alone, tables_settings, wait_for


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "REFRESH_SECONDS", 0.2)


def make(database: Any, folder: Any, dsn: str | None = None) -> Alone:
    settings = tables_settings(database, folder, source=SourceSettings(dsn or database.dsn))
    return Alone(TablesOutput(settings, MemoryStore("e2e"), MemoryDestination(), ProcessTasks()))


def rows(pipeline: Alone, table: str) -> list[int]:
    return sorted(row["id"] for row in pipeline.destination.rows(table))


def ready(pipeline: Alone, *names: str) -> bool:
    pipeline.wait(0)
    return all(name in pipeline.phases and pipeline.phases[name].name == "ready" for name in names)


def answered(pipeline: Alone, kind: CommandKind) -> bool:
    asked = pipeline.store.add_command(kind)
    return wait_for(lambda: pipeline.store.get_command(asked.number).answered, "an answer", 20)


def test_a_lock_on_one_table_stops_neither_changes_nor_commands_of_others(any_database: Any, tmp_path: Any) -> None:
    database = any_database
    database.execute("create table a (id int primary key); create table b (id int primary key)")
    with make(database, tmp_path) as pipeline:
        wait_for(lambda: ready(pipeline, "public.a", "public.b"), "tables")
        with psycopg.connect(database.dsn) as locking:
            locking.execute("lock table a in access exclusive mode")
            # A table that is new meanwhile is published; its snapshot waits for the open transaction.
            database.execute("create table c (id int primary key); insert into c values (1)")
            for number in range(1, 6):
                database.execute("insert into b values (%s)", [number])
                wait_for(lambda n=number: rows(pipeline, "public.b") == list(range(1, n + 1)), "changes", 20)
                assert answered(pipeline, CommandKind.REFRESH)
            wait_for(lambda: "public.c" in pipeline.phases, "the new table", 60)
        database.execute("insert into a values (1)")
        wait_for(lambda: rows(pipeline, "public.a") == [1], "the table that was locked")
        wait_for(lambda: ready(pipeline, "public.c"), "the copy of the new table")


@pytest.fixture
def limited(database: Any) -> Iterator[str]:
    """A role that replicates, and owns its own tables and nothing else."""
    role = f"limited_{database.name[-12:]}"
    database.execute(f"create role {role} login replication password 'secret'")
    database.execute(f"grant create on schema public to {role}; grant create on database {database.name} to {role}")
    yield role
    database.execute(f"drop owned by {role} cascade")
    database.execute(f"drop role {role}")


def as_role(dsn: str, role: str) -> str:
    return psycopg.conninfo.make_conninfo(dsn, user=role, password="secret")


def test_a_table_of_another_owner_is_reported_and_the_rest_goes_on(
    database: Any, tmp_path: Any, limited: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(as_role(database.dsn, limited), autocommit=True) as own:
        own.execute("create table public.mine (id int primary key)")
    database.execute("create table theirs (id int primary key)")
    with make(database, tmp_path, as_role(database.dsn, limited)) as pipeline:
        wait_for(lambda: ready(pipeline, "public.mine"), "its own table")
        assert pipeline.coordinator.unpublished.keys() == {"public.theirs"}
        database.execute("create table later (id int primary key)")
        wait_for(lambda: "public.later" in pipeline.coordinator.unpublished, "the next one")
        assert isinstance(pipeline.coordinator.unpublished["public.later"], PermissionDenied)
        with psycopg.connect(as_role(database.dsn, limited), autocommit=True) as own:
            own.execute("insert into public.mine values (1)")
            wait_for(lambda: rows(pipeline, "public.mine") == [1], "changes")
            assert not pipeline.wait(0)
            # Given to the role, it is published after a while.
            database.execute(f"alter table later owner to {limited}")
            wait_for(lambda: ready(pipeline, "public.later"), "the table that is its own now")
        assert pipeline.coordinator.unpublished.keys() == {"public.theirs"}
    told = [record for record in caplog.records if "cannot be published" in record.message]
    assert len(told) == 2


def test_a_start_with_nothing_to_publish_says_why(database: Any, tmp_path: Any, limited: str) -> None:
    database.execute("create table theirs (id int primary key)")
    with pytest.raises(PermissionDenied, match="theirs"):
        make(database, tmp_path, as_role(database.dsn, limited)).start()
    [(slots,)] = database.execute("select count(*) from pg_replication_slots where database = current_database()")
    assert slots == 0


def test_a_lock_on_a_new_table_does_not_hold_up_a_start(database: Any, tmp_path: Any) -> None:
    database.execute("create table a (id int primary key)")
    with make(database, tmp_path) as pipeline:
        wait_for(lambda: ready(pipeline, "public.a"), "the first table")
    database.execute("create table b (id int primary key)")
    pipeline = tables_alone(pipeline.settings, pipeline.store, MemoryDestination(), ProcessTasks())
    with psycopg.connect(database.dsn) as locking:
        locking.execute("lock table b in access exclusive mode")
        starting = threading.Thread(target=pipeline.start, daemon=True)
        starting.start()
        starting.join(30)
        is_started = not starting.is_alive()
        unpublished = set(pipeline.coordinator.unpublished)
    starting.join()
    try:
        assert is_started
        assert unpublished == {"public.b"}
        wait_for(lambda: ready(pipeline, "public.b"), "the new table")
    finally:
        pipeline.shutdown()
