"""Documents on a real server: versions, refusals, and how much is in memory."""

from __future__ import annotations

import json
import pickle
import tracemalloc

import pyarrow as pa
import pytest

from penstock.documents.base import DOCUMENT_SCHEMA, Rejection
from penstock.sinks.opensearch import OpenSearchSink
from tests.integration.documents.opensearch.conftest import Looker, MakeSink, batch_of, mapping_of, write


def test_documents_are_durable_after_a_flush_and_searched_when_caught_up(
    sink: OpenSearchSink, looker: Looker, make_sink: MakeSink
) -> None:
    # Only our own refresh makes them visible. Closing the index ends a periodic refresh that is under way.
    generation = looker.behind()[0]
    looker.request("PUT", f"/{generation}/_settings", {"index": {"refresh_interval": "-1"}})
    looker.request("POST", f"/{generation}/_close")
    looker.request("POST", f"/{generation}/_open")
    sink.write(batch_of(looker.index, {"a": {"n": 1}, "b": {"n": 2}}))
    assert sink.flush(False).rejections == ()
    assert sink.fetch(looker.index, ["a", "b", "c"]) == {"a": {"n": 1}, "b": {"n": 2}}
    assert looker.searched() == {}
    sink.flush(True)
    assert looker.searched() == {"a": {"n": 1}, "b": {"n": 2}}
    assert looker.settings(generation)["index.translog.durability"] == "request"


@pytest.mark.trap(44)
def test_what_is_older_never_replaces_what_is_newer(sink: OpenSearchSink, looker: Looker) -> None:
    index = looker.index
    assert write(sink, index, {"a": {"n": 5}}, 5) == []
    assert write(sink, index, {"a": {"n": 4}}, 4) == [], "stale is no refusal"
    assert write(sink, index, {"a": None}, 4) == [], "a stale removal neither"
    assert looker.stored() == {"a": {"n": 5}}
    assert write(sink, index, {"a": {"n": 50}}, 5) == []
    assert looker.stored() == {"a": {"n": 50}}, "an equal version is written again"
    assert write(sink, index, {"a": None, "never there": None}, 6) == []
    assert write(sink, index, {"a": {"n": 5}, "never there": {"n": 5}}, 5) == []
    assert looker.stored() == {}, "what was removed does not come back, nor what was removed before it came"
    assert write(sink, index, {"a": {"n": 6}}, 6) == []
    assert looker.stored() == {"a": {"n": 6}}


def test_several_versions_in_one_batch(sink: OpenSearchSink, looker: Looker) -> None:
    batches = [batch_of(looker.index, {"a": {"n": version}}, version) for version in (2, 3, 1)]
    sink.write(pa.concat_tables(batches))
    assert sink.flush(False).rejections == ()
    assert looker.stored() == {"a": {"n": 3}}


def test_any_id_and_any_json_arrives(sink: OpenSearchSink, looker: Looker) -> None:
    ids = ['q"uote', "back\\slash", "new\nline", "tab\t\x01", "ümläut/ ?#%&", "12", "é" * 256, "_id"]
    documents = {each: {"n": number, "text": each} for number, each in enumerate(ids)}
    bodies = [json.dumps(each, indent=2) for each in documents.values()]
    count = len(ids)
    sink.write(pa.table([[looker.index] * count, ids, [1] * count, bodies], schema=DOCUMENT_SCHEMA))
    assert sink.flush(False).rejections == ()
    assert looker.stored() == documents
    assert sink.fetch(looker.index, ids) == documents


SECRET = "4711 Secret Street"


@pytest.mark.trap(46)
def test_what_does_not_fit_is_refused_alone_and_its_values_are_not_told(sink: OpenSearchSink, looker: Looker) -> None:
    refused = write(
        sink,
        looker.index,
        {
            "good": {"n": 1},
            "number": {"n": SECRET},
            "range": {"n": 4711 << 40},
            "date": {"when": {"day": SECRET}},
            "object": {"when": SECRET},
            "new": {"unheard_of": SECRET},
            "deep": {"when": {SECRET: 1}},
            "keyword": {"shape": SECRET * 3000},
            "also good": {"n": 2},
        },
    )
    assert dict(refused) == {
        "number": "mapper_parsing_exception [n]: the value is not a number",
        "range": "mapper_parsing_exception [n]: the number is out of the type's range",
        "date": "mapper_parsing_exception [when.day]: the value is not a date in the mapping's format",
        "object": "mapper_parsing_exception [when]: the value does not fit the mapping",
        "new": "strict_dynamic_mapping_exception [unheard_of]: the mapping does not have this field",
        "deep": "strict_dynamic_mapping_exception [when]: the mapping does not have this field",
        "keyword": "illegal_argument_exception [shape]: the value is too long for a keyword",
    }
    assert not any("4711" in reason for _, reason in refused)
    assert looker.stored() == {"good": {"n": 1}, "also good": {"n": 2}}
    [found] = looker.request("GET", f"/{looker.index}/_mapping").values()
    assert "unheard_of" not in found["mappings"]["properties"], "no field is ever guessed"


