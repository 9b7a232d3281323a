"""Whole pipelines into another database: random tables and writers, kills, equal to the source in the end."""

from __future__ import annotations

import os
from functools import partial
from random import Random
from typing import Any

import psycopg
import pytest

from penstock.changes.transform import Transforms
from penstock.comparison.verification import verify_tables
from penstock.destinations.postgres import PostgresDestination
from penstock.source.connections import PINNED_PARAMETERS
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from tests.e2e.support import Alone, Background, tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import move_sightings, wait_applied, wait_ready
from tests.e2e.test_inexact_keys import wait_phases
from tests.e2e.test_transforms import READY, RULES, House, write
from tests.e2e.test_types import Compared, differences
from tests.support import type_matrix
from tests.support.planned_tables import Size, plan_tables
from tests.support.postgres_readback import PostgresReadBack
from tests.support.readback import check_equal
from tests.support.samples import available_samples
from tests.support.trial import TrialSettings, run_trial, run_trials
from tests.support.type_matrix import WIDE, key_tables
from tests.support.workload import Ddl
from tests.support.writers import Writers

SOAK_TRIALS = int(os.environ.get("PENSTOCK_SOAK_TRIALS", "20"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "6000"))
SIZE = Size(tables=6, columns=8, sessions=3, initial_rows=40)


@pytest.fixture
def target(database: Any) -> Any:
    """The address of an empty database on the same server."""
    name = database.server.create_database()
    yield database.server.dsn(name)
    database.server.drop_database(name)


