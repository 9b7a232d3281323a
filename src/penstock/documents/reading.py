"""What a sink has: for those who compare and look. Only sinks that keep documents for others have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from penstock.documents.base import Sink
from penstock.errors import ConfigError

SCAN_CHUNK = 5_000


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """How an index is in the sink."""

    generation: str | None = None
    """What serves searches; None if nothing does."""
    filling: str | None = None
    """What is being filled beside it, or for the first time."""
    documents: int = 0
    """In what serves."""


@runtime_checkable
class ReadableSink(Protocol):
    """Reads what serves searches. An index that does not exist has no documents."""

    def facts(self, index: str) -> IndexFacts:
        """How the index is now."""
        ...

    def fetch(self, index: str, ids: Sequence[str]) -> Mapping[str, Any]:
        """The documents with these ids, as parsed JSON, also if searches do not see them yet; absent if not there."""
        ...

    def scan(self, index: str, chunk: int = SCAN_CHUNK) -> Iterator[list[str]]:
        """The ids of all documents, in any order; those that come or go meanwhile may be among them or not."""
        ...

    def sample(self, index: str, count: int) -> list[str]:
        """Ids of some documents, by chance."""
        ...


def readable(sink: Sink, name: str) -> ReadableSink:
    """The sink as one that can be read; an error that names it if it cannot."""
    if isinstance(sink, ReadableSink):
        return sink
    raise ConfigError(
        f"sink {name!r} cannot be read: what it was given is not there any more, or not for others",
        hint="Documents can be looked at in opensearch, and in sinks of your own that have what ReadableSink has.",
    )
