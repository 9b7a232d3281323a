"""Sinks without a server: in memory, on standard output, a counter, and one that writes to several sinks."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from penstock.documents.base import FlushReport, IndexFacts, Sink
from penstock.documents.mapping import IndexMapping
from penstock.documents.sinks.folders import WholeReads


@dataclass(slots=True)
class Generation:
    """One build of an index. Removed documents keep their version, so that an older body cannot bring them back."""

    fingerprint: str
    documents: dict[str, tuple[int, str | None]] = field(default_factory=dict[str, tuple[int, str | None]])
    seeded: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """A backfill and changes write to a generation at the same time."""

    def take(self, id_: str, version: int, body: str | None) -> None:
        """Store a body or a removal, unless a higher version exists."""
        with self.lock:
            known = self.documents.get(id_)
            if known is None or known[0] <= version:
                self.documents[id_] = (version, body)

    @property
    def count(self) -> int:
        """The number of documents."""
        return sum(body is not None for _, body in self.documents.values())


@dataclass(slots=True)
class MemoryIndex:
    """The generation that serves searches, and the one being filled."""

    serving: Generation | None = None
    filling: Generation | None = None

    @property
    def generations(self) -> list[Generation]:
        """The generations that changes go to, the newest last."""
        return [each for each in (self.serving, self.filling) if each is not None]


class MemorySink(WholeReads, Sink):
    """Indexes in memory, for tests: generations, versions and seeding work as in a search server."""

    runs_in_tasks = False

    def __init__(self) -> None:
        self.indexes: dict[str, MemoryIndex] = {}
        self._waiting: list[pa.Table] = []

    def documents(self, index: str) -> dict[str, Any]:
        """Return the documents that a search would see, by id."""
        return {id_: json.loads(body) for id_, body in self.bodies(index).items()}

    def ensure_index(self, mapping: IndexMapping) -> None:
        """See `Sink`. A new fingerprint means a new generation."""
        index = self.indexes.setdefault(mapping.index, MemoryIndex())
        newest = index.filling or index.serving
        if newest is None or newest.fingerprint != mapping.fingerprint:
            index.filling = Generation(mapping.fingerprint)

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        self._waiting.append(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`. Writes to both generations."""
        for batch in self._waiting:
            # Cold: this sink is for tests.
            for row in batch.to_pylist():
                for generation in self.indexes[row["index"]].generations:
                    generation.take(row["id"], row["version"], row["body"])
        self._waiting.clear()
        return FlushReport()

    def is_seeded(self, index: str) -> bool:
        """See `Sink`."""
        found = self.indexes.get(index)
        return found is not None and found.serving is not None and found.serving.seeded and found.filling is None

    def mark_seeded(self, index: str) -> None:
        """See `Sink`."""
        found = self.indexes[index]
        if found.filling is not None:
            found.serving, found.filling = found.filling, None
        if found.serving is not None:
            found.serving.seeded = True

    def serve(self, index: str) -> None:
        """See `Sink`."""
        found = self.indexes[index]
        if found.serving is None:
            found.serving, found.filling = found.filling, None

    def reindex(self, mapping: IndexMapping) -> None:
        """See `Sink`."""
        self.indexes.setdefault(mapping.index, MemoryIndex()).filling = Generation(mapping.fingerprint)

    def filling(self, index: str) -> Sink:
        """See `Sink`."""
        sink = MemorySink()
        sink.indexes[index] = MemoryIndex(serving=self.indexes[index].generations[-1])
        return sink

    # Reading: see `ReadableSink`

    def facts(self, index: str) -> IndexFacts:
        """See `ReadableSink`."""
        found = self.indexes.get(index, MemoryIndex())
        return IndexFacts(
            generation=found.serving.fingerprint if found.serving is not None else None,
            filling=found.filling.fingerprint if found.filling is not None else None,
            documents=len(self.bodies(index)),
        )

    def bodies(self, index: str) -> dict[str, str]:
        """See `WholeReads`."""
        serving = self.indexes.get(index, MemoryIndex()).serving
        found = serving.documents.items() if serving is not None else ()
        return {id_: body for id_, (_, body) in found if body is not None}

    def count(self, index: str) -> int | None:
        """See `Sink`."""
        serving = self.indexes[index].serving
        return None if serving is None else serving.count


class StdoutSink(Sink):
    """Prints one line per document: `{"op":"upsert","index":…,"id":…,"version":…,"document":{…}}`, or `"op":"delete"`.

    It cannot store that it was filled: without `skip_backfill` each start prints everything again.
    """

    runs_in_tasks = False

    def __init__(self, stream: TextIO | None = None, *, pretty: bool = False) -> None:
        self._stream = stream
        self._pretty = pretty
        self._waiting: list[pa.Table] = []

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        self._waiting.append(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`."""
        stream = self._stream or sys.stdout
        for batch in self._waiting:
            # Cold: for people to read.
            for row in batch.to_pylist():
                body = row.pop("body")
                line = {"op": "delete" if body is None else "upsert", **row}
                if body is not None:
                    line["document"] = json.loads(body)
                stream.write(json.dumps(line, ensure_ascii=False, indent=2 if self._pretty else None) + "\n")
        self._waiting.clear()
        stream.flush()
        return FlushReport()


class CountingSink(Sink):
    """Counts documents and bytes by index, and stores nothing: to measure everything before the sink."""

    runs_in_tasks = False

    def __init__(self) -> None:
        self.upserts: Counter[str] = Counter()
        self.deletes: Counter[str] = Counter()
        self.bytes = 0

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        present = pc.is_valid(batch.column("body"))
        for counter, mask in ((self.upserts, present), (self.deletes, pc.invert(present))):
            counts = pc.value_counts(batch.column("index").filter(mask))
            for each in counts.to_pylist():
                counter[each["values"]] += each["counts"]
        self.bytes += pc.sum(pc.binary_length(batch.column("body"))).as_py() or 0

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`."""
        return FlushReport()


class TeeSink(Sink):
    """Forwards every call to several sinks, one after the other; the first error ends the call.

    An index is seeded if it is seeded in all of them. A document that one of them rejects is rejected.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self.runs_in_tasks = all(each.runs_in_tasks for each in self._sinks)

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.write(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`."""
        reports = [sink.flush(caught_up) for sink in self._sinks]
        return FlushReport(tuple(rejection for report in reports for rejection in report.rejections))

    def check(self, mapping: IndexMapping) -> str:
        """See `Sink`."""
        return next(filter(None, (sink.check(mapping) for sink in self._sinks)), "")

    def ensure_index(self, mapping: IndexMapping) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.ensure_index(mapping)

    def is_seeded(self, index: str) -> bool:
        """See `Sink`."""
        return all(sink.is_seeded(index) for sink in self._sinks)

    def mark_seeded(self, index: str) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.mark_seeded(index)

    def serve(self, index: str) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.serve(index)

    def reindex(self, mapping: IndexMapping) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.reindex(mapping)

    def filling(self, index: str) -> Sink:
        """See `Sink`."""
        return TeeSink([sink.filling(index) for sink in self._sinks])

    def count(self, index: str) -> int | None:
        """See `Sink`. Returns the smallest count."""
        counts = [count for sink in self._sinks if (count := sink.count(index)) is not None]
        return min(counts, default=None)
