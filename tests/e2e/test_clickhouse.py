"""Whole pipelines into ClickHouse, with its engine in this process: random tables and writers, every type, omitted
values, changes of schemas; equal to the source in the end."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import psycopg
import pytest

from penstock.changes.transform import Transforms
from penstock.comparison.verification import verify_tables
from penstock.destinations.clickhouse import ClickHouseDestination
from penstock.source.connections import PINNED_PARAMETERS
from penstock.spark.tasks import SparkTasks
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from tests.e2e.support import Alone, Background, tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import move_sightings, wait_applied, wait_ready
from tests.e2e.test_inexact_keys import wait_phases
from tests.e2e.test_transforms import READY, RULES, House, write
from tests.e2e.test_types import Compared, differences
from tests.support import type_matrix
from tests.support.clickhouse import ClickHouse
from tests.support.clickhouse_gateway import PASSWORD, USER, open_gateway
from tests.support.planned_tables import Size, plan_tables
from tests.support.readback import check_equal
from tests.support.samples import available_samples
from tests.support.trial import TrialSettings, run_trial
from tests.support.type_matrix import WIDE, key_tables
from tests.support.workload import Ddl
from tests.support.writers import Writers

SIZE = Size(tables=6, columns=8, sessions=3, initial_rows=40)


def pipeline_into(
    database: Any, folder: Any, clickhouse: ClickHouse, *, max_rows: int = 500, publication: str = "e2e", **options: Any
) -> Alone:
    settings = tables_settings(
        database,
        folder,
        publication=publication,
        manage_publication=publication == "e2e",
        batches=BatchSettings(interval=0.1, max_rows=max_rows),
    )
    return tables_alone(settings, MemoryStore("e2e"), clickhouse.open(**options), LocalTasks())


@pytest.mark.trap(22, 25, 26, 27, 29, 31, 32)
def test_random_tables_are_followed(database, clickhouse, tmp_path):
    with database.connect() as connection:
        tables = plan_tables(Random(21), available_samples(connection), SIZE)
    writers = Writers(database.dsn, Random(22), tables, SIZE, truncates=False)
    with pipeline_into(database, tmp_path, clickhouse) as pipeline:
        with writers:
            wait_ready(pipeline, len(tables))
            writers.begin_truncates()
            before = pipeline.status.changes
            wait_for(lambda: pipeline.status.changes > before + 1_500, "changes to flow")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
        check_equal(database.dsn, clickhouse.readback("e2e"), [table.name for table in tables])


@pytest.mark.timeout(600)
@pytest.mark.trap(3, 19, 20, 28, 34, 35, 38)
@pytest.mark.parametrize(
    "settings",
    [
        TrialSettings(62, kills=6, destination="clickhouse", ddl=Ddl.ANY),
        TrialSettings(61, kills=6, destination="clickhouse"),
    ],
    ids=["columns change", "columns stay"],
)
def test_whoever_is_killed_the_tables_equal_the_source(clickhouse_engine, settings, make_server, tmp_path):
    """The engine runs in the process of the pipeline, and is killed with it."""
    report = run_trial(settings, tmp_path, server=make_server())
    assert report.starts > 1


@pytest.mark.timeout(600)
@pytest.mark.trap(31)
def test_every_value_of_every_type_arrives(database, clickhouse, tmp_path):
    with database.connect() as connection:
        cases = type_matrix.create(connection)
    tables = [*WIDE, *(keyed.name for keyed in key_tables(cases))]
    with pipeline_into(database, tmp_path, clickhouse, max_rows=5_000) as pipeline:
        wait_ready(pipeline, len(tables))
        with database.connect() as connection:
            type_matrix.change(connection, cases)
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    readback = clickhouse.readback("e2e")
    options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
    with psycopg.connect(database.dsn, autocommit=True, options=options) as server:
        found = {("clickhouse", table): Compared(server, readback, table) for table in tables}
    assert not list(differences(cases, found))


@pytest.mark.trap(25, 27)
def test_rows_that_come_into_view_have_all_their_cells(database, clickhouse, tmp_path):
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
    with pipeline_into(database, tmp_path, clickhouse, publication="filtered", max_rows=50) as pipeline:
        wait_ready(pipeline, 1)
        with Background(database, partial(move_sightings, chance=Random(5))) as sightings:
            wait_for(lambda: sightings.count > 400, "rows to come into view")
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    rows = clickhouse.query("select id, seen, counter, note from {database}.public__sightings")
    assert sorted(rows) == sorted(database.execute("select id, seen, counter, note from sightings where seen"))


class Annex(House):
    """A database, and ClickHouse that follows it."""

    def __init__(self, database: Any, folder: Any, clickhouse: ClickHouse) -> None:
        super().__init__(database, folder)
        self.clickhouse = clickhouse

    def pipeline(self, rules: Any = RULES, **options: Any) -> Alone:
        settings = tables_settings(
            self.database, self.folder, manage_publication=True, transforms=Transforms(rules), **options
        )
        return tables_alone(settings, self.store, self.clickhouse.open(), LocalTasks())

    def lake(self, table: str) -> list[dict[str, Any]]:
        rows = self.clickhouse.readback("e2e").read_table(f"public.{table}").to_pylist()
        return sorted(({name: row[name] for name in row if name != "_unrepresentable"} for row in rows), key=str)

    def columns(self, table: str) -> list[str]:
        return [column.name for column in self.clickhouse.readback("e2e").schema(f"public.{table}").columns]

    def verify(self, pipeline: Alone) -> Any:
        return verify_tables(pipeline.definition.settings, self.store, self.clickhouse.open(), LocalTasks())


def test_rules_for_columns_and_rows_hold_and_verify_agrees(database, clickhouse, tmp_path):
    house = Annex(database, tmp_path, clickhouse)
    write(database, 1)
    with house.pipeline() as pipeline:
        wait_phases(pipeline, READY)
        house.check()
        write(database, 2)
        wait_applied(pipeline, database)
        house.check()
        database.execute(
            "alter table users add city text default 'A'; insert into users (id, country, city) values (-1, 'DE', 'B')"
        )
        wait_applied(pipeline, database)
        assert {row["city"] for row in house.lake("users")} == {"A", "B"}
        database.execute("alter table users drop city; insert into users (id, country) values (-2, 'DE')")
        wait_applied(pipeline, database)
        wait_for(lambda: "city" not in house.columns("users"), "the column to go")
        wait_phases(pipeline, READY)
        house.check()
        assert {table.result for table in house.verify(pipeline).tables} == {"equal"}


@pytest.mark.trap(15, 25)
def test_tables_follow_their_schemas_and_verify_agrees(database, clickhouse, tmp_path):
    """Columns are added with a default, renamed, dropped, widened and retyped; keys change; the table is truncated."""
    database.execute("create table notes (id int primary key, counter numeric(6, 2), body text)")
    database.execute("alter table notes alter body set storage external")
    database.execute("insert into notes select i, i, repeat(md5(i::text), 200) from generate_series(1, 200) i")
    with pipeline_into(database, tmp_path, clickhouse) as pipeline:
        wait_ready(pipeline, 1)
        for statement in (
            "update notes set counter = counter + 1; update notes set id = id + 1000 where id > 150",
            "alter table notes add due date default '2020-02-29'; update notes set counter = 0 where id < 20",
            "alter table notes rename body to text; update notes set counter = 1 where id < 20",
            "alter table notes alter counter type numeric(12, 2); update notes set counter = 9999999 where id < 5",
            "alter table notes drop due; delete from notes where id between 20 and 40",
            "alter table notes alter counter type text; insert into notes values (-1, 'many', 'x')",
            "alter table notes drop constraint notes_pkey; alter table notes add primary key (counter, id)",
            "update notes set counter = 'none' where id = -1; truncate notes; insert into notes values (7, 'a', 'b')",
            "insert into notes select i, i, repeat(md5(i::text), 200) from generate_series(10, 50) i",
        ):
            database.execute(statement)
            wait_applied(pipeline, database)
            wait_ready(pipeline, 1)
            check_equal(database.dsn, clickhouse.readback("e2e"), ["notes"])
        report = verify_tables(pipeline.definition.settings, pipeline.definition.store, clickhouse.open(), LocalTasks())
        assert [table.result for table in report.tables] == ["equal"]
    assert clickhouse.views() == ["public__notes"]
    assert len(clickhouse.data_tables()) == 1


def test_history_leads_to_the_rows_of_the_source(database, clickhouse, tmp_path):
    """Of each row, the newest change; and no change appears twice."""
    database.execute("create table counters (id int primary key, n int, note text)")
    database.execute("insert into counters select i, 0, 'copied' from generate_series(1, 100) i")
    with pipeline_into(database, tmp_path, clickhouse, max_rows=50, mode="history") as pipeline:
        wait_ready(pipeline, 1)
        chance = Random(7)
        for turn in range(60):
            low = chance.randrange(150)
            database.execute(
                f"update counters set n = n + 1, note = 'turn {turn}' where id between {low} and {low + 20}; "
                f"delete from counters where id = {chance.randrange(150)}; "
                f"insert into counters values ({chance.randrange(150)}, {turn}, null) on conflict do nothing"
            )
        wait_applied(pipeline, database)
        view = "{database}.public__counters"
        order = "(_commit_lsn, _ordinal)"
        last = f"select id, argMax(tuple(n), {order}).1, argMax(tuple(note), {order}).1 from {view} group by id"
        found = clickhouse.query(f"{last} having argMax(_op, {order}) != 'delete'")
        assert sorted(found) == sorted(database.execute("select id, n, note from counters"))
        keys = "select count(), uniqExact(_commit_lsn, _ordinal) from {database}.public__counters where _ordinal >= 0"
        ((count, distinct),) = clickhouse.query(keys)
        assert count == distinct > 500


@pytest.mark.timeout(600)
def test_tasks_of_spark_write_over_http(database, clickhouse, spark, tmp_path):
    """Tasks are other processes. A gateway of ours stands for a server; the engine behind it is the real one."""
    database.execute("create table notes (id int primary key, counter int, body text)")
    database.execute("alter table notes alter body set storage external")
    database.execute("insert into notes select i, 0, repeat(md5(i::text), 200) from generate_series(1, 300) i")
    settings = tables_settings(
        database, tmp_path, manage_publication=True, batches=BatchSettings(interval=0.1, max_rows=500)
    )
    with open_gateway(clickhouse.url) as gateway:
        url = f"{gateway.url}/{clickhouse.database}"
        destination = ClickHouseDestination(url, user=USER, password=PASSWORD)
        with tables_alone(settings, MemoryStore("e2e"), destination, SparkTasks(spark)) as pipeline:
            wait_ready(pipeline, 1)
            database.execute("update notes set counter = 1; update notes set id = id + 1000 where id > 250")
            database.execute("delete from notes where id < 10; alter table notes add note text default 'n'")
            database.execute("insert into notes values (1, 2, 'x', null)")
            wait_applied(pipeline, database)
            assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
            report = verify_tables(
                pipeline.definition.settings, pipeline.definition.store, destination, SparkTasks(spark)
            )
            assert [table.result for table in report.tables] == ["equal"]
    check_equal(database.dsn, clickhouse.readback("e2e"), ["notes"])
