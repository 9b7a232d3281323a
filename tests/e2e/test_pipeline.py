"""A whole pipeline: copied while it changes, streamed, and equal to the source in the end."""

from __future__ import annotations

from random import Random

import pytest

from penstock.destinations.memory import MemoryDestination
from penstock.lsn import Lsn, reaches
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from tests.e2e.support import current_position, tables_alone, tables_settings, wait_for
from tests.support.planned_tables import Size, plan_tables
from tests.support.readback import MemoryReadBack, check_equal
from tests.support.samples import available_samples
from tests.support.writers import Writers

SIZE = Size(tables=6, columns=8, sessions=4, initial_rows=60)


@pytest.mark.trap(22, 23, 25, 27)
def test_tables_are_copied_while_they_change_and_then_followed(database, tmp_path):
    with database.connect() as connection:
        tables = plan_tables(Random(11), available_samples(connection), SIZE)
    for name in ("empty", "quiet", "away.quiet"):
        database.execute(f"create schema if not exists away; create table {name} (id int primary key, note text)")
    for name in ("quiet", "away.quiet"):
        database.execute(f"insert into {name} select i, repeat('x', i) from generate_series(1, 300) i")
    names = [*(table.name for table in tables), "empty", "quiet", "quiet"]
    destination = MemoryDestination()
    settings = tables_settings(
        database, tmp_path, tables=("public.*", "away.*"), batches=BatchSettings(interval=0.1, max_rows=1_000)
    )
    store = MemoryStore("e2e")
    writers = Writers(database.dsn, Random(12), tables, SIZE, truncates=False)
    with tables_alone(settings, store, destination, LocalTasks()) as pipeline:
        with writers:
            # Without truncates every table goes straight to Ready; with them a copy may start over.
            wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"] * len(names), "ready")
            writers.begin_truncates()
            before = pipeline.status.changes
            wait_for(lambda: pipeline.status.changes > before + 500, "changes to flow")
            database.execute("create table late (id int primary key, version int, note text)")
            database.execute("insert into late values (1, 1, 'x')")
            wait_for(lambda: "public.late" in pipeline.phases, "the new table to join")
        wait_for(lambda: pipeline.phases["public.late"].name == "ready", "the new table to be ready")
        end = current_position(database)
        wait_for(lambda: reaches(pipeline.status.applied, end), "apply to reach the end")
        check_equal(database.dsn, MemoryReadBack(destination), [*names, "late"])
        histories = {
            table: [record.phase.name for record in store.get_table_replication_history(table)]
            for table in store.get_table_replication_states()
        }
        way = ["init", "data_sync", "finished_copy", "sync_done", "ready"]
        assert all(history == way for history in histories.values()), histories
    # All of it was acknowledged.
    (confirmed,) = database.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [settings.slot]
    )[0]
    assert reaches(Lsn.parse(confirmed), end)
