"""Sinks on a real search server, one index per test, and what is behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pytest

from penstock.documents.base import DOCUMENT_SCHEMA, Sink
from penstock.documents.mapping import IndexMapping
from penstock.sinks.opensearch import OpenSearchSink
from penstock.testing.opensearch import ExistingOpenSearch

PROPERTIES: dict[str, Any] = {
    "n": {"type": "integer"},
    "shape": {"type": "keyword"},
    "text": {"type": "text"},
    "when": {"properties": {"day": {"type": "date"}}},
    "labels": {"type": "object", "dynamic": True},
}


def mapping_of(index: str, fingerprint: str = "aa11", **more: Any) -> IndexMapping:
    return IndexMapping(index, fingerprint, {"dynamic": "strict", "properties": {**PROPERTIES, **more}}, {})


def batch_of(index: str, documents: Mapping[str, Any], version: int = 1) -> pa.Table:
    """Bodies by id; None removes."""
    bodies = [None if each is None else json.dumps(each) for each in documents.values()]
    count = len(bodies)
    return pa.table([[index] * count, list(documents), [version] * count, bodies], schema=DOCUMENT_SCHEMA)


class Looker:
    """What is on the server, seen from outside."""

    def __init__(self, server: ExistingOpenSearch, index: str) -> None:
        self.server = server
        self.index = index

    def request(self, method: str, path: str, body: object = None) -> Any:
        return self.server.request(method, path, body)

    def behind(self, alias: str | None = None) -> list[str]:
        """The indexes that an alias leads to."""
        found = self.request("GET", f"/_cat/aliases/{alias or self.index}?format=json&h=index")
        return [each["index"] for each in found]

    def indexes(self) -> list[str]:
        """All indexes whose names begin with the test's."""
        found = self.request("GET", f"/_cat/indices/{self.index}*?format=json&h=index&expand_wildcards=all")
        return sorted(each["index"] for each in found)

    def settings(self, name: str) -> dict[str, Any]:
        [found] = self.request("GET", f"/{name}/_settings?flat_settings=true").values()
        return found["settings"]

    def searched(self, name: str | None = None) -> dict[str, Any]:
        """What a search finds, by id; nothing is refreshed."""
        found = self.request("POST", f"/{name or self.index}/_search", {"size": 1000})
        return {each["_id"]: each["_source"] for each in found["hits"]["hits"]}

    def stored(self, name: str | None = None) -> dict[str, Any]:
        """What is there, whether searches see it yet or not."""
        self.request("POST", f"/{name or self.index}/_refresh")
        return self.searched(name)


@pytest.fixture
def looker(opensearch: ExistingOpenSearch, index_name: str) -> Looker:
    return Looker(opensearch, index_name)


MakeSink = Callable[..., OpenSearchSink]


@pytest.fixture
def make_sink(opensearch: ExistingOpenSearch) -> Iterator[MakeSink]:
    """A sink as another process would have it."""
    sinks: list[OpenSearchSink] = []

    def make(**options: Any) -> OpenSearchSink:
        sinks.append(OpenSearchSink(**{"url": opensearch.url, "replicas": 0, **options}))
        return sinks[-1]

    yield make
    for each in sinks:
        each.close()


@pytest.fixture
def sink(make_sink: MakeSink, index_name: str) -> OpenSearchSink:
    """With an index that serves and has nothing in it."""
    made = make_sink()
    made.ensure_index(mapping_of(index_name))
    made.mark_seeded(index_name)
    return made


def write(sink: Sink, index: str, documents: Mapping[str, Any], version: int = 1) -> list[tuple[str, str]]:
    """Write and flush; gives ids and reasons of what was refused."""
    sink.write(batch_of(index, documents, version))
    return [(each.id, each.reason) for each in sink.flush(False).rejections]
