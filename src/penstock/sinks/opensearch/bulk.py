"""Sends documents to one generation until the server has accepted or rejected each of them.

The lines of a bulk request are joined by columns: bodies are JSON already and pass through unchanged. The server
answers for each document: accepted, try again, rejected, or a failure that stops the sink. Its answers quote ids and
values, which must not leave this module: a rejection names the type of the error, the field, and one of our sentences.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DestinationError, IndexUnusable
from penstock.sinks.base import Rejection
from penstock.sinks.lines import TEXT, escaped, joined, one_line, text
from penstock.sinks.opensearch.client import (
    NOT_FOUND,
    OK,
    TOO_LARGE,
    Answer,
    OpenSearchClient,
    OpenSearchSettings,
    RetryLimit,
    Transient,
)

LONGEST_ID = 512
"""In bytes. A longer one makes the server reject the whole request."""

_ACTION_BYTES = 84
"""Bytes sent for a document besides its id and body."""
STALE = 409
"""A newer body or removal exists: nothing to do."""

_STATUS = b'"status"'
_PASSING = frozenset({408, 429})
_PASSING_TYPES = frozenset({"cluster_block_exception", "circuit_breaking_exception"})
# The server tries to create an index for a missing alias, but its name is invalid.
_GONE_TYPES = frozenset({"index_not_found_exception", "index_closed_exception", "invalid_index_name_exception"})
_SENTENCES: Mapping[str, str] = {
    "strict_dynamic_mapping_exception": "the mapping does not have this field",
    "mapper_parsing_exception": "the value does not fit the mapping",
    "document_parsing_exception": "the value does not fit the mapping",
    "max_bytes_length_exceeded_exception": "the value is too long for a keyword",
    "illegal_argument_exception": "the index rejects the value",
    "json_parse_exception": "the body is not JSON",
    "json_e_o_f_exception": "the body is not JSON",
    "not_x_content_exception": "the body is not a JSON object",
    "number_format_exception": "the value is not a number",
    "input_coercion_exception": "the number is out of the type's range",
    "date_time_parse_exception": "the value is not a date in the mapping's format",
    "parse_exception": "the value does not fit the mapping",
    "parsing_exception": "the value does not fit the mapping",
    "x_content_parse_exception": "the value does not fit the mapping",
}
"""Error types that concern the document itself; causes are more precise than the outer type."""
_FIELDS = (
    re.compile(r"failed to parse field \[([^\]]*)\]"),
    re.compile(r"object mapping for \[([^\]]*)\]"),
    re.compile(r'Document contains at least one immense term in field="([^"]*)"'),
)
_NEW_FIELD = re.compile(r"mapping set to strict, dynamic introduction of \[([^\]]*)\] within \[([^\]]*)\]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
"""The form of a field's name; anything else may come from data and is not reported."""
_WANTED = "errors,items.*.status,items.*.error.type,items.*.error.reason,items.*.error.caused_by"
_HASH_LENGTH = 16
_BAD_ID = f"the id is empty or longer than {LONGEST_ID} bytes"
_TOO_LARGE = "the document exceeds the server's limit for a request"


def bulk_lines(batch: pa.Table, routing: tuple[int, int] | None = None, prefix: str = "") -> memoryview:
    """Return the body of a request for these documents (`DOCUMENT_SCHEMA`); the index is in the URL."""
    before = json.dumps(prefix)[:-1]
    body = one_line(batch.column("body"))
    routed = [text('","routing":"'), escaped(routings(batch.column("id"), routing))] if routing else []
    gone = pc.is_null(body)
    line = pc.binary_join_element_wise(
        pc.if_else(gone, text(f'{{"delete":{{"_id":{before}'), text(f'{{"index":{{"_id":{before}')),
        escaped(batch.column("id")),
        *routed,
        text('","version":'),
        pc.cast(batch.column("version"), TEXT),
        text(',"version_type":"external_gte"}}\n'),
        pc.coalesce(pc.binary_join_element_wise(body, text(""), text("\n")), text("")),
        text(""),
    )
    return joined(line)


