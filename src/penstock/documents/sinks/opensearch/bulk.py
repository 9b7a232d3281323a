"""Sends documents to one generation until each is taken or refused for good."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from penstock.documents.base import Rejection
from penstock.documents.sinks.opensearch.answers import Verdict, judge
from penstock.documents.sinks.opensearch.client import OK, TOO_LARGE, OpenSearchClient, Passing, Patience
from penstock.documents.sinks.opensearch.lines import LONGEST_ID, bulk_lines, cut, unusable_ids
from penstock.documents.sinks.opensearch.settings import OpenSearchSettings
from penstock.errors import DestinationError, IndexUnusable

_WANTED = "errors,items.*.status,items.*.error.type,items.*.error.reason,items.*.error.caused_by"
_HASH_LENGTH = 16
_BAD_ID = f"the id is empty or longer than {LONGEST_ID} bytes"
_TOO_LARGE = "the document is larger than the server takes in one request"


@dataclass(frozen=True, slots=True)
class Target:
    """A generation, as those who write need it."""

    index: str
    generation: str
    alias: str
    fields: frozenset[str] = frozenset()
    """What the mapping has; only these may be named when a document is refused."""


class BulkSender:
    """Sends; every document that it was given is durable when it returns, but for those that it gives back."""

    def __init__(self, client: OpenSearchClient, settings: OpenSearchSettings) -> None:
        self._client = client
        self._settings = settings

    def send(self, target: Target, batch: pa.Table) -> list[Rejection]:
        """All of a batch, in pieces; gives what is refused."""
        rejections: list[Rejection] = []
        unusable = unusable_ids(batch)
        if pc.any(unusable).as_py():
            rejections += _rejected(target, batch.filter(unusable), _BAD_ID)
            batch = batch.filter(pc.invert(unusable))
        for piece in cut(batch, self._settings.bulk_documents, self._settings.bulk_bytes):
            rejections += self._send_piece(target, piece)
        return rejections

    def _send_piece(self, target: Target, piece: pa.Table) -> Iterator[Rejection]:
        patience = Patience(self._settings.retry_seconds)
        path = f"/{quote(target.alias, safe='')}/_bulk?filter_path={_WANTED}"
        while piece.num_rows:
            try:
                answer = self._client.try_once("POST", path, bulk_lines(piece), lines=True)
            except Passing as error:
                # Perhaps it was taken: versions make it harmless to send it again.
                patience.wait(error)
                continue
            if answer.status == TOO_LARGE:
                yield from self._send_smaller(target, piece)
                return
            if answer.status not in OK:
                raise DestinationError(
                    f"the search server answered {answer.status} {answer.error_type()} to documents of {target.index!r}"
                )
            verdict = judge(answer.data, answer.json(), target.fields)
            _check(target, verdict)
            for place, reason in verdict.refused:
                yield from _rejected(target, piece.slice(place, 1), reason)
            if len(verdict.again) < piece.num_rows:
                patience.backoff.reset()
            piece = piece.take(pa.array(verdict.again, pa.int64()))
            if verdict.again:
                patience.wait(f"{len(verdict.again)} documents: {verdict.busy}")

    def _send_smaller(self, target: Target, piece: pa.Table) -> Iterator[Rejection]:
        if piece.num_rows == 1:
            yield from _rejected(target, piece, _TOO_LARGE)
            return
        half = piece.num_rows // 2
        yield from self._send_piece(target, piece.slice(0, half))
        yield from self._send_piece(target, piece.slice(half))


def _rejected(target: Target, batch: pa.Table, reason: str) -> list[Rejection]:
    rows = zip(batch.column("id").to_pylist(), batch.column("body").to_pylist(), strict=True)
    return [Rejection(target.index, id_, reason, _hash(body)) for id_, body in rows]


def _hash(body: str | None) -> str:
    return "" if body is None else hashlib.sha256(body.encode()).hexdigest()[:_HASH_LENGTH]


def _check(target: Target, verdict: Verdict) -> None:
    if verdict.gone:
        raise IndexUnusable(
            f"index {target.generation!r}, a generation of {target.index!r}, is gone or closed ({verdict.gone})",
            index=target.index,
        )
    if verdict.unknown:
        raise DestinationError(
            f"the search server refused documents of {target.index!r} for a reason that Penstock does not know:"
            f" {verdict.unknown}",
            hint="Look into the server's log; nothing of this batch was acknowledged.",
        )
