"""Types that formats of Spark do not have, or write inexactly: what arrives in Delta and in PostgreSQL."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged, Unrepresentable
from penstock.destinations.naming import FOLDERS
from penstock.destinations.spark import SparkDestination
from penstock.schema import Column, TableSchema
from penstock.schema.types import PostgresType, TypeKind
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import INT8, ORDERS, TEXT
from tests.integration.destinations.spark.started import copy, started
from tests.support.delta_jars import jdbc_url

TIME, TIMESTAMP, TIMESTAMPTZ = (
    PostgresType(1083, "time"),
    PostgresType(1114, "timestamp"),
    PostgresType(1184, "timestamptz"),
)
DATE, NUMERIC, BYTEA, FLOAT4 = (
    PostgresType(1082, "date"),
    PostgresType(1700, "numeric"),
    PostgresType(17, "bytea"),
    PostgresType(700, "float4"),
)
PRICE = (10 << 16 | 2) + 4


def array(oid: int, of: PostgresType) -> PostgresType:
    return PostgresType(oid, f"_{of.name}", kind=TypeKind.ARRAY, element=of)


ALL = TableSchema(
    17_100,
    "public",
    "all_types",
    (
        Column("id", 1, INT8, identity=True, primary_key_position=1),
        Column("clock", 2, TIME),
        Column("clocks", 3, array(1183, TIME)),
        Column("moment", 4, TIMESTAMP),
        Column("moments", 5, array(1115, TIMESTAMP)),
        Column("zoned", 6, TIMESTAMPTZ),
        Column("zoneds", 7, array(1185, TIMESTAMPTZ)),
        Column("day", 8, DATE),
        Column("price", 9, NUMERIC, PRICE),
        Column("prices", 10, array(1231, NUMERIC), PRICE),
        Column("raw", 11, BYTEA),
        Column("real", 12, FLOAT4),
        Column("reals", 13, array(1021, FLOAT4)),
    ),
)
MOMENTS = (
    datetime(2024, 3, 31, 2, 30, 0, 123456),  # In Europe this does not exist.
    datetime(1, 1, 1),
    datetime(1582, 10, 10, 23, 59, 59, 999999),  # In java.util's calendar neither.
    datetime(1883, 11, 18, 12, 0, 0, 1),
    datetime(9999, 12, 31, 23, 59, 59, 999999),
)


def row(number: int, moment: datetime) -> dict[str, Any]:
    clock, zoned = time(12, 30, number % 60, 120_000), moment.replace(tzinfo=UTC)
    return {
        "id": number,
        "clock": clock,
        "clocks": [clock, None, time(0, 0)],
        "moment": moment,
        "moments": [moment, None],
        "zoned": zoned,
        "zoneds": [zoned, None],
        "day": moment.date(),
        "price": Decimal("-1.10"),
        "prices": [Decimal("99999999.99"), None],
        "raw": b"\x00\xff",
        "real": 0.1,
        "reals": [float("inf"), None, 1.5],
    }


ROWS = [row(number, moment) for number, moment in enumerate(MOMENTS, 1)]
NOTHING = dict.fromkeys((column.name for column in ALL.columns), None)


def printed(clock: time | None) -> str | None:
    return clock and str(clock).rstrip("0").rstrip(".") if clock and clock.microsecond else clock and str(clock)


def write_all(destination: SparkDestination, source: ScriptedSource) -> None:
    """Copy the first rows, insert the same ones with other keys, and fill one by an update."""
    copy(destination, source, ALL, [*ROWS, NOTHING | {"id": 21}])
    with source.transaction() as transaction:
        for each in ROWS:
            transaction.insert(ALL, each | {"id": each["id"] + 10})
        transaction.update(ALL, ROWS[0] | {"id": 21})
        transaction.update(ALL, dict.fromkeys(NOTHING, Unchanged) | {"id": 1, "price": Decimal("-1.10")})
    result = destination.write_events(source.batch()).result()
    assert result.tables[ALL.table_id].error is None


def expected() -> list[dict[str, Any]]:
    rows = [*ROWS, *(each | {"id": each["id"] + 10} for each in ROWS), ROWS[0] | {"id": 21}]
    return [
        each
        | {"clock": printed(each["clock"]), "clocks": [printed(clock) for clock in each["clocks"]]}
        | {"real": pytest.approx(0.1)}
        for each in rows
    ]


@pytest.mark.trap(31)
def test_delta_has_every_value_and_times_as_text(delta_spark: Any, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    lake, checkpoint = str(tmp_path / "lake"), str(tmp_path / "checkpoint")
    write_all(started(delta_spark, format="delta", mode="upsert", path=lake, checkpoint=checkpoint), source)
    frame = delta_spark.read.format("delta").load(f"{lake}/{FOLDERS.table(ALL)}")
    assert (frame.schema["clock"].dataType.simpleString(), frame.schema["clocks"].dataType.simpleString()) == (
        "string",
        "array<string>",
    )
    rows = frame.drop("_unrepresentable").toArrow().sort_by("id").to_pylist()
    assert rows == expected()


@pytest.mark.trap(31)
def test_postgres_has_every_value_and_other_arrays_as_json(jdbc_spark: Any, database: Any, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    options = {"url": jdbc_url(database.dsn)}
    zones = jdbc_spark._jvm.java.util.TimeZone
    before = zones.getDefault()
    zones.setDefault(zones.getTimeZone("Europe/Berlin"))
    try:
        write_all(started(jdbc_spark, format="jdbc", mode="upsert", table="mirror.{table}", options=options), source)
    finally:
        zones.setDefault(before)
    names = [column.name for column in ALL.columns]
    database.execute("set timezone = 'UTC'")
    found = database.execute(f"select {', '.join(names)} from mirror.all_types order by id")
    rows = [dict(zip(names, cells, strict=True)) for cells in found]
    for each in rows:
        each["moments"] = [text and datetime.fromisoformat(text) for text in json.loads(each["moments"])]
        each["zoneds"] = [text and datetime.fromisoformat(text) for text in json.loads(each["zoneds"])]
        each["zoned"] = each["zoned"].astimezone(UTC)
        each["prices"] = json.loads(each["prices"], parse_float=Decimal)
        each["reals"] = [None if cell is None else float(cell) for cell in json.loads(each["reals"])]
    assert rows == expected()


@pytest.mark.trap(31)
def test_times_that_only_text_can_hold_are_keys(delta_spark: Any, tmp_path: Path) -> None:
    shifts = replace(
        ORDERS,
        table_id=17_101,
        name="shifts",
        columns=(Column("begins", 1, TIME, identity=True, primary_key_position=1), Column("who", 2, TEXT)),
    )
    source = ScriptedSource(tmp_path / "segments")
    lake, checkpoint = str(tmp_path / "lake"), str(tmp_path / "checkpoint")
    destination = started(delta_spark, format="delta", mode="upsert", path=lake, checkpoint=checkpoint)
    late = Unrepresentable("24:00:00")
    copy(destination, source, shifts, [{"begins": late, "who": "a"}, {"begins": time(8), "who": "b"}])
    with source.transaction() as transaction:
        transaction.update(shifts, {"begins": late, "who": "c"})
        transaction.update(shifts, {"begins": time(9), "who": "d"}, old={"begins": time(8)})
    assert destination.write_events(source.batch()).result().tables[shifts.table_id].error is None
    frame = delta_spark.read.format("delta").load(f"{lake}/{FOLDERS.table(shifts)}")
    assert sorted(map(tuple, frame.select("who", "begins").collect())) == [("c", None), ("d", "09:00:00")]


@pytest.mark.trap(14)
def test_a_timestamp_may_be_added_to_a_table_that_has_none(delta_spark: Any, tmp_path: Path) -> None:
    source = ScriptedSource(tmp_path / "segments")
    lake, checkpoint = str(tmp_path / "lake"), str(tmp_path / "checkpoint")
    destination = started(delta_spark, format="delta", mode="upsert", path=lake, checkpoint=checkpoint)
    copy(destination, source, ORDERS, [{"id": 1, "note": "a", "due": None}])
    added = replace(ORDERS, columns=(*ORDERS.columns, Column("at", 9, TIMESTAMP), Column("clock", 10, TIME)))
    with source.transaction() as transaction:
        transaction.insert(added, {"id": 2, "note": "b", "due": None, "at": MOMENTS[0], "clock": time(1)})
    assert destination.write_events(source.batch()).result().tables[ORDERS.table_id].error is None
    frame = delta_spark.read.format("delta").load(f"{lake}/{FOLDERS.table(ORDERS)}")
    assert sorted(map(tuple, frame.select("id", "at", "clock").collect())) == [
        (1, None, None),
        (2, MOMENTS[0], "01:00:00"),
    ]
    # A copy replaces the columns, too.
    other = replace(ORDERS, table_id=17_102, name="other")
    copy(destination, source, other, [{"id": 1, "note": "a", "due": None}])
    wider = replace(added, table_id=17_102, name="other")
    destination.drop_table_for_copy(wider, "attempt-2")
    cells = {"id": 1, "note": "b", "due": None, "at": MOMENTS[0], "clock": None}
    destination.write_table_rows(wider, source.copy(wider, [cells], attempt="attempt-2"))
    frame = delta_spark.read.format("delta").load(f"{lake}/{FOLDERS.table(other)}")
    assert [tuple(each) for each in frame.select("id", "at").collect()] == [(1, MOMENTS[0])]
