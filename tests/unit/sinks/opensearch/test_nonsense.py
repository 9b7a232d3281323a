"""A server, or something in front of it, that answers nonsense for a while: nothing is lost, and nothing ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from penstock.documents.base import DOCUMENT_SCHEMA
from penstock.documents.mapping import IndexMapping, index_mapping
from penstock.errors import DestinationError, DestinationUnavailable, IndexUnusable
from penstock.sinks.opensearch import OpenSearchSink
from penstock.sinks.opensearch.bulk import BulkSender, Target
from penstock.sinks.opensearch.client import Answer, OpenSearchClient, OpenSearchSettings, RetryLimit, Transient
from penstock.sinks.opensearch.sink import Targets
from penstock.specification import parse_specification

SETTINGS = OpenSearchSettings("http://127.0.0.1:1", bulk_documents=2)
TARGET = Target("people", "people_aa_1", "people_aa_1_WRITE")
HTML = Answer(200, b"<html>we will be back soon</html>")


def documents(count: int) -> pa.Table:
    ids = [str(number) for number in range(count)]
    return pa.table([["people"] * count, ids, [1] * count, ["{}"] * count], schema=DOCUMENT_SCHEMA)


def taken(count: int) -> Answer:
    return answer({"errors": False, "items": [{"index": {"status": 201}}] * count})


def answer(said: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(said).encode())


class Scripted(OpenSearchClient):
    """Gives these answers, one after the other."""

    def __init__(self, answers: Sequence[Answer | Callable[[], Answer]]) -> None:
        super().__init__(SETTINGS)
        self._answers = list(answers)
        self.requests: list[str] = []
        self.bodies: list[Any] = []

    def try_once(self, method: str, path: str, body: Any = None, *, lines: bool = False) -> Answer:
        self.requests.append(f"{method} {path.partition('?')[0]}")
        self.bodies.append(body)
        found = self._answers.pop(0)
        return found() if callable(found) else found


@pytest.mark.trap(46)
@pytest.mark.parametrize(
    "nonsense",
    [
        HTML,
        Answer(404, b"<html>no such page</html>"),
        answer({}),
        answer({"error": "an upstream failed"}),
        answer({"errors": False, "items": [{"index": {"status": 201}}]}),
    ],
    ids=["HTML", "404", "{}", "error object", "short list"],
)
def test_documents_are_sent_again_until_an_answer_names_each_of_them(nonsense: Answer) -> None:
    client = Scripted([nonsense, taken(2), nonsense, taken(2)])
    assert BulkSender(client, SETTINGS).send(TARGET, documents(4), RetryLimit(60)) == []
    assert len(client.requests) == 4


@pytest.mark.trap(45)
def test_all_pieces_of_a_build_share_one_limit() -> None:
    limit = RetryLimit(0.4)

    def late() -> Answer:
        limit.started = time.monotonic() - 0.5
        return taken(2)

    client = Scripted([HTML, late, HTML, taken(2)])
    with pytest.raises(DestinationUnavailable, match="has not accepted documents"):
        BulkSender(client, SETTINGS).send(TARGET, documents(4), limit)
    assert len(client.requests) == 3, "the second piece has no time left"


def test_a_run_that_stops_does_not_wait_for_a_server_that_is_away() -> None:
    mapping = index_mapping(parse_specification("version: 1\ntable: t\nfields: [{text: n}]", "people"))
    stop, asked = threading.Event(), threading.Event()

    def refused() -> Answer:
        if asked.is_set():
            stop.set()
        asked.set()
        raise Transient("nobody listens")

    sink = OpenSearchSink("http://127.0.0.1:1", retry_seconds=300)
    sink.retry_until(stop)
    client = Scripted([refused] * 10)
    client._stop, sink._client_ = stop, client
    with pytest.raises(DestinationUnavailable, match="nobody listens"):
        sink.ensure_index(mapping)
    assert len(client.requests) == 2
    for one in (sink, OpenSearchSink.of(sink.settings, {"people": Targets(TARGET)})):
        one.retry_until(stop)
        one._targets = {"people": Targets(TARGET)}
        for each in (one, one.filling("people")):
            each.write(documents(1))
            with pytest.raises(DestinationUnavailable, match="has not accepted documents"):
                each.flush(False)


GENERATION = "people_aa11_20260101000000"
SERVED = {
    GENERATION: {
        "aliases": {"people": {}, f"{GENERATION}_WRITE": {}},
        "mappings": {"_meta": {"penstock": {"index": "people", "fingerprint": "aa11", "seeded": "u1"}}},
        "settings": {"index": {"uuid": "u1"}},
    }
}
ABSENT = answer({"error": {"type": "index_not_found_exception"}, "status": 404}, 404)


def looking(*answers: Answer) -> OpenSearchSink:
    """A sink that knows its index, and whose periodic look gets these answers."""
    sink = OpenSearchSink("http://127.0.0.1:1")
    sink._client_ = Scripted([answer(SERVED), answer(SERVED), answer({"acknowledged": True}), *answers])
    sink.ensure_index(IndexMapping("people", "aa11", {"properties": {}}, {}))
    assert sink.is_seeded("people")
    return sink


@pytest.mark.parametrize("nonsense", [HTML, Answer(404, b"not here"), answer({}, 404)], ids=["HTML", "404", "empty"])
def test_a_look_at_the_index_that_is_answered_with_nonsense_is_repeated(nonsense: Answer) -> None:
    sink = looking(nonsense, answer(SERVED), answer({}))
    sink.flush(True)
    assert sink._client.requests[-1] == f"POST /{GENERATION}_WRITE/_refresh"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "nonsense", [answer({}), answer({"error": "an upstream failed"}), answer({"acknowledged": False})]
)
def test_a_change_of_an_index_is_repeated_until_it_is_acknowledged(nonsense: Answer) -> None:
    done = answer({"acknowledged": True})
    client = Scripted([nonsense, done, nonsense, done, nonsense, done])
    client.expect("PUT", "/people_aa_1", {})
    client.expect("POST", "/_aliases", {})
    client.expect("DELETE", "/people_aa_1", allowed=(404,))
    assert len(client.requests) == 6


def test_an_error_in_place_of_indexes_is_not_their_state() -> None:
    sink = looking(answer({"error": "an upstream failed"}), answer(SERVED), answer({}))
    sink.flush(True)
    looks = ["GET /people,people_*"] * 2
    assert sink._client.requests[-3:-1] == looks, "the answer is asked for again"  # type: ignore[attr-defined]


def test_a_generation_whose_creation_was_not_answered_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.sinks.opensearch.sink.new_generation", lambda *_: GENERATION)
    made = {GENERATION: {**SERVED[GENERATION], "aliases": {f"{GENERATION}_WRITE": {}}}}
    exists = answer({"error": {"type": "resource_already_exists_exception"}, "status": 400}, 400)
    mapping = IndexMapping("people", "aa11", {"properties": {}}, {})
    sink = OpenSearchSink("http://127.0.0.1:1")
    sink._client_ = Scripted([answer({}), exists, answer({})])
    with pytest.raises(DestinationUnavailable, match="contradict"):
        sink.ensure_index(mapping)
    sink._client_ = Scripted([answer({}), exists, answer(made), answer(made)])
    sink.ensure_index(mapping)
    refused = answer({"error": {"type": "mapper_parsing_exception", "reason": "no such type"}, "status": 400}, 400)
    sink._client_ = Scripted([answer({}), refused])
    with pytest.raises(DestinationError, match="no such type"):
        sink.ensure_index(mapping)


def test_a_generation_that_nonsense_hides_is_not_gone_when_it_should_serve() -> None:
    sink = OpenSearchSink("http://127.0.0.1:1")
    begun = {GENERATION: {**SERVED[GENERATION], "aliases": {f"{GENERATION}_WRITE": {}}}}
    begun[GENERATION]["mappings"] = {"_meta": {"penstock": {"index": "people", "fingerprint": "aa11"}}}
    sink._client_ = Scripted([answer(begun), answer({"acknowledged": True}), answer(begun), answer({}), answer(SERVED)])
    sink.ensure_index(IndexMapping("people", "aa11", {"properties": {}}, {}))
    with pytest.raises(DestinationUnavailable, match="contradict"):
        sink.mark_seeded("people")


def test_an_index_is_gone_only_if_the_server_states_it() -> None:
    with pytest.raises(DestinationUnavailable, match="contradict"):
        looking(answer({}), answer(SERVED)).flush(True)
    with pytest.raises(IndexUnusable, match="was deleted or replaced"):
        looking(answer({}), ABSENT).flush(True)
    replaced = {GENERATION: {"settings": {"index": {"uuid": "u2"}}}}
    with pytest.raises(IndexUnusable, match="was deleted or replaced"):
        looking(answer({}), answer(replaced)).flush(True)


ELASTIC = answer({"version": {"number": "8.15.0", "build_flavor": "default"}, "tagline": "You Know, for Search"})


def test_elasticsearch_has_another_name_for_points_in_time() -> None:
    """Scripted: there is no Elasticsearch among the servers of the tests."""
    page = {"hits": {"hits": [{"_id": "1", "sort": [1]}]}}
    sink = OpenSearchSink("http://127.0.0.1:1")
    client = Scripted(
        [answer({}), ELASTIC, answer({"id": "point"}), answer(SERVED), answer(page), answer({"succeeded": True})]
    )
    sink._client_ = client
    assert list(sink.scan("people")) == [["1"]]
    assert [client.requests[2], client.requests[-1]] == ["POST /people/_pit", "DELETE /_pit"]


def test_vectors_are_created_as_elasticsearch_names_them() -> None:
    specification = parse_specification("version: 1\ntable: t\nfields: [{vector: v, dimensions: 3}]", "people")
    sink = OpenSearchSink("http://127.0.0.1:1")
    client = Scripted([ELASTIC, answer({"template": {}})])
    sink._client_ = client
    assert sink.check(index_mapping(specification)) == ""
    assert client.bodies[-1]["template"]["mappings"]["properties"] == {"v": {"type": "dense_vector", "dims": 3}}
