"""Whole pipelines into a DuckDB file: random tables and writers, every type, omitted values, changes of schemas, kills;
equal to the source in the end."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from penstock.comparison.verification import verify_tables
from penstock.source.connections import PINNED_PARAMETERS
from penstock.spark.tasks import SparkTasks
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from tests.e2e.support import Alone, Background, tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import move_sightings, wait_applied, wait_ready
from tests.e2e.test_types import Compared, differences
from tests.support import type_matrix
from tests.support.duckdb import Duck
from tests.support.planned_tables import Size, plan_tables
from tests.support.readback import check_equal
from tests.support.samples import available_samples
from tests.support.trial import TrialSettings, run_trial, run_trials
from tests.support.type_matrix import WIDE, key_tables
from tests.support.workload import Ddl
from tests.support.writers import Writers

SOAK_TRIALS = int(os.environ.get("PENSTOCK_SOAK_TRIALS", "20"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "7000"))
SIZE = Size(tables=6, columns=8, sessions=3, initial_rows=40)


@pytest.fixture
def duck(tmp_path: Path) -> Duck:
    return Duck(str(tmp_path / "lake.db"))


def pipeline_into(
    database: Any, folder: Any, duck: Duck, *, tasks: Any = None, publication: str = "e2e", **options: Any
) -> Alone:
    settings = tables_settings(
        database,
        folder,
        publication=publication,
        manage_publication=publication == "e2e",
        batches=BatchSettings(interval=0.1, max_rows=5_000),
    )
    return tables_alone(settings, MemoryStore("e2e"), duck.open(**options), tasks or LocalTasks())


@pytest.mark.trap(22, 25, 26, 27, 29, 31, 32)
@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
def test_random_tables_are_followed(database, duck, tmp_path, mode):
    with database.connect() as connection:
        tables = plan_tables(Random(21), available_samples(connection), SIZE)
    writers = Writers(database.dsn, Random(22), tables, SIZE, truncates=False)
    with pipeline_into(database, tmp_path, duck, mode=mode) as pipeline:
        with writers:
            wait_ready(pipeline, len(tables))
            writers.begin_truncates()
            before = pipeline.status.changes
            wait_for(lambda: pipeline.status.changes > before + 1_000, "changes to flow")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
        check_equal(database.dsn, duck.readback("e2e"), [table.name for table in tables])


@pytest.mark.timeout(600)
@pytest.mark.trap(3, 19, 20, 28, 34, 35, 38)
def test_whoever_is_killed_the_tables_equal_the_source(make_server, tmp_path):
    settings = TrialSettings(63, kills=6, destination="duckdb", ddl=Ddl.ANY)
    report = run_trial(settings, tmp_path, server=make_server())
    assert report.starts > 1


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_whoever_is_killed_the_tables_equal_the_source_for_many_seeds(tmp_path, record_property):
    """The modes take turns, and what happens to columns and tables; every fifth trial runs on Spark."""
    trials = [
        TrialSettings(
            seed,
            kills=6,
            master="local[2]" if seed % 5 == 0 else None,
            destination="duckdb",
            options={"mode": "soft_delete"} if seed % 3 == 1 else {},
            # Rows of a partition that goes stay where they are kept on purpose.
            ddl=Ddl.STRUCTURE if seed % 3 == 0 else [*Ddl][seed % (len(Ddl) - 1)],
        )
        for seed in range(SOAK_SEED, SOAK_SEED + SOAK_TRIALS)
    ]
    run_trials(trials, tmp_path, record_property)


@pytest.mark.timeout(600)
@pytest.mark.trap(31)
def test_every_value_of_every_type_arrives(database, duck, tmp_path):
    with database.connect() as connection:
        cases = type_matrix.create(connection)
    tables = [*WIDE, *(keyed.name for keyed in key_tables(cases))]
    with pipeline_into(database, tmp_path, duck) as pipeline:
        wait_ready(pipeline, len(tables))
        with database.connect() as connection:
            type_matrix.change(connection, cases)
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    readback = duck.readback("e2e")
    options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
    with psycopg.connect(database.dsn, autocommit=True, options=options) as server:
        found = {("duckdb", table): Compared(server, readback, table) for table in tables}
    assert not list(differences(cases, found))


@pytest.mark.trap(25, 27)
def test_rows_that_come_into_view_have_all_their_cells(database, duck, tmp_path):
    """A row filter's transition is an insert without its large cells, which only the source can tell."""
    database.execute(
        """
        create table sightings (id bigint primary key, seen boolean not null, counter int, note text);
        alter table sightings alter column note set storage external;
        insert into sightings select i, i % 2 = 0, 0, repeat(md5(i::text), 200) from generate_series(1, 200) i;
        create unique index sighted on sightings (id, seen);
        alter table sightings replica identity using index sighted;
        create publication filtered for table sightings where (seen)
        """
    )
    with pipeline_into(database, tmp_path, duck, publication="filtered") as pipeline:
        wait_ready(pipeline, 1)
        with Background(database, partial(move_sightings, chance=Random(5))) as sightings:
            wait_for(lambda: sightings.count > 300, "rows to come into view")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    rows = duck.query("select id, seen, counter, note from public.sightings")
    assert sorted(rows) == sorted(database.execute("select id, seen, counter, note from sightings where seen"))


