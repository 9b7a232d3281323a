"""Tables that leave the publication, or come back, while a worker copies them."""

from __future__ import annotations

import threading

import pytest

from penstock import failpoints
from penstock.destinations.memory import MemoryDestination
from penstock.lsn import reaches
from penstock.state import CommandKind, MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.testing.faults import FaultyDestination
from tests.e2e.support import Alone, tables_alone, tables_settings, wait_for
from tests.e2e.test_pipeline import current_position


@pytest.fixture
def pipeline(database, tmp_path):
    """Two tables of a publication that we do not manage; not started."""
    database.execute("create table a (id int primary key); create table b (id int primary key)")
    database.execute("insert into a values (1); insert into b values (1)")
    database.execute("create publication e2e for table a, b")
    settings = tables_settings(database, tmp_path, tables=("*.*",), manage_publication=False)
    made = tables_alone(settings, MemoryStore("e2e"), FaultyDestination(MemoryDestination()), LocalTasks())
    yield made
    failpoints.arm("")
    made.shutdown()


def refresh(pipeline: Alone) -> None:
    pipeline.store.add_command(CommandKind.REFRESH)


def phase(pipeline: Alone, table: str) -> str | None:
    found = pipeline.phases.get(table)
    return None if found is None else found.name


def rows(pipeline: Alone, table: str) -> list[int]:
    return sorted(row["id"] for row in pipeline.destination.rows(table))


@pytest.mark.trap(18, 23)
@pytest.mark.parametrize("moment", ["data_sync", "finished_copy"])
def test_a_table_that_leaves_during_its_copy_holds_back_nothing(database, pipeline, moment):
    failpoints.arm("after_copy=sleep:2" if moment == "data_sync" else "in_sync_wait=sleep:2")
    pipeline.start()
    wait_for(lambda: phase(pipeline, "public.a") == moment, "the table to be copied")
    database.execute("alter publication e2e drop table a")
    refresh(pipeline)
    wait_for(lambda: phase(pipeline, "public.a") is None, "the table to leave")
    wait_for(lambda: phase(pipeline, "public.b") == "ready", "the other table")
    wait_for(lambda: not any("sync" in thread.name for thread in threading.enumerate()), "the workers to end")
    database.execute("insert into b values (2)")
    end = current_position(database)
    database.execute("insert into b values (3)")
    wait_for(lambda: reaches(pipeline.status.acknowledged, end), "the acknowledgement")
    assert phase(pipeline, "public.a") is None
    assert set(pipeline.store.get_table_replication_states().values()) == {pipeline.phases["public.b"]}


@pytest.mark.trap(18, 19)
def test_a_table_that_comes_back_during_its_copy_is_copied_again(database, pipeline):
    with pipeline.destination.hold("write_table_rows") as hold:
        pipeline.start()
        hold.wait_until_reached()
        wait_for(lambda: phase(pipeline, "public.a") == "data_sync", "the copy")
        database.execute("alter publication e2e drop table a")
        database.execute("insert into a values (2)")  # nobody hears of it
        database.execute("alter publication e2e add table a")
        refresh(pipeline)
        wait_for(lambda: phase(pipeline, "public.a") == "init", "the table to start over")
    wait_for(lambda: phase(pipeline, "public.a") == "ready", "the second copy")
    database.execute("insert into a values (3)")
    wait_for(lambda: rows(pipeline, "public.a") == [1, 2, 3], "all rows")
    history = pipeline.store.get_table_replication_history
    (table_id,) = [each for each, name in pipeline._names.items() if name == "public.a"]
    assert [record.phase.name for record in history(table_id)][-5:] == [
        "init", "data_sync", "finished_copy", "sync_done", "ready",
    ]  # fmt: skip
