"""Traces of batches, sent to an OpenTelemetry collector (OTLP over HTTP).

Spans are made when a batch has ended, from its record, and wait in a bounded queue: a collector that is slow or away
costs spans, never time of the pipeline. Endpoint and service come from the config; the standard variables `OTEL_…` set
headers, certificates, timeouts and further attributes of the resource.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from penstock.observe.batches import BatchRecord, RecentBatches, Span
from penstock.registry import requires_extra

logger = logging.getLogger(__name__)

QUEUE = 4096
"""Spans that wait; more are dropped."""
SEND_SECONDS = 1.0
STOP_SECONDS = 3.0
"""The pipeline waits no longer than this for the last spans."""
_DAY = 86400.0
_PARTS = ("job", "commit")
"""Spans that are parts of `write`."""


def require_traces(endpoint: str | None) -> None:
    """Raise `ConfigError` before the pipeline starts if the extra is missing."""
    if endpoint is not None:
        with requires_extra("otel", "[telemetry]"):
            importlib.import_module("opentelemetry.sdk.trace")
            importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")


@contextmanager
def tracing(endpoint: str | None, pipeline: str) -> Generator[Traces | None]:
    """Send traces inside the block, if there is an endpoint; yield None otherwise."""
    if endpoint is None:
        yield None
        return
    traces = Traces(endpoint, pipeline)
    try:
        yield traces
    finally:
        traces.close()


class Traces:
    """Sends the batches of a pipeline."""

    def __init__(self, endpoint: str, pipeline: str) -> None:
        # Imported here: pipelines without traces do not need the extra.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Its own lines would go to stderr as they are; `_Watched` reports what matters.
        logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
        logging.getLogger("opentelemetry").propagate = False
        named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "penstock"}
        self._resource = Resource.create({**named, "penstock.pipeline": pipeline})
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._processor = BatchSpanProcessor(
            _watched(exporter), max_queue_size=QUEUE, schedule_delay_millis=SEND_SECONDS * 1000
        )

    def follow(self, output: str, batches: RecentBatches) -> None:
        """Send the batches of an output from now on."""
        batches.new_trace = _new_trace
        batches.listener = lambda record: self.send(output, record)

    def send(self, output: str, record: BatchRecord) -> None:
        """Put the spans of a batch into the queue; never raises, and never waits."""
        try:
            for span in self._spans(output, record):
                self._processor.on_end(span)
        except Exception as error:
            logger.warning("a trace was not sent error=%s", type(error).__name__)

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        thread = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)

    def _spans(self, output: str, record: BatchRecord) -> Generator[Any]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        assert record.trace_id is not None
        trace, scope = int(record.trace_id, 16), InstrumentationScope("penstock")

        def context() -> SpanContext:
            return SpanContext(trace, secrets.randbits(64) or 1, is_remote=False, trace_flags=TraceFlags(1))

        def made(
            name: str, own: SpanContext, parent: SpanContext | None, begun: float, ended: float, **options: Any
        ) -> ReadableSpan:
            times = {"start_time": int(begun * 1e9), "end_time": int(max(begun, ended) * 1e9)}
            fixed = {"resource": self._resource, "instrumentation_scope": scope}
            return ReadableSpan(name, own, parent, **fixed, **times, **options)

        root, begun = context(), record.begun
        if 0 < record.begun - record.first_commit < _DAY:
            # By the source's clock, which may be wrong: then there is no such span.
            begun = record.first_commit
            yield made("capture", context(), root, begun, record.begun)
        above = root
        for span in reversed(record.spans):  # a part comes before the span that it is a part of
            own = context()
            parent = above if span.name in _PARTS else root
            if span.name == "write":
                above = own
            yield made(span.name, own, parent, span.begun, _end(span))
        status = Status(StatusCode.UNSET) if record.error is None else Status(StatusCode.ERROR, record.error)
        ended = record.begun + record.seconds
        yield made("batch", root, None, begun, ended, attributes=_attributes(output, record), status=status)


def _watched(exporter: Any) -> Any:
    """Return an exporter that warns once when spans are lost, and again after it has worked meanwhile."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Watched(SpanExporter):
        def __init__(self) -> None:
            self._is_failing = False

        def export(self, spans: Any) -> SpanExportResult:
            result = exporter.export(spans)
            failed = result is not SpanExportResult.SUCCESS
            if failed and not self._is_failing:
                logger.warning("traces are lost: the collector does not take them")
            self._is_failing = failed
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Watched()


def _attributes(output: str, record: BatchRecord) -> dict[str, str | int]:
    return {
        "penstock.output": output,
        "penstock.worker": record.worker,
        "penstock.position": record.position,
        "penstock.transactions": record.transactions,
        "penstock.rows": record.rows,
        "penstock.bytes": record.bytes,
        "penstock.tables": record.table_count,
        **{f"penstock.{operation}": count for operation, count in record.operations.items()},
    }


def _end(span: Span) -> float:
    return span.begun + span.seconds


def _new_trace() -> str:
    return secrets.token_hex(16)
