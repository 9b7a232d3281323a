"""A whole pipeline on Spark: tables of all shapes, copied while they change, followed, and equal at the end."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.lsn import Lsn, reaches
from penstock.spark.session import APPLY_POOL
from penstock.spark.tasks import SparkTasks, group_of
from penstock.state import MemoryStore
from penstock.tables import TablesSettings
from tests.e2e.support import current_position, tables_alone, tables_settings, wait_for
from tests.support.delta_jars import delta_spark_options, find_delta_jars
from tests.support.drive_pipeline import DriveSettings
from tests.support.pipeline_process import PipelineProcess
from tests.support.processes import Part
from tests.support.readback import check_equal
from tests.support.spark_cluster import Cluster

ROWS = 400
"""Of each table at the start."""
MANY = 4_000
"""Of the largest one."""
CLUSTER_SECONDS = 480.0
"""A guard, not a measure."""
NEEDS_JARS = pytest.mark.skipif(not find_delta_jars(), reason="needs Delta's jars for Spark: make jars")
WAY = ["init", "data_sync", "finished_copy", "sync_done", "ready"]


@dataclass(frozen=True)
class Shape:
    """A table, its first rows, and what writers do to it: statements with the parameters k (a key) and r (a number)."""

    name: str
    columns: str
    rows: str
    """The cells of row i, after `select`."""
    changes: tuple[str, ...] = ()
    after: str = ""
    count: int = ROWS


def keyed(name: str, columns: str, cells: str, update: str, **options: Any) -> Shape:
    """A table with the key `id`, of which rows come, change, change their key and go."""
    escaped = cells.replace("%", "%%")
    changes = (
        f"insert into {name} select {escaped} from (select %(k)s::int as i) s on conflict do nothing",
        f"update {name} set {update} where id = %(k)s",
        f"update {name} set {update} where id between %(k)s and %(k)s + 5",
        f"delete from {name} where id = %(k)s",
        f"update {name} set id = id + 5000 where id = %(k)s",
    )
    return Shape(name, f"id int primary key, {columns}", cells, changes, **options)


SHAPES = (
    keyed("integers", "small int2, large int8, flag bool", "i, i % 100, i * 1e12::int8, i % 3 = 0", "large = -large"),
    keyed("floats", "a float4, b float8", "i, i / 7.0, case i % 9 when 0 then 'NaN' else i / 3.0 end::float8",
          "a = a * 1.1, b = case when b > 100 then 'Infinity' else b * 3 end"),
    keyed("numerics", "price numeric(12,2), wide numeric(45,5), free numeric",
          "i, i / 100.0, i * 1e35, case i % 10 when 0 then 'NaN' else i * 1.50 end::numeric",
          "price = price + 0.01, wide = -wide, free = free / 3"),
    keyed("texts", "a text, b varchar(40), c char(6)", "i, repeat('ä', i % 50), md5(i::text), 'x' || i % 100",
          "a = a || E'\\n\\\\', c = null"),
    keyed("moments", "d date, t time, z timestamptz, p timestamp, v interval, o timetz",
          "i, case i % 20 when 0 then 'infinity' else date '2024-01-01' + i end, time '00:00' + i * interval '1 s', "
          "timestamptz '2024-01-01 00:00+00' + i * interval '1 ms', "
          "timestamp '0044-03-15 BC' + i * interval '9 years', "
          "i * interval '1 day 1 s', '12:00+02'",
          "d = d + 1, t = case when random() < 0.1 then '24:00' else t end, z = now(), p = 'infinity'"),
    keyed("blobs", "b bytea, u uuid, s bit(5), n varbit", "i, decode(md5(i::text), 'hex'), md5(i::text)::uuid, "
          "(i % 32)::bit(5), b'101'", "b = b || '\\x00ff', u = gen_random_uuid()"),
    keyed("lists", "a int[], b text[], c date[], d int[]",
          "i, array[i, null], array['a,b', '\"', null, i::text], array[date '2024-01-01' + i, 'infinity'], "
          "array[[i, 1], [2, 3]]", "a = a || a[1] + 1, b = b || array['{}'], c = c[1:1]"),
    keyed("documents", "version int, body jsonb",
          "i, 0, jsonb_build_object('n', i, 'text', (select string_agg(md5(i * 1000 + j || ''), '') "
          "from generate_series(1, 150) j))", "version = version + 1",
          after="alter table documents alter body set storage external"),
    keyed("enums", "mood mood, amount positive, place place", "i, 'sad', i + 1, row(i, 'x, \"y\"')::place",
          "mood = 'happy', amount = amount + 1"),
    keyed("networks", "a inet, c cidr, m macaddr, r int4range, w tsvector",
          "i, '10.0.0.1', '10.0.0.0/8', '08:00:2b:01:02:03', int4range(i, i + 10), to_tsvector('simple', 'a b ' || i)",
          "a = a + 1, r = 'empty'"),
    Shape("composite_keys", "a int, b text, c date, note text, primary key (b, a)",
          "i % 20, 'k' || i, date '2024-01-01', 'n'",
          ("update composite_keys set note = note || 'x' where a = %(k)s %% 20",
           "update composite_keys set b = b || 'y' where b = 'k' || %(k)s",
           "delete from composite_keys where b = 'k' || %(k)s",
           "insert into composite_keys values (%(k)s %% 20, 'k' || %(k)s, null, null) on conflict do nothing")),
    Shape("without_key", "a int, b text", "i % 10, 'same'",
          ("insert into without_key values (%(k)s %% 10, 'same'), (%(k)s %% 10, 'same')",
           "update without_key set b = 'other' where ctid = (select min(ctid) from without_key where a = %(k)s %% 10)",
           "delete from without_key where ctid = (select min(ctid) from without_key where a = %(k)s %% 10)"),
          after="alter table without_key replica identity full"),
    keyed("full_identity", "version int, body text", "i, 0, repeat(md5(i::text), 100)", "version = version + 1",
          after="alter table full_identity replica identity full, alter body set storage external"),
    Shape("by_index", "code text not null, id int, body text", "'c' || i, i, 'b'",
          ("update by_index set body = body || 'z' where code = 'c' || %(k)s",
           "update by_index set code = code || '!' where id = %(k)s",
           "delete from by_index where code = 'c' || %(k)s"),
          after="create unique index by_index_code on by_index (code); "
                "alter table by_index replica identity using index by_index_code"),
    Shape("only_inserts", "at timestamptz, what text", "now(), 'i' || i",
          ("insert into only_inserts values (now(), 'n' || %(k)s), (null, null)",)),
    Shape("parted", "id int, day date, note text, primary key (id, day)", "i, date '2024-01-01' + i % 50, 'n' || i",
          ("update parted set note = note || '.' where id = %(k)s",
           "update parted set day = date '2024-01-01' + %(r)s %% 50 where id = %(k)s",
           "delete from parted where id = %(k)s",
           "insert into parted values (%(k)s, '2024-01-31', 'new') on conflict do nothing")),
    keyed('"Odd ""name"""', '"_op" text, "Select" int, "_OP" int, "with space" text', "i, 'o', i, -i, 's'",
          '"_op" = "_op" || \'p\', "with space" = null'),
    keyed("derived", "a int, gone int, twice int generated always as (a * 2) stored", "i, i", "a = a + 1",
          after="alter table derived drop column gone"),
    keyed("wide", ", ".join(f"c{n} int" for n in range(80)), "i, i, 2, null, i", "c0 = c0 + 1, c79 = c0"),
    keyed("many", "version int, note text", "i, 0, md5(i::text)", "version = version + 1", count=MANY),
    Shape("empty", "id int primary key, note text", "i, 'x'", count=0),
    Shape("quiet", "id int primary key, note text", "i, 'x'"),
)  # fmt: skip


