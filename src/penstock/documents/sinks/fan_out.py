"""Every document to several sinks."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.documents.base import FlushReport, Sink
from penstock.documents.mapping import IndexMapping


class FanOutSink(Sink):
    """Forwards every method to all, one after the other; the first error ends the call.

    An index is seeded when it is in all of them. What one of them refuses counts as refused.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, batch: pa.Table) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.write(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        """See `Sink`."""
        reports = [sink.flush(caught_up) for sink in self._sinks]
        return FlushReport(tuple(rejection for report in reports for rejection in report.rejections))

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

    def reindex(self, mapping: IndexMapping) -> None:
        """See `Sink`."""
        for sink in self._sinks:
            sink.reindex(mapping)

    def filling(self, index: str) -> Sink:
        """See `Sink`."""
        return FanOutSink([sink.filling(index) for sink in self._sinks])

    def count(self, index: str) -> int | None:
        """See `Sink`. The smallest: what one of them lacks is missing."""
        counts = [count for sink in self._sinks if (count := sink.count(index)) is not None]
        return min(counts, default=None)
