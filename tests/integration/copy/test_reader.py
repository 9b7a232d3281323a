"""Ranges read in a snapshot: which rows, which columns, and what happens when the table changes meanwhile."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import time
from collections import Counter
from random import Random
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from penstock.changes.segment import UNREPRESENTABLE
from penstock.copy import CopyRows, CopySettings
from penstock.errors import PublicationChanged, Retry, SnapshotLost, SourceError, TableLocked, TableRewritten
from penstock.source import SourceSettings
from penstock.source.snapshots import take_snapshot
from tests.integration.copy.conftest import PUBLICATION, SMALL_RANGES, Source, read


def create(source: Source, rows: int = 20_000) -> None:
    source.execute("create table t (id int primary key, word text, amount numeric(12, 2))")
    source.execute("insert into t select i, repeat(md5(i::text), 3), i / 100.0 from generate_series(1, %s) i", [rows])
    source.execute(f"create publication {PUBLICATION} for table t")


def ids(table: pa.Table, column: str = "id") -> list[int]:
    return sorted(table.column(column).to_pylist())


@pytest.mark.trap(20)
def test_every_row_is_in_exactly_one_range(any_source: Source) -> None:
    create(any_source)
    rows = any_source.prepare()
    assert len(rows.ranges) > 10
    assert rows.schema.name == "t"
    found = [identifier for part in rows.ranges for batch in rows.read(part) for identifier in batch["id"].to_pylist()]
    assert sorted(found) == list(range(1, 20_001))
    batches = list(rows.read(rows.ranges[0]))
    assert len(batches) > 1
    assert all(batch.schema == rows.arrow_schema for batch in batches)
    assert max(batch.nbytes for batch in batches) < 2 * SMALL_RANGES.chunk_bytes


@pytest.mark.trap(21)
def test_rows_behind_the_planned_end_are_read(source: Source) -> None:
    """The size of the table is that of the planning; ranges are open, so it decides nothing."""
    create(source, 100)
    snapshot = source.snapshot()
    rows = source.prepare(snapshot=snapshot)
    (only,) = rows.ranges
    assert (only.first_block, only.end_block) == (0, None)
    source.execute("insert into t select generate_series(1000, 20000)")
    later = source.prepare()
    assert ids(read(rows)) == list(range(1, 101))
    assert len(later.ranges) > 3
    assert len(ids(read(later))) == 100 + 19_001


@pytest.mark.trap(22)
def test_an_empty_table_has_a_schema_and_no_rows(source: Source) -> None:
    create(source, 0)
    rows = source.prepare()
    assert len(rows.ranges) == 1
    assert rows.arrow_schema.names == ["id", "word", "amount", UNREPRESENTABLE]
    assert list(rows.arrow()) == []
    assert rows.estimated_bytes in range(100_000)


def test_a_table_without_columns_has_rows(source: Source) -> None:
    source.execute("create table t ()")
    source.execute("insert into t select from generate_series(1, 5)")
    source.execute(f"create publication {PUBLICATION} for table t")
    assert read(source.prepare()).num_rows == 5


@pytest.mark.trap(17)
def test_partitions_are_read_leaf_by_leaf_whatever_their_column_order(any_source: Source) -> None:
    source = any_source
    source.execute("create table t (id int not null, word text, gone int, at date) partition by range (id)")
    source.execute("create table t1 partition of t for values from (0) to (1000) partition by list (id)")
    source.execute("create table t1a partition of t1 default")
    source.execute("create table t2 (at date, word text, unused int, id int not null, gone int)")
    source.execute("alter table t2 drop column unused")
    source.execute("alter table t attach partition t2 for values from (1000) to (2000)")
    source.execute("create table t3 partition of t for values from (2000) to (3000)")
    source.execute("alter table t drop column gone")
    source.execute("insert into t select i, 'w' || i, date '2024-01-01' + i from generate_series(1, 1999) i")
    source.execute(f"create publication {PUBLICATION} for table t with (publish_via_partition_root)")
    rows = source.prepare()
    assert {part.leaf.oid for part in rows.ranges} == {source.oid(name) for name in ("t1a", "t2", "t3")}
    assert {part.table_id for part in rows.ranges} == {source.oid("t")}
    found = read(rows).sort_by("id")
    assert found.column("id").to_pylist() == list(range(1, 2000))
    assert found.column("word").to_pylist() == [f"w{i}" for i in range(1, 2000)]
    assert [str(day) for day in found.column("at").to_pylist()[999:1001]] == ["2026-09-27", "2026-09-28"]


@pytest.mark.trap(17)
def test_leaves_published_by_themselves_are_tables(source: Source) -> None:
    source.execute("create table t (id int) partition by range (id)")
    source.execute("create table t1 partition of t for values from (0) to (10)")
    source.execute("create table t2 partition of t for values from (10) to (20)")
    source.execute("insert into t select generate_series(0, 19)")
    source.execute(f"create publication {PUBLICATION} for table t")
    assert ids(read(source.prepare("t2"))) == list(range(10, 20))
    with pytest.raises(PublicationChanged):
        source.prepare("t")


def test_a_partitioned_table_without_partitions_has_no_ranges(source: Source) -> None:
    source.execute("create table t (id int) partition by range (id)")
    source.execute(f"create publication {PUBLICATION} for table t with (publish_via_partition_root)")
    rows = source.prepare()
    assert rows.ranges == ()
    assert rows.arrow_schema.names == ["id", UNREPRESENTABLE]


def test_children_that_inherit_are_not_their_parent(source: Source) -> None:
    source.execute("create table t (id int)")
    source.execute("create table child () inherits (t)")
    source.execute("insert into t values (1)")
    source.execute("insert into child values (2)")
    source.execute(f"create publication {PUBLICATION} for table t, child")
    assert ids(read(source.prepare("t"))) == [1]
    assert ids(read(source.prepare("child"))) == [2]


def test_column_lists_and_row_filters_are_honoured(any_source: Source) -> None:
    source = any_source
    source.execute('create table t (id int primary key, "Odd ""name" int, secret text, "_op" text)')
    source.execute("insert into t select i, i % 10, 'x', 'y' from generate_series(1, 1000) i")
    source.execute(
        f'create publication {PUBLICATION} for table t (id, "Odd ""name", "_op") '
        'where ("Odd ""name" < 3 or "Odd ""name" is null)'
    )
    rows = source.prepare(settings=CopySettings(range_bytes=8192))
    assert len(rows.ranges) > 2
    assert rows.arrow_schema.names == ["id", 'Odd "name', "_op#4", UNREPRESENTABLE]
    assert ids(read(rows)) == [i for i in range(1, 1001) if i % 10 < 3]


def test_a_filter_on_the_root_holds_for_its_partitions(source: Source) -> None:
    source.execute("create schema kinds")
    source.execute("create type kinds.kind as enum ('a', 'b')")
    source.execute("create table t (id int, kind kinds.kind) partition by range (id)")
    source.execute("create table t1 (kind kinds.kind, id int)")
    source.execute("alter table t attach partition t1 default")
    source.execute(
        "insert into t select i, case when i % 2 = 0 then 'a' else 'b' end::kinds.kind from generate_series(1, 10) i"
    )
    source.execute(
        f"create publication {PUBLICATION} for table t where (id > 2 and id < 9) with (publish_via_partition_root)"
    )
    assert ids(read(source.prepare())) == [3, 4, 5, 6, 7, 8]


def test_generated_columns_are_read_as_they_are_published(source: Source) -> None:
    source.execute("create table t (id int, twice int generated always as (id * 2) stored)")
    source.execute("insert into t values (1), (2)")
    source.execute(f"create publication {PUBLICATION} for table t")
    assert source.prepare().arrow_schema.names == ["id", UNREPRESENTABLE]
    source.execute(f"alter publication {PUBLICATION} set (publish_generated_columns = stored)")
    assert read(source.prepare()).column("twice").to_pylist() == [2, 4]


@pytest.mark.trap(21)
@pytest.mark.parametrize(
    "statement",
    [
        "truncate t",
        "vacuum full t",
        "cluster t using t_pkey",
        "alter table t alter amount type float8",
        "alter table t alter id type int8",
        "alter table t rename word to other",
        "alter table t drop column word",
        "alter table t drop column word; alter table t add word text",
        "alter table t rename word to other; alter table t rename amount to word; alter table t rename other to amount",
        "alter table t alter id type oid",
        "drop table t",
        "drop table t; create table t (id int primary key, word text, amount numeric(12, 2))",
    ],
)
def test_a_table_that_changed_since_the_snapshot_voids_the_copy(source: Source, statement: str) -> None:
    create(source, 5_000)
    rows = source.prepare()
    assert len(ids(pa.Table.from_batches(rows.read(rows.ranges[0])))) > 100
    for part in statement.split(";"):
        source.execute(part)
    for part in rows.ranges:
        with pytest.raises(TableRewritten, match=r"public\.t") as caught:
            list(rows.read(part))
        assert caught.value.retry is Retry.TIMED
    if "drop table" not in statement:
        assert read(source.prepare()).num_rows == (0 if statement == "truncate t" else 5_000)


@pytest.mark.trap(21)
def test_a_rewritten_partition_voids_the_copy(source: Source) -> None:
    source.execute("create table t (id int) partition by range (id)")
    source.execute("create table t1 partition of t default")
    source.execute("insert into t values (1)")
    source.execute(f"create publication {PUBLICATION} for table t with (publish_via_partition_root)")
    rows = source.prepare()
    source.execute("truncate t1")
    with pytest.raises(TableRewritten):
        read(rows)


@pytest.mark.parametrize(
    "statement",
    [
        "alter table t rename to other",
        "alter table t add more int default 5",
        "alter table t alter word set not null",
        "alter table t alter amount type numeric(20, 2)",
        "create schema elsewhere; alter table t set schema elsewhere",
        "vacuum t",
        "analyze t",
    ],
)
def test_what_changes_no_row_disturbs_no_copy(source: Source, statement: str) -> None:
    create(source, 5_000)
    rows = source.prepare()
    for part in statement.split(";"):
        source.execute(part)
    assert ids(read(rows)) == list(range(1, 5_001))
    assert read(rows).schema.names == ["id", "word", "amount", UNREPRESENTABLE]


@pytest.mark.trap(21)
def test_ddl_waits_for_the_range_that_is_being_read_and_not_for_the_copy(source: Source) -> None:
    create(source)
    rows = source.prepare(settings=CopySettings(range_bytes=2 << 20, chunk_bytes=10_000))
    reading = rows.read(rows.ranges[0])
    next(reading)
    with source.database.connect(options="-c lock_timeout=200") as connection:
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("truncate t")
        reading.close()
        connection.execute("set lock_timeout = '20s'")
        connection.execute("truncate t")


def test_a_lock_that_stays_is_an_error_that_is_tried_again(source: Source) -> None:
    create(source, 10)
    snapshot = source.snapshot()
    rows = source.prepare(settings=CopySettings(lock_timeout=0.2), snapshot=snapshot)
    with source.database.connect(autocommit=False) as connection:
        connection.execute("lock table t in access exclusive mode")
        with pytest.raises(TableLocked) as caught:
            read(rows)
        with pytest.raises(TableLocked):
            source.prepare(settings=CopySettings(lock_timeout=0.2), snapshot=snapshot)
    assert caught.value.retry is Retry.TIMED


def test_a_snapshot_that_is_gone_voids_the_copy(source: Source) -> None:
    create(source, 10)
    snapshot = source.snapshot()
    rows = source.prepare(snapshot=snapshot)
    snapshot.close()
    with pytest.raises(SnapshotLost):
        read(rows)


def test_row_security_that_would_hide_rows_is_an_error(source: Source) -> None:
    create(source, 10)
    role = f"reader_{source.database.name}"
    source.execute(f"create role {role} login replication password 'p'")
    try:
        source.execute(f"grant select on t to {role}")
        source.execute("alter table t enable row level security")
        rows = source.prepare()
        settings = SourceSettings(make_conninfo(source.settings.url, user=role, password="p"))
        with pytest.raises(SourceError, match=r"row-level security|row security"):
            read(dataclasses.replace(rows, reader=dataclasses.replace(rows.reader, source=settings)))
    finally:
        source.execute(f"drop owned by {role}")
        source.execute(f"drop role {role}")


def test_a_rate_is_kept(source: Source) -> None:
    create(source, 3_000)
    settings = CopySettings(chunk_bytes=20_000, max_bytes_per_second=1_000_000)
    rows = source.prepare(settings=settings)
    start = time.monotonic()
    size = sum(batch.nbytes for batch in rows.arrow())
    assert size > 300_000
    assert time.monotonic() - start > 0.3


@pytest.mark.trap(50, 52)
def test_what_travels_to_tasks_is_small_and_pickles(source: Source) -> None:
    create(source)
    rows = source.prepare(settings=CopySettings(range_bytes=8192))
    assert len(rows.ranges) > 200
    again: CopyRows = pickle.loads(pickle.dumps(rows))
    assert again == rows
    assert ids(pa.Table.from_batches(again.read(again.ranges[3]))) == ids(
        pa.Table.from_batches(rows.read(rows.ranges[3]))
    )
    shipped = pickle.dumps((rows.reader, rows.ranges[0]))
    assert len(shipped) < 4_000
    reader, part = pickle.loads(shipped)
    assert sum(batch.num_rows for batch in reader.read(part)) > 0


@pytest.mark.trap(52)
def test_a_range_is_never_held_as_a_whole(source: Source) -> None:
    """Batches come one at a time, each as large as its chunk, whatever the size of the range."""
    create(source)
    rows = source.prepare(settings=CopySettings(range_bytes=1 << 30, chunk_bytes=50_000))
    (only,) = rows.ranges
    sizes = [batch.nbytes for batch in rows.read(only)]
    assert len(sizes) > 20
    assert max(sizes) < 150_000


def test_tables_copied_under_load_are_as_they_were_at_the_position(source: Source) -> None:
    """Writers insert, update and delete; two tables share a snapshot, and each equals what that snapshot shows."""
    create(source, 5_000)
    source.execute("create table u (id int primary key, word text, amount numeric(12, 2))")
    source.execute("insert into u select * from t")
    source.execute(f"alter publication {PUBLICATION} add table u")
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(seed: int) -> None:
        random = Random(seed)
        try:
            with source.database.connect() as connection:
                while not stop.is_set():
                    table = random.choice("tu")
                    key = random.randrange(1, 5_001) * 2 + seed
                    with connection.transaction():
                        connection.execute(f"update {table} set word = %s where id = %s", [str(random.random()), key])
                        connection.execute(f"delete from {table} where id = %s", [key + 10])
                        connection.execute(
                            f"insert into {table} values (%s, 'new', 1) on conflict do nothing", [key + 20_000]
                        )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=[seed]) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        with take_snapshot(source.settings) as snapshot:
            for table in "tu":
                rows = source.prepare(table, snapshot=snapshot)
                copied = read(rows)
                with snapshot.connect() as inside:
                    truth: list[Any] = inside.execute(f"select id, word, amount from public.{table}").fetchall()
                columns = [copied.column(name).to_pylist() for name in ("id", "word", "amount")]
                assert Counter(zip(*columns, strict=True)) == Counter(truth)
                assert rows.position == snapshot.position
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
