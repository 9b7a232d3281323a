"""Whole pipelines into another database: random tables and writers, kills, equal to the source in the end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from penstock.destinations.postgres import PostgresDestination
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from tests.e2e.support import Alone, tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import wait_applied, wait_ready
from tests.support.planned_tables import Size, plan_tables
from tests.support.postgres_readback import PostgresReadBack
from tests.support.readback import check_equal
from tests.support.samples import available_samples
from tests.support.trial import TrialSettings, run_trial
from tests.support.workload import Ddl
from tests.support.writers import Writers

SIZE = Size(tables=6, columns=8, sessions=3, initial_rows=40)


@pytest.fixture
def target(database: Any) -> Any:
    """The address of an empty database on the same server."""
    name = database.server.create_database()
    yield database.server.dsn(name)
    database.server.drop_database(name)


def pipeline_into(database: Any, folder: Any, target: str, *, max_rows: int = 500, **options: Any) -> Alone:
    settings = tables_settings(
        database, folder, manage_publication=True, batches=BatchSettings(interval=0.1, max_rows=max_rows)
    )
    return tables_alone(settings, MemoryStore("e2e"), PostgresDestination(target, **options), LocalTasks())


@pytest.mark.trap(22, 25, 26, 27, 29, 31, 32)
@pytest.mark.parametrize(
    "options",
    [{}, {"transactional": "batch"}, {"mode": "soft_delete"}],
    ids=["mirror", "batches in one transaction", "soft delete"],
)
def test_random_tables_are_followed(database, target, tmp_path, options):
    with database.connect() as connection:
        tables = plan_tables(Random(21), available_samples(connection), SIZE)
    writers = Writers(database.dsn, Random(22), tables, SIZE, truncates=False)
    with pipeline_into(database, tmp_path, target, **options) as pipeline:
        with writers:
            wait_ready(pipeline, len(tables))
            writers.begin_truncates()
            before = pipeline.status.changes
            wait_for(lambda: pipeline.status.changes > before + 1_500, "changes to flow")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    check_equal(database.dsn, PostgresReadBack(target, "e2e"), [table.name for table in tables])


@pytest.mark.timeout(600)
@pytest.mark.trap(3, 19, 20, 28, 34, 35, 38)
@pytest.mark.parametrize(
    "settings",
    [
        TrialSettings(41, kills=3, destination="postgres", ddl=Ddl.ANY),
        TrialSettings(42, kills=2, destination="postgres", options={"transactional": "batch"}),
    ],
    ids=["mirror", "batches in one transaction"],
)
def test_whoever_is_killed_the_tables_equal_the_source(settings, make_server, tmp_path):
    report = run_trial(settings, tmp_path, server=make_server())
    assert report.starts > 1
