"""`penstock schema`: JSON Schemas of config files and index specifications."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import typer
from pydantic.json_schema import GenerateJsonSchema

from penstock.cli.display import echo
from penstock.cli.index import schema as print_index_schema
from penstock.config.models import ConfigFile

schema = typer.Typer(
    name="schema",
    help="Print JSON Schemas, for completion and checks in editors.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@schema.command("config")
def print_config_schema() -> None:
    """Print the JSON Schema of the config file.

    Editors with a TOML language server (Taplo, Even Better TOML) use it if the first line of the file names it.

    Examples:

        penstock schema config > penstock.schema.json
        sed -i '1i #:schema ./penstock.schema.json' penstock.toml
    """
    echo(json.dumps(config_schema(), indent=2, ensure_ascii=False))


schema.command("index")(print_index_schema)


def config_schema() -> dict[str, Any]:
    """The schema of the config file, with its key names."""
    found = ConfigFile.model_json_schema(by_alias=True, mode="validation", schema_generator=_Generator)
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        **_without_null(found),
        "title": "Config file of a Penstock pipeline",
        "description": "docs/reference/config.md describes every key.",
    }


class _Generator(GenerateJsonSchema):
    """Omits titles, and writes default durations in seconds."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, timedelta):
            return dft.total_seconds()
        return super().encode_default(dft)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _without_null(schema: Any) -> Any:
    """Remove null, which TOML does not have, and the defaults of whole sections."""
    if isinstance(schema, list):
        return [_without_null(each) for each in schema if each != {"type": "null"}]
    if not isinstance(schema, dict):
        return schema
    tidy = {name: _without_null(each) for name, each in schema.items() if not _is_empty_default(name, each)}
    choices = tidy.get("anyOf", [])
    if len(choices) == 1:
        del tidy["anyOf"]
        tidy |= choices[0]
    return tidy


def _is_empty_default(name: str, value: Any) -> bool:
    return name == "default" and (value is None or isinstance(value, dict))