FEW = tuple(shape for shape in SHAPES if shape.name in ("documents", "without_key", "parted", "empty", "quiet", "many"))
"""For where starting takes most of the time."""
FEW_AND_ONE_LARGE = tuple(
    replace(shape, rows="i, 0, repeat(md5(i::text), 20)", count=13_000) if shape.name == "many" else shape
    for shape in FEW
)
"""One is too large to share a task with others: its copy is under way when theirs are done."""


def create_tables(database: Any, shapes: tuple[Shape, ...] = SHAPES) -> None:
    database.execute(
        "create type mood as enum ('sad', 'happy'); create domain positive as int check (value > 0);"
        "create type place as (a int, b text)"
    )
    with database.connect() as connection:
        for shape in shapes:
            parted = " partition by range (day)" if shape.name == "parted" else ""
            connection.execute(f"create table {shape.name} ({shape.columns}){parted}")
            if parted:
                connection.execute(
                    "create table parted_1 partition of parted for values from (minvalue) to ('2024-01-20')"
                )
                connection.execute("create table parted_2 partition of parted default")
            connection.execute(f"insert into {shape.name} select {shape.rows} from generate_series(1, {shape.count}) i")
            if shape.after:
                connection.execute(shape.after)


@contextmanager
def writers(
    database: Any,
    count: int,
    shapes: tuple[Shape, ...] = SHAPES,
    *,
    pause: float = 0.03,
    truncating: bool = False,
) -> Iterator[None]:
    """Threads that change all tables at random; every tenth transaction is rolled back, and some parts of others."""
    stop = threading.Event()
    errors: list[BaseException] = []
    changing = [shape for shape in shapes if shape.changes]

    def change(connection: psycopg.Connection, chance: random.Random) -> None:
        shape = chance.choice(changing)
        parameters = {"k": chance.randrange(1, ROWS + 100), "r": chance.randrange(1000)}
        connection.execute(chance.choice(shape.changes), parameters)

    def write(seed: int) -> None:
        chance = random.Random(seed)
        try:
            with database.connect() as connection:
                while not stop.wait(pause):
                    try:
                        with connection.transaction():
                            for _ in range(chance.choice([1, 1, 3, 30])):
                                change(connection, chance)
                            with connection.transaction():
                                change(connection, chance)
                                if chance.random() < 0.5:
                                    raise psycopg.Rollback
                            if truncating and chance.random() < 0.02:
                                connection.execute("truncate composite_keys, enums")
                            if chance.random() < 0.1:
                                raise psycopg.Rollback
                    except (
                        psycopg.errors.DeadlockDetected,
                        psycopg.errors.UniqueViolation,
                        # A row that another writer has moved to another partition.
                        psycopg.errors.SerializationFailure,
                    ):
                        continue
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(seed,), daemon=True) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not errors, errors[0]


