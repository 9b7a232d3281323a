"""`spark.read.format("penstock")` on a real server: all rows of one moment, read in parallel."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

import penstock
from penstock.datasource import keeper as keeping
from penstock.datasource.keeper import keeper_of_process
from penstock.datasource.source import PenstockSource
from tests.e2e.support import Background, wait_for

pytest.importorskip("pyspark")


@pytest.fixture
def session(spark: Any) -> Any:
    penstock.register(spark)
    return spark


def table_of(session: Any, database: Any, table: str, **options: Any) -> Any:
    reader = session.read.format("penstock").option("url", database.dsn).option("table", table)
    return reader.options(**options).load()


def sessions_of(database: Any) -> int:
    """How many sessions of others the database has."""
    [(count,)] = database.execute(
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )
    return count


def test_a_table_is_read_with_its_types(session: Any, any_database: Any) -> None:
    any_database.execute("create type mood as enum ('sad', 'ok')")
    any_database.execute(
        'create table "Odd t" (id int8 primary key, "Wide ""n""" numeric(12, 2), at timestamptz, day date, b bytea,'
        " tags text[], ok bool, f float8, m mood, j jsonb, doubled int8 generated always as (id * 2) stored)"
    )
    any_database.execute(
        """insert into "Odd t" values (1, 12.50, '2026-01-02 03:04:05.678901+00', '2026-01-02', '\\x00ff',
           array['a', null, 'ü'], true, 'NaN', 'ok', '{"a": 1}'),
           (2, null, null, null, null, null, null, null, null, null)"""
    )
    frame = table_of(session, any_database, '"Odd t"')
    assert frame.schema.simpleString() == (
        'struct<id:bigint,Wide "n":decimal(12,2),at:timestamp,day:date,b:binary,tags:array<string>,ok:boolean,f:double,'
        "m:string,j:string,doubled:bigint>"
    )
    first, second = sorted(frame.collect())
    assert first[:4] == (
        1,
        Decimal("12.50"),
        datetime.datetime.fromisoformat("2026-01-02T03:04:05.678901+00:00").astimezone().replace(tzinfo=None),
        datetime.date(2026, 1, 2),
    )
    assert (bytes(first.b), first.tags, first.ok, first.m, first.j) == (
        b"\x00\xff",
        ["a", None, "ü"],
        True,
        "ok",
        '{"a": 1}',
    )
    assert (str(first.f), first.doubled, second.doubled) == ("nan", 2, 4)
    assert list(second[1:10]) == [None] * 9


def test_many_tasks_read_the_rows_of_one_moment(session: Any, database: Any) -> None:
    """Rows move between partitions and blocks all the time; their sum never changes."""
    database.execute("create table moving (id int, part int, n int8, pad text) partition by list (part)")
    for part in range(3):
        database.execute(f"create table moving_{part} partition of moving for values in ({part})")
    database.execute("insert into moving select i, i % 3, i, repeat('x', 500) from generate_series(1, 20000) i")

    def move(connection: Any) -> None:
        connection.execute("update moving set part = (part + 1) % 3 where id % 7 = (random() * 7)::int")
        connection.execute("update moving set n = case id when 5 then n + 1000 else n - 1000 end where id in (5, 6)")

    with Background(database, move):
        frame = table_of(session, database, "public.moving", partitions="8")
        assert frame.rdd.getNumPartitions() >= 8
        for _ in range(3):
            assert frame.selectExpr("count(*)", "sum(n)", "count(distinct id)").collect() == [
                (20_000, 20_000 * 20_001 // 2, 20_000)
            ]


def test_two_tables_in_one_snapshot_are_consistent(session: Any, database: Any) -> None:
    database.execute("create table a (id int primary key); create table b (id int primary key)")
    numbers = iter(range(1, 10_000_000))

    def add(connection: Any) -> None:
        with connection.transaction():
            number = next(numbers)
            connection.execute("insert into a values (%s)", [number])
            connection.execute("insert into b values (%s)", [number])

    with Background(database, add), penstock.snapshot(database.dsn) as snapshot:
        wait_for(lambda: database.execute("select 1 from b where id > 20"), "rows")
        a, b = (table_of(session, database, name, snapshot=snapshot.name) for name in "ab")
        count = a.count()
        assert b.count() == count, "also if rows were added between the two"
        assert a.join(b, "id").count() == count
    with pytest.raises(Exception, match="Take another one, and call load"):
        table_of(session, database, "a", snapshot=snapshot.name).count()


def test_filters_reach_the_server_and_change_no_result(session: Any, database: Any) -> None:
    database.execute(
        'create table items (id int primary key, name text collate "C", price numeric(10, 2), at timestamptz, '
        "day date, f float8, padded char(3))"
    )
    database.execute(
        "insert into items select i, chr(64 + i % 60) || '''\\\"', i / 4.0, timestamptz '2026-01-01 00:00+00' + "
        "i * interval '1 hour', date '2026-01-01' + i, case when i % 10 = 0 then float8 'NaN' else i end, 'a' "
        "from generate_series(1, 300) i"
    )
    database.execute("insert into items (id) values (1000)")
    frame = table_of(session, database, "items")
    # Spark's own cache leaves out rows with NaN.
    whole = session.createDataFrame(frame.collect(), frame.schema)
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        for text in (
            "id = 7",
            "id > 290 and id <= 295",
            "id in (3, 4, null)",
            "id not in (3, 4)",
            "price >= 70.25 and price < 71",
            "price = 10",
            "name = 'A''\"'",
            "name > 'F'",
            "name in ('A''\"', 'nobody')",
            "at >= timestamp '2026-01-05 00:00:00'",
            "at = timestamp '2026-01-01 02:00:00'",
            "day < date '2026-01-04'",
            "f > 295",
            "f = double('NaN')",
            "f is null",
            "price is not null and id > 200",
            "padded = 'a'",
            "padded = 'a  '",
            "id = 7 or id = 8",
            "id <=> 9",
        ):
            filtered = table_of(session, database, "items").where(text)
            assert (
                filtered.toPandas().id.sort_values().to_list()
                == whole.where(text).toPandas().id.sort_values().to_list()
            ), text
    finally:
        session.conf.unset("spark.sql.session.timeZone")


def test_conditions_for_the_server(session: Any, database: Any) -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, StringStartsWith
    from pyspark.sql.types import StructType

    database.execute("create table items (id int primary key, name text, at timestamptz, u uuid, big numeric)")

    def pushed(*filters: Any) -> str | None:
        with penstock.snapshot(database.dsn) as snapshot:
            source = PenstockSource({"url": database.dsn, "table": "items", "snapshot": snapshot.name})
            reader = source.reader(StructType.fromDDL(source.schema()))
            assert list(reader.pushFilters(list(filters))) == list(filters), "Spark applies them again"
            [part] = reader.partitions()
        return part.value[0].where

    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert pushed(EqualTo(("id",), 7), IsNotNull(("name",))) == '"id" = \'7\'::pg_catalog.int4 and "name" is not null'
    assert pushed(In(("name",), ("a'\\", None))) == "\"name\" in ( E'a''\\\\'::pg_catalog.text)"
    assert pushed(GreaterThan(("at",), moment)) == "\"at\" > '2026-01-01 00:00:00+00:00'::pg_catalog.timestamptz"
    # Collations, texts that are no uuid, numbers as text, and what Spark has that SQL has not.
    assert pushed(GreaterThan(("name",), "a"), EqualTo(("u",), "x"), GreaterThan(("big",), "9")) is None
    assert pushed(StringStartsWith(("name",), "a")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "nowhere"}, "there is no table nowhere"),
        ({"table": "shown"}, "shown is a view, and only tables can be read"),
        ({"table": "t", "columns": "id, other"}, "t has no column 'other'"),
        ({"table": "t", "partitions": "none"}, "'partitions' should be a whole number"),
        ({"table": "t", "outOfRange": "ignore"}, "'outOfRange' should be one of 'keep', 'error'"),
        ({"table": "t", "dbtable": "t"}, "has no option 'dbtable'"),
        ({}, "needs the option 'table'"),
    ],
)
def test_mistakes_are_named(session: Any, database: Any, options: dict[str, str], message: str) -> None:
    database.execute("create table t (id int); create view shown as select 1 as one")
    with pytest.raises(Exception, match=message):
        session.read.format("penstock").option("url", database.dsn).options(**options).load()


