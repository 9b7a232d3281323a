"""Generations behind an alias: filled beside what serves, swapped at once, and found again after anything."""

from __future__ import annotations

import threading
import time
import urllib.error
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import IndexUnusable
from penstock.sinks.opensearch import OpenSearchSink
from penstock.sinks.opensearch.client import FILLING_GC_DELETES, SERVING_GC_DELETES
from penstock.sinks.opensearch.generations import paths_of
from tests.integration.documents.opensearch.conftest import Looker, MakeSink, batch_of, mapping_of, write


@pytest.mark.trap(47)
def test_searches_see_nothing_of_an_index_before_it_is_complete(make_sink: MakeSink, looker: Looker) -> None:
    sink = make_sink()
    sink.ensure_index(mapping_of(looker.index))
    assert not sink.is_seeded(looker.index)
    write(sink.filling(looker.index), looker.index, {"a": {"n": 1}})
    assert looker.behind() == []
    facts = sink.facts(looker.index)
    assert (facts.generation, facts.documents) == (None, 0)
    assert facts.filling == looker.indexes()[0]
    sink.mark_seeded(looker.index)
    assert sink.is_seeded(looker.index)
    assert looker.searched() == {"a": {"n": 1}}, "all of it, at once"
    assert sink.facts(looker.index).generation == looker.behind()[0]


def test_whoever_starts_again_finds_what_serves(sink: OpenSearchSink, make_sink: MakeSink, looker: Looker) -> None:
    write(sink, looker.index, {"a": {"n": 1}})
    there = looker.indexes()
    other = make_sink()
    other.ensure_index(mapping_of(looker.index))
    assert other.is_seeded(looker.index)
    write(other, looker.index, {"b": {"n": 2}})
    assert looker.stored() == {"a": {"n": 1}, "b": {"n": 2}}
    assert looker.indexes() == there


def test_whoever_starts_again_goes_on_with_what_was_begun(make_sink: MakeSink, looker: Looker) -> None:
    first = make_sink()
    first.ensure_index(mapping_of(looker.index))
    write(first.filling(looker.index), looker.index, {"a": {"n": 1}})
    second = make_sink()
    second.ensure_index(mapping_of(looker.index))
    assert not second.is_seeded(looker.index)
    write(second.filling(looker.index), looker.index, {"b": {"n": 2}})
    second.mark_seeded(looker.index)
    assert looker.searched() == {"a": {"n": 1}, "b": {"n": 2}}
    assert len(looker.indexes()) == 1


@pytest.mark.trap(47)
def test_another_shape_is_filled_beside_the_one_that_serves(
    sink: OpenSearchSink, make_sink: MakeSink, looker: Looker
) -> None:
    index = looker.index
    write(sink, index, {"old": {"n": 1}, "removed": {"n": 1}})
    changed = make_sink()
    changed.ensure_index(mapping_of(index, "bb22", added={"type": "keyword"}))
    assert not changed.is_seeded(index)
    filling = changed.filling(index)
    assert write(filling, index, {"old": {"n": 1, "added": "x"}}, 2) == []
    assert write(changed, index, {"live": {"n": 3}, "removed": None, "odd": {"added": "y"}}, 3) == []
    assert looker.stored() == {"old": {"n": 1}, "live": {"n": 3}}, "what fits the old shape is kept up to date there"
    changed.mark_seeded(index)
    assert looker.searched() == {"old": {"n": 1, "added": "x"}, "live": {"n": 3}, "odd": {"added": "y"}}


def test_what_does_not_fit_the_new_shape_is_refused_though_the_old_one_takes_it(
    sink: OpenSearchSink, make_sink: MakeSink, looker: Looker
) -> None:
    changed = make_sink()
    changed.ensure_index(mapping_of(looker.index, "bb22", shape={"type": "integer"}))
    assert [id_ for id_, _ in write(changed, looker.index, {"a": {"shape": "round"}})] == ["a"]
    assert looker.stored() == {"a": {"shape": "round"}}


def test_a_reindex_begins_empty_and_throws_away_what_was_begun(sink: OpenSearchSink, looker: Looker) -> None:
    write(sink, looker.index, {"stale": {"n": 1}})
    sink.reindex(mapping_of(looker.index))
    write(sink.filling(looker.index), looker.index, {"half": {"n": 1}})
    sink.reindex(mapping_of(looker.index))
    assert not sink.is_seeded(looker.index)
    write(sink.filling(looker.index), looker.index, {"new": {"n": 1}})
    assert looker.stored() == {"stale": {"n": 1}}
    assert len(looker.indexes()) == 2
    sink.mark_seeded(looker.index)
    assert looker.searched() == {"new": {"n": 1}}


