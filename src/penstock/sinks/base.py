"""The contract of sinks: what they are given, and what they promise. Others may implement `Sink` and `ReadableSink`.

Methods with a default are optional for classes that derive from `Sink`. The engine (`penstock.documents.engine`) may
write a document again after a crash. That is safe: documents are identified by their key, and carry a version, so an
older body never replaces a newer one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from penstock.errors import ConfigError

DOCUMENT_SCHEMA = pa.schema(
    [
        pa.field("index", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("body", pa.large_string()),
    ]
)
"""The columns that a sink receives; the body is JSON as text, or null to remove the document."""
SCAN_CHUNK = 5_000


@dataclass(frozen=True, slots=True)
class IndexMapping:
    """What a sink needs to create an index."""

    index: str
    fingerprint: str
    """Identifies the shape of documents and mappings; a new fingerprint means a new generation."""
    mappings: dict[str, Any]
    analysis: dict[str, Any]
    owner: str = ""
    """The output that writes the index: no other one may."""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further settings, fixed when the index is created."""
    dynamic_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings that an existing index gets, too."""
    routing: tuple[int, int] | None = None
    """Which part of the id decides in which shard a document is, and of how many parts."""
    aliases: tuple[str, ...] = ()
    id_prefix: str = ""

    def body(self, *, shards: int = 1, replicas: int = 1, refresh_interval: str = "1s") -> dict[str, Any]:
        """Return the body of the request that creates the index; the arguments are defaults."""
        fixed = {"number_of_shards": shards, **self.settings, "analysis": self.analysis}
        in_place = self.in_place(replicas=replicas, refresh_interval=refresh_interval)
        return {"settings": {"index": fixed | in_place}, "mappings": self.mappings}

    def in_place(self, *, replicas: int, refresh_interval: str) -> dict[str, Any]:
        """Return the settings of an index that serves, which may change at any time; the arguments are defaults."""
        defaults: dict[str, Any] = {"refresh_interval": refresh_interval}
        if "auto_expand_replicas" not in self.dynamic_settings:
            defaults["number_of_replicas"] = replicas
        return defaults | self.dynamic_settings


@dataclass(frozen=True, slots=True)
class Rejection:
    """A document that a sink will never take, such as one that does not fit the mapping."""

    index: str
    id: str
    reason: str
    body_hash: str = ""
    """Distinguishes bodies without showing them."""


@dataclass(frozen=True, slots=True)
class FlushReport:
    """The result of a flush: everything written since the last one is durable, except for the rejections."""

    rejections: tuple[Rejection, ...] = ()


class Sink(Protocol):
    """Stores documents. One thread at a time calls it, except for `write` in tasks."""

    runs_in_tasks: bool = True
    """False if only this process can use it: documents are then built in this process, too, not by Spark."""

    def write(self, batch: pa.Table) -> None:
        """Take documents (`DOCUMENT_SCHEMA`); they may be kept in memory until `flush`.

        In tasks the sink is a copy of the one on the driver. A later write of an id wins unless its version is lower;
        removing a document that does not exist is no error.
        """
        ...

    def flush(self, caught_up: bool) -> FlushReport:
        """Make everything durable that was written before. If it raises, nothing is known to be durable.

        Retries transient failures (429, 503) itself, and reports only final rejections. `caught_up` means that no more
        changes are waiting: a good moment to make documents visible to searches.
        """
        ...

    def retry_until(self, stop: threading.Event) -> None:
        """Give up retries, with the last failure, when this event is set; called before the first use, not in tasks."""

    def upsert(self, index: str, id: str, version: int, body: str) -> None:  # noqa: A002 (the index's own word)
        """Write one document."""
        self.write(
            pa.Table.from_pylist([{"index": index, "id": id, "version": version, "body": body}], DOCUMENT_SCHEMA)
        )

    def delete(self, index: str, id: str, version: int) -> None:  # noqa: A002 (the index's own word)
        """Remove one document."""
        self.write(
            pa.Table.from_pylist([{"index": index, "id": id, "version": version, "body": None}], DOCUMENT_SCHEMA)
        )

    def check(self, mapping: IndexMapping) -> str:
        """Return why the sink would not create this index; empty if it would, or cannot tell. Changes nothing."""
        return ""

    def ensure_index(self, mapping: IndexMapping) -> None:
        """Create the index if it does not exist. Called on every start; must not disturb searches."""

    def is_seeded(self, index: str) -> bool:
        """Return whether the index was filled completely, in the shape that `ensure_index` was given."""
        return False

    def mark_seeded(self, index: str) -> None:
        """Switch searches to the new index, in one step: all its documents are durable."""

    def serve(self, index: str) -> None:
        """Let searches see the index as it is, though it was not filled (`skip_backfill`); it stays not seeded."""

    def reindex(self, mapping: IndexMapping) -> None:
        """Create an empty index beside the one that serves; not seeded until `mark_seeded`."""

    def filling(self, index: str) -> Sink:
        """Return a sink that writes only to the generation being filled; the backfill uses it.

        Plain `write`, which changes use, goes to the generation that serves and to the one being filled. If none is
        being filled, the result writes to the generation that serves. Sinks without generations keep the default.
        """
        return self

    def count(self, index: str) -> int | None:
        """Return how many documents the index has now (of a `filling` sink, its generation); None if unknown.

        Compared with the number of written documents before a generation serves. Counts everything written before,
        whether searches see it yet or not.
        """
        return None


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """The state of an index in the sink."""

    generation: str | None = None
    """The generation that serves searches; None if none does."""
    filling: str | None = None
    """The generation that is being filled."""
    documents: int = 0
    """The number of documents in the generation that serves."""


@runtime_checkable
class ReadableSink(Protocol):
    """Reads the generation that serves searches. An index that does not exist has no documents."""

    def facts(self, index: str) -> IndexFacts:
        """Return the current state of the index."""
        ...

    def fetch(self, index: str, ids: Sequence[str]) -> Mapping[str, Any]:
        """Return the documents with these ids that exist, as parsed JSON, even if searches do not see them yet."""
        ...

    def scan(self, index: str, chunk: int = SCAN_CHUNK) -> Iterator[list[str]]:
        """Yield the ids of all documents, in any order; those that change meanwhile may be missing."""
        ...

    def sample(self, index: str, count: int) -> list[str]:
        """Return the ids of a random sample of documents."""
        ...


def readable(sink: Sink, name: str) -> ReadableSink:
    """Return the sink as one that can be read; raise `ConfigError` if it cannot."""
    if isinstance(sink, ReadableSink):
        return sink
    raise ConfigError(
        f"sink {name!r} keeps no documents that other processes can read",
        hint="Use another sink, or your own with the methods of penstock.documents.base.ReadableSink.",
    )
