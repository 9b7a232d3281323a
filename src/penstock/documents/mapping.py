"""The index that a specification asks for: mappings and settings of OpenSearch, from the specification alone.

Mappings are strict: a key that the specification does not have is refused, not guessed. Texts get what people need
besides searching them, as subfields: `keyword` to filter and sort, `keyword_lowercase` to do so in any case, `text` to
search a keyword by its parts, and `sort` for enums with an order. `options` of a field come last and win.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.documents.catalog import SourceCatalog
from penstock.documents.fingerprint import build_fingerprint, fingerprint
from penstock.documents.specification import (
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
        # A code is found by its parts, by its whole, and without what separates them.
        CODE_ANALYZER: {
            "type": "custom",
            "tokenizer": "whitespace",
            "filter": ["penstock_parts", "flatten_graph", "lowercase", "asciifolding"],
        },
    },
    "normalizer": {LOWERCASE: {"type": "custom", "filter": ["lowercase", "asciifolding"]}},
    "char_filter": {},
}


@dataclass(frozen=True, slots=True)
class IndexMapping:
    """What a sink needs to create an index."""

    index: str
    fingerprint: str
    """Changes with whatever makes documents or mappings different; another one is another generation."""
    mappings: dict[str, Any]
    analysis: dict[str, Any]

    def body(self, *, shards: int = 1, replicas: int = 1, refresh_interval: str = "1s") -> dict[str, Any]:
        """What creates the index."""
        settings = {
            "number_of_shards": shards,
            "number_of_replicas": replicas,
            "refresh_interval": refresh_interval,
            "analysis": self.analysis,
        }
        return {"settings": {"index": settings}, "mappings": self.mappings}


def index_mapping(specification: IndexSpecification, catalog: SourceCatalog | None = None) -> IndexMapping:
    """The index of a specification; without the catalog only to be looked at, since its fingerprint is not whole."""
    writer = _Writer()
    properties = writer.properties(specification.fields, "")
    mappings: dict[str, Any] = {"dynamic": "strict", "properties": properties}
    if writer.templates:
        mappings["dynamic_templates"] = writer.templates
    analysis = {name: {**part, **writer.analysis.get(name, {})} for name, part in _ANALYSIS.items()}
    analysis = {name: part for name, part in analysis.items() if part}
    mark = fingerprint(specification) if catalog is None else build_fingerprint(specification, catalog)
    return IndexMapping(specification.name, mark, mappings, analysis)


class _Writer:
    """Collects what mappings need elsewhere: templates of maps, normalizers of enums."""

    def __init__(self) -> None:
        self.templates: list[dict[str, Any]] = []
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
            case ScalarType.JSON:
                # Kept as it is and not searched: what is in it is not known, and strict mappings would refuse it.
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
        """A subfield that holds each variant's rank; other values stay, and sort after all ranks."""
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