def test_a_build_that_another_shape_made_useless_is_removed(make_sink: MakeSink, looker: Looker) -> None:
    make_sink().ensure_index(mapping_of(looker.index, "aa11"))
    make_sink().ensure_index(mapping_of(looker.index, "bb22"))
    [left] = looker.indexes()
    assert left.startswith(f"{looker.index}_bb22_")


@pytest.mark.trap(45)
def test_while_it_is_filled_nothing_is_refreshed_and_removals_are_remembered_long(
    make_sink: MakeSink, looker: Looker
) -> None:
    sink = make_sink(refresh_interval="3s")
    sink.ensure_index(mapping_of(looker.index))
    [name] = looker.indexes()
    before = looker.settings(name)
    assert (before["index.refresh_interval"], before["index.gc_deletes"]) == ("-1", f"{FILLING_GC_DELETES}s")
    looker.request("PUT", f"/{name}/_settings", {"index": {"refresh_interval": "1s", "gc_deletes": "60s"}})
    make_sink().ensure_index(mapping_of(looker.index))
    assert looker.settings(name) == before, "whoever goes on with it puts that right"
    sink.mark_seeded(looker.index)
    after = looker.settings(name)
    assert (after["index.refresh_interval"], after["index.gc_deletes"]) == ("3s", f"{SERVING_GC_DELETES}s")


@pytest.mark.trap(45)
def test_an_old_body_does_not_bring_back_what_was_removed_while_filling(make_sink: MakeSink, looker: Looker) -> None:
    sink = make_sink()
    sink.ensure_index(mapping_of(looker.index))
    [name] = looker.indexes()
    write(sink, looker.index, {"a": None}, 5)
    looker.request("POST", f"/{name}/_flush?force=true")
    looker.request("POST", f"/{name}/_forcemerge?max_num_segments=1")
    write(sink.filling(looker.index), looker.index, {"a": {"n": 4}}, 4)
    assert looker.stored(name) == {}
    # The counterproof: an index that forgets at once, as soon as its clock, which is a coarse one, has moved on.
    looker.request("PUT", f"/{name}/_settings", {"index": {"gc_deletes": "0s"}})
    attempt = 0
    for attempt in range(50):
        write(sink, looker.index, {f"b{attempt}": None}, 5)
        time.sleep(0.1)
        looker.request("POST", f"/{name}/_refresh")
        write(sink.filling(looker.index), looker.index, {f"b{attempt}": {"n": 4}}, 4)
        if looker.stored(name):
            break
    assert looker.stored(name) == {f"b{attempt}": {"n": 4}}


@pytest.mark.trap(47)
def test_a_swap_that_a_crash_interrupted_is_finished(sink: OpenSearchSink, make_sink: MakeSink, looker: Looker) -> None:
    write(sink, looker.index, {"old": {"n": 1}})
    [old] = looker.behind()
    sink.reindex(mapping_of(looker.index))
    write(sink.filling(looker.index), looker.index, {"new": {"n": 1}})
    sink.mark_seeded(looker.index)
    [new] = looker.behind()
    # As if the alias had not been moved.
    looker.request(
        "POST",
        "/_aliases",
        {
            "actions": [
                {"remove": {"index": new, "alias": looker.index}},
                {"add": {"index": old, "alias": looker.index}},
            ]
        },
    )
    other = make_sink()
    other.ensure_index(mapping_of(looker.index))
    assert other.is_seeded(looker.index)
    assert looker.searched() == {"new": {"n": 1}}


@pytest.mark.trap(47)
def test_an_index_from_a_backup_is_built_anew(sink: OpenSearchSink, make_sink: MakeSink, looker: Looker) -> None:
    write(sink, looker.index, {"of then": {"n": 1}})
    [name] = looker.behind()
    for source, target in ((name, f"{looker.index}-kept"), (f"{looker.index}-kept", name)):
        looker.request("PUT", f"/{source}/_settings", {"index": {"blocks": {"write": True}}})
        aliases = {looker.index: {}, f"{name}_WRITE": {}} if target == name else {}
        # The server clones asynchronously: every write waits for the copy it makes.
        looker.request("POST", f"/{source}/_clone/{target}?wait_for_active_shards=1", {"aliases": aliases})
        looker.request("GET", f"/_cluster/health/{target}?wait_for_status=yellow")
        looker.request("PUT", f"/{target}/_settings", {"index": {"blocks": {"write": None}}})
        looker.request("DELETE", f"/{source}")
    other = make_sink()
    other.ensure_index(mapping_of(looker.index))
    assert not other.is_seeded(looker.index)
    assert looker.searched() == {"of then": {"n": 1}}, "it serves until the new one is complete"
    other.mark_seeded(looker.index)
    assert looker.searched() == {}