@pytest.mark.timeout(600)
@pytest.mark.trap(15, 25)
def test_tables_follow_their_schemas_and_verify_agrees(database, duck, spark, tmp_path):
    """Columns are added with a default, renamed, dropped, widened and retyped; keys change; the table is truncated.
    Tasks are processes of Spark, which open the file one after the other."""
    database.execute("create table notes (id int primary key, counter numeric(6, 2), day date, body text)")
    database.execute("alter table notes alter body set storage external")
    database.execute(
        "insert into notes select i, i, 'infinity', repeat(md5(i::text), 200) from generate_series(1, 99) i"
    )
    tasks = SparkTasks(spark)
    with pipeline_into(database, tmp_path, duck, tasks=tasks) as pipeline:
        wait_ready(pipeline, 1)
        for statement in (
            "update notes set counter = counter + 1; update notes set id = id + 1000 where id > 50",
            "alter table notes add due date default '2020-02-29'; update notes set counter = 0 where id < 20",
            "alter table notes rename body to text; update notes set counter = 1 where id < 20",
            "alter table notes rename day to moment; update notes set counter = 2 where id < 20",
            "alter table notes alter counter type numeric(12, 2); update notes set counter = 9999999 where id < 5",
            "alter table notes drop due, drop moment; delete from notes where id between 20 and 40",
            "alter table notes alter counter type text; insert into notes values (-1, 'many', 'x')",
            "alter table notes drop constraint notes_pkey; alter table notes add primary key (counter, id)",
            "update notes set counter = 'none' where id = -1; truncate notes; insert into notes values (7, 'a', 'b')",
            "insert into notes select i, i, repeat(md5(i::text), 200) from generate_series(10, 50) i",
        ):
            database.execute(statement)
            wait_applied(pipeline, database)
            wait_ready(pipeline, 1)
            check_equal(database.dsn, duck.readback("e2e"), ["notes"])
        report = verify_tables(pipeline.definition.settings, pipeline.definition.store, duck.open(), tasks)
        assert [table.result for table in report.tables] == ["equal"]
    tables = duck.query("select table_schema || '.' || table_name from information_schema.tables")
    assert sorted(tables) == [("penstock.destination_tables",), ("public.notes",)]
    assert not list(tmp_path.glob("lake.db.stage/*/*/*"))


def test_history_leads_to_the_rows_of_the_source(database, duck, tmp_path):
    """Of each row, the newest change; and no change appears twice."""
    database.execute("create table counters (id int primary key, n int, note text)")
    database.execute("insert into counters select i, 0, 'copied' from generate_series(1, 100) i")
    with pipeline_into(database, tmp_path, duck, mode="history") as pipeline:
        wait_ready(pipeline, 1)
        chance = Random(7)
        for turn in range(60):
            low = chance.randrange(150)
            database.execute(
                f"update counters set n = n + 1, note = 'turn {turn}' where id between {low} and {low + 20}; "
                f"delete from counters where id = {chance.randrange(150)}; "
                f"insert into counters values ({chance.randrange(150)}, {turn}, null) on conflict do nothing"
            )
        database.execute("alter table counters alter note type varchar(20), add tag text; truncate counters")
        database.execute("insert into counters values (1, 2, 'again', 'tag')")
        wait_applied(pipeline, database)
    last = (
        "select arg_max((id, n, note, tag, _op), (_commit_lsn, _ordinal)) from public.counters "
        "where (_commit_lsn, _ordinal) > (select max((_commit_lsn, _ordinal)) from public.counters "
        "where _op = 'truncate') group by id"
    )
    rows = [tuple(row.values()) if isinstance(row, dict) else tuple(row) for (row,) in duck.query(last)]
    assert rows == [(1, 2, "again", "tag", "insert")]
    keys = "select count(*), count(distinct (_commit_lsn, _ordinal)) from public.counters where _ordinal >= 0"
    ((count, distinct),) = duck.query(keys)
    assert count == distinct > 500
