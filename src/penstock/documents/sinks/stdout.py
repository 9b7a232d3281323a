"""Documents as lines of JSON on standard output, and a sink that only counts them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TextIO

import pyarrow as pa
import pyarrow.compute as pc

from penstock.documents.base import FlushReport, Sink


class StdoutSink(Sink):
    """`{"op":"upsert","index":…,"id":…,"version":…,"document":{…}}` or `"op":"delete"`, a line each.

    It cannot remember that it was seeded: without `skip_backfill` everything comes again at each start.
    """

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
            # Cold: somebody reads this.
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
    """Counts documents and bytes by index, and keeps nothing: for measuring what comes before the sink."""

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
