"""The index that a specification describes: OpenSearch mappings and settings, and the fingerprint of a build.

Mappings are strict: a key that the specification does not have is rejected, not guessed. Texts get subfields for what
people need besides full-text search: `keyword` to filter and sort, `keyword_lowercase` to do so in any case, `text` to
search a keyword by its parts, and `sort` for enums with an order. `options` of a field come last and win.

The fingerprint is a short text that changes when anything that shapes documents or mappings changes; the index is then
rebuilt. It covers tables, columns, keys, relations, filters, orders, limits, transforms, defaults, constants, options,
settings that need a new index, and the version of the mappings that this code writes. It leaves out what changes
neither documents nor mappings: the index's name, the order of fields, `required`, settings that an existing index can
get, and the formatting of the file. A build's fingerprint has a second part for the keys that the specification leaves
to the database.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from penstock.documents.catalog import SourceCatalog, complete
from penstock.errors import ConfigError
from penstock.sinks.base import IndexMapping
from penstock.specification.tree import (
    Aggregate,
    Constant,
    Field,
    Geo,
    Group,
    IndexSpecification,
    Join,
    Operation,
    Scalar,
    ScalarType,
)

TEXT_ANALYZER = "penstock_text"
CODE_ANALYZER = "penstock_code"
LOWERCASE = "penstock_lowercase"

Properties = dict[str, Any]

_KEYWORD_LIMIT = 256
_PLAIN = {
    ScalarType.UUID: "keyword",
    ScalarType.BOOLEAN: "boolean",
    ScalarType.SHORT: "short",
    ScalarType.INTEGER: "integer",
    ScalarType.LONG: "long",
    ScalarType.FLOAT: "float",
    ScalarType.DOUBLE: "double",
    ScalarType.DECIMAL: "double",
    ScalarType.DATE: "date",
    ScalarType.TIMESTAMP: "date",
    ScalarType.BINARY: "binary",
}
_ANALYSIS: dict[str, Any] = {
    "filter": {
        "penstock_parts": {"type": "word_delimiter_graph", "catenate_all": True, "preserve_original": True},
    },
    "analyzer": {
        TEXT_ANALYZER: {"type": "custom", "tokenizer": "standard", "filter": ["lowercase", "asciifolding"]},
        # Finds a code by its parts, as a whole, and without separators.
        CODE_ANALYZER: {
            "type": "custom",
            "tokenizer": "whitespace",
            "filter": ["penstock_parts", "flatten_graph", "lowercase", "asciifolding"],
        },
    },
    "normalizer": {LOWERCASE: {"type": "custom", "filter": ["lowercase", "asciifolding"]}},
}
_PARTS = ("char_filter", "tokenizer", "filter", "analyzer", "normalizer")
"""The parts of `analysis`."""
MAPPING_VERSION = 1
"""Increased when this code derives other mappings, analyzers or values from the same specification."""

_IRRELEVANT = frozenset({"name", "required", "dynamic_settings", "place", "aliases"})
_LENGTH = 12
_COMPLETED_LENGTH = 8


def index_mapping(
    specification: IndexSpecification, catalog: SourceCatalog | None = None, *, owner: str = ""
) -> IndexMapping:
    """Return the index of a specification; without the catalog its fingerprint is incomplete, so only for display."""
    writer = _Writer()
    properties = writer.properties(specification.fields, "")
    mappings: dict[str, Any] = {"dynamic": "strict", "properties": properties}
    if writer.templates:
        mappings["dynamic_templates"] = writer.templates
    if specification.source_excludes:
        mappings["_source"] = {"excludes": list(specification.source_excludes)}
    routing = None
    if specification.routing:
        mappings["_routing"] = {"required": True}
        routing = _routing(specification if catalog is None else complete(specification, catalog))
    settings: dict[str, Any] = {**({"knn": True} if writer.has_vectors else {}), **specification.settings}
    parts = [_ANALYSIS, writer.analysis, settings.pop("analysis", {})]
    analysis = {name: {key: each for part in parts for key, each in part.get(name, {}).items()} for name in _PARTS}
    analysis = {name: part for name, part in analysis.items() if part}
    mark = fingerprint(specification) if catalog is None else build_fingerprint(specification, catalog)
    return IndexMapping(
        specification.name,
        mark,
        mappings,
        analysis,
        owner,
        settings,
        specification.dynamic_settings,
        routing,
        specification.aliases,
        specification.id_prefix,
    )


def _routing(specification: IndexSpecification) -> tuple[int, int] | None:
    """Return the place of the routing column in the id; None if the id is left to a catalog that is not known."""
    columns = specification.doc_id or specification.primary_key
    if columns and specification.routing not in columns:
        raise ConfigError(
            f"index {specification.name!r}: routing must be a column of the document id ({', '.join(columns)})",
            hint=f"Add {specification.routing} to doc_id: a document must never move to another shard.",
        )
    return (columns.index(specification.routing), len(columns)) if columns else None


class _Writer:
    """Collects what mappings need elsewhere: templates for maps, normalizers for enums."""

    def __init__(self) -> None:
        self.templates: list[dict[str, Any]] = []
        self.has_vectors = False
        self.analysis: dict[str, dict[str, Any]] = {"char_filter": {}, "normalizer": {}}

    def properties(self, fields: Sequence[Field], path: str) -> Properties:
        return {each.name: self._property(each, f"{path}{each.name}") for each in fields}

    def _property(self, field: Field, path: str) -> Properties:
        match field:
            case Scalar():
                return {**self._scalar(field, path), **field.options}
            case Geo():
                return {"type": "geo_point", **field.options}
            case Constant():
                return {"type": _constant_type(field.value)}
            case Group():
                return {"type": "object", "properties": self.properties(field.fields, f"{path}."), **field.options}
            case Join():
                kind = "nested" if field.to_many else "object"
                return {"type": kind, "properties": self.properties(field.fields, f"{path}."), **field.options}
            case Aggregate():
                return {**_aggregate(field), **field.options}

    def _scalar(self, field: Scalar, path: str) -> Properties:
        match field.type:
            case ScalarType.CUSTOM:
                return {"type": field.opensearch}
            case ScalarType.VECTOR:
                self.has_vectors = True
                return {"type": "knn_vector", "dimension": field.dimensions}
            case ScalarType.JSON:
                # Stored but not searched: its keys are unknown, and strict mappings would reject them.
                return {"type": "object", "enabled": False}
            case ScalarType.MAP:
                leaf = _leaf(field.values or ScalarType.KEYWORD)
                self.templates.append({path: {"path_match": f"{path}.*", "mapping": leaf}})
                return {"type": "object", "dynamic": True}
            case ScalarType.ENUM if field.variants:
                mapping = _leaf(ScalarType.ENUM)
                return mapping | {"fields": mapping["fields"] | {"sort": self._ranked(field.variants, path)}}
            case _:
                return _leaf(field.type)

    def _ranked(self, variants: Sequence[str], path: str) -> Properties:
        """Return a subfield with each variant's rank; other values are kept and sort after all ranks."""
        name = f"penstock_rank_{path.replace('.', '_')}"
        filters: list[str] = []
        for rank, variant in enumerate(variants):
            filters.append(f"{name}_{rank}")
            self.analysis["char_filter"][filters[-1]] = {
                "type": "pattern_replace",
                "pattern": f"^{re.escape(variant)}$",
                "replacement": f"\u0001{rank:04d}",
            }
        self.analysis["normalizer"][name] = {"type": "custom", "char_filter": filters}
        return {"type": "keyword", "normalizer": name}


