"""Settings and analyzers of a specification, on a real search server."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.documents.mapping import IndexMapping, index_mapping
from penstock.errors import DestinationUnavailable
from penstock.specification import parse_specification
from tests.integration.documents.opensearch.conftest import Looker, MakeSink, write

SPECIFICATION = """
version: 1
table: products
settings: {settings}
source_excludes: [notes]
fields:
- text: name
  options: {{analyzer: parts}}
- text: notes
"""
ANALYSIS = """{
  analyzer: {parts: {type: custom, tokenizer: hyphens, filter: [lowercase]}},
  tokenizer: {hyphens: {type: pattern, pattern: '-'}}
}"""


def mapping_of(looker: Looker, settings: str) -> IndexMapping:
    return index_mapping(parse_specification(SPECIFICATION.format(settings=settings), looker.index))


def found_by(looker: Looker, query: dict[str, Any]) -> list[str]:
    looker.request("POST", f"/{looker.index}/_refresh")
    found = looker.request("POST", f"/{looker.index}/_search", {"query": query})
    return [each["_id"] for each in found["hits"]["hits"]]


def test_an_index_gets_its_settings_and_finds_by_its_own_analyzer(make_sink: MakeSink, looker: Looker) -> None:
    sink = make_sink(shards=2, refresh_interval="7s")
    settings = (
        f"{{index: {{number_of_shards: 3, max_result_window: 20000}}, codec: best_compression, analysis: {ANALYSIS}}}"
    )
    sink.ensure_index(mapping_of(looker, settings))
    sink.mark_seeded(looker.index)
    there = looker.settings(looker.index)
    assert there["index.number_of_shards"] == "3"
    assert there["index.max_result_window"] == "20000"
    assert there["index.codec"] == "best_compression"
    assert there["index.refresh_interval"] == "7s", "of the sink, where the specification has none"
    assert there["index.translog.durability"] == "request"
    write(sink, looker.index, {"1": {"name": "AB-12 34", "notes": "secret"}})
    assert found_by(looker, {"match": {"name": {"query": "12 34", "analyzer": "keyword"}}}) == ["1"]
    assert found_by(looker, {"match": {"notes": "secret"}}) == ["1"], "searched"
    assert looker.stored() == {"1": {"name": "AB-12 34"}}, "not stored"


def test_a_setting_is_changed_in_place_where_the_server_can(make_sink: MakeSink, looker: Looker) -> None:
    base = f"analysis: {ANALYSIS}"
    first = make_sink()
    first.ensure_index(mapping_of(looker, f"{{{base}}}"))
    first.mark_seeded(looker.index)
    write(first, looker.index, {"1": {"name": "a"}})
    before = looker.behind()

    second = make_sink(refresh_interval="9s")
    second.ensure_index(
        mapping_of(looker, f"{{{base}, max_result_window: 123, search.slowlog.threshold.query.warn: 3s}}")
    )
    assert second.is_seeded(looker.index)
    assert looker.behind() == before
    there = looker.settings(looker.index)
    assert there["index.max_result_window"] == "123"
    assert there["index.search.slowlog.threshold.query.warn"] == "3s"
    assert there["index.refresh_interval"] == "9s"

    third = make_sink()
    third.ensure_index(mapping_of(looker, f"{{{base}, number_of_shards: 2}}"))
    assert not third.is_seeded(looker.index), "needs a new index"
    write(third.filling(looker.index), looker.index, {"2": {"name": "b"}})
    third.mark_seeded(looker.index)
    assert looker.settings(looker.index)["index.number_of_shards"] == "2"
    assert looker.behind() != before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("{nonsense: 1}", r"unknown setting \[index.nonsense\]"),
        ("{number_of_shards: many}", r"Failed to parse value \[many\] for setting \[index.number_of_shards\]"),
        ("{analysis: {analyzer: {parts: {type: custom, tokenizer: hyphen}}}}", r"Failed to build analyzers: \[parts\]"),
        ("{}", r"analyzer \[parts\] has not been configured"),
    ],
)
def test_a_check_says_what_the_server_would_refuse(
    settings: str, reason: str, make_sink: MakeSink, looker: Looker
) -> None:
    said = make_sink().check(mapping_of(looker, settings))
    assert re.search(reason, said), said
    assert make_sink().check(mapping_of(looker, f"{{analysis: {ANALYSIS}}}")) == ""
    assert looker.indexes() == [], "nothing was created"


def test_a_check_does_not_wait_for_a_server(make_sink: MakeSink, looker: Looker) -> None:
    with pytest.raises(DestinationUnavailable, match="does not answer"):
        make_sink(url="http://127.0.0.1:1").check(mapping_of(looker, "{}"))


def test_documents_of_a_tenant_are_in_one_shard_and_can_be_read_and_removed(
    make_sink: MakeSink, looker: Looker
) -> None:
    text = "version: 1\ntable: t\nprimary_key: [tenant, id]\nrouting: tenant\nfields: [{long: id}]\n"
    text += "settings: {number_of_shards: 5}"
    mapping = index_mapping(parse_specification(text, looker.index))
    sink = make_sink()
    sink.ensure_index(mapping)
    ids = [f"{tenant}:{number}" for tenant in ("a", "b%3A", "c") for number in range(8)]
    write(sink.filling(looker.index), looker.index, {id_: {"id": 1} for id_ in ids})
    sink.mark_seeded(looker.index)
    found = looker.request("POST", f"/{looker.index}/_search?routing=b%3A&preference=_primary", {"size": 100})
    assert {each["_id"] for each in found["hits"]["hits"]} >= {f"b%3A:{number}" for number in range(8)}
    assert found["_shards"]["total"] == 1
    write(sink, looker.index, {"a:1": None, "b%3A:2": {"id": 2}}, version=2)
    other = make_sink()
    assert other.fetch(looker.index, ["a:1", "b%3A:2", "c:3", "strange"]) == {"b%3A:2": {"id": 2}, "c:3": {"id": 1}}
    assert len(looker.stored()) == 23
    again = make_sink()
    again.ensure_index(mapping)
    write(again, looker.index, {"a:2": None}, version=3)
    assert len(looker.stored()) == 22


def test_a_server_without_vectors_says_so_in_a_check(make_sink: MakeSink, looker: Looker) -> None:
    """The server of the tests has no plugins."""
    text = "version: 1\ntable: t\nfields: [{vector: v, dimensions: 3}]"
    said = make_sink().check(index_mapping(parse_specification(text, looker.index)))
    assert "unknown setting [index.knn]" in said


def test_two_databases_share_an_alias_and_have_ids_of_their_own(make_sink: MakeSink, looker: Looker) -> None:
    text = "version: 1\ntable: t\nprimary_key: id\nfields: [{long: n}]"
    shared = f"{looker.index}-all"

    def mapping_for(place: str, *aliases: str) -> IndexMapping:
        specification = parse_specification(text, f"{looker.index}-{place}")
        return index_mapping(replace(specification, aliases=aliases, id_prefix=f'{place}"'))

    sinks = {}
    for place in ("eu", "us"):
        sinks[place] = make_sink()
        sinks[place].ensure_index(mapping_for(place, shared))
        name = f"{looker.index}-{place}"
        write(sinks[place].filling(name), name, {"1": {"n": 1}, "2": {"n": 2}})
        sinks[place].mark_seeded(name)
    assert set(looker.stored(shared)) == {'eu"1', 'eu"2', 'us"1', 'us"2'}

    eu = f"{looker.index}-eu"
    write(sinks["eu"], eu, {"1": None, "2": {"n": 3}}, version=2)
    reader = make_sink()
    assert reader.fetch(eu, ["1", "2"]) == {"2": {"n": 3}}
    sinks["eu"].flush(True)
    assert (reader.sample(eu, 9), list(reader.scan(eu))) == (["2"], [["2"]])
    assert write(sinks["eu"], eu, {"3": {"n": "no number"}}, version=3)[0][0] == "3", "the id that the database has"

    sinks["eu"].reindex(mapping_for("eu", shared))
    write(sinks["eu"].filling(eu), eu, {"9": {"n": 9}})
    assert len(looker.stored(shared)) == 3
    sinks["eu"].mark_seeded(eu)
    assert set(looker.stored(shared)) == {'eu"9', 'us"1', 'us"2'}, "the alias moved with the generation"

    again = make_sink()
    again.ensure_index(mapping_for("us", shared, f"{shared}-too"))
    assert again.is_seeded(f"{looker.index}-us")
    assert set(looker.stored(f"{shared}-too")) == {'us"1', 'us"2'}, "in place"


def test_an_index_template_of_the_server_fills_in_what_nobody_says(make_sink: MakeSink, looker: Looker) -> None:
    """The server merges templates by name; what Penstock sends, and so the specification, goes before them."""
    template = {
        "index_patterns": [f"{looker.index}_*"],
        "template": {
            "settings": {"max_result_window": 7777, "number_of_shards": 4, "refresh_interval": "33s"},
            "mappings": {"properties": {"name": {"type": "keyword"}, "added": {"type": "keyword"}}},
        },
    }
    looker.request("PUT", f"/_index_template/{looker.index}", template)
    try:
        sink = make_sink(refresh_interval="7s")
        sink.ensure_index(mapping_of(looker, f"{{number_of_shards: 2, analysis: {ANALYSIS}}}"))
        write(sink.filling(looker.index), looker.index, {"1": {"name": "AB-12"}})
        sink.mark_seeded(looker.index)
        there = looker.settings(looker.index)
        assert there["index.max_result_window"] == "7777", "only the template says it"
        assert (there["index.number_of_shards"], there["index.refresh_interval"]) == ("2", "7s")
        [found] = looker.request("GET", f"/{looker.index}/_mapping").values()
        fields = found["mappings"]["properties"]
        assert (fields["name"]["type"], fields["added"]["type"]) == ("text", "keyword")
        again = make_sink(refresh_interval="7s")
        again.ensure_index(mapping_of(looker, f"{{number_of_shards: 2, analysis: {ANALYSIS}}}"))
        assert again.is_seeded(looker.index), "what the template added is no reason for a new index"
        assert looker.stored() == {"1": {"name": "AB-12"}}
    finally:
        looker.request("DELETE", f"/_index_template/{looker.index}")