def test_columns_are_chosen_and_values_without_room_are_an_error_unless_told_otherwise(
    session: Any, database: Any
) -> None:
    database.execute("create table t (id int, \"Name\" text, day date); insert into t values (1, 'a', 'infinity')")
    assert table_of(session, database, "t", columns='"Name", id').columns == ["id", "Name"]
    with pytest.raises(Exception, match=r"public\.t\.day"):
        table_of(session, database, "t").collect()
    assert table_of(session, database, "t", outOfRange="null").collect() == [(1, "a", None)]
    [kept] = table_of(session, database, "t", outOfRange="keep").collect()
    assert (kept.day, kept._unrepresentable) == (None, {"day": "infinity"})
    assert table_of(session, database, "t", outOfRange="text").collect() == [(1, "a", "infinity")]


def test_a_password_is_in_no_error(session: Any, database: Any) -> None:
    reader = session.read.format("penstock").option("table", "t")
    with pytest.raises(Exception, match="127") as raised:
        reader.option("url", "postgresql://someone:geheim@127.0.0.1:1/none").load()
    assert "geheim" not in str(raised.value)


def test_a_table_that_was_altered_since_load_is_an_error(session: Any, database: Any) -> None:
    database.execute("create table t (id int, old text); insert into t values (1, 'a')")
    frame = table_of(session, database, "t")
    database.execute("alter table t add column new int")
    with pytest.raises(Exception, match="not those that the data frame was made with"):
        frame.collect()


def test_snapshots_end_when_nobody_reads_in_them(session: Any, database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    database.execute("create table t (id int); insert into t select generate_series(1, 10)")
    monkeypatch.setattr(keeping, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(keeping, "_LOOK_SECONDS", 0.1)
    assert table_of(session, database, "t").count() == 10
    wait_for(lambda: sessions_of(database) == 0, "the keeper to end its sessions")
    kept = penstock.snapshot(database.dsn, seconds=0.2)
    wait_for(lambda: sessions_of(database) == 0, "the snapshot to expire")
    kept.close()


@pytest.fixture(autouse=True)
def no_sessions_are_left() -> Iterator[None]:
    yield
    for each in keeper_of_process()._kept:
        each._used_at = time.monotonic() - 2 * keeping.IDLE_SECONDS


def test_a_foreign_client_does_not_end_the_keeper(session: Any, database: Any) -> None:
    import socket

    database.execute("create table t (id int)")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(keeper_of_process().address.path)
        stranger.sendall(b"nonsense")
    assert table_of(session, database, "t").count() == 0
    assert threading.active_count() < 200
