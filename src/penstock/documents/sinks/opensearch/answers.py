"""What a server says about each document of a bulk: taken, again, refused for good, or nothing that goes on.

What it says quotes ids and values. Nothing of that leaves here: a refusal is told as its type, the field, and a
sentence of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import failpoints

STALE = 409
"""A newer body is there, or a newer removal: what was wanted is done."""

_NO_ERRORS = b'"errors":false'
_HEAD = 64
_PASSING = frozenset({408, 429})
_PASSING_TYPES = frozenset({"cluster_block_exception", "circuit_breaking_exception"})
# A name that leads nowhere is taken for that of an index to be made, which it cannot be.
_GONE_TYPES = frozenset({"index_not_found_exception", "index_closed_exception", "invalid_index_name_exception"})
_SENTENCES: Mapping[str, str] = {
    "strict_dynamic_mapping_exception": "the mapping does not have this field",
    "mapper_parsing_exception": "the value does not fit the mapping",
    "document_parsing_exception": "the value does not fit the mapping",
    "max_bytes_length_exceeded_exception": "the value is longer than a keyword can be",
    "illegal_argument_exception": "the index does not take the value",
    "json_parse_exception": "the body is not JSON",
    "json_e_o_f_exception": "the body is not JSON",
    "not_x_content_exception": "the body is not a JSON object",
    "number_format_exception": "the value is not a number",
    "input_coercion_exception": "the number is out of the type's range",
    "date_time_parse_exception": "the value is not a date of the mapping's format",
    "parse_exception": "the value does not fit the mapping",
    "parsing_exception": "the value does not fit the mapping",
    "x_content_parse_exception": "the value does not fit the mapping",
}
"""Types that are about the document itself; those of causes are more exact than those of the whole."""
_FIELDS = (
    re.compile(r"failed to parse field \[([^\]]*)\]"),
    re.compile(r"object mapping for \[([^\]]*)\]"),
    re.compile(r'Document contains at least one immense term in field="([^"]*)"'),
)
_NEW_FIELD = re.compile(r"mapping set to strict, dynamic introduction of \[([^\]]*)\] within \[([^\]]*)\]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
"""What a field of a specification looks like; what looks different may come from data, and is not told."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a request: places of documents that go again, of those refused with the reason, and trouble."""

    again: tuple[int, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    busy: str = ""
    """Why some go again, by type."""
    gone: str = ""
    """The index is not there or closed: nothing helps but a person."""
    unknown: str = ""
    """A refusal that is not about a document, as far as we know."""


def judge(data: bytes, said: Any, fields: frozenset[str]) -> Verdict:
    """Read an answer; only where something was not taken are its items looked at. `fields` may be named."""
    if _NO_ERRORS in data[:_HEAD]:
        return Verdict()
    items: Sequence[Mapping[str, Any]] = said.get("items", ())
    again: list[int] = []
    refused: list[tuple[int, str]] = []
    busy = gone = unknown = ""
    # By item: most answers have no error and do not come here.
    for place, item in enumerate(items):
        (outcome,) = item.values()
        error = outcome.get("error")
        status = int(outcome.get("status", 0))
        # A removal of what is not there is also 404, but is no error.
        if error is None or status == STALE:
            continue
        kind = str(error.get("type", ""))
        if kind in _GONE_TYPES:
            gone = kind
        elif status in _PASSING or status >= 500 or kind in _PASSING_TYPES:
            if failpoints.is_off("busy_tried_again"):
                refused.append((place, f"{status} {kind}"))
                continue
            again.append(place)
            busy = f"{status} {kind}"
        elif kind in _SENTENCES:
            refused.append((place, reason_of(error, fields)))
        else:
            unknown = f"{status} {kind}"
    return Verdict(tuple(again), tuple(refused), busy, gone, unknown)


def reason_of(error: Mapping[str, Any], fields: frozenset[str]) -> str:
    """Type, field and a sentence: `mapper_parsing_exception [price]: the value is not a number`."""
    kind = str(error.get("type"))
    sentence = _SENTENCES.get(kind, "the index does not take the document")
    cause = error.get("caused_by")
    while isinstance(cause, Mapping):
        inner = str(cause.get("type"))
        if inner != "illegal_argument_exception":
            sentence = _SENTENCES.get(inner, sentence)
        cause = cause.get("caused_by")
    field = _field(str(error.get("reason", "")), fields)
    return f"{kind} [{field}]: {sentence}" if field else f"{kind}: {sentence}"


def _field(reason: str, fields: frozenset[str]) -> str:
    """The field that a reason begins with, as far as the mapping has it: keys of maps come from data."""
    if found := _NEW_FIELD.match(reason):
        key, parent = found.groups()
        known = _known(parent, fields)
        return ".".join(filter(None, (known, key if _NAME.fullmatch(key) else "")))
    for pattern in _FIELDS:
        if found := pattern.match(reason):
            return _known(found[1], fields)
    return ""


def _known(path: str, fields: frozenset[str]) -> str:
    while path and path not in fields:
        path = path.rpartition(".")[0]
    return path
