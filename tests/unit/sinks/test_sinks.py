"""Sinks that need no server."""

from __future__ import annotations

import io
import json

import pytest

from penstock.documents.base import Sink
from penstock.documents.mapping import IndexMapping
from penstock.documents.sinks import CountingSink, MemorySink, StdoutSink, TeeSink

ONE = IndexMapping("one", "f1", {}, {})


@pytest.fixture
def memory() -> MemorySink:
    sink = MemorySink()
    sink.ensure_index(ONE)
    sink.mark_seeded("one")
    return sink


def test_documents_are_there_after_a_flush(memory: MemorySink) -> None:
    memory.upsert("one", "a", 1, '{"x": 1}')
    assert memory.documents("one") == {}
    assert memory.flush(True).rejections == ()
    assert memory.documents("one") == {"a": {"x": 1}}


@pytest.mark.trap(44)
def test_an_older_body_never_replaces_a_newer_one(memory: MemorySink) -> None:
    memory.upsert("one", "a", 5, '{"x": 5}')
    memory.upsert("one", "a", 4, '{"x": 4}')
    memory.delete("one", "a", 3)
    memory.flush(True)
    assert memory.documents("one") == {"a": {"x": 5}}
    memory.delete("one", "a", 6)
    memory.upsert("one", "a", 5, '{"x": 5}')
    memory.flush(True)
    assert memory.documents("one") == {}, "what was removed does not come back"
    memory.upsert("one", "a", 6, '{"x": 6}')
    memory.flush(True)
    assert memory.documents("one") == {"a": {"x": 6}}, "equal versions are the same document"


@pytest.mark.trap(47)
def test_a_new_generation_is_filled_beside_the_one_that_serves(memory: MemorySink) -> None:
    memory.upsert("one", "old", 1, "{}")
    memory.flush(True)
    memory.ensure_index(ONE)
    assert memory.is_seeded("one"), "the same shape needs nothing"
    memory.ensure_index(IndexMapping("one", "f2", {}, {}))
    assert not memory.is_seeded("one")
    memory.upsert("one", "live", 2, "{}")
    memory.flush(True)
    assert set(memory.documents("one")) == {"old", "live"}, "what serves goes on"
    memory.mark_seeded("one")
    assert memory.is_seeded("one")
    assert set(memory.documents("one")) == {"live"}


@pytest.mark.trap(45)
def test_what_fills_a_generation_leaves_the_one_that_serves_alone(memory: MemorySink) -> None:
    memory.upsert("one", "old", 1, "{}")
    memory.flush(True)
    memory.ensure_index(IndexMapping("one", "f2", {}, {}))
    filling = memory.filling("one")
    filling.upsert("one", "old", 2, '{"shape": "new"}')
    filling.upsert("one", "found by the backfill", 2, "{}")
    memory.delete("one", "old", 3)
    memory.upsert("one", "live", 3, "{}")
    memory.flush(False)
    filling.flush(False)
    assert set(memory.documents("one")) == {"live"}
    memory.mark_seeded("one")
    assert set(memory.documents("one")) == {"live", "found by the backfill"}, "a removal outlives an older body"


def test_where_nothing_is_being_filled_the_generation_that_serves_is(memory: MemorySink) -> None:
    filling = memory.filling("one")
    filling.upsert("one", "a", 1, "{}")
    filling.flush(True)
    assert set(memory.documents("one")) == {"a"}


def test_every_sink_of_a_fan_out_is_filled(memory: MemorySink) -> None:
    other, counting = MemorySink(), CountingSink()
    other.ensure_index(ONE)
    other.mark_seeded("one")
    fan = TeeSink([memory, other, counting])
    fan.reindex(ONE)
    filling = fan.filling("one")
    filling.upsert("one", "a", 1, "{}")
    filling.flush(False)
    assert (memory.documents("one"), other.documents("one"), counting.upserts["one"]) == ({}, {}, 1)
    fan.mark_seeded("one")
    assert set(memory.documents("one")) == set(other.documents("one")) == {"a"}


def test_sinks_that_remember_nothing_are_never_seeded() -> None:
    for sink in (StdoutSink(io.StringIO()), CountingSink()):
        sink.ensure_index(ONE)
        sink.mark_seeded("one")
        assert not sink.is_seeded("one")


def test_standard_output_gets_a_line_for_each_document() -> None:
    stream = io.StringIO()
    sink = StdoutSink(stream)
    sink.upsert("one", "a", 3, '{"naïve": [1, 2]}')
    sink.delete("one", "b", 4)
    assert stream.getvalue() == ""
    sink.flush(False)
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"op": "upsert", "index": "one", "id": "a", "version": 3, "document": {"naïve": [1, 2]}},
        {"op": "delete", "index": "one", "id": "b", "version": 4},
    ]
    sink.flush(False)
    assert len(stream.getvalue().splitlines()) == 2, "each is written once"


def test_counting(capsys: pytest.CaptureFixture[str]) -> None:
    sink: Sink = (counting := CountingSink())
    sink.upsert("one", "a", 1, "{}")
    sink.upsert("two", "a", 1, "{}")
    sink.delete("one", "b", 1)
    sink.flush(True)
    assert (dict(counting.upserts), dict(counting.deletes), counting.bytes) == ({"one": 1, "two": 1}, {"one": 1}, 4)
    assert capsys.readouterr().out == ""