def pipeline_into(
    database: Any, folder: Any, target: str, *, max_rows: int = 500, publication: str = "e2e", **options: Any
) -> Alone:
    settings = tables_settings(
        database,
        folder,
        publication=publication,
        manage_publication=publication == "e2e",
        batches=BatchSettings(interval=0.1, max_rows=max_rows),
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


SOAK_OPTIONS = [{}, {"transactional": "batch"}, {"mode": "soft_delete"}]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_whoever_is_killed_the_tables_equal_the_source_for_many_seeds(tmp_path, record_property):
    """The options take turns, and what happens to columns and tables; every fifth trial runs on Spark."""
    trials = [
        TrialSettings(
            seed,
            kills=6,
            master="local[2]" if seed % 5 == 0 else None,
            destination="postgres",
            options=options,
            # Rows of a partition that goes stay where they are kept on purpose.
            ddl=Ddl.STRUCTURE if seed % 3 == 0 and "mode" not in options else [*Ddl][seed % (len(Ddl) - 1)],
        )
        for seed in range(SOAK_SEED, SOAK_SEED + SOAK_TRIALS)
        for options in [SOAK_OPTIONS[seed % len(SOAK_OPTIONS)]]
    ]
    run_trials(trials, tmp_path, record_property)


@pytest.mark.timeout(600)
@pytest.mark.trap(31)
@pytest.mark.parametrize("where", ["another database", "another schema"])
def test_every_value_of_every_type_arrives(database, target, tmp_path, where):
    """In another database, types of one's own are text; in another schema of the same one, they keep their names."""
    with database.connect() as connection:
        cases = type_matrix.create(connection)
    tables = [*WIDE, *(keyed.name for keyed in key_tables(cases))]
    place, schema = (target, "{schema}") if where == "another database" else (database.dsn, "mirror of {schema}")
    with pipeline_into(database, tmp_path, place, max_rows=5_000, schema=schema) as pipeline:
        wait_ready(pipeline, len(tables))
        with database.connect() as connection:
            type_matrix.change(connection, cases)
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    readback = PostgresReadBack(place, "e2e")
    options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
    with psycopg.connect(database.dsn, autocommit=True, options=options) as server:
        found = {(where, table): Compared(server, readback, table) for table in tables}
    assert not list(differences(cases, found))


def query(target: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(target, autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


@pytest.mark.trap(25, 27)
def test_large_values_that_did_not_change_are_not_written_again(database, target, tmp_path):
    """The server omits them; their rows keep the same values out of line, and a changed key takes them along."""
    database.execute("create table notes (id int primary key, counter int, body text)")
    database.execute("alter table notes alter body set storage external")
    database.execute("insert into notes select i, 0, repeat(md5(i::text), 200) from generate_series(1, 20) i")
    with pipeline_into(database, tmp_path, target) as pipeline:
        wait_ready(pipeline, 1)
        chunks = "select id, pg_column_toast_chunk_id(body) from public.notes where id <= 10 order by id"
        before = query(target, chunks)
        database.execute("update notes set counter = counter + 1")
        database.execute("update notes set id = id + 100, counter = 7 where id > 15")
        wait_applied(pipeline, database)
        assert query(target, chunks) == before
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    check_equal(database.dsn, PostgresReadBack(target, "e2e"), ["notes"])


@pytest.mark.trap(25, 27)
def test_rows_that_come_into_view_have_all_their_cells(database, target, tmp_path):
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
    with pipeline_into(database, tmp_path, target, publication="filtered", max_rows=50) as pipeline:
        wait_ready(pipeline, 1)
        with Background(database, partial(move_sightings, chance=Random(5))) as sightings:
            wait_for(lambda: sightings.count > 400, "rows to come into view")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    rows = query(target, "select id, seen, counter, note from public.sightings")
    assert sorted(rows) == sorted(database.execute("select id, seen, counter, note from sightings where seen"))


class Annex(House):
    """A database, and another one that follows it."""

    def __init__(self, database: Any, folder: Any, target: str) -> None:
        super().__init__(database, folder)
        self.target = target

    def pipeline(self, rules: Any = RULES, **options: Any) -> Alone:
        settings = tables_settings(
            self.database, self.folder, manage_publication=True, transforms=Transforms(rules), **options
        )
        return tables_alone(settings, self.store, PostgresDestination(self.target), LocalTasks())

    def lake(self, table: str) -> list[dict[str, Any]]:
        rows = PostgresReadBack(self.target, "e2e").read_table(f"public.{table}").to_pylist()
        return sorted(({name: row[name] for name in row if name != "_unrepresentable"} for row in rows), key=str)

    def columns(self, table: str) -> list[str]:
        return [column.name for column in PostgresReadBack(self.target, "e2e").schema(f"public.{table}").columns]

    def verify(self, pipeline: Alone) -> Any:
        destination = PostgresDestination(self.target)
        return verify_tables(pipeline.definition.settings, self.store, destination, LocalTasks())


def test_rules_for_columns_and_rows_hold_and_verify_agrees(database, target, tmp_path):
    house = Annex(database, tmp_path, target)
    write(database, 1)
    with house.pipeline() as pipeline:
        wait_phases(pipeline, READY)
        house.check()
        write(database, 2)
        wait_applied(pipeline, database)
        house.check()
        database.execute(
            "alter table users add city text; insert into users (id, country, city) values (-1, 'DE', 'B')"
        )
        wait_applied(pipeline, database)
        assert {row["city"] for row in house.lake("users")} == {None, "B"}
        database.execute("alter table users drop city; insert into users (id, country) values (-2, 'DE')")
        wait_applied(pipeline, database)
        wait_for(lambda: "city" not in house.columns("users"), "the column to go")
        wait_phases(pipeline, READY)
        house.check()
        assert {table.result for table in house.verify(pipeline).tables} == {"equal"}
        query(target, "update public.users set bio = 'other' where id = -2 returning 1")
        query(target, "delete from public.visits where ctid = (select min(ctid) from public.visits) returning 1")
        results = {table.table: table.result for table in house.verify(pipeline).tables}
    assert results == {"public.users": "different", "public.visits": "different", "public.accounts": "equal"}


def test_copies_have_the_indexes_of_the_source(any_database, tmp_path):
    database = any_database
    target = database.server.dsn(name := database.server.create_database())
    database.execute("create function only_here(text) returns text immutable language sql as 'select $1'")
    database.execute('create table "on" (id int primary key, email text, price int, note text)')
    for index in (
        "create unique index \"my USING index\" on \"on\" (lower(email)) where note <> 'it''s'",
        'create index on "on" using hash (price)',
        'create index missing_there on "on" (only_here(note))',
    ):
        database.execute(index)
    database.execute("create table parted (id int primary key, day date) partition by range (id)")
    database.execute("create table part partition of parted for values from (0) to (100)")
    database.execute("create index by_day on parted (day desc) include (id)")
    database.execute("insert into \"on\" values (1, 'A', 1, 'n'); insert into parted values (1, 'today')")

    def indexes() -> list[tuple[str, str]]:
        with psycopg.connect(target) as connection:
            return connection.execute(
                "select indexname, substr(indexdef, strpos(indexdef, ' USING b') + strpos(indexdef, ' USING h')) "
                "from pg_indexes where schemaname = 'public' order by 1"
            ).fetchall()

    wanted = [
        ("by_day", " USING btree (day DESC) INCLUDE (id)"),
        ("my USING index", " USING btree (lower(email)) WHERE (note <> 'it''s'::text)"),
        ("on_pkey", " USING btree (id)"),
        ("on_price_idx", " USING hash (price)"),
        ("parted_pkey", " USING btree (id)"),
    ]
    with pipeline_into(database, tmp_path, target, indexes=True) as pipeline:
        wait_ready(pipeline, 2)
        assert indexes() == wanted
        # They do not keep the table from being replaced by a new copy.
        database.execute("alter table \"on\" alter price type text using price || '!'")
        database.execute("insert into \"on\" values (2, 'B', '2', 'n')")
        wait_for(lambda: rows_of(target) == [("1!",), ("2",)], "the new copy")
        assert indexes() == wanted
    database.server.drop_database(name)


def rows_of(target: str) -> list[Any]:
    with psycopg.connect(target) as connection:
        return connection.execute('select price::text from public."on" order by id').fetchall()
