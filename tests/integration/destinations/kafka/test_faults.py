"""What a consumer of committed records sees when brokers, processes or topics fail. Each change comes once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.destinations.kafka.client import Writer
from penstock.destinations.kafka.destination import KafkaDestination
from penstock.errors import DestinationUnavailable, LeaseLost, TableOwned
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import ITEMS, LINES, ORDERS
from tests.support.kafka import Kafka

SECONDS = 60


def order(number: int, note: str | None = "a note") -> dict[str, Any]:
    return {"id": number, "note": note, "due": None}


def copied(kafka: Kafka, source: ScriptedSource, *schemas: Any, **options: Any) -> KafkaDestination:
    destination = kafka.started(**options)
    for schema in schemas:
        rows = source.copy(schema, [])
        destination.drop_table_for_copy(schema, rows.attempt)
        destination.write_table_rows(schema, rows)
    return destination


def insert(source: ScriptedSource, schema: Any, *rows: dict[str, Any]) -> None:
    with source.transaction() as transaction:
        for row in rows:
            transaction.insert(schema, row)


def ids(kafka: Kafka, schema: Any = ORDERS) -> list[int]:
    return [event.value["after"]["id"] for event in kafka.events(kafka.topic(schema))]


def after_commit(error: KafkaException | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next commit happen and its answer get lost; without an error, let the process die before it."""
    commit = Writer._commit

    def lose(self: Writer, producer: Any) -> None:
        monkeypatch.undo()
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self, producer)
        assert error is not None
        raise error

    monkeypatch.setattr(Writer, "_commit", lose)