def _leaf(type_: ScalarType) -> Properties:
    lowercase = {"type": "keyword", "normalizer": LOWERCASE, "ignore_above": _KEYWORD_LIMIT}
    if type_ in (ScalarType.TEXT, ScalarType.IDENTIFIER):
        keyword = {"type": "keyword", "ignore_above": _KEYWORD_LIMIT}
        return {
            "type": "text",
            "analyzer": TEXT_ANALYZER if type_ is ScalarType.TEXT else CODE_ANALYZER,
            "fields": {"keyword": keyword, "keyword_lowercase": lowercase},
        }
    if type_ in (ScalarType.KEYWORD, ScalarType.ENUM):
        text = {"type": "text", "analyzer": CODE_ANALYZER}
        return {"type": "keyword", "fields": {"text": text, "keyword_lowercase": lowercase}}
    return {"type": _PLAIN[type_]}


def _aggregate(field: Aggregate) -> Properties:
    if field.operation is Operation.COUNT:
        return {"type": "long"}
    if field.operation is Operation.AVG or field.value_type is None:
        return {"type": "double"}
    if field.value_type is ScalarType.JSON:
        return {"type": "object", "enabled": False}
    return _leaf(field.value_type)


def _constant_type(value: str | float | bool | None) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "long"
        case float():
            return "double"
        case _:
            return "keyword"


def fingerprint(specification: IndexSpecification) -> str:
    """Return the fingerprint of a specification: twelve hexadecimal digits."""
    return _digest(specification)[:_LENGTH]


def build_fingerprint(specification: IndexSpecification, catalog: SourceCatalog) -> str:
    """Return `fingerprint` plus eight digits that change when the keys from the database change."""
    return fingerprint(specification) + _digest(complete(specification, catalog))[:_COMPLETED_LENGTH]


def is_built_from(build: str, specification: IndexSpecification) -> bool:
    """Return whether a build has this specification, whatever keys the database has by now."""
    return build[:_LENGTH] == fingerprint(specification)


def _digest(specification: IndexSpecification) -> str:
    described = {"mapping_version": MAPPING_VERSION, "index": _describe(specification)}
    text = json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        # Defaults are left out, so a new key does not change the fingerprints of old files.
        said = {each.name: getattr(value, each.name) for each in fields(value) if not _is_default(value, each)}
        if "fields" in said:
            said["fields"] = {each.name: each for each in said["fields"]}
        return {"": type(value).__name__} | {
            name: _describe(each) for name, each in said.items() if name not in _IRRELEVANT
        }
    if isinstance(value, Mapping):
        return {str(key): _describe(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_describe(each) for each in value]
    return value


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    current = getattr(value, field.name)
    if field.default_factory is not MISSING:
        return current == field.default_factory()
    return field.default is not MISSING and current == field.default
