"""The http destination against a real server in this process: the contract, retries, and what never leaves."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.base import Destination
from penstock.destinations.http import HttpDestination
from penstock.errors import ConfigError, DestinationUnavailable, PenstockError, Retry
from penstock.schema import TableSchema
from penstock.testing.destinations import DestinationContract, ScriptedSource, make_context
from penstock.testing.destinations.contract import LINES, ORDERS
from tests.unit.destinations.receiver import Receiver


class HttpHarness:
    def __init__(self, receiver: Receiver, format_: str) -> None:
        self.receiver = receiver
        self.format = format_

    def open(self) -> Destination:
        return HttpDestination(self.receiver.url, format=self.format, records_position=True, retry_seconds=5)

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        return self.receiver.rows(schema)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class TestHttpWithArrow(DestinationContract):
    @pytest.fixture
    def harness(self, receiver: Receiver) -> HttpHarness:
        return HttpHarness(receiver, "arrow")


class TestHttpWithLines(DestinationContract):
    @pytest.fixture
    def harness(self, receiver: Receiver) -> HttpHarness:
        return HttpHarness(receiver, "ndjson")


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")


def started(receiver: Receiver, **options: Any) -> HttpDestination:
    destination = HttpDestination(receiver.url, **{"retry_seconds": 5.0, **options})
    destination.startup(make_context())
    return destination


def copy(destination: HttpDestination, source: ScriptedSource, rows: list[Any]) -> None:
    destination.drop_table_for_copy(LINES, "attempt-1")
    destination.write_table_rows(LINES, source.copy(LINES, rows, ranges=2))


def write_line(source: ScriptedSource, number: int) -> None:
    with source.transaction() as transaction:
        transaction.insert(LINES, {"level": number, "line": "secret cell"})


@pytest.mark.parametrize("fault", [429, 500, 503, "cut", "after"])
def test_passing_troubles_are_tried_again_with_the_same_key(
    receiver: Receiver, source: ScriptedSource, fault: int | str
) -> None:
    destination = started(receiver)
    copy(destination, source, [])
    write_line(source, 1)
    receiver.requests.clear()
    receiver.faults = [fault, fault]
    assert destination.write_events(source.batch()).result().tables == {}
    assert len(receiver.requests) == 3
    assert len({request.headers["Idempotency-Key"] for request in receiver.requests}) == 1
    assert len({request.body for request in receiver.requests}) == 1
    assert receiver.rows(LINES) == [{"level": 1, "line": "secret cell"}]


def test_the_key_names_pipeline_table_begin_and_end(receiver: Receiver, source: ScriptedSource) -> None:
    destination = started(receiver)
    copy(destination, source, [])
    write_line(source, 1)
    batch = source.batch()
    destination.write_events(batch)
    request = receiver.requests[-1]
    key = request.headers["Idempotency-Key"]
    for part in ("contract/", "/tables/audit/lines/", f"{batch.begin}-{batch.end}"):
        assert part in key
    assert request.headers["Penstock-Begin"] == str(batch.begin)
    assert request.headers["Penstock-End"] == str(batch.end)


@pytest.mark.trap(20)
def test_parts_of_a_copy_are_named_by_attempt_range_and_index(receiver: Receiver, source: ScriptedSource) -> None:
    copy(started(receiver), source, [{"level": 1, "line": "same"}] * 4)
    paths = [request.path for request in receiver.requests if "/parts/" in request.path]
    assert paths == [f"/api/tables/audit/lines/copies/attempt-1/parts/{index}-0" for index in range(2)]


def test_a_receiver_that_stays_away_is_an_error_that_is_tried_again(receiver: Receiver, source: ScriptedSource) -> None:
    destination = started(receiver, retry_seconds=0.3)
    copy(destination, source, [])
    write_line(source, 1)
    receiver.faults = [503] * 20
    with pytest.raises(DestinationUnavailable, match="503") as caught:
        destination.write_events(source.batch()).result()
    assert caught.value.retry is Retry.TIMED


def test_what_the_receiver_asks_for_in_retry_after_is_waited(receiver: Receiver, source: ScriptedSource) -> None:
    destination = started(receiver, retry_seconds=0.9)
    receiver.retry_after = "1"
    receiver.faults = [429]
    with pytest.raises(PenstockError, match="429") as caught:
        destination.drop_table_for_copy(ORDERS, "attempt-1")
    assert caught.value.retry is Retry.TIMED


@pytest.mark.trap(33)
@pytest.mark.parametrize("status", [400, 404, 422, 302])
def test_a_rejected_table_stops_alone_and_is_not_tried_again(
    receiver: Receiver, source: ScriptedSource, status: int
) -> None:
    destination = started(receiver)
    copy(destination, source, [])
    write_line(source, 1)
    receiver.requests.clear()
    receiver.faults = [status]
    error = destination.write_events(source.batch()).result().of(LINES.table_id).error
    assert isinstance(error, PenstockError)
    assert error.retry is Retry.OPERATOR
    assert str(status) in error.message
    assert len(receiver.requests) == 1


def test_credentials_come_from_the_environment_and_are_never_shown(
    receiver: Receiver, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RECEIVER_TOKEN", "hunter2")
    caplog.set_level(logging.DEBUG)
    destination = started(receiver, auth_env="RECEIVER_TOKEN", retry_seconds=0.5, headers={"X-Team": "data"})
    assert receiver.requests[-1].headers["Authorization"] == "Bearer hunter2"
    assert receiver.requests[-1].headers["X-Team"] == "data"
    receiver.faults = [503, 401]
    with pytest.raises(ConfigError, match="credentials") as caught:
        copy(destination, source, [])
    shown = f"{caplog.text}{caught.value!r}{caught.value.hint}{vars(destination)}"
    assert "hunter2" not in shown
    assert "Secret(…)" in repr(vars(destination))


def test_values_appear_neither_in_logs_nor_in_errors(
    receiver: Receiver, source: ScriptedSource, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    destination = started(receiver)
    copy(destination, source, [])
    write_line(source, 1)
    receiver.faults = [503, 400]
    error = destination.write_events(source.batch()).result().of(LINES.table_id).error
    assert "secret cell" not in f"{caplog.text}{error!r}"


def test_the_receiver_can_refuse_a_pipeline(receiver: Receiver) -> None:
    receiver.faults = [409]
    with pytest.raises(ConfigError, match="refused pipeline 'contract'"):
        started(receiver)


def test_a_receiver_that_does_not_say_positions_is_refused_when_it_should(receiver: Receiver) -> None:
    receiver._start = lambda record: (204, None)
    with pytest.raises(ConfigError, match="records_position"):
        started(receiver, records_position=True)
    assert started(receiver).position(LINES.table_id) is None


def test_what_cannot_work_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECEIVER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="http://"):
        HttpDestination("ftp://host")
    with pytest.raises(ConfigError, match="credentials") as caught:
        HttpDestination("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="format"):
        HttpDestination("http://host", format="xml")
    with pytest.raises(ConfigError, match="RECEIVER_TOKEN"):
        HttpDestination("http://host", auth_env="RECEIVER_TOKEN")


def test_nobody_there_is_an_error_that_is_tried_again() -> None:
    destination = HttpDestination("http://127.0.0.1:9", retry_seconds=0.1)
    with pytest.raises(PenstockError, match="unreachable") as caught:
        destination.startup(make_context())
    assert caught.value.retry is Retry.TIMED
    assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message
