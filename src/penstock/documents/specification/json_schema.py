"""The JSON Schema of index specifications, for editors: derived from the models, so that the two cannot drift apart.

The models know fields as `{kind, name, …}`. People write `{keyword: email, …}`, so each kind becomes an object whose
type key is required.
"""

from __future__ import annotations

from typing import Any

from penstock.documents.specification.models import FIELD_MODELS, SpecificationModel

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_FIELD = "Field"


def json_schema() -> dict[str, Any]:
    """The schema, as plain dictionaries and lists."""
    schema = SpecificationModel.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = schema.pop("$defs")
    fields = {kind: _written(kind, definitions[model.__name__]) for kind, model in FIELD_MODELS.items()}
    others = {name: each for name, each in definitions.items() if "kind" not in each["properties"]}
    definitions = {**others, **fields, _FIELD: {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in fields]}}
    return {"$schema": _DIALECT, **_plain(schema), "$defs": {name: _plain(each) for name, each in definitions.items()}}


def _written(kind: str, model: dict[str, Any]) -> dict[str, Any]:
    """A field as it is written: its type key with the name, then the rest."""
    properties = dict(model["properties"])
    del properties["kind"]
    name = {**properties.pop("name"), "description": "The field's name in the document."}
    required = [each for each in model.get("required", []) if each not in ("kind", "name")]
    return {**model, "properties": {kind: name, **properties}, "required": [kind, *required]}


def _plain(value: Any) -> Any:
    """References to fields point at the union of all kinds; titles that repeat the key go."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "discriminator" in value:
        return {"$ref": f"#/$defs/{_FIELD}"}
    return {key: _plain(each) for key, each in value.items() if not (key == "title" and isinstance(each, str))}
