"""A search server that is busy, away, killed in the middle of a bulk, or that says no: nothing is lost, all is told."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import DestinationRefused, DestinationUnavailable
from penstock.sinks.opensearch import OpenSearchSink, bulk
from penstock.sinks.opensearch.bulk import BulkResult, read_answer
from penstock.testing.opensearch import OpenSearchServer
from penstock.testing.server import free_port
from tests.integration.documents.opensearch.conftest import Looker, batch_of, mapping_of, write


@pytest.fixture
def server(pressed: OpenSearchServer) -> OpenSearchServer:
    return pressed.start()


def sink_on(server: OpenSearchServer, index: str, **options: Any) -> OpenSearchSink:
    sink = OpenSearchSink(server.url, replicas=0, **options)
    sink.ensure_index(mapping_of(index))
    sink.mark_seeded(index)
    return sink


def rejected_by_the_queue(server: OpenSearchServer) -> int:
    [node] = server.request("GET", "/_nodes/stats/thread_pool")["nodes"].values()
    return int(node["thread_pool"]["write"]["rejected"])


@pytest.mark.trap(46)
@pytest.mark.parametrize("on", [True, False], ids=["with", "without"])
def test_in_a_storm_of_429_every_document_arrives_and_none_is_refused(
    server: OpenSearchServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    name = f"storm-{on}".lower()
    sinks = [sink_on(server, name, shards=8, bulk_documents=200)]
    sinks += [OpenSearchSink(server.url, replicas=0, bulk_documents=200) for _ in range(3)]
    before = rejected_by_the_queue(server)
    refused: list[Any] = []

    def send(sink: OpenSearchSink, part: int) -> None:
        sink.ensure_index(mapping_of(name))
        refused.extend(write(sink, name, {f"{part}-{number}": {"n": number} for number in range(2000)}))

    if not on:
        monkeypatch.setattr(bulk, "read_answer", _refuse_busy)
    threads = [threading.Thread(target=send, args=(sink, part)) for part, sink in enumerate(sinks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(240)
    assert rejected_by_the_queue(server) > before, "there was a storm"
    assert bool(refused) is not on
    assert sinks[0].count(name) == 8000 - len(refused)
    if on:
        assert any("429" in record.getMessage() for record in caplog.records), "and somebody can see it"
    for sink in sinks:
        sink.close()


def _refuse_busy(*arguments: Any) -> BulkResult:
    verdict = read_answer(*arguments)
    return replace(verdict, again=(), refused=verdict.refused + tuple((place, verdict.busy) for place in verdict.again))


def test_a_server_killed_in_the_middle_of_bulks_comes_back_with_what_was_flushed_and_takes_the_rest(
    server: OpenSearchServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    flushed = sink_on(server, "durable")
    write(flushed, "durable", {"a": {"n": 1}, "b": {"n": 1}}, 1)
    write(flushed, "durable", {"b": None}, 2)
    sink = sink_on(server, "killed", bulk_documents=50, retry_seconds=290)
    taken = threading.Event()
    refused: list[Any] = []

    def send() -> None:
        for part in range(40):
            refused.extend(
                write(sink, "killed", {f"{part}-{number}": {"n": number} for number in range(250)}, part + 1)
            )
            if part == 5:
                taken.set()

    sender = threading.Thread(target=send)
    sender.start()
    assert taken.wait(120)
    server.kill()
    server.start()
    sender.join(240)
    assert not sender.is_alive()
    assert refused == []
    assert sink.count("killed") == 10_000
    assert any("busy or unavailable" in record.getMessage() for record in caplog.records), "it was away meanwhile"
    assert Looker(server, "durable").stored() == {"a": {"n": 1}}
    again = OpenSearchSink(server.url, replicas=0)
    again.ensure_index(mapping_of("durable"))
    assert flushed.is_seeded("durable")
    assert again.is_seeded("durable")
    for each in (sink, flushed, again):
        each.close()


def test_a_request_that_is_too_large_is_halved_until_it_fits(server: OpenSearchServer) -> None:
    sink = sink_on(server, "large")
    documents: dict[str, Any] = {str(number): {"text": "x" * 300_000} for number in range(6)}
    documents["enormous"] = {"text": "x" * 1_200_000}
    assert write(sink, "large", documents) == [("enormous", "the document exceeds the server's limit for a request")]
    assert sink.count("large") == 6
    sink.close()


def test_a_server_that_stays_away_ends_in_an_error_that_is_tried_again() -> None:
    sink = OpenSearchSink(f"http://127.0.0.1:{free_port()}", retry_seconds=0.5, user="me", password="topsecret")
    with pytest.raises(DestinationUnavailable) as caught:
        sink.ensure_index(mapping_of("away"))
    assert "topsecret" not in str(caught.value)
    assert caught.value.hint
    sink.close()


class Teller(threading.Thread):
    """Answers every request on a socket with the same bytes: a gateway in front of a search server."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.requests: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.requests.append(connection.recv(65536))
                connection.sendall(self._answer)

    def __enter__(self) -> Teller:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join(10)


def answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def test_a_wrong_password_is_told_and_not_tried_again() -> None:
    with Teller(answer("401 Unauthorized", "Authentication finally failed")) as gateway:
        sink = OpenSearchSink(gateway.url, user="me", password="topsecret")
        with pytest.raises(DestinationRefused, match="401") as caught:
            sink.ensure_index(mapping_of("people"))
        sink.close()
    assert "topsecret" not in str(caught.value)
    assert len(gateway.requests) == 1
    assert b"authorization: basic bwu6dg9wc2vjcmv0" in gateway.requests[0].lower()


def test_a_full_disk_is_waited_for_and_not_taken_for_a_lack_of_rights() -> None:
    body = '{"error": {"type": "cluster_block_exception", "reason": "index [people] blocked"}, "status": 403}'
    with Teller(answer("403 Forbidden", body)) as gateway:
        sink = OpenSearchSink(gateway.url, retry_seconds=0.5)
        with pytest.raises(DestinationUnavailable, match="cluster_block_exception"):
            sink.ensure_index(mapping_of("people"))
        sink.close()
    assert len(gateway.requests) > 1


def test_something_else_at_the_address_is_told() -> None:
    with Teller(answer("405 Method Not Allowed", "<html>hello</html>")) as page:
        sink = OpenSearchSink(page.url)
        with pytest.raises(Exception, match="answered 405") as caught:
            sink.ensure_index(mapping_of("people"))
        sink.close()
    assert "OpenSearch" in caught.value.hint  # type: ignore[attr-defined]


def test_documents_for_nobody_are_not_lost_in_silence() -> None:
    sink = OpenSearchSink("http://127.0.0.1:1")
    sink.write(batch_of("people", {"a": {"n": 1}}))
    with pytest.raises(Exception, match="before ensure_index"):
        sink.flush(False)
