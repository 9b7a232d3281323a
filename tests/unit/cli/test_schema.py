"""`penstock schema config`: what editors get to know."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config.models import ConfigFile
from penstock.config.problems import _keys

ROOT = Path(__file__).parents[3]


def printed() -> dict[str, Any]:
    result = CliRunner().invoke(app, ["schema", "config"])
    assert result.exit_code == 0
    return json.loads(result.output)


def resolve(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    for choice in (part, *part.get("anyOf", [])):
        if "$ref" in choice:
            return schema["$defs"][choice["$ref"].rpartition("/")[2]]
    return part


def keys_of_schema(schema: dict[str, Any], part: dict[str, Any], before: str = "") -> set[str]:
    found: set[str] = set()
    for name, inner in part.get("properties", {}).items():
        inner = resolve(schema, inner)
        if isinstance(inner.get("additionalProperties"), dict):
            # By names of the user's: of tables, of columns.
            inner = resolve(schema, inner["additionalProperties"])
        found |= keys_of_schema(schema, inner, f"{before}{name}.") if "properties" in inner else {f"{before}{name}"}
    return found


def keys_of_model(model: type[BaseModel], before: str = "") -> set[str]:
    found: set[str] = set()
    for name, inner in _keys(model).items():
        found |= {f"{before}{name}"} if inner is None else keys_of_model(inner, f"{before}{name}.")
    return found


def test_the_schema_has_every_key() -> None:
    schema = printed()
    assert keys_of_schema(schema, schema) == keys_of_model(ConfigFile)
    assert schema["required"] == ["pipeline", "source"]
    assert schema["additionalProperties"] is False


def test_it_is_about_toml_which_has_no_null_and_no_iso_durations() -> None:
    schema = printed()
    text = json.dumps(schema)
    assert '"type": "null"' not in text
    assert ": null" not in text
    assert '"PT' not in text
    assert schema["$defs"]["ErrorHoldSection"]["properties"]["time"]["default"] == 3600
    sizes = schema["$defs"]["SpoolSection"]["properties"]["max_bytes"]
    assert {each["type"] for each in sizes["anyOf"]} == {"integer", "string"}


def test_the_example_uses_keys_of_the_schema() -> None:
    schema = printed()
    example = tomllib.loads((ROOT / "examples/penstock.toml").read_text())
    for section, values in example.items():
        known = resolve(schema, schema["properties"][section])
        unknown = values.keys() - known["properties"].keys()
        assert not unknown or known["additionalProperties"] is True, (section, unknown)