def table_names(shapes: tuple[Shape, ...] = SHAPES) -> list[str]:
    return [shape.name[1:-1].replace('""', '"') if '"' in shape.name else shape.name for shape in shapes]


@dataclass
class CountingTasks:
    """Spark's tasks, with a list of the batches that were handed over."""

    tasks: SparkTasks
    described: list[str]

    @property
    def elsewhere(self) -> bool:
        return self.tasks.elsewhere

    @property
    def parallel(self) -> int:
        return self.tasks.parallel

    def run(self, items: Any, function: Callable[[Any], Any], *, description: str) -> list[Any]:
        self.described.append(description)
        return self.tasks.run(items, function, description=description)

    def copying(self) -> Any:
        return self.tasks.copying()


def job_ids(spark: Any) -> set[int]:
    return set(spark.sparkContext.statusTracker().getJobIdsForGroup(group_of(APPLY_POOL)))


def job_description(spark: Any, job: int) -> str:
    return spark.sparkContext._jsc.sc().statusStore().job(job).description().get()


def pipeline_settings(database: Any, folder: Path) -> TablesSettings:
    named = frozenset({"public.only_inserts"})
    return tables_settings(database, folder, "spark", interval=0.2, unidentified=named)


@pytest.mark.trap(22, 23, 25, 27, 50)
def test_tables_of_all_shapes_are_copied_and_followed_on_spark(spark: Any, database: Any, tmp_path: Path) -> None:
    create_tables(database)
    tasks = CountingTasks(SparkTasks(spark), [])
    store = MemoryStore("spark")
    destination = ParquetDestination(tmp_path / "lake")
    settings = pipeline_settings(database, tmp_path)
    with tables_alone(settings, store, destination, tasks, spark) as pipeline:

        def all_ready() -> bool:
            phases = pipeline.phases
            assert not (stopped := {name: phase for name, phase in phases.items() if phase.name == "errored"}), stopped
            return len(phases) == len(SHAPES) and {phase.name for phase in phases.values()} == {"ready"}

        def reached(position: Lsn) -> Callable[[], bool]:
            return lambda: (
                pipeline.wait(0) or (pipeline.status is not None and reaches(pipeline.status.applied, position))
            )

        with writers(database, 4):
            wait_for(all_ready, "all tables to be ready")
            # From now on only apply works: each batch is one job of Spark, whatever the number of tables, and no table
            # stays behind to get batches of its own.
            batches = pipeline.status.batches
            tasks.described.clear()
            wait_for(lambda: pipeline.status.batches >= batches + 3, "batches under load")
        with writers(database, 2, truncating=True):
            before = pipeline.status.batches
            wait_for(lambda: pipeline.status.batches >= before + 3, "batches with truncates")
        wait_for(reached(current_position(database)), "apply to reach the end")
        wait_for(all_ready, "all tables to be ready")
        described = tasks.described
        # A batch under way when the list was cleared has its job before these.
        jobs = sorted(job_ids(spark))[-len(described) :]
        assert [job_description(spark, job) for job in jobs] == described
        assert len(described) <= pipeline.status.batches - batches <= len(described) + 1
        ends = [Lsn.parse(description.rpartition(" up to ")[2]) for description in described]
        assert all(not reaches(before, after) for before, after in pairwise(ends)), described
        assert any(" more up to " in description for description in described), described
    check_equal(database.dsn, ParquetReader(tmp_path / "lake"), table_names())
    for table_id in store.get_table_replication_states():
        history = [record.phase.name for record in store.get_table_replication_history(table_id)]
        assert history == WAY


