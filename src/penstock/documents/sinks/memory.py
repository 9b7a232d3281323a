"""Indexes in memory, for tests and for looking: generations, versions and seeding as a search server has them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.documents.base import FlushReport, Sink
from penstock.documents.mapping import IndexMapping
from penstock.documents.reading import SCAN_CHUNK, IndexFacts


@dataclass(slots=True)
class Generation:
    """One build of an index. Removed documents keep their version, so that an older body cannot bring them back."""

    fingerprint: str
    documents: dict[str, tuple[int, str | None]] = field(default_factory=dict[str, tuple[int, str | None]])

    def take(self, id_: str, version: int, body: str | None) -> None:
        """A body or a removal, unless a higher version is there."""
        known = self.documents.get(id_)
        if known is None or known[0] <= version:
            self.documents[id_] = (version, body)

    @property
    def count(self) -> int:
        """Documents that are there."""
        return sum(body is not None for _, body in self.documents.values())


@dataclass(slots=True)
class MemoryIndex:
    """What serves searches, and what is being filled beside it."""

    serving: Generation | None = None
    filling: Generation | None = None

    @property
    def generations(self) -> list[Generation]:
        """All that get what changes, the newest last."""
        return [each for each in (self.serving, self.filling) if each is not None]


class MemorySink(Sink):
    """Documents are there after `flush`, and searches see a generation after `mark_seeded`."""

    def __init__(self) -> None:
        self.indexes: dict[str, MemoryIndex] = {}
        self._waiting: list[pa.Table] = []

    def documents(self, index: str) -> dict[str, Any]:
        """What a search would see, by id."""
        return {id_: json.loads(body) for id_, body in self._serving(index).items()}

    def ensure_index(self, mapping: IndexMapping) -> None:
        """See `Sink`. Another fingerprint is another generation."""
        index = self.indexes.setdefault(mapping.index, MemoryIndex())
        newest = index.filling or index.serving
        if newest is None or newest.fingerprint != mapping.fingerprint:
            index.filling = Generation(mapping.fingerprint)

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        self._waiting.append(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`. Both generations get everything."""
        for batch in self._waiting:
            # Cold: this sink is for tests and for looking.
            for row in batch.to_pylist():
                for generation in self.indexes[row["index"]].generations:
                    generation.take(row["id"], row["version"], row["body"])
        self._waiting.clear()
        return FlushReport()

    def is_seeded(self, index: str) -> bool:
        """See `Sink`."""
        found = self.indexes.get(index)
        return found is not None and found.serving is not None and found.filling is None

    def mark_seeded(self, index: str) -> None:
        """See `Sink`."""
        found = self.indexes[index]
        if found.filling is not None:
            found.serving, found.filling = found.filling, None

    def reindex(self, mapping: IndexMapping) -> None:
        """See `Sink`."""
        self.indexes.setdefault(mapping.index, MemoryIndex()).filling = Generation(mapping.fingerprint)

    def filling(self, index: str) -> Sink:
        """See `Sink`."""
        return _GenerationSink(index, self.indexes[index].generations[-1])

    # What others read: see `ReadableSink`

    def facts(self, index: str) -> IndexFacts:
        """See `ReadableSink`."""
        found = self.indexes.get(index, MemoryIndex())
        return IndexFacts(
            generation=found.serving.fingerprint if found.serving is not None else None,
            filling=found.filling.fingerprint if found.filling is not None else None,
            documents=len(self._serving(index)),
        )

    def fetch(self, index: str, ids: Sequence[str]) -> dict[str, Any]:
        """See `ReadableSink`."""
        found = self._serving(index)
        return {id_: json.loads(found[id_]) for id_ in ids if id_ in found}

    def scan(self, index: str, chunk: int = SCAN_CHUNK) -> Iterator[list[str]]:
        """See `ReadableSink`."""
        ids = list(self._serving(index))
        for start in range(0, len(ids), chunk):
            yield ids[start : start + chunk]

    def sample(self, index: str, count: int) -> list[str]:
        """See `ReadableSink`."""
        ids = list(self._serving(index))
        return random.sample(ids, min(count, len(ids)))

    def _serving(self, index: str) -> dict[str, str]:
        serving = self.indexes.get(index, MemoryIndex()).serving
        found = serving.documents.items() if serving is not None else ()
        return {id_: body for id_, (_, body) in found if body is not None}

    def count(self, index: str) -> int | None:
        """See `Sink`."""
        serving = self.indexes[index].serving
        return None if serving is None else serving.count


class _GenerationSink(Sink):
    """Writes into one generation of one index."""

    def __init__(self, index: str, generation: Generation) -> None:
        self._index = index
        self._generation = generation
        self._waiting: list[pa.Table] = []

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        self._waiting.append(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`."""
        for batch in self._waiting:
            # Cold: this sink is for tests and for looking.
            for row in batch.to_pylist():
                if row["index"] == self._index:
                    self._generation.take(row["id"], row["version"], row["body"])
        self._waiting.clear()
        return FlushReport()

    def count(self, index: str) -> int | None:
        """See `Sink`."""
        return self._generation.count
