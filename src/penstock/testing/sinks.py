"""The contract of sinks with generations, as a class of tests to derive from.

class TestMySink(SinkContract):
    def open(self) -> Sink:
        return MySink("http://localhost:7700")
"""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping
from typing import Any

from penstock.sinks.base import IndexMapping, ReadableSink, Sink, readable

_PROPERTIES = {"n": {"type": "integer"}, "shape": {"type": "keyword"}}


class SinkContract:
    """Every test uses its own index, and several sink objects, as a pipeline uses several processes."""

    shared = True
    """True if copies in other processes, and sinks opened later, see the same documents."""

    def open(self) -> Sink:
        """Return a new sink object over what the sinks of this test have written."""
        raise NotImplementedError

    def setup_method(self) -> None:
        self.index = f"test-{secrets.token_hex(6)}"

    def mapping(self, fingerprint: str = "aa11") -> IndexMapping:
        """Return a mapping of the test's index."""
        return IndexMapping(self.index, fingerprint, {"dynamic": "strict", "properties": _PROPERTIES}, {})

    def serving(self) -> Sink:
        """Return a sink whose index serves and is empty."""
        sink = self.open()
        sink.ensure_index(self.mapping())
        sink.mark_seeded(self.index)
        return sink

    def put(self, sink: Sink, version: int, documents: Mapping[str, int | None]) -> None:
        """Write and flush documents that contain these numbers; None removes a document."""
        for id_, number in documents.items():
            if number is None:
                sink.delete(self.index, id_, version)
            else:
                sink.upsert(self.index, id_, version, f'{{"n": {number}}}')
        assert sink.flush(False).rejections == ()

    def seen(self, sink: Sink) -> dict[str, int]:
        """Return what searches see: the numbers, by document id."""
        assert sink.flush(True).rejections == ()
        reader = self.reader(sink)
        found: dict[str, Any] = {}
        for ids in reader.scan(self.index):
            found |= reader.fetch(self.index, ids)
        return {id_: document["n"] for id_, document in found.items()}

    def reader(self, sink: Sink) -> ReadableSink:
        """Return the sink as a readable one."""
        return readable(sink, type(sink).__name__)

    def test_what_is_older_never_replaces_what_is_newer(self) -> None:
        sink = self.serving()
        self.put(sink, 5, {"a": 5})
        self.put(sink, 4, {"a": 4})
        self.put(sink, 3, {"a": None})
        assert self.seen(sink) == {"a": 5}
        self.put(sink, 5, {"a": 50})
        assert self.seen(sink) == {"a": 50}, "an equal version is written again"

    def test_what_was_removed_does_not_come_back(self) -> None:
        sink = self.serving()
        self.put(sink, 1, {"a": 1})
        self.put(sink, 6, {"a": None, "never there": None})
        self.put(sink, 5, {"a": 5, "never there": 5})
        assert self.seen(sink) == {}
        self.put(sink, 6, {"a": 6})
        assert self.seen(sink) == {"a": 6}

    def test_searches_see_nothing_before_all_is_there(self) -> None:
        sink = self.open()
        sink.ensure_index(self.mapping())
        assert not sink.is_seeded(self.index)
        self.put(sink.filling(self.index), 1, {"a": 1})
        assert self.seen(sink) == {}
        sink.mark_seeded(self.index)
        assert sink.is_seeded(self.index)
        assert self.seen(sink) == {"a": 1}

    def test_the_same_shape_needs_nothing(self) -> None:
        self.put(self.serving(), 1, {"a": 1})
        if self.shared:
            again = self.open()
            again.ensure_index(self.mapping())
            assert again.is_seeded(self.index)
            assert self.seen(again) == {"a": 1}

    def test_another_shape_is_filled_beside_what_serves(self) -> None:
        sink = self.serving()
        self.put(sink, 1, {"old": 1})
        sink.ensure_index(self.mapping("bb22"))
        assert not sink.is_seeded(self.index)
        self.put(sink.filling(self.index), 2, {"found": 2})
        assert self.seen(sink) == {"old": 1}, "what fills leaves what serves alone"
        self.put(sink, 3, {"live": 3})
        assert self.seen(sink) == {"old": 1, "live": 3}, "what changes goes to both"
        sink.mark_seeded(self.index)
        assert self.seen(sink) == {"found": 2, "live": 3}

    def test_a_removal_outlives_an_older_body_that_fills(self) -> None:
        sink = self.serving()
        sink.reindex(self.mapping())
        self.put(sink, 5, {"gone": None})
        self.put(sink.filling(self.index), 4, {"gone": 4, "there": 4})
        sink.mark_seeded(self.index)
        assert self.seen(sink) == {"there": 4}

    def test_a_reindex_begins_empty_each_time(self) -> None:
        sink = self.serving()
        self.put(sink, 1, {"stale": 1})
        sink.reindex(self.mapping())
        self.put(sink.filling(self.index), 1, {"half": 1})
        sink.reindex(self.mapping())
        assert not sink.is_seeded(self.index)
        assert sink.filling(self.index).count(self.index) in (0, None)
        sink.mark_seeded(self.index)
        assert self.seen(sink) == {}

    def test_where_nothing_is_filled_what_serves_is_meant(self) -> None:
        sink = self.serving()
        self.put(sink.filling(self.index), 1, {"a": 1})
        assert self.seen(sink) == {"a": 1}

    def test_what_is_being_filled_is_counted_whether_searches_see_it_or_not(self) -> None:
        sink = self.serving()
        self.put(sink, 1, {"a": 1})
        sink.reindex(self.mapping())
        filling = sink.filling(self.index)
        self.put(filling, 2, {"b": 2, "c": 2, "d": 2})
        self.put(sink, 3, {"d": None})
        assert filling.count(self.index) == 2
        assert sink.count(self.index) == 1

    def test_copies_write_to_the_same_generations(self) -> None:
        if not self.shared:
            return
        sink = self.serving()
        sink.reindex(self.mapping())
        self.put(pickle.loads(pickle.dumps(sink)), 1, {"live": 1})
        self.put(pickle.loads(pickle.dumps(sink.filling(self.index))), 1, {"found": 1})
        assert self.seen(sink) == {"live": 1}
        sink.mark_seeded(self.index)
        assert self.seen(sink) == {"live": 1, "found": 1}

    def test_what_there_is_can_be_read(self) -> None:
        sink = self.serving()
        reader = self.reader(sink)
        self.put(sink, 1, {str(number): number for number in range(25)})
        sink.flush(True)
        chunks = list(reader.scan(self.index, 10))
        assert sorted(id_ for chunk in chunks for id_ in chunk) == sorted(map(str, range(25)))
        assert max(map(len, chunks)) <= 10
        assert reader.fetch(self.index, ["3", "nobody"]) == {"3": {"n": 3}}
        assert len(set(reader.sample(self.index, 7))) == 7
        facts = reader.facts(self.index)
        assert (facts.documents, facts.filling) == (25, None)
        assert facts.generation is not None

    def test_another_generation_has_another_name(self) -> None:
        sink = self.serving()
        reader = self.reader(sink)
        names = {reader.facts(self.index).generation}
        for fingerprint in ("bb22", "cc33"):
            sink.reindex(self.mapping(fingerprint))
            filling = reader.facts(self.index).filling
            assert filling not in names
            sink.mark_seeded(self.index)
            assert reader.facts(self.index).generation == filling
            names.add(filling)