def routings(ids: pa.ChunkedArray, routing: tuple[int, int]) -> pa.ChunkedArray:
    """Return the part of each id by which it is routed (`penstock.documents.expressions.document_id`)."""
    part, width = routing
    if width == 1:
        return ids
    parts = pc.list_element(pc.split_pattern(ids, ":"), part)
    return pc.replace_substring(pc.replace_substring(parts, "%3A", ":"), "%25", "%")


def documents_size(batch: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the approximate number of bytes sent for each document."""
    body = pc.fill_null(pc.binary_length(batch.column("body")), 0)
    lengths = pc.add(pc.cast(body, pa.int64()), pc.cast(pc.binary_length(batch.column("id")), pa.int64()))
    return lengths.to_numpy() + _ACTION_BYTES


def split(batch: pa.Table, most_documents: int, most_bytes: int) -> Iterator[pa.Table]:
    """Split documents into pieces of limited number and bytes; a larger document is alone in its piece."""
    ends = np.cumsum(documents_size(batch))
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        fitting = int(np.searchsorted(ends, before + most_bytes, side="right"))
        stop = max(start + 1, min(fitting, start + most_documents))
        yield batch.slice(start, stop - start)
        start = stop


def unusable_ids(batch: pa.Table, prefix: str = "") -> pa.ChunkedArray:
    """Mark documents with an id that no index takes; one of them would fail the whole request."""
    length = pc.binary_length(batch.column("id"))
    return pc.or_(pc.equal(length, 0), pc.greater(length, LONGEST_ID - len(prefix.encode())))


@dataclass(frozen=True, slots=True)
class BulkResult:
    """The result of a request: places of documents to send again, places and reasons of rejected ones, and failures."""

    again: tuple[int, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    busy: str = ""
    """Why some are sent again: status and type."""
    gone: str = ""
    """Type of the error if the index is missing or closed; not retried."""
    unknown: str = ""
    """Status and type of an unknown error."""


def read_answer(answer: Answer, count: int, fields: frozenset[str]) -> BulkResult:
    """Read an answer to a request with `count` documents; rejections may name these `fields`.

    Raises `Transient` unless it names every document: nothing is known about the others, so all are sent again.
    """
    said = answer.json()
    items = said.get("items") if isinstance(said, dict) else None
    if not isinstance(items, list) or len(items) != count:
        raise Transient("it answered a bulk request with something other than the result of each document")
    if said.get("errors") is False and answer.data.count(_STATUS) >= count:
        return BulkResult()
    again: list[int] = []
    refused: list[tuple[int, str]] = []
    busy = gone = unknown = ""
    # Cold: most answers have no errors.
    for place, item in enumerate(items):
        action, status, error = _outcome(item)
        # Removing a missing document is 404 without an error.
        if status == STALE or (error is None and (status in OK or (action, status) == ("delete", NOT_FOUND))):
            continue
        kind = str((error or {}).get("type", ""))
        if kind in _GONE_TYPES:
            gone = kind
        elif status in _PASSING or status >= 500 or kind in _PASSING_TYPES:
            again.append(place)
            busy = f"{status} {kind}".rstrip()
        elif error is not None and kind in _SENTENCES:
            refused.append((place, reason_of(error, fields)))
        else:
            unknown = f"{status} {kind}".rstrip()
    return BulkResult(tuple(again), tuple(refused), busy, gone, unknown)


def _outcome(item: Any) -> tuple[str, int, Mapping[str, Any] | None]:
    """Return action, status and error of an item."""
    for action, outcome in item.items() if isinstance(item, dict) else ():
        if isinstance(outcome, dict) and isinstance(outcome.get("status"), int):
            error = outcome.get("error")
            return action, outcome["status"], {} if error is not None and not isinstance(error, dict) else error
    raise Transient("it answered a bulk request without the status of a document")


def reason_of(error: Mapping[str, Any], fields: frozenset[str]) -> str:
    """Return type, field and a sentence: `mapper_parsing_exception [price]: the value is not a number`."""
    kind = str(error.get("type"))
    sentence = _SENTENCES.get(kind, "the index rejects the document")
    cause = error.get("caused_by")
    while isinstance(cause, Mapping):
        inner = str(cause.get("type"))
        if inner != "illegal_argument_exception":
            sentence = _SENTENCES.get(inner, sentence)
        cause = cause.get("caused_by")
    field = _field(str(error.get("reason", "")), fields)
    return f"{kind} [{field}]: {sentence}" if field else f"{kind}: {sentence}"


def _field(reason: str, fields: frozenset[str]) -> str:
    """Return the field that a reason starts with, if the mapping has it: keys of maps come from data."""
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


@dataclass(frozen=True, slots=True)
class Target:
    """A generation to write to."""

    index: str
    generation: str
    alias: str
    fields: frozenset[str] = frozenset()
    """The fields of the mapping; a rejection may name only these."""
    routing: tuple[int, int] | None = None
    id_prefix: str = ""


class BulkSender:
    """Sends documents until they are durable or rejected."""

    def __init__(self, client: OpenSearchClient, settings: OpenSearchSettings) -> None:
        self._client = client
        self._settings = settings

    def send(self, target: Target, batch: pa.Table, retries: RetryLimit) -> list[Rejection]:
        """Send a batch in pieces, durably; return the rejections. All pieces together have the time of `retries`."""
        rejections: list[Rejection] = []
        unusable = unusable_ids(batch, target.id_prefix)
        if pc.any(unusable).as_py():
            # Removing such a document needs nothing: no index has it.
            refused = pc.and_(unusable, pc.is_valid(batch.column("body")))
            rejections += _rejected(target, batch.filter(refused), _BAD_ID)
            batch = batch.filter(pc.invert(unusable))
        for piece in split(batch, self._settings.bulk_documents, self._settings.bulk_bytes):
            rejections += self._send_piece(target, piece, retries)
        return rejections

    def _send_piece(self, target: Target, piece: pa.Table, retries: RetryLimit) -> Iterator[Rejection]:
        path = f"/{quote(target.alias, safe='')}/_bulk?filter_path={_WANTED}"
        while piece.num_rows:
            try:
                answer = self._client.try_once(
                    "POST", path, bulk_lines(piece, target.routing, target.id_prefix), lines=True
                )
                if answer.status == TOO_LARGE:
                    yield from self._send_smaller(target, piece, retries)
                    return
                answer.require_said()
                if answer.status not in OK:
                    raise DestinationError(
                        f"the search server answered {answer.status} {answer.error_type()} to documents of index "
                        f"{target.index!r}"
                    )
                result = read_answer(answer, piece.num_rows, target.fields)
            except Transient as error:
                # The server may have accepted it; versions make it harmless to send it again.
                retries.wait(error)
                continue
            _check(target, result)
            for place, reason in result.refused:
                yield from _rejected(target, piece.slice(place, 1), reason)
            if len(result.again) < piece.num_rows:
                retries.backoff.reset()
            piece = piece.take(pa.array(result.again, pa.int64()))
            if result.again:
                retries.wait(f"{len(result.again)} documents: {result.busy}")

    def _send_smaller(self, target: Target, piece: pa.Table, retries: RetryLimit) -> Iterator[Rejection]:
        if piece.num_rows == 1:
            yield from _rejected(target, piece, _TOO_LARGE)
            return
        half = piece.num_rows // 2
        yield from self._send_piece(target, piece.slice(0, half), retries)
        yield from self._send_piece(target, piece.slice(half), retries)


def _rejected(target: Target, batch: pa.Table, reason: str) -> list[Rejection]:
    rows = zip(batch.column("id").to_pylist(), batch.column("body").to_pylist(), strict=True)
    return [Rejection(target.index, id_, reason, _hash(body)) for id_, body in rows]


def _hash(body: str | None) -> str:
    return "" if body is None else hashlib.sha256(body.encode()).hexdigest()[:_HASH_LENGTH]


def _check(target: Target, result: BulkResult) -> None:
    if result.gone:
        raise IndexUnusable(
            f"index {target.generation!r}, a generation of {target.index!r}, was deleted or closed ({result.gone})",
            index=target.index,
        )
    if result.unknown:
        raise DestinationError(
            f"the search server rejected documents of index {target.index!r} with an unknown error: {result.unknown}",
            hint="Check the server's log; nothing of this batch was acknowledged.",
        )
