"""The examples of streams run, and give what their pages say."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.support.spark_trial import ROOT, load_example

pytest.importorskip("pyspark")


@pytest.fixture
def session(spark: Any) -> Any:
    penstock.register(spark)
    return spark


def example(name: str) -> Any:
    return load_example(ROOT / "examples" / "spark" / f"{name}.py")


def run(frame: Any, mode: str, name: str, folder: Path) -> None:
    """Run a query over everything that is there."""
    writer = frame.writeStream.outputMode(mode).format("memory").queryName(name)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()


def test_history_keeps_every_version(delta_spark: Any, session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table prices (id int primary key, price numeric(10, 2))")
    database.execute("insert into prices values (1, 1), (2, 2)")
    history = example("history")

    def go_on() -> None:
        history.start(session, database.dsn, str(tmp_path), availableNow=True).awaitTermination()

    go_on()
    database.execute("update prices set price = price + 10 where id = 1")
    database.execute("update prices set price = price + 10 where id = 1")
    database.execute("delete from prices where id = 2")
    go_on()
    database.execute("update prices set price = 99 where id = 1")
    go_on()
    rows = session.read.format("delta").load(str(tmp_path / "table")).orderBy("id", "lsn", "ordinal").collect()
    assert [(row.id, row.price, row.valid_to is None) for row in rows] == [
        (1, Decimal(1), False),
        (1, Decimal(11), False),
        (1, Decimal(21), False),
        (1, Decimal(99), True),
        (2, Decimal(2), False),
    ]
    ones = [row for row in rows if row.id == 1]
    assert [row.valid_to for row in ones[:-1]] == [row.valid_from for row in ones[1:]]
    database.execute("update prices set id = 3 where id = 1; insert into prices values (4, 4)")
    database.execute("truncate prices; insert into prices values (3, 5)")
    go_on()
    rows = session.read.format("delta").load(str(tmp_path / "table")).where("id = 3 or lsn > 0 and valid_to is null")
    found = [(row.id, row.price, row.valid_to is None) for row in rows.orderBy("lsn").collect()]
    assert found == [(3, Decimal(99), False), (3, Decimal(5), True)]


def test_changes_are_counted_in_windows(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table orders (id int primary key, n int)")
    database.execute("create publication orders_counts for table orders")
    database.execute("select pg_create_logical_replication_slot('orders_counts', 'pgoutput')")
    database.execute("insert into orders select i, 0 from generate_series(1, 7) i")
    database.execute("update orders set n = 1 where id < 4")
    frame = example("counts").count(session, database.dsn, spoolLocation=str(tmp_path / "spool"))
    run(frame, "complete", "counts", tmp_path)
    rows = session.sql("select _op, sum(count) from counts group by 1 order by 1").collect()
    assert [tuple(row) for row in rows] == [("insert", 7), ("update", 3)]


def test_two_streams_are_joined(session: Any, database: Any, tmp_path: Path) -> None:
    database.execute("create table orders (id int primary key, customer text)")
    database.execute("create table payments (id int primary key, order_id int, amount int)")
    for table in ("orders", "payments"):
        database.execute(f"create publication join_{table} for table {table}")
        database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [f"join_{table}"])
    database.execute("insert into orders values (1, 'ann'), (2, 'bob')")
    database.execute("insert into payments values (1, 1, 5), (2, 1, 6), (3, 9, 7)")
    run(example("join").join(session, database.dsn, str(tmp_path)), "append", "joined", tmp_path)
    rows = session.sql("select order_id, customer, amount from joined order by amount").collect()
    assert [tuple(row) for row in rows] == [(1, "ann", 5), (1, "ann", 6)]


@pytest.mark.trap(25, 27)
def test_upserts_keep_omitted_values_of_rows_whose_keys_change(
    delta_spark: Any, session: Any, database: Any, tmp_path: Path
) -> None:
    database.execute("create table customers (id int primary key, name text, email text, notes text)")
    database.execute("alter table customers alter column notes set storage external")
    rows = "insert into customers values (1, 'a', 'e', repeat('x', 9000)), (2, 'b', null, repeat('y', 9000))"
    database.execute(f"{rows}; insert into customers values (8)")
    upsert = example("upsert")

    def go_on() -> None:
        query = upsert.start(session, database.dsn, str(tmp_path), spoolLocation=str(tmp_path / "spool"))
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    def found() -> list[tuple[Any, ...]]:
        rows = session.read.format("delta").load(str(tmp_path / "table")).orderBy("id").collect()
        return [(row.id, row.name, row.email, row.notes[0], len(row.notes)) for row in rows]

    go_on()
    database.execute("alter table customers replica identity full")
    database.execute(f"insert into customers values (9); truncate customers; {rows}")
    database.execute("update customers set id = 3 where id = 1")
    database.execute("update customers set id = 4, name = 'c' where id = 3")
    go_on()
    assert found() == [(2, "b", None, "y", 9000), (4, "c", "e", "x", 9000)]
    # Changes from before the identity was set do not have the old row.
    database.execute("alter table customers replica identity default")
    database.execute("update customers set name = 'd' where id = 2")
    database.execute("alter table customers replica identity full")
    go_on()
    assert found() == [(2, "d", None, "y", 9000), (4, "c", "e", "x", 9000)]
    database.execute("alter table customers replica identity default")
    database.execute("delete from customers where id = 2; update customers set id = 2 where id = 4")
    with pytest.raises(Exception, match="set REPLICA IDENTITY FULL"):
        go_on()
    # Neither a row without its value, nor with that of the row which had the key before.
    assert found() == [(2, "d", None, "y", 9000), (4, "c", "e", "x", 9000)]