@pytest.mark.timeout(1800)
@pytest.mark.trap(33, 50)
def test_on_a_cluster_whose_workers_are_killed_nothing_is_lost(database: Any, cluster: Cluster, tmp_path: Path) -> None:
    """Its workers do not see the spool: an empty disk of their own covers the driver's folder."""
    create_tables(database, FEW_AND_ONE_LARGE)
    slot = f"spark_{database.name[-12:]}"
    pipeline = PipelineProcess(
        DriveSettings(
            *(database.dsn, str(cluster.driver_folder), slot),
            options={"path": str(tmp_path / "lake")},
            master=cluster.url,
            spark=cluster.options,
            interval=0.2,
            # So slow that the largest table is still being copied when a worker goes.
            copy_bytes_per_second=1_000_000,
        )
    )
    pipeline.start()
    try:
        with writers(database, 2, FEW_AND_ONE_LARGE, pause=0.05):
            # One is lost while tables are copied, with both at work.
            pipeline.wait_for("both workers", lambda seen: seen.executors == 2, CLUSTER_SECONDS)
            pipeline.wait_for("a copy", lambda seen: seen.phases.get("public.many") == "data_sync", CLUSTER_SECONDS)
            cluster.kill_worker(0)
            pipeline.wait_phases("ready", len(FEW_AND_ONE_LARGE), CLUSTER_SECONDS)
            pipeline.wait_for("the loss of a worker", lambda seen: seen.executors == 1, CLUSTER_SECONDS)
            # The other one while changes flow, with a new one in its place.
            cluster.start_worker(2)
            pipeline.wait_for("the new worker", lambda seen: seen.executors == 2, CLUSTER_SECONDS)
            wait_for_batches(pipeline, 2)
            cluster.kill_worker(1)
            wait_for_batches(pipeline, 3)
            assert set(pipeline.seen.phases.values()) == {"ready"}
        pipeline.wait_applied(current_position(database), CLUSTER_SECONDS)
        assert pipeline.stop() == 0
    finally:
        pipeline.close()
    check_equal(database.dsn, ParquetReader(pipeline.settings.lake), table_names(FEW_AND_ONE_LARGE))
    if cluster.cannot_hide:
        pytest.skip(f"all is equal, but workers saw the driver's folder: {cluster.cannot_hide}")


def wait_for_batches(pipeline: PipelineProcess, count: int) -> None:
    before = pipeline.seen.batches
    pipeline.wait_for("batches", lambda seen: seen.batches >= before + count, CLUSTER_SECONDS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("destination", ["parquet", pytest.param("spark", marks=NEEDS_JARS)])
def test_a_jvm_that_is_lost_during_a_copy_ends_the_run_and_the_next_one_copies(
    destination: str, database: Any, tmp_path: Path
) -> None:
    """Nobody writes to the source: no change tells the pipeline that its JVM is gone."""
    database.execute("create table t (id int primary key, pad text)")
    database.execute("insert into t select i, repeat('x', 1000) from generate_series(1, 5000) i")
    options = {"format": "delta", "mode": "upsert"} if destination == "spark" else {}
    spark = delta_spark_options() if destination == "spark" else {}
    settings = DriveSettings(
        database.dsn, str(tmp_path), tables=("public.t",), slot=f"jvm_{database.name[-12:]}", destination=destination,
        options=options, master="local[2]", spark=spark,
    )  # fmt: skip
    pipeline = PipelineProcess(settings)
    try:
        pipeline.start(settings=replace(settings, copy_bytes_per_second=100_000))
        pipeline.wait_for("the copy to begin", lambda seen: "data_sync" in seen.phases.values())
        assert pipeline.kill(Part.JVM)
        assert pipeline.wait_ended() == 1
        pipeline.start()
        pipeline.wait_phases("ready", 1)
        assert pipeline.stop() == 0
    finally:
        pipeline.close()