def test_generations_are_removed_after_a_while(sink: OpenSearchSink, make_sink: MakeSink, looker: Looker) -> None:
    [old] = looker.behind()
    sink.reindex(mapping_of(looker.index))
    sink.mark_seeded(looker.index)
    [new] = looker.behind()
    sink.flush(True)
    assert looker.indexes() == sorted([old, new]), "somebody may still read it"
    impatient = make_sink(grace_seconds=0)
    impatient.ensure_index(mapping_of(looker.index))
    impatient.flush(True)
    assert looker.indexes() == [new]


def test_an_old_shape_that_comes_back_is_built_anew(sink: OpenSearchSink, make_sink: MakeSink, looker: Looker) -> None:
    write(sink, looker.index, {"stale": {"n": 1}})
    changed = make_sink()
    changed.ensure_index(mapping_of(looker.index, "bb22"))
    changed.mark_seeded(looker.index)
    back = make_sink()
    back.ensure_index(mapping_of(looker.index, "aa11"))
    assert not back.is_seeded(looker.index), "the first generation knows nothing of what came after it"
    back.mark_seeded(looker.index)
    assert looker.searched() == {}


def test_searches_never_see_a_swap(sink: OpenSearchSink, looker: Looker) -> None:
    ids = [str(number) for number in range(20)]
    write(sink, looker.index, {each: {"shape": "0"} for each in ids})
    sink.flush(True)
    found: list[list[tuple[str, int]]] = []
    failures: list[BaseException] = []
    done = threading.Event()
    body = {"size": 0, "aggs": {"shapes": {"terms": {"field": "shape"}}}}

    def search() -> None:
        while not done.is_set():
            try:
                answer = looker.request("POST", f"/{looker.index}/_search", body)
            except BaseException as error:
                failures.append(error)
                return
            found.append([(each["key"], each["doc_count"]) for each in answer["aggregations"]["shapes"]["buckets"]])

    searcher = threading.Thread(target=search)
    searcher.start()
    try:
        for generation in range(1, 5):
            sink.reindex(mapping_of(looker.index))
            write(sink.filling(looker.index), looker.index, {each: {"shape": str(generation)} for each in ids}, 2)
            sink.mark_seeded(looker.index)
    finally:
        done.set()
        searcher.join(60)
    assert not failures
    assert {tuple(each) for each in found} <= {((str(generation), 20),) for generation in range(5)}
    assert len(found) >= 5, "somebody searched meanwhile"


def test_an_index_deleted_by_hand_is_noticed_and_not_made_by_the_server(sink: OpenSearchSink, looker: Looker) -> None:
    [name] = looker.behind()
    looker.request("DELETE", f"/{name}")
    # A removal with an external version makes an index just as a document does.
    for body in ({"n": 1}, None):
        sink.write(batch_of(looker.index, {"a": body}))
        with pytest.raises(IndexUnusable, match=name) as caught:
            sink.flush(False)
        assert "index rebuild" in caught.value.hint
        assert looker.indexes() == [], "no index with guessed mappings came into being"
    with pytest.raises(IndexUnusable, match="deleted or replaced"):
        sink.flush(True)


def test_after_a_new_start_an_index_deleted_by_hand_is_built_anew(
    sink: OpenSearchSink, make_sink: MakeSink, looker: Looker
) -> None:
    looker.request("DELETE", f"/{looker.behind()[0]}")
    other = make_sink()
    other.ensure_index(mapping_of(looker.index))
    assert not other.is_seeded(looker.index)
    other.mark_seeded(looker.index)
    assert looker.searched() == {}


def test_a_generation_deleted_while_it_is_filled_never_serves(make_sink: MakeSink, looker: Looker) -> None:
    sink = make_sink()
    sink.ensure_index(mapping_of(looker.index))
    looker.request("DELETE", f"/{looker.indexes()[0]}")
    with pytest.raises(IndexUnusable, match="deleted or replaced"):
        sink.mark_seeded(looker.index)


