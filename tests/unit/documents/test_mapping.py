"""Mappings and fingerprints, from specifications alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.documents.catalog import SourceCatalog, SourceColumn, SourceTable
from penstock.documents.mapping import build_fingerprint, fingerprint, index_mapping, is_built_from
from penstock.errors import ConfigError
from penstock.schema import PostgresType, ReplicaIdentity
from penstock.sinks.opensearch.sink import for_elasticsearch
from penstock.source.patterns import TableName
from penstock.specification import load_specification, parse_specification

FOLDER = Path(__file__).parents[1] / "specification" / "specifications"
HEAD = "version: 1\ntable: users\nprimary_key: id\n"


def properties(fields: str) -> dict[str, Any]:
    return index_mapping(parse_specification(HEAD + f"fields:\n{fields}", "users")).mappings["properties"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("uuid", "keyword"),
        ("boolean", "boolean"),
        ("short", "short"),
        ("integer", "integer"),
        ("long", "long"),
        ("float", "float"),
        ("double", "double"),
        ("decimal", "double"),
        ("date", "date"),
        ("timestamp", "date"),
        ("binary", "binary"),
        ("geo", "geo_point"),
    ],
)
def test_types_without_subfields(kind: str, expected: str) -> None:
    assert properties(f"- {{{kind}: x}}") == {"x": {"type": expected}}


def test_texts_can_be_filtered_and_sorted_and_keywords_searched() -> None:
    found = properties("- text: a\n- identifier: b\n- keyword: c\n- enum: d")
    assert (found["a"]["type"], found["a"]["analyzer"]) == ("text", "penstock_text")
    assert found["b"]["analyzer"] == "penstock_code"
    assert set(found["a"]["fields"]) == set(found["b"]["fields"]) == {"keyword", "keyword_lowercase"}
    assert (found["c"]["type"], set(found["c"]["fields"])) == ("keyword", {"text", "keyword_lowercase"})
    assert found["d"] == found["c"]


def test_relations_are_objects_or_nested() -> None:
    customers = index_mapping(load_specification(FOLDER / "customers.schema.yml")).mappings
    assert customers["dynamic"] == "strict"
    found = customers["properties"]
    assert found["card"]["type"] == found["account"]["type"] == "object"
    assert found["orders"]["type"] == "nested"
    items = found["orders"]["properties"]["items"]
    assert items["type"] == "nested"
    assert items["properties"]["product"]["type"] == "object"
    assert found["orderCount"] == {"type": "long"}
    assert found["averageOrder"] == found["lifetimeValue"] == {"type": "double"}
    assert found["lastOrderAt"] == {"type": "date"}


def test_json_is_kept_as_it_is_and_maps_have_a_template() -> None:
    articles = index_mapping(load_specification(FOLDER / "articles.schema.yml")).mappings
    found = articles["properties"]
    assert found["raw"] == {"type": "object", "enabled": False}
    assert found["title"] == {"type": "object", "dynamic": True}
    template = articles["dynamic_templates"][0]["title"]
    assert template["path_match"] == "title.*"
    assert template["mapping"]["analyzer"] == "penstock_text"
    assert found["price"] == {"type": "scaled_float", "scaling_factor": 100}
    assert found["tagIds"] == {"type": "long"}
    assert (found["source"], found["nothing"]) == ({"type": "keyword"}, {"type": "keyword"})


def test_options_win() -> None:
    found = properties("- text: a\n  options: {analyzer: english, fields: {}}\n- {constant: n, value: 1}")
    assert found["a"] == {"type": "text", "analyzer": "english", "fields": {}}
    assert found["n"] == {"type": "long"}


def test_variants_of_an_enum_sort_by_their_rank() -> None:
    mapping = index_mapping(parse_specification(HEAD + "fields:\n- enum: s\n  variants: [low, 'a.b']", "users"))
    normalizer = mapping.mappings["properties"]["s"]["fields"]["sort"]["normalizer"]
    filters = [
        mapping.analysis["char_filter"][each] for each in mapping.analysis["normalizer"][normalizer]["char_filter"]
    ]
    assert [(each["pattern"], each["replacement"]) for each in filters] == [
        ("^low$", "\u00010000"),
        (r"^a\.b$", "\u00010001"),
    ]


def test_the_body_creates_an_index_and_is_json() -> None:
    mapping = index_mapping(load_specification(FOLDER / "customers.schema.yml"))
    body = json.loads(json.dumps(mapping.body(shards=3, replicas=0, refresh_interval="-1")))
    assert body["settings"]["index"]["number_of_shards"] == 3
    assert body["settings"]["index"]["refresh_interval"] == "-1"
    used = {*body["settings"]["index"]["analysis"]["normalizer"], *body["settings"]["index"]["analysis"]["analyzer"]}
    assert {"penstock_text", "penstock_code", "penstock_lowercase"} < used


def test_a_vector_needs_a_setting_and_has_another_name_in_elasticsearch() -> None:
    text = "fields:\n- {vector: v, dimensions: 3, options: {space_type: l2}}\n"
    text += "- {object: o, fields: [{vector: w, dimensions: 2}]}"
    body = index_mapping(parse_specification(HEAD + text, "users")).body()
    assert body["settings"]["index"]["knn"] is True
    assert body["mappings"]["properties"]["v"] == {"type": "knn_vector", "dimension": 3, "space_type": "l2"}
    other = for_elasticsearch(body)
    assert "knn" not in other["settings"]["index"]
    assert other["mappings"]["properties"]["v"] == {"type": "dense_vector", "dims": 3, "space_type": "l2"}
    assert other["mappings"]["properties"]["o"]["properties"]["w"] == {"type": "dense_vector", "dims": 2}


def test_routing_is_a_part_of_the_id() -> None:
    text = HEAD.replace("primary_key: id", "doc_id: [tenant, id]\nrouting: id") + "fields: [{keyword: a}]"
    mapping = index_mapping(parse_specification(text, "users"))
    assert (mapping.routing, mapping.mappings["_routing"]) == ((1, 2), {"required": True})
    with pytest.raises(ConfigError, match="routing must be a column of the document id"):
        index_mapping(parse_specification(text.replace("routing: id", "routing: a"), "users"))


# Fingerprints

FINGERPRINTS = {"customers": "358efdb84dca", "articles": "63c5f819fe35"}


def test_fingerprints_are_the_same_in_every_process_and_version() -> None:
    """If this fails, every index of every user is built anew: raise MAPPING_VERSION only if that is meant."""
    found = {name: fingerprint(load_specification(FOLDER / f"{name}.schema.yml")) for name in ("customers", "articles")}
    assert found == FINGERPRINTS


BASE = HEAD + "fields:\n- {keyword: a}\n- {integer: b}\n"


@pytest.mark.parametrize(
    "other",
    [
        HEAD + "fields:\n- {integer: b}\n- {keyword: a}\n",
        HEAD + "fields:\n- {keyword: a, required: true}\n- {integer: b}\n",
        HEAD + "settings: {number_of_replicas: 2, search: {idle.after: 5s}}\nfields:\n- {keyword: a}\n- {integer: b}\n",
        "# A\nversion: 1\ntable: USERS\nschema: public\nprimary_key: [id]\nfields: [{keyword: a}, {integer: b}]",
    ],
)
def test_what_changes_no_document_needs_no_reindex(other: str) -> None:
    assert fingerprint(parse_specification(other, "another_name")) == fingerprint(parse_specification(BASE, "users"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{keyword: a}", "{text: a}"),
        ("{keyword: a}", "{keyword: a, column: c}"),
        ("{keyword: a}", "{keyword: a, default: ''}"),
        ("{keyword: a}", "{keyword: a, expression: b}"),
        ("{keyword: a}", "{keyword: a, options: {ignore_above: 10}}"),
        ("{keyword: a}", "{keyword: a, transforms: [trim]}"),
        ("{keyword: a}", "{keyword: c}"),
        ("- {integer: b}\n", ""),
        ("table: users", "table: people"),
        ("primary_key: id", "primary_key: id\ndoc_id: code"),
        ("primary_key: id", "primary_key: id\nfilters: [{raw: x}]"),
        ("primary_key: id", "primary_key: id\nsoft_delete: {column: gone}"),
        ("{keyword: a}", "{constant: a, value: 1}"),
        ("primary_key: id", "primary_key: id\nsettings: {number_of_shards: 2}"),
        ("primary_key: id", "primary_key: id\nsettings: {analysis: {analyzer: {x: {type: english}}}}"),
        ("primary_key: id", "primary_key: id\nsource_excludes: [a]"),
        ("primary_key: id", "primary_key: id\nrouting: id"),
    ],
)
def test_what_changes_documents_or_mappings_needs_one(old: str, new: str) -> None:
    assert old in BASE
    changed = BASE.replace(old, new)
    assert fingerprint(parse_specification(changed, "users")) != fingerprint(parse_specification(BASE, "users"))


def with_key(*columns: str) -> SourceCatalog:
    name, whole = TableName("public", "users"), PostgresType(23, "int4")
    there = {each: SourceColumn(each, whole, True) for each in ("tenant", "id")}
    return SourceCatalog({name: SourceTable(name, "r", there, columns, ReplicaIdentity.DEFAULT, frozenset(columns))})


def test_a_key_that_is_left_to_the_database_is_part_of_what_was_built() -> None:
    left = parse_specification("version: 1\ntable: users\nfields: [{integer: id}]\n", "users")
    named = parse_specification("version: 1\ntable: users\nprimary_key: id\nfields: [{integer: id}]\n", "users")
    assert build_fingerprint(left, with_key("id")) != build_fingerprint(left, with_key("tenant", "id"))
    assert build_fingerprint(named, with_key("id")) == build_fingerprint(named, with_key("tenant", "id"))
    assert is_built_from(build_fingerprint(left, with_key("id")), left)
    assert not is_built_from(build_fingerprint(left, with_key("id")), named)