@pytest.mark.trap(28)
def test_a_commit_whose_answer_is_lost_counts_once(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = ScriptedSource(tmp_path)
    destination = copied(kafka, source, ORDERS)
    insert(source, ORDERS, order(1), order(2))
    batch = source.batch()
    lost = KafkaException(KafkaError(KafkaError._TIMED_OUT, "lost", retriable=True))
    after_commit(lost, monkeypatch)
    with pytest.raises(DestinationUnavailable):
        destination.write_events(batch).result(SECONDS)
    destination.write_events(batch).result(SECONDS)
    assert ids(kafka) == [1, 2]
    assert destination.position(ORDERS.table_id) == batch.end


@pytest.mark.trap(28)
def test_a_process_that_dies_before_its_commit_leaves_nothing(kafka: Kafka, tmp_path: Path):
    """It is killed with all messages and positions at the broker; its successor writes them again."""
    source = ScriptedSource(tmp_path)
    copied(kafka, source, ORDERS).shutdown()
    code = (
        "import sys, pytest\n"
        "from pathlib import Path\n"
        "from tests.integration.destinations.kafka import test_faults as t\n"
        "t.write_and_die(sys.argv[1], sys.argv[2], Path(sys.argv[3]))\n"
    )
    command = [sys.executable, "-c", code, kafka.servers, kafka.name, str(tmp_path / "again")]
    ended = subprocess.run(command, timeout=120, check=False, cwd=Path(__file__).parents[4])
    assert ended.returncode == -signal.SIGKILL
    insert(source, ORDERS, order(1), order(2))
    batch = source.batch()
    destination = kafka.started()
    assert destination.position(ORDERS.table_id) == batch.begin
    destination.write_events(batch).result(SECONDS)
    assert ids(kafka) == [1, 2]


def write_and_die(servers: str, name: str, folder: Path) -> None:
    """The process of the test above."""
    kafka, source = Kafka(servers, name), ScriptedSource(folder)
    destination = kafka.started()
    source.copy(ORDERS, [])
    insert(source, ORDERS, order(1), order(2))
    with pytest.MonkeyPatch.context() as patch:
        flush = Writer._commit

        def die(self: Writer, producer: Any) -> None:
            assert flush is not None
            assert producer.flush(SECONDS) == 0
            os.kill(os.getpid(), signal.SIGKILL)

        patch.setattr(Writer, "_commit", die)
        destination.write_events(source.batch()).result(SECONDS)


def test_a_process_that_lost_its_lease_writes_nothing(kafka: Kafka, tmp_path: Path):
    source = ScriptedSource(tmp_path)
    zombie = copied(kafka, source, ORDERS, ITEMS)
    successor = kafka.started(replace(make_context(), epoch=1))
    insert(source, ORDERS, order(1))
    batch = source.batch()
    successor.write_events(batch).result(SECONDS)
    with pytest.raises(DestinationUnavailable):
        zombie.write_events(batch).result(SECONDS)
    insert(source, ITEMS, order(1))
    items = source.batch()
    for stale in (batch, items, items):
        with pytest.raises(LeaseLost):
            zombie.write_events(stale).result(SECONDS)
    insert(source, ORDERS, order(2))
    # The zombie has fenced the successor while it found out; the successor goes on.
    with pytest.raises(DestinationUnavailable):
        successor.write_events(source.batch()).result(SECONDS)
    successor.write_events(source.batch()).result(SECONDS)
    with pytest.raises(LeaseLost):
        kafka.started()
    assert ids(kafka) == [1, 2]
    assert ids(kafka, ITEMS) == []


def test_a_message_that_is_too_large_stops_its_table_only(kafka: Kafka, tmp_path: Path):
    source = ScriptedSource(tmp_path)
    destination = copied(
        kafka, source, ORDERS, ITEMS, topic_config={"max.message.bytes": "20000"}, client={"compression.type": "none"}
    )
    insert(source, ORDERS, order(1))
    insert(source, ITEMS, order(1), order(2, "x" * 30_000))
    insert(source, ORDERS, order(2))
    batch = source.batch()
    result = destination.write_events(batch).result(SECONDS)
    error = result.of(ITEMS.table_id).error
    assert error is not None
    assert "larger than the topic allows" in str(error)
    assert str(ITEMS) in str(error)
    assert result.of(ORDERS.table_id).error is None
    assert ids(kafka) == [1, 2]
    assert ids(kafka, ITEMS) == []
    assert destination.position(ITEMS.table_id) == batch.begin


def test_a_topic_that_is_deleted_needs_a_new_copy(kafka: Kafka, tmp_path: Path):
    source = ScriptedSource(tmp_path)
    copied(kafka, source, ORDERS, ITEMS).shutdown()
    deleted = kafka.topic(ORDERS)
    kafka.cluster.admin().delete_topics([deleted])[deleted].result(SECONDS)
    destination = kafka.started()
    assert destination.position(ORDERS.table_id) is None
    insert(source, ORDERS, order(1))
    insert(source, ITEMS, order(1))
    result = destination.write_events(source.batch()).result(SECONDS)
    assert "no complete copy" in str(result.of(ORDERS.table_id).error)
    assert ids(kafka, ITEMS) == [1]
    rows = source.copy(ORDERS, [order(1)], attempt="attempt-2")
    destination.drop_table_for_copy(ORDERS, "attempt-2")
    destination.write_table_rows(ORDERS, rows)
    assert ids(kafka) == [1]


@pytest.mark.soak
def test_a_topic_that_is_deleted_meanwhile_stops_its_table_only(kafka: Kafka, tmp_path: Path):
    source = ScriptedSource(tmp_path)
    destination = copied(kafka, source, ORDERS, ITEMS)
    deleted = kafka.topic(ORDERS)
    kafka.cluster.admin().delete_topics([deleted])[deleted].result(SECONDS)
    insert(source, ORDERS, order(1))
    insert(source, ITEMS, order(1))
    result = destination.write_events(source.batch()).result(SECONDS)
    assert "no complete copy" in str(result.of(ORDERS.table_id).error)
    assert ids(kafka, ITEMS) == [1]


def test_two_pipelines_never_share_a_topic(kafka: Kafka, tmp_path: Path):
    """Both claim it at the same time; the first claim counts."""
    destinations = [kafka.started(make_context(name)) for name in ("one", "two")]
    found: list[BaseException | None] = [None, None]

    def claim(number: int) -> None:
        try:
            rows = ScriptedSource(tmp_path / str(number)).copy(ORDERS, [order(number)])
            destinations[number].drop_table_for_copy(ORDERS, rows.attempt)
            destinations[number].write_table_rows(ORDERS, rows)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=claim, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert [type(each) for each in found].count(TableOwned) == 1, found


def test_a_broker_that_restarts_loses_and_doubles_nothing(make_kafka: Any, tmp_path: Path):
    server = make_kafka()
    kafka = Kafka(server.bootstrap_servers, "test")
    source = ScriptedSource(tmp_path)
    destination = copied(kafka, source, ORDERS, LINES)
    written: list[int] = []
    failures = 0
    for number in range(3):
        insert(source, ORDERS, order(number))
        batch = source.batch()
        if number == 1:
            server.kill()
            threading.Thread(target=server.start).start()
        while True:
            try:
                destination.write_events(batch).result(SECONDS)
                break
            except DestinationUnavailable:
                failures += 1
                assert failures < 20
        written.append(number)
    assert ids(kafka) == written
    assert kafka.rows(LINES) == []
