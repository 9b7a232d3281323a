"""One short text for all that makes documents what they are: if it changes, the index is built anew.

Part of it: tables, columns, keys, relations, filters, orders, limits, transforms, defaults, constants, options, and the
version of the mappings that this code writes. Not part of it, since neither documents nor mappings change: the index's
name, the order in which fields stand, `required`, and how the file is written.

What a specification leaves to the database, the keys of its tables, makes documents what they are as well: a build has
the fingerprint of its specification, and behind it that of what the database has filled in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from penstock.documents.catalog import SourceCatalog, complete
from penstock.documents.specification import IndexSpecification

MAPPING_VERSION = 1
"""Raised when this code derives other mappings, analyzers or values from the same specification."""

_IRRELEVANT = frozenset({"name", "required"})
_LENGTH = 12
_COMPLETED_LENGTH = 8


def fingerprint(specification: IndexSpecification) -> str:
    """Twelve hexadecimal digits."""
    return _digest(specification)[:_LENGTH]


def build_fingerprint(specification: IndexSpecification, catalog: SourceCatalog) -> str:
    """Eight more than `fingerprint` has: they change when the database fills in something else."""
    return fingerprint(specification) + _digest(complete(specification, catalog))[:_COMPLETED_LENGTH]


def is_built_from(build: str, specification: IndexSpecification) -> bool:
    """Whether a build of this fingerprint has this specification, whatever the database fills in by now."""
    return build[:_LENGTH] == fingerprint(specification)


def _digest(specification: IndexSpecification) -> str:
    described = {"mapping_version": MAPPING_VERSION, "index": _describe(specification)}
    text = json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _describe(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        # What is as it is when nobody says anything is left out: a new key leaves the fingerprints of old files alone.
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


def _is_default(value: Any, field: Field[Any]) -> bool:
    current = getattr(value, field.name)
    if field.default_factory is not MISSING:
        return current == field.default_factory()
    return field.default is not MISSING and current == field.default
