"""`spark.readStream.format("penstock")` on a real server: every change, in batches that a restart repeats."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.e2e.support import Background, wait_for
from tests.support.spark_stream import Collected

pytest.importorskip("pyspark")


@pytest.fixture
def session(spark: Any) -> Any:
    penstock.register(spark)
    return spark


def values(rows: list[Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_changes_arrive_with_what_describes_them(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key, name text, big text)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        database.execute("insert into t select 1, 'a', string_agg(md5(i::text), '') from generate_series(1, 500) i")
        database.execute("update t set name = 'b'")
        database.execute("update t set id = 2")
        database.execute("delete from t")
        database.execute("truncate t")
        rows = query.wait_rows(5)
    assert query.columns == [
        *("id", "name", "big", "_op", "_commit_lsn", "_ordinal", "_commit_time", "_xid", "_unchanged", "_old")
    ]
    assert values(rows, "_op", "id", "name", "_unchanged") == [
        ("insert", 1, "a", []),
        ("update", 1, "b", ["big"]),
        ("update", 2, "b", ["big"]),
        ("delete", 2, None, ["name", "big"]),
        ("truncate", None, None, []),
    ]
    assert [row["_old"] and row["_old"]["id"] for row in rows] == [None, None, 1, None, None]
    assert len(rows[0].big) == 16_000
    assert rows[1].big is None
    assert all(row["_commit_time"] and row["_xid"] for row in rows)


def test_a_restarted_query_continues_where_it_was(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        database.execute("insert into t select generate_series(1, 10)")
        query.wait_rows(10)
    database.execute("insert into t select generate_series(11, 20)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        database.execute("insert into t select generate_series(21, 30)")
        rows = [*query.wait_rows(20)]
    assert sorted(row.id for row in rows if row.id > 10) == list(range(11, 31))


def slot_position(database: Any, name: str = "stream") -> int:
    [(position,)] = database.execute(
        "select confirmed_flush_lsn - '0/0' from pg_replication_slots where slot_name = %s", [name]
    )
    return int(position)


@pytest.mark.trap(5, 7, 53)
def test_the_slot_of_an_idle_query_moves_and_stopping_frees_it(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key); create table other (pad text)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        before = slot_position(database)
        for _ in range(10):
            database.execute("insert into other select repeat('x', 1000) from generate_series(1, 10000)")
        [(written,)] = database.execute("select pg_current_wal_lsn() - '0/0'")
        assert written - before > 90_000_000
        wait_for(lambda: slot_position(database) > before + 60_000_000, "the slot to move")
        assert query.rows == []
    database.idle_slot("stream")
    wait_for(lambda: not captures_of(tmp_path), "capture to end")


def captures_of(folder: Path) -> list[str]:
    """The processes that have a file in the spool open, as capture has its lock."""
    lock = str(folder / "spool" / "lock")
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [process.name for each in (process / "fd").iterdir() if os.readlink(each) == lock]
    return found


def test_a_copy_comes_first_without_gap_or_repeat(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key, n int)")
    database.execute("insert into t select i, 0 from generate_series(1, 5000) i")
    numbers = iter(range(5001, 10_000_000))

    def write(connection: Any) -> None:
        connection.execute("insert into t values (%s, 0)", [next(numbers)])
        connection.execute("update t set n = n + 1 where id = 7")

    copying = Collected(session, tmp_path, database.dsn, table="t", startingPosition="snapshot")
    with Background(database, write), copying as query:
        wait_for(lambda: len(query.batches) >= 4, "batches")
    with Collected(session, tmp_path, database.dsn, table="t", startingPosition="snapshot") as rest:
        rest.wait_slot(database)
        [(total, updates)] = database.execute("select count(*), max(n) from t where id <> 7 or n > 0")

        def all_rows() -> dict[tuple[int, int, Any], Any]:
            # A batch that was not committed when the query was stopped comes again: the same rows.
            rows = [*query.rows, *rest.rows]
            return {(row["_commit_lsn"], row["_ordinal"], row.id): row for row in rows}

        wait_for(lambda: sum(row["_op"] != "update" for row in all_rows().values()) >= total, "all rows")
        wait_for(lambda: max(row.n for row in all_rows().values()) == updates, "all updates")
    rows = list(all_rows().values())
    assert rows
    new = [row.id for row in rows if row["_op"] in ("snapshot", "insert")]
    assert len(new) == len(set(new)) == total, "each row was copied or inserted, once"
    assert {row["_op"] for row in rows} == {"snapshot", "insert", "update"}
    copied = [row for row in rows if row["_op"] == "snapshot"]
    first = next(row.n for row in copied if row.id == 7)
    assert sorted(row.n for row in rows if row["_op"] == "update") == list(range(first + 1, updates + 1))
    assert len(query.batches[0]) == len(copied)


@pytest.mark.trap(3)
def test_batches_have_whole_transactions_of_about_the_given_size(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
    shutil.rmtree(tmp_path / "checkpoint")
    with database.connect() as connection:
        for number in range(20):
            connection.execute("insert into t select generate_series(%s::int, %s)", [number * 10, number * 10 + 9])
        connection.execute("insert into t select generate_series(1000, 1099)")
        connection.execute("insert into t values (2000)")
    with Collected(session, tmp_path, database.dsn, table="t", maxRowsPerBatch="25") as query:
        query.wait_rows(301)
    sizes = [len(batch) for batch in query.batches if batch]
    assert sizes == [20] * 10 + [100, 1], "a larger transaction is a batch of its own"
    assert len(query.rows) == 301


def test_a_changed_table_stops_the_query_and_a_restart_continues(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key, a int, gone text)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        database.execute("insert into t values (1, 1, 'x')")
        with database.connect(autocommit=False) as connection:
            connection.execute("insert into t values (2, 2, 'y')")
            connection.execute("alter table t drop column gone, add column b text")
            connection.execute("alter table t rename a to c")
            connection.execute("insert into t values (3, 3, 'b')")
            connection.commit()
        message = query.wait_error()
        assert "a was renamed to c, b was added, gone was dropped" in message
        assert "Start the query again from its checkpoint" in message
        assert values(query.rows, "id") == [(1,)], "everything before the transaction is processed"
    database.execute("alter table t alter column c type int8")
    database.execute("insert into t values (4, 5000000000, 'c')")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        rows = [row for row in query.wait_rows(3) if row.id > 1]
    assert values(rows, "id", "c", "b", "_unchanged") == [
        (2, 2, None, ["b"]),
        (3, 3, "b", []),
        (4, 5_000_000_000, "c", []),
    ]


def test_an_envelope_has_all_tables_and_follows_their_columns(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table a (id int primary key, f float8, t timestamptz, tags text[])")
    database.execute("create table b (x uuid, y numeric); alter table b replica identity full")
    database.execute("create table ignored (id int primary key)")
    database.execute("insert into a values (1, 'NaN', 'infinity', array['p', null])")
    options = {"tables": "a, public.b", "startingPosition": "snapshot"}
    with Collected(session, tmp_path, database.dsn, **options) as query:
        query.wait_rows(1)
        database.execute("insert into b values ('00000000-0000-0000-0000-000000000001', 1.50)")
        database.execute("alter table a add column more bytea default '\\x01'")
        database.execute("update a set id = 2")
        database.execute("delete from b")
        database.execute("truncate a, b")
        rows = query.wait_rows(6)
    uuid = "00000000-0000-0000-0000-000000000001"
    assert [(row["_table"], row["_op"], row["_key"], row["_row"], row["_old"]) for row in rows[:4]] == [
        ("public.a", "snapshot", {"id": "1"}, {"id": "1", "f": "NaN", "t": "infinity", "tags": "{p,NULL}"}, None),
        ("public.b", "insert", {}, {"x": uuid, "y": "1.50"}, None),
        (
            *("public.a", "update", {"id": "2"}),
            {"id": "2", "f": "NaN", "t": "infinity", "tags": "{p,NULL}", "more": "\\x01"},
            {"id": "1"},
        ),
        ("public.b", "delete", {}, {"x": uuid, "y": "1.50"}, None),
    ]
    assert sorted((row["_table"], row["_op"]) for row in rows[4:]) == [
        ("public.a", "truncate"),
        ("public.b", "truncate"),
    ]


@pytest.mark.trap(8)
def test_a_spool_that_is_lost_is_read_from_the_slot_again(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        database.execute("insert into t select generate_series(1, 10)")
        query.wait_rows(10)
    database.execute("insert into t values (11)")
    wait_for(lambda: not captures_of(tmp_path), "capture to end")
    shutil.rmtree(tmp_path / "spool")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        # Spark repeats the last batch if it was stopped before it had noted its end.
        wait_for(lambda: 11 in {row.id for row in query.rows}, "the row that was only in the slot")
        rows = query.rows
    assert len(rows) == len({row.id for row in rows})


def test_available_now_reads_everything_and_ends(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    for begin in (0, 100, 200):
        query = Collected(session, tmp_path, database.dsn, table="t", available_now=True)
        query.query.awaitTermination(120)
        assert not query.query.isActive
        assert {row.id for row in query.rows} == (set(range(begin - 100, begin)) if begin else set())
        database.execute("insert into t select generate_series(%s::int, %s)", [begin, begin + 99])


@pytest.mark.trap(10)
def test_what_would_lose_changes_is_refused(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        database.execute("insert into t values (1)")
        query.wait_rows(1)
    database.idle_slot("stream")
    database.execute("insert into t values (2)")
    database.execute("select pg_replication_slot_advance('stream', pg_current_wal_lsn())")
    assert "another program has read from it" in Collected(session, tmp_path, database.dsn, table="t").wait_error()
    database.execute("select pg_drop_replication_slot('stream')")
    assert "slot 'stream' is gone" in Collected(session, tmp_path, database.dsn, table="t").wait_error()
    slots = database.execute("select slot_name from pg_replication_slots where database = current_database()")
    assert slots == [], "and none is created over the gap"


def test_a_slot_of_another_database_is_named_as_such(session: Any, database: Any, tmp_path: Path) -> None:
    """Names of slots belong to the whole server, so two queries of the same name meet."""
    database.execute("create table t (id int primary key)")
    other = database.server.create_database()
    database.server.execute("select pg_create_logical_replication_slot('stream', 'pgoutput')", database=other)
    try:
        message = Collected(session, tmp_path, database.dsn, table="t").wait_error()
    finally:
        database.server.drop_database(other)
    assert f"slot 'stream' belongs to database '{other}'" in message
    assert "Choose another slot name" in message
    assert not database.execute("select from pg_publication")


def test_mistakes_are_named(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key); create table keyless (n int)")

    def message(**options: str) -> str:
        try:
            return Collected(session, tmp_path, database.dsn, **options).wait_error()
        except Exception as error:
            return str(error)

    assert "either the option 'table' or 'tables'" in message()
    assert "should be 'latest', 'snapshot', or a position" in message(table="t", startingPosition="earliest")
    assert "has no option 'slots'" in message(table="t", slots="x")
    assert "invalid name for a replication slot" in message(table="t", slot="No!")
    assert "keyless" in message(table="keyless")
    assert not database.execute("select from pg_publication"), "nothing is left that would make its updates fail"
    reader = session.readStream.format("penstock").option("url", database.dsn).option("table", "t")
    query = reader.load().writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start()
    with pytest.raises(Exception, match="readStream needs the option 'slot'"):
        query.awaitTermination(60)
    reader = session.read.format("penstock").option("url", database.dsn).option("table", "t").option("slot", "s")
    with pytest.raises(Exception, match=r"the option 'slot' is for spark\.readStream"):
        reader.load().count()


def test_partitioned_tables_and_whole_old_rows(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute(
        "create table t (id int, part int, big text, at time, primary key (id, part)) partition by list (part)"
    )
    for part in (1, 2):
        database.execute(f"create table t{part} partition of t for values in ({part})")
        database.execute(f"alter table t{part} replica identity full")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        database.execute(
            "insert into t select 1, 1, string_agg(md5(i::text), ''), '12:30' from generate_series(1, 500) i"
        )
        database.execute("update t set at = '13:30'")
        database.execute("update t set part = 2")
        rows = query.wait_rows(4)
    assert values(rows, "_op", "id", "part") == [
        ("insert", 1, 1),
        ("update", 1, 1),
        ("delete", 1, 1),
        ("insert", 1, 2),
    ]
    assert rows[1]["_unchanged"] == ["big"]
    assert (len(rows[1]["_old"]["big"]), str(rows[1]["_old"]["at"]), str(rows[1].at)) == (
        16_000,
        "12:30:00",
        "13:30:00",
    )
    assert [len(row.big or "") for row in rows] == [16_000, 0, 16_000, 16_000]


@pytest.mark.trap(8)
def test_a_second_query_on_a_slot_is_refused_and_the_first_goes_on(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    with Collected(session, tmp_path, database.dsn, table="t") as query:
        query.wait_slot(database)
        (tmp_path / "second").mkdir()
        second = {"table": "t", "spoolLocation": str(tmp_path / "spool")}
        message = Collected(session, tmp_path / "second", database.dsn, **second).wait_error()
        assert "Give each query a slot and a spoolLocation of its own" in message
        database.execute("insert into t values (1)")
        assert values(query.wait_rows(1), "id") == [(1,)]


@pytest.mark.trap(53)
def test_a_copy_that_is_interrupted_is_replaced_by_another_one(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key)")
    database.execute("insert into t values (1)")
    frame = session.readStream.format("penstock").options(
        url=database.dsn, table="t", slot="stream", startingPosition="snapshot", spoolLocation=str(tmp_path / "spool")
    )

    def fail(rows: Any, number: int) -> None:
        raise RuntimeError("interrupted")

    writer = frame.load().writeStream.foreachBatch(fail)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(Exception, match="interrupted"):
        query.awaitTermination(120)
    database.execute("insert into t values (2)")
    options = {"table": "t", "startingPosition": "snapshot"}
    # With this trigger Spark plans ahead; the copy may come with the next run.
    with Collected(session, tmp_path, database.dsn, available_now=True, **options) as first:
        first.query.awaitTermination(120)
    assert first.batches[0] == [], "the batch that was interrupted"
    with Collected(session, tmp_path, database.dsn, **options) as query:
        query.wait_rows(3 - len(first.rows))
        database.execute("insert into t values (3)")
        query.wait_rows(4 - len(first.rows))
    copied, *changes = [batch for batch in (*first.batches, *query.batches) if batch]
    assert sorted(values(copied, "_ordinal", "_op", "id", "_xid"), key=str) == [
        (-1, "snapshot", 1, None),
        (-1, "snapshot", 2, None),
        (-2, "truncate", None, None),
    ]
    assert [each for batch in changes for each in values(batch, "_op", "id")] == [("insert", 3)], "the copy has 2"
