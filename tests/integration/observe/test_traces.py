"""Traces of a real pipeline: a collector gets the spans of each batch, and one that hangs or is away costs nothing."""

from __future__ import annotations

import gzip
import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

import penstock
from penstock import Pipeline
from penstock.capture import process
from penstock.observe import LogFormat, configure_logging, traces
from tests.conftest import Database
from tests.program import start_capture
from tests.support.waiting import pause

PATIENCE = 60.0
CONFIG = """
[pipeline]
id = "shop"
spool = {{min_free_bytes = 0}}
batch = {{interval = "50ms"}}
[source]
url = "{dsn}"
tables = ["public.*"]
[spark]
master = "none"
[destination]
type = "{type}"
path = "lake"
[telemetry]
endpoint = "http://127.0.0.1:{port}"
"""


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Event()

    @property
    def port(self) -> int:
        return self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces"
        self.server.asked.set()
        self.server.may_answer.wait(PATIENCE)
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append({a.key: a.value.string_value for a in each.resource.attributes})
            self.server.spans += [span for scope in each.scope_spans for span in scope.spans]
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.may_answer.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def pipeline(
    database: Database, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[Pipeline]:
    monkeypatch.setattr(process, "start_child", start_capture)
    database.execute("create table things (id int primary key, note text); insert into things values (0, 'copied')")
    config = CONFIG.format(dsn=database.dsn, type=getattr(request, "param", "parquet"), port=collector.port)
    (tmp_path / "penstock.toml").write_text(config)
    with penstock.open(tmp_path / "penstock.toml") as running:
        running.wait_until_ready(PATIENCE)
        yield running


def wait(look: Any, what: str) -> Any:
    begun = time.monotonic()
    while not (found := look()):
        assert time.monotonic() < begun + PATIENCE, f"waited for {what}"
        pause(begun, longest=0.2)
    return found


def traces_of(collector: Collector) -> dict[bytes, dict[str, Any]]:
    found: dict[bytes, dict[str, Any]] = {}
    for span in list(collector.spans):
        found.setdefault(span.trace_id, {})[span.name] = span
    return found


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


@pytest.mark.parametrize("pipeline", ["parquet", "delta"], indirect=True)
def test_a_batch_is_a_trace_from_the_commit_to_the_record(
    pipeline: Pipeline, database: Database, collector: Collector
) -> None:
    database.execute(
        "insert into things values (1, 'a cell'), (2, 'a cell'); update things set note = 'b' where id = 1"
    )

    def find() -> Any:
        whole = (each for each in traces_of(collector).values() if "batch" in each)
        return next((each for each in whole if attributes(each["batch"]).get("penstock.insert") == 2), None)

    trace = wait(find, "the trace")
    batch, write = trace["batch"], trace["write"]
    assert set(trace) == {"batch", "capture", "build", "write", "job", "commit", "record"}
    assert batch.parent_span_id == b""
    for name in ("capture", "build", "write", "record"):
        assert trace[name].parent_span_id == batch.span_id, name
    for name in ("job", "commit"):
        assert trace[name].parent_span_id == write.span_id, name
        assert write.start_time_unix_nano <= trace[name].start_time_unix_nano
    order = [trace[name].start_time_unix_nano for name in ("capture", "build", "write", "job", "commit", "record")]
    assert order == sorted(order)
    assert batch.start_time_unix_nano == trace["capture"].start_time_unix_nano
    facts = attributes(batch)
    assert (facts["penstock.output"], facts["penstock.rows"], facts["penstock.update"]) == ("tables", 3, 1)
    assert collector.resources[0]["service.name"] == "penstock"
    assert collector.resources[0]["penstock.pipeline"] == "shop"
    assert "a cell" not in str(collector.spans)


@pytest.mark.parametrize("pipeline", ["delta"], indirect=True)
def test_log_lines_of_a_batch_have_its_trace(pipeline: Pipeline, database: Database, collector: Collector) -> None:
    written = io.StringIO()
    before = logging.getLogger("penstock")
    handlers, level, propagate = list(before.handlers), before.level, before.propagate
    configure_logging("debug", LogFormat.JSON, written)
    try:
        database.execute("insert into things values (3, 'x')")

        def logged() -> list[str]:
            lines = [json.loads(line) for line in written.getvalue().splitlines()]
            return [line["trace_id"] for line in lines if "trace_id" in line]

        ids = wait(logged, "a line with a trace")
        wait(lambda: bytes.fromhex(ids[0]) in traces_of(collector), "its trace")
    finally:
        before.handlers[:], before.propagate = handlers, propagate
        before.setLevel(level)


def test_a_collector_that_hangs_costs_spans_and_no_time(
    pipeline: Pipeline, database: Database, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "STOP_SECONDS", 0.1)
    collector.may_answer.clear()
    database.execute("insert into things values (10, 'x')")
    assert collector.asked.wait(PATIENCE)
    for number in range(11, 15):
        database.execute(f"insert into things values ({number}, 'x')")
        pipeline.wait_until_caught_up(PATIENCE)
    assert penstock.read_table(pipeline, "public.things").num_rows == 6
    pipeline.close()  # does not wait for the collector
    assert not collector.may_answer.is_set()


def test_a_collector_that_is_away_is_named_once_and_the_pipeline_goes_on(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "start_child", start_capture)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    database.execute("create table things (id int primary key, note text)")
    (tmp_path / "penstock.toml").write_text(CONFIG.format(dsn=database.dsn, type="parquet", port=9))
    with penstock.open(tmp_path / "penstock.toml") as running:
        running.wait_until_ready(PATIENCE)

        def warned() -> int:
            return [record.getMessage() for record in caplog.records].count(
                "traces are lost: the collector does not take them"
            )

        database.execute("insert into things values (1, 'x')")
        wait(warned, "the warning")
        database.execute("insert into things values (2, 'x')")
        running.wait_until_caught_up(PATIENCE)
        assert penstock.read_table(running, "public.things").num_rows == 2
    assert warned() == 1
