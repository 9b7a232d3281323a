"""Sinks without a server: in memory, on standard output, a counter, and one that writes to several sinks."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.base import FlushReport, IndexMapping, Sink
from penstock.sinks.folders import FolderSink, Generation, IndexState


class MemorySink(FolderSink):
    """Indexes in memory, for tests: generations, versions and seeding work as in a search server.

    Removed documents keep their version, so that an older body cannot bring them back.
    """

    runs_in_tasks = False

    def __init__(self) -> None:
        super().__init__()
        self._described: dict[str, bytes] = {}
        self._generations: dict[str, dict[str, tuple[int, str | None]]] = {}
        self._lock = threading.Lock()
        """A backfill and changes write to a generation at the same time."""

    def documents(self, index: str) -> dict[str, Any]:
        """Return the documents that a search would see, by id."""
        return {id_: json.loads(body) for id_, body in self.bodies(index).items()}

    def bodies(self, index: str) -> dict[str, str]:
        """See `WholeReads`."""
        serving = IndexState.parse(self._load(index)).serving
        found = {} if serving is None else self._generations[serving.name]
        return {id_: body for id_, (_, body) in found.items() if body is not None}

    # Generations: see `FolderSink`

    def _load(self, index: str) -> bytes | None:
        return self._described.get(index)

    def _store(self, index: str, content: bytes) -> None:
        self._described[index] = content

    def _create(self, index: str, generation: Generation, owner: str) -> None:
        self._generations[generation.name] = {}

    def _exists(self, index: str, generation: Generation) -> bool:
        return generation.name in self._generations

    def _append(self, index: str, generation: Generation, rows: pa.Table) -> None:
        with self._lock:
            stored = self._generations[generation.name]
            # Cold: this sink is for tests.
            for row in rows.to_pylist():
                if stored.get(row["id"], (0, None))[0] <= row["version"]:
                    stored[row["id"]] = row["version"], row["body"]

    def _publish(self, index: str, state: IndexState) -> None:
        """Readers look the generation up."""

    def _count(self, index: str, generation: Generation) -> int:
        return sum(body is not None for _, body in self._generations[generation.name].values())


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
        self._waiting.append(batch)

    def flush(self, caught_up: bool) -> FlushReport:
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
        present = pc.is_valid(batch.column("body"))
        for counter, mask in ((self.upserts, present), (self.deletes, pc.invert(present))):
            counts = pc.value_counts(batch.column("index").filter(mask))
            for each in counts.to_pylist():
                counter[each["values"]] += each["counts"]
        self.bytes += pc.sum(pc.binary_length(batch.column("body"))).as_py() or 0

    def flush(self, caught_up: bool) -> FlushReport:
        return FlushReport()


class TeeSink(Sink):
    """Forwards every call to several sinks, one after the other; the first error ends the call.

    An index is seeded if it is seeded in all of them. A document that one of them rejects is rejected.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self.runs_in_tasks = all(each.runs_in_tasks for each in self._sinks)

    def write(self, batch: pa.Table) -> None:
        for sink in self._sinks:
            sink.write(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        reports = [sink.flush(caught_up) for sink in self._sinks]
        return FlushReport(tuple(rejection for report in reports for rejection in report.rejections))

    def retry_until(self, stop: threading.Event) -> None:
        for sink in self._sinks:
            sink.retry_until(stop)

    def check(self, mapping: IndexMapping) -> str:
        return next(filter(None, (sink.check(mapping) for sink in self._sinks)), "")

    def ensure_index(self, mapping: IndexMapping) -> None:
        for sink in self._sinks:
            sink.ensure_index(mapping)

    def is_seeded(self, index: str) -> bool:
        return all(sink.is_seeded(index) for sink in self._sinks)

    def mark_seeded(self, index: str) -> None:
        for sink in self._sinks:
            sink.mark_seeded(index)

    def serve(self, index: str) -> None:
        for sink in self._sinks:
            sink.serve(index)

    def reindex(self, mapping: IndexMapping) -> None:
        for sink in self._sinks:
            sink.reindex(mapping)

    def filling(self, index: str) -> Sink:
        return TeeSink([sink.filling(index) for sink in self._sinks])

    def count(self, index: str) -> int | None:
        """See `Sink`. Returns the smallest count."""
        counts = [count for sink in self._sinks if (count := sink.count(index)) is not None]
        return min(counts, default=None)
