"""The JSON Schema for editors: accepts what loads, and has every key that the parser has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.specification.models import FIELD_MODELS, SpecificationModel, json_schema, keys_of
from penstock.specification.yaml_positions import parse_yaml

FOLDER = Path(__file__).parent / "specifications"
SCHEMA = json_schema()
_TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict, "null": type(None)}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """As much of a validator as this schema needs."""
    if "$ref" in schema:
        return accepts(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], value)
    if "oneOf" in schema and sum(accepts(each, value) for each in schema["oneOf"]) != 1:
        return False
    if "anyOf" in schema and not any(accepts(each, value) for each in schema["anyOf"]):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    kind = schema.get("type")
    if kind == "number":
        return isinstance(value, int | float)
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (kind == "integer" and isinstance(value, bool))):
        return False
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(accepts(schema.get("items", {}), each) for each in value)
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        complete = set(schema.get("required", [])) <= value.keys() <= known.keys()
        return complete and all(accepts(known[key], each) for key, each in value.items())
    return True


@pytest.mark.parametrize("name", ["customers", "articles", "lines"])
def test_files_that_load_are_accepted(name: str) -> None:
    assert accepts(SCHEMA, parse_yaml((FOLDER / f"{name}.schema.yml").read_text()).value)


@pytest.mark.parametrize(
    "text",
    [
        "version: 2\ntable: a\nfields: [{keyword: a}]",
        "table: a\nfields: [{keyword: a}]",
        "version: 1\ntable: a\nfields: []",
        "version: 1\ntable: a\nfields: [{keyword: a, colum: b}]",
        "version: 1\ntable: a\nfields: [{keyword: a, text: b}]",
        "version: 1\ntable: a\nfields: [{nope: a}]",
        "version: 1\ntable: a\nfields: [{has_many: a, table: b, primary_key: c, fields: []}]",
        "version: 1\ntable: a\nfields: [{keyword: a, from: row}]",
        "version: 1\ntable: a\nfields: [{object: a, fields: [{kind: keyword, name: b}]}]",
    ],
)
def test_files_that_do_not_load_are_refused(text: str) -> None:
    assert not accepts(SCHEMA, parse_yaml(text).value)


def test_it_has_the_keys_of_the_models() -> None:
    assert set(SCHEMA["properties"]) == set(keys_of(SpecificationModel))
    for kind, model in FIELD_MODELS.items():
        written = SCHEMA["$defs"][kind]
        assert set(written["properties"]) == {kind, *keys_of(model)}
        assert not written["additionalProperties"]
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
