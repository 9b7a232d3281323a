"""Whole pipelines into Delta tables: random tables and writers, processes killed, equal to the source in the end."""

from __future__ import annotations

import os
from functools import partial
from random import Random

import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.lsn import reaches
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from penstock.workers.apply import ErrorHold
from tests.e2e.lake import HistoryReadBack, LakeReadBack
from tests.e2e.support import Alone, Background, current_position, tables_alone, tables_settings, wait_for
from tests.support.planned_tables import Size, plan_tables
from tests.support.readback import check_equal, check_exactly_once
from tests.support.samples import available_samples
from tests.support.trial import TrialSettings, run_trial, run_trials
from tests.support.workload import Ddl
from tests.support.writers import Writers

SOAK_TRIALS = int(os.environ.get("PENSTOCK_SOAK_TRIALS", "50"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "2000"))
SIZE = Size(tables=6, columns=8, sessions=3, initial_rows=40)


def pipeline_into(
    database, folder, *, max_rows: int = 500, publication="e2e", lake=None, error_hold=None, **options
) -> Alone:
    settings = tables_settings(
        database,
        folder,
        publication=publication,
        manage_publication=publication == "e2e",
        batches=BatchSettings(interval=0.1, max_rows=max_rows),
        error_hold=error_hold or ErrorHold(),
    )
    destination = DeltaDestination(lake or folder / "lake", **options)
    return tables_alone(settings, MemoryStore("e2e"), destination, LocalTasks())


def wait_applied(pipeline: Alone, database) -> None:
    end = current_position(database)
    wait_for(lambda: reaches(pipeline.status.applied, end), "apply to reach the end")


def wait_ready(pipeline: Alone, count: int) -> None:
    wait_for(lambda: [phase.name for phase in pipeline.phases.values()] == ["ready"] * count, "ready tables")


@pytest.mark.trap(22, 25, 26, 27, 29, 31, 32)
@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({}, LakeReadBack),
        ({"deletion_vectors": False}, LakeReadBack),
        ({"mode": "soft_delete"}, LakeReadBack),
        ({"mode": "history"}, HistoryReadBack),
    ],
    ids=["mirror", "mirror without vectors", "soft delete", "history"],
)
def test_random_tables_are_followed(database, tmp_path, options, read):
    with database.connect() as connection:
        tables = plan_tables(Random(21), available_samples(connection), SIZE)
    writers = Writers(database.dsn, Random(22), tables, SIZE, truncates=False)
    with pipeline_into(database, tmp_path, **options) as pipeline:
        with writers:
            wait_ready(pipeline, len(tables))
            writers.begin_truncates()
            before = pipeline.status.changes
            wait_for(lambda: pipeline.status.changes > before + 1_500, "changes to flow")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    readback = read(tmp_path / "lake")
    check_equal(database.dsn, readback, [table.name for table in tables])
    if read is HistoryReadBack:
        assert check_exactly_once(readback) > 1_000


@pytest.mark.trap(3, 19, 20, 28, 34, 35, 38)
@pytest.mark.parametrize(
    "settings",
    [
        TrialSettings(31, kills=3, destination="delta", ddl=Ddl.ANY),
        TrialSettings(32, kills=2, destination="delta", options={"mode": "history"}),
        TrialSettings(33, kills=2, destination="delta", split_rows=3),
    ],
    ids=["mirror", "history", "split"],
)
def test_whoever_is_killed_the_lake_equals_the_source(settings, make_server, tmp_path):
    report = run_trial(settings, tmp_path, server=make_server())
    assert report.starts > 1
    assert (report.splits > 0) == (settings.split_rows is not None)


SOAK_MODES = [{}, {"mode": "history"}, {"deletion_vectors": False}, {"mode": "soft_delete"}]
MIRRORS = [{}, {"deletion_vectors": False}]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_whoever_is_killed_the_lake_equals_the_source_for_many_seeds(tmp_path, record_property):
    """The modes take turns, and what happens to columns; every fifth trial runs on Spark, and two of three split what
    a table has in a batch over tasks."""
    trials = [
        TrialSettings(
            seed,
            kills=6,
            master="local[2]" if seed % 5 == 0 else None,
            destination="delta",
            options=options,
            # Rows of a partition that goes stay where they are kept on purpose.
            split_rows=None if seed % 3 == 1 else 3,
            ddl=Ddl.STRUCTURE if seed % 3 == 0 and options in MIRRORS else [*Ddl][seed % (len(Ddl) - 1)],
        )
        for seed in range(SOAK_SEED, SOAK_SEED + SOAK_TRIALS)
        for options in [SOAK_MODES[seed % len(SOAK_MODES)]]
    ]
    run_trials(trials, tmp_path, record_property)


def move_sightings(connection, chance: Random) -> None:
    """Rows come into view of a filter and leave it, move their keys, and are deleted; their large texts stay."""
    number = chance.randrange(40)
    statement = chance.choices(
        [
            "update sightings set seen = not seen where id %% 40 = %(n)s",
            "update sightings set counter = counter + 1 where id %% 40 = %(n)s",
            ("update sightings set id = id + 1000 where id = (select max(id) from sightings where id %% 40 = %(n)s)"),
            "delete from sightings where id = (select min(id) from sightings where id %% 40 = %(n)s)",
        ],
        [8, 6, 3, 1],
    )[0]
    connection.execute(statement, {"n": number})


@pytest.mark.trap(25, 27)
def test_rows_that_come_into_view_have_all_their_cells(database, tmp_path):
    """A row filter's transition is an insert without its large cells, which only the source can tell."""
    database.execute("create table sightings (id bigint primary key, seen boolean, counter int, note text)")
    database.execute("alter table sightings alter column note set storage external")
    database.execute(
        "insert into sightings select i, i % 2 = 0, 0, repeat(md5(i::text), 200) from generate_series(1, 200) i"
    )
    database.execute("alter table sightings replica identity default")
    # A filter needs its columns in the identity.
    database.execute("create unique index sighted on sightings (id, seen)")
    database.execute("alter table sightings alter column seen set not null")
    database.execute("alter table sightings replica identity using index sighted")
    database.execute("create publication filtered for table sightings where (seen)")
    with pipeline_into(database, tmp_path, publication="filtered", max_rows=50) as pipeline:
        wait_ready(pipeline, 1)
        with Background(database, partial(move_sightings, chance=Random(5))) as sightings:
            wait_for(lambda: sightings.count > 800, "rows to come into view")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    rows = LakeReadBack(tmp_path / "lake").read_table("public.sightings").to_pylist()
    expected = database.execute("select id, seen, counter, note from sightings where seen")
    assert sorted(tuple(row[name] for name in ("id", "seen", "counter", "note")) for row in rows) == sorted(expected)


@pytest.mark.trap(26)
def test_keys_that_rows_may_share_for_a_while_lose_no_row(database, tmp_path):
    """A deferrable key is checked when the transaction ends: until then it does not tell rows apart."""
    database.execute("create table queue (place int primary key deferrable initially deferred, who text)")
    database.execute("alter table queue replica identity full")
    database.execute("insert into queue select i, 'w' || i from generate_series(1, 20) i")
    with pipeline_into(database, tmp_path) as pipeline:
        wait_ready(pipeline, 1)
        database.execute("update queue set place = place + 1")
        database.execute("update queue set place = 5 - place where place in (2, 3)")
        wait_applied(pipeline, database)
        check_equal(database.dsn, LakeReadBack(tmp_path / "lake"), ["queue"])
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
