"""The options of the Kafka destination, and what they do to messages, on a real broker."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.changes.events import Unchanged
from penstock.destinations.registry import create_destination
from penstock.errors import ConfigError, DestinationUnavailable
from penstock.schema import Column
from penstock.testing.destinations import ScriptedSource
from penstock.testing.destinations.contract import INT8, ITEMS, LINES, ORDERS
from penstock.testing.server import free_port
from tests.support.kafka import AvroDecoder, Kafka, read_topic


def order(number: int, note: Any = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def life(kafka: Kafka, source: ScriptedSource, **options: Any) -> None:
    """Copy two tables; insert, change and delete rows; truncate one; copy it again."""
    destination = kafka.started(**options)
    for schema in (ORDERS, ITEMS):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, [order(1)]))
    with source.transaction() as transaction:
        transaction.insert(ORDERS, order(2))
        transaction.insert(ITEMS, order(2))
        transaction.update(ORDERS, order(2, Unchanged))
        transaction.delete(ORDERS, {"id": 1})
        transaction.truncate(ITEMS)
    destination.write_events(source.batch()).result(60)
    destination.drop_table_for_copy(ORDERS, "attempt-2")
    destination.write_table_rows(ORDERS, source.copy(ORDERS, [order(2)], attempt="attempt-2"))
    destination.shutdown()


def test_one_topic_has_all_tables_in_the_order_of_the_changes_of_each(kafka: Kafka, tmp_path: Path):
    life(kafka, ScriptedSource(tmp_path), topic=f"{kafka.name}-all", topic_prefix=None)
    events = kafka.events(f"{kafka.name}-all")
    shown = {
        table: [event.value["op"] for event in events if event.value and event.value["source"]["table"] == table]
        for table in ("orders", "Order items")
    }
    assert shown == {"orders": ["r", "c", "u", "d", "t", "r"], "Order items": ["r", "c", "t"]}


def test_flat_messages_are_rows(kafka: Kafka, tmp_path: Path):
    options = {"tombstones": False, "truncates": False, "unavailable_value": "?"}
    life(kafka, ScriptedSource(tmp_path), envelope="flat", **options)
    values = [event.value for event in kafka.events(kafka.topic(ORDERS))]
    row = {"id": 2, "note": "a note", "due": None}
    assert [(each["__op"], each["__deleted"]) for each in values] == [
        ("r", "false"),
        ("c", "false"),
        ("u", "false"),
        ("d", "true"),
        ("t", "false"),
        ("r", "false"),
    ]
    assert {name: values[1][name] for name in row} == row
    assert values[2]["note"] == "?"
    assert [each["__op"] for each in (event.value for event in kafka.events(kafka.topic(ITEMS)))] == ["r", "c"]


def test_changes_of_a_key_stay_in_order_in_several_partitions(kafka: Kafka, tmp_path: Path):
    """A table without a key has one partition, because its rows have no order otherwise."""
    source, destination = ScriptedSource(tmp_path), kafka.started(partitions=3)
    for schema in (ORDERS, LINES):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, []))
    with source.transaction() as transaction:
        for number in range(30):
            transaction.insert(ORDERS, order(number))
            transaction.insert(LINES, {"level": number, "line": ""})
        for number in range(30):
            transaction.update(ORDERS, order(number, "new"))
    destination.write_events(source.batch()).result(60)
    events = kafka.events(kafka.topic(ORDERS))
    assert len({event.partition for event in events}) == 3
    for number in range(30):
        assert [event.value["op"] for event in events if event.key == {"id": number}] == ["c", "u"]
    lines = kafka.events(kafka.topic(LINES))
    assert len({event.partition for event in lines}) == 1
    assert [event.value["after"]["level"] for event in lines] == list(range(30))


@pytest.mark.parametrize("envelope", ["debezium", "flat"])
def test_avro_has_the_same_events_and_new_schemas_when_columns_change(
    kafka: Kafka, schema_registry: str, tmp_path: Path, envelope: str
):
    kafka.decode = AvroDecoder(schema_registry)
    options = {"format": "avro", "schema_registry": schema_registry, "envelope": envelope}
    kafka.open(**options).probe()
    source = ScriptedSource(tmp_path)
    life(kafka, source, **options)
    added = replace(ORDERS, columns=(*ORDERS.columns, Column("amount", 4, INT8)))
    with source.transaction() as transaction:
        transaction.insert(added, order(3) | {"amount": 30})
        transaction.update(added, order(4, Unchanged) | {"amount": 40}, old={"id": 3})
    destination = kafka.started(**options)
    destination.write_events(source.batch()).result(60)
    destination.shutdown()
    values = [event.value for event in kafka.events(kafka.topic(ORDERS)) if event.value is not None]
    if envelope == "flat":
        assert [each["__op"] for each in values] == ["r", "c", "u", "d", "t", "r", "c", "d", "c"]
        assert (values[-1]["amount"], values[-1]["note"], values[-2]["__deleted"]) == (
            40,
            "__debezium_unavailable_value",
            "true",
        )
        return
    assert [each["op"] for each in values] == ["r", "c", "u", "d", "t", "r", "c", "d", "c"]
    assert values[2]["after"]["note"] == "__debezium_unavailable_value"
    assert values[-1]["after"] == order(4, "__debezium_unavailable_value") | {"amount": 40}
    assert kafka.rows(added) == [order(2) | {"amount": None}, order(4) | {"amount": 40}]


def test_a_registry_that_is_away_makes_all_tables_wait(kafka: Kafka, tmp_path: Path):
    away = f"http://127.0.0.1:{free_port()}"
    destination = kafka.started(format="avro", schema_registry=away)
    destination.drop_table_for_copy(ORDERS, "attempt-1")
    with pytest.raises(DestinationUnavailable):
        destination.write_table_rows(ORDERS, ScriptedSource(tmp_path).copy(ORDERS, []))


def test_a_probe_leaves_no_record(kafka: Kafka):
    kafka.open().probe()
    assert list(read_topic(kafka.cluster, kafka.control_topic)) == []
    away = kafka.open()
    object.__setattr__(away._cluster, "servers", f"127.0.0.1:{free_port()}")
    object.__setattr__(away._cluster, "answer_seconds", 1.0)
    with pytest.raises(DestinationUnavailable):
        away.probe()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bootstrap_servers": "kafka://a b"}, "bootstrap_servers"),
        ({"format": "xml"}, "unknown format"),
        ({"envelope": "none"}, "unknown envelope"),
        ({"topic": "a b"}, "cannot be a topic"),
        ({"topic": "a", "topic_prefix": "b"}, "exclude each other"),
        ({"partitions": 0}, "partitions"),
        ({"transaction_timeout": 0}, "transaction_timeout"),
        ({"client": {"transactional.id": "mine"}}, "cannot be set"),
        ({"client_env": {"sasl.password": "PENSTOCK_NO_SUCH_VARIABLE"}}, "PENSTOCK_NO_SUCH_VARIABLE"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        create_destination("kafka", {"bootstrap_servers": "localhost:9092", **options})


def test_secrets_are_not_printed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KAFKA_PASSWORD", "s3cret")
    options = {"bootstrap_servers": "localhost:9092", "client_env": {"sasl.password": "KAFKA_PASSWORD"}}
    destination: Any = create_destination("kafka", options)
    assert "s3cret" not in repr(vars(destination))
    assert "s3cret" in json.dumps(destination._cluster.settings)