def test_keys_of_maps_are_not_told(sink: OpenSearchSink, looker: Looker) -> None:
    assert write(sink, looker.index, {"a": {"labels": {"john@example.org": 1}}}) == []
    [(_, reason)] = write(sink, looker.index, {"b": {"labels": {"john@example.org": SECRET}}})
    assert reason == "mapper_parsing_exception [labels]: the value does not fit the mapping"


def test_a_refused_body_is_known_by_its_hash(sink: OpenSearchSink, looker: Looker) -> None:
    found: list[Rejection] = []
    for body in ({"n": "x"}, {"n": "x"}, {"n": "y"}):
        sink.write(batch_of(looker.index, {"a": body}))
        found += sink.flush(False).rejections
    assert found[0].body_hash == found[1].body_hash != found[2].body_hash


def test_bodies_that_are_no_documents_are_refused(sink: OpenSearchSink, looker: Looker) -> None:
    for id_, body in (("cut", '{"n": 1'), ("array", "[1]"), ("null", "null"), ("empty", "")):
        sink.upsert(looker.index, id_, 1, body)
    sink.upsert(looker.index, "good", 1, '{"n": 1}')
    rejections = sink.flush(False).rejections
    assert {each.id for each in rejections} == {"cut", "array", "null", "empty"}
    assert looker.stored() == {"good": {"n": 1}}


def test_ids_that_no_index_takes_do_not_spoil_the_others(sink: OpenSearchSink, looker: Looker) -> None:
    refused = write(sink, looker.index, {"": {"n": 1}, "x" * 513: {"n": 1}, "good": {"n": 1}})
    assert {id_ for id_, _ in refused} == {"", "x" * 513}
    assert looker.stored() == {"good": {"n": 1}}


def test_a_refusal_is_told_once(sink: OpenSearchSink, looker: Looker) -> None:
    assert len(write(sink, looker.index, {"a": {"n": "x"}})) == 1
    assert sink.flush(True).rejections == ()


def test_a_copy_in_a_task_writes_to_the_same_generation(sink: OpenSearchSink, looker: Looker) -> None:
    write(sink, looker.index, {"before": {"n": 0}})
    copy = pickle.loads(pickle.dumps(sink))
    assert write(copy, looker.index, {"a": {"n": 1}, "b": {"n": "x"}}) == [
        ("b", "mapper_parsing_exception [n]: the value is not a number")
    ]
    assert looker.stored() == {"before": {"n": 0}, "a": {"n": 1}}
    copy.close()


def test_documents_of_several_indexes_in_one_batch(sink: OpenSearchSink, looker: Looker) -> None:
    other = f"{looker.index}-other"
    sink.ensure_index(mapping_of(other, "bb22"))
    sink.mark_seeded(other)
    sink.write(pa.concat_tables([batch_of(looker.index, {"a": {"n": 1}}), batch_of(other, {"a": {"n": 2}})]))
    sink.flush(True)
    assert (looker.searched(), looker.searched(other)) == ({"a": {"n": 1}}, {"a": {"n": 2}})


def test_a_batch_is_sent_in_pieces_and_held_in_memory_piece_by_piece(make_sink: MakeSink, looker: Looker) -> None:
    small = make_sink(bulk_bytes=1 << 20)
    small.ensure_index(mapping_of(looker.index))
    body = json.dumps({"text": "word " * 2000})
    count = 4000
    batch = pa.table(
        [[looker.index] * count, [str(each) for each in range(count)], [1] * count, [body] * count],
        schema=DOCUMENT_SCHEMA,
    )
    assert batch.nbytes > 40_000_000
    allocated = pa.default_memory_pool().bytes_allocated()
    tracemalloc.start()
    before = pa.default_memory_pool().max_memory()
    small.write(batch)
    assert small.flush(False).rejections == ()
    _, python_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    arrow_growth = pa.default_memory_pool().max_memory() - max(before, allocated)
    assert python_peak < 10 << 20
    assert arrow_growth < 10 << 20
    assert small.filling(looker.index).count(looker.index) == count