def test_an_alias_that_was_moved_is_noticed(sink: OpenSearchSink, looker: Looker) -> None:
    [name] = looker.behind()
    looker.request("POST", "/_aliases", {"actions": [{"remove": {"index": name, "alias": looker.index}}]})
    with pytest.raises(IndexUnusable, match="points to nothing instead of") as caught:
        sink.flush(True)
    assert "index rebuild" in caught.value.hint
    looker.request("PUT", f"/{looker.index}-theirs", {"aliases": {looker.index: {}}})
    with pytest.raises(IndexUnusable, match="-theirs', which is not an index of Penstock"):
        sink.flush(True)


def test_an_index_of_another_pipeline_is_refused_and_not_touched(make_sink: MakeSink, looker: Looker) -> None:
    ours, theirs = (replace(mapping_of(looker.index), owner=owner) for owner in ("a:documents", "b:documents"))
    first = make_sink()
    first.ensure_index(ours)
    first.mark_seeded(looker.index)
    before = looker.indexes()
    second = make_sink()
    for call in (second.ensure_index, second.reindex):
        with pytest.raises(IndexUnusable, match="belongs to another pipeline, 'a:documents'") as caught:
            call(theirs)
        assert "another name" in caught.value.hint
    assert looker.indexes() == before
    first.flush(True)
    again = make_sink()
    again.ensure_index(ours)
    assert again.is_seeded(looker.index)


@pytest.mark.trap(47)
def test_an_index_that_was_not_filled_serves_and_does_not_count_as_filled(make_sink: MakeSink, looker: Looker) -> None:
    for start in range(2):
        sink = make_sink()
        sink.ensure_index(mapping_of(looker.index))
        assert not sink.is_seeded(looker.index)
        sink.serve(looker.index)
        write(sink, looker.index, {str(start): {"n": start}})
        sink.flush(True)
        assert not sink.is_seeded(looker.index)
        assert len(looker.indexes()) == 1
    assert looker.stored() == {"0": {"n": 0}, "1": {"n": 1}}
    filled = make_sink()
    filled.reindex(mapping_of(looker.index))
    filled.mark_seeded(looker.index)
    assert filled.is_seeded(looker.index)


def test_a_name_that_somebody_else_uses_is_refused_at_the_start(make_sink: MakeSink, looker: Looker) -> None:
    looker.request("PUT", f"/{looker.index}")
    with pytest.raises(IndexUnusable, match=r"an index named .* exists") as caught:
        make_sink().ensure_index(mapping_of(looker.index))
    assert "Delete or rename the index" in caught.value.hint
    looker.request("DELETE", f"/{looker.index}")
    looker.request("PUT", f"/{looker.index}-theirs", {"aliases": {looker.index: {}}})
    with pytest.raises(IndexUnusable, match="not an index of Penstock"):
        make_sink().ensure_index(mapping_of(looker.index))


def test_a_mapping_that_the_server_refuses_is_told(make_sink: MakeSink, looker: Looker) -> None:
    with pytest.raises(Exception, match="unheard_of_type") as caught:
        make_sink().ensure_index(mapping_of(looker.index, bad={"type": "unheard_of_type"}))
    assert not isinstance(caught.value, urllib.error.URLError)
    assert looker.indexes() == []


def test_a_server_takes_questions_about_many_indexes(looker: Looker) -> None:
    for path in paths_of([f"{looker.index}{'-long' * 30}{number}" for number in range(60)]):
        assert looker.request("GET", path) == {}


def test_what_is_there_can_be_read(sink: OpenSearchSink, looker: Looker) -> None:
    documents: dict[str, Any] = {str(number): {"n": number} for number in range(25)}
    write(sink, looker.index, documents)
    chunks = list(sink.scan(looker.index, 10))
    assert [len(each) for each in chunks] == [10, 10, 5]
    assert {id_ for each in chunks for id_ in each} == set(documents)
    assert set(sink.sample(looker.index, 7)) <= set(documents)
    assert len(sink.sample(looker.index, 7)) == 7
    assert sink.fetch(looker.index, ["3", "nobody"]) == {"3": {"n": 3}}
    assert (sink.facts(looker.index).documents, sink.count(looker.index)) == (25, 25)
    nobody = f"{looker.index}-nobody"
    assert (list(sink.scan(nobody)), sink.sample(nobody, 3), sink.fetch(nobody, ["1"])) == ([], [], {})
    assert sink.facts(nobody).generation is None
