"""Whole pipelines into a real broker, and what a consumer of committed records makes of the topics."""

from __future__ import annotations

import json
import os
from typing import Any

import psycopg
import pytest

from penstock.source.connections import PINNED_PARAMETERS
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings
from tests.e2e.support import Alone, tables_alone, tables_settings
from tests.e2e.test_delta import wait_applied, wait_ready
from tests.e2e.test_types import Compared, differences
from tests.support import type_matrix
from tests.support.kafka import AvroDecoder, Kafka, KafkaReadBack
from tests.support.planned_tables import Size
from tests.support.trial import TrialSettings, run_trial, run_trials
from tests.support.type_matrix import WIDE, key_tables
from tests.support.workload import Ddl

SOAK_TRIALS = int(os.environ.get("PENSTOCK_SOAK_TRIALS", "20"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "7000"))
SIZE = Size(tables=6, columns=8, sessions=3, initial_rows=40)


def pipeline_into(database: Any, folder: Any, kafka: Kafka, *, max_rows: int = 500, **options: Any) -> Alone:
    settings = tables_settings(database, folder, batches=BatchSettings(interval=0.1, max_rows=max_rows))
    return tables_alone(settings, MemoryStore("e2e"), kafka.open(**options), LocalTasks())


@pytest.mark.timeout(400)
@pytest.mark.trap(3, 19, 20, 28, 34, 35, 38)
def test_whoever_is_killed_each_change_comes_once(kafka_server, make_server, tmp_path):
    """The consumer fails if a change comes twice or out of order; its rows equal the source."""
    settings = TrialSettings(71, kills=4, destination="kafka", options={"bootstrap_servers": kafka_server}, size=SIZE)
    report = run_trial(settings, tmp_path, server=make_server())
    assert report.starts > 1


@pytest.mark.soak
@pytest.mark.timeout(SOAK_TRIALS * 300)
def test_soak_trials(kafka_server, tmp_path, record_testsuite_property):
    trials = [
        TrialSettings(
            SOAK_SEED + number,
            kills=5,
            destination="kafka",
            options={"bootstrap_servers": kafka_server},
            ddl=(Ddl.NONE, Ddl.ANY)[number % 2],
        )
        for number in range(SOAK_TRIALS)
    ]
    run_trials(trials, tmp_path, record_testsuite_property)


@pytest.mark.timeout(600)
@pytest.mark.trap(31)
@pytest.mark.parametrize("form", ["json", pytest.param("avro", marks=pytest.mark.soak)])
def test_every_value_of_every_type_arrives(database, kafka, form, request, tmp_path):
    more, decode = {}, json.loads
    if form == "avro":
        registry = request.getfixturevalue("schema_registry")
        more, decode = {"format": "avro", "schema_registry": registry}, AvroDecoder(registry)
    with database.connect() as connection:
        cases = type_matrix.create(connection)
    tables = [*WIDE, *(keyed.name for keyed in key_tables(cases))]
    with pipeline_into(
        database, tmp_path, kafka, max_rows=5_000, topic_config={"max.message.bytes": "100000000"}, **more
    ) as pipeline:
        wait_ready(pipeline, len(tables))
        with database.connect() as connection:
            type_matrix.change(connection, cases)
        wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    found = KafkaReadBack(kafka.servers, kafka.control_topic, "e2e", decode)
    options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
    with psycopg.connect(database.dsn, autocommit=True, options=options) as server:
        compared = {("kafka", table): Compared(server, found, table) for table in tables}
        assert list(differences(cases, compared)) == []


def test_events_look_like_those_of_debezium(database, kafka, tmp_path):
    """A life of a row: copied, inserted, updated, its key changed, deleted, truncated."""
    with database.connect() as connection:
        connection.execute("create table orders (id int primary key, note text, body text)")
        connection.execute("alter table orders alter column body set storage external")
        connection.execute("insert into orders values (1, 'copied', repeat('x', 9000))")
    with pipeline_into(database, tmp_path, kafka) as pipeline:
        wait_ready(pipeline, 1)
        with database.connect() as connection:
            connection.execute("update orders set note = 'new' where id = 1")
            connection.execute("update orders set id = 2 where id = 1")
            connection.execute("delete from orders")
            connection.execute("truncate orders")
        wait_applied(pipeline, database)
    events = kafka.events(f"{kafka.name}.public.orders")
    shown = [(event.value and event.value["op"], event.key) for event in events]
    one, two = {"id": 1}, {"id": 2}
    assert shown == [
        ("r", one),
        ("u", one),
        *(("d", one), (None, one), ("c", two)),
        *(("d", two), (None, two)),
        ("t", None),
    ]
    copied, updated = events[0].value, events[1].value
    assert copied["after"] == {"id": 1, "note": "copied", "body": "x" * 9000}
    assert (copied["before"], copied["source"]["snapshot"]) == (None, "true")
    assert updated["after"] == {"id": 1, "note": "new", "body": "__debezium_unavailable_value"}
    assert events[2].value["before"] == {"id": 1, "note": None, "body": None}
    source = updated["source"]
    assert (source["connector"], source["schema"], source["table"]) == ("postgresql", "public", "orders")
    assert source["ts_us"] // 1000 == source["ts_ms"]
    assert json.loads(source["sequence"])[0] == str(source["lsn"])
