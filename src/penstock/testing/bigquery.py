"""BigQuery for tests: an emulator for tables, queries and load jobs, and a fake for what the emulator does not do.

    with EmulatedBigQuery() as server:
        BigQueryDestination("shop", "mirror", endpoint=server.endpoint, storage_endpoint=server.storage_endpoint)

The emulator (PyPI `bqemulator`) ignores `_CHANGE_TYPE`, primary keys and the names of load jobs. The **fake** stands
between the real clients and the emulator, and does what the documentation of BigQuery says:

- of the rows with one key, the one with the highest `_CHANGE_SEQUENCE_NUMBER` counts; of equal ones, the last one;
- a committed stream takes a row at each offset once, and none after it was finalized;
- the name of a job can be used once.

It shows that Penstock uses these rules, not that BigQuery keeps them. `make bigquery-emulator` installs the emulator.
"""

from __future__ import annotations

import datetime
import decimal
import http.client
import io
import json
import os
import secrets
import shutil
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import grpc
import pyarrow as pa
import pyarrow.parquet as pq
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery
from google.cloud.bigquery.format_options import ParquetOptions
from google.cloud.bigquery_storage_v1 import types
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from penstock.errors import ConfigError, ServerUnavailable
from penstock.testing.server import STOP_SECONDS, OwnServer, free_port

HOME_VARIABLE = "PENSTOCK_BIGQUERY_EMULATOR"
"""The folder of the emulator; by default `bigquery-emulator` in the interpreter's environment."""
START_SECONDS = 120.0
_SERVICE = "google.cloud.bigquery.storage.v1"
_CHANGE_TYPE, _CHANGE_SEQUENCE = "_CHANGE_TYPE", "_CHANGE_SEQUENCE_NUMBER"


def find_emulator() -> Path | None:
    """Return the emulator's folder, if it is installed."""
    home = Path(os.environ.get(HOME_VARIABLE) or Path(sys.prefix) / "bigquery-emulator")
    return home if (home / "bin" / "bqemulator").exists() and (home / "home").exists() else None


def why_not() -> str | None:
    """Return what is missing to run the emulator here, with the remedy; None if nothing is."""
    return None if find_emulator() is not None else "the BigQuery emulator is not installed: make bigquery-emulator"


@dataclass(slots=True)
class Cut:
    """A connection that breaks: before BigQuery has a chunk, or after that but before its answer."""

    table: str
    """The beginning of the table's name."""
    after: bool
    times: int
    skip: int
    """How many appends to that table come before."""
    seen: int = 0


@dataclass(slots=True)
class _Stream:
    table: str
    rows: int = 0
    is_final: bool = False


@dataclass(slots=True)
class _Table:
    key: list[str] = field(default_factory=list[str])
    newest: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict[tuple[Any, ...], tuple[int, ...]])


class EmulatedBigQuery(OwnServer):
    """The emulator with the fake in front of it."""

    project = "penstock"

    def __init__(self) -> None:
        home = find_emulator()
        if home is None:
            raise ConfigError(why_not() or "", hint="make bigquery-emulator")
        super().__init__("penstock-bq-", pid_file="pid", end_signal="KILL")
        self._home = home
        self._grpc_port = free_port()
        self._lock = threading.RLock()
        self._tables: dict[str, _Table] = {}
        self._streams: dict[str, _Stream] = {}
        self._jobs: dict[str, Any] = {}
        self._cuts: list[Cut] = []
        self.appended: list[tuple[str, int]] = []
        """The table and the number of rows of every append that was carried out."""

    def start(self) -> Self:
        """See `OwnServer`."""
        shutil.copytree(self._home / "home", self.folder / "home")
        for path in [self.folder / "home", *(self.folder / "home").rglob("*")]:
            self._give(path)
        command = [
            str(self._home / "bin" / "bqemulator"), "start", "--project", self.project, "--log-level", "error",
            "--rest-port", str(self.port), "--grpc-port", str(self._grpc_port), "--ephemeral",
            "--data-dir", str(self.folder),
        ]  # fmt: skip
        self._process = self._spawn(
            command, {**os.environ, "HOME": str(self.folder / "home"), "TMPDIR": str(self.folder)}
        )
        (self.folder / "pid").write_text(str(self._process.pid))
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._grpc_port}")
        self._wait()
        self._client = bigquery.Client(
            self.project,
            credentials=AnonymousCredentials(),
            client_options=ClientOptions(api_endpoint=f"http://127.0.0.1:{self.port}"),
        )
        self._rest = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._rest.serve_forever, daemon=True).start()
        self._server = grpc.server(ThreadPoolExecutor(16))
        self._server.add_generic_rpc_handlers((self._write_handlers(), self._read_handlers()))
        self._storage_port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def kill(self) -> None:
        """See `OwnServer`."""
        for name in ("_server", "_rest"):
            server = getattr(self, name, None)
            if server is not None:
                server.stop(None) if name == "_server" else server.shutdown()
                delattr(self, name)
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        self._process = None

    @property
    def endpoint(self) -> str:
        """The URL for tables and jobs."""
        return f"http://127.0.0.1:{self._rest.server_port}"

    @property
    def storage_endpoint(self) -> str:
        """Host and port for appending and reading rows."""
        return f"127.0.0.1:{self._storage_port}"

    def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query; independent of the code under test."""
        return self._client.query(sql).to_arrow(create_bqstorage_client=False).to_pylist()

    def cut(self, table: str, *, after: bool, times: int = 1, skip: int = 0) -> Cut:
        """Break the next connections that append to a table whose name begins like this, after `skip` appends."""
        cut = Cut(table, after, times, skip)
        with self._lock:
            self._cuts.append(cut)
        return cut

    def heal(self) -> None:
        """Break no more connections."""
        with self._lock:
            self._cuts.clear()

    def expire_streams(self) -> None:
        """Forget all streams, as BigQuery does with those that were not used for long."""
        with self._lock:
            self._streams.clear()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.running and time.monotonic() < deadline:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", f"/bigquery/v2/projects/{self.project}/datasets")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    grpc.channel_ready_future(self._channel).result(START_SECONDS)
                    return
            except OSError:
                time.sleep(0.1)
        raise ServerUnavailable(f"the emulator did not start; its log ends with:\n{self.log_tail()}", hint="")

    # What the fake adds to the Storage Write API.

    def _write_handlers(self) -> grpc.GenericRpcHandler:
        def unary(kind: Any, answer: Callable[[Any, grpc.ServicerContext], Any]) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=kind.deserialize,
                response_serializer=_serialized,
            )

        append = grpc.stream_stream_rpc_method_handler(
            self._append,
            request_deserializer=types.AppendRowsRequest.deserialize,
            response_serializer=types.AppendRowsResponse.serialize,
        )
        handlers = {
            "AppendRows": append,
            "CreateWriteStream": unary(types.CreateWriteStreamRequest, self._create_stream),
            "FinalizeWriteStream": unary(types.FinalizeWriteStreamRequest, self._finalize_stream),
        }
        return grpc.method_handlers_generic_handler(f"{_SERVICE}.BigQueryWrite", handlers)

    def _create_stream(self, request: Any, _: grpc.ServicerContext) -> Any:
        with self._lock:
            name = f"{request.parent}/streams/s{secrets.token_hex(4)}"
            self._streams[name] = _Stream(request.parent)
        return types.WriteStream(name=name, type_=types.WriteStream.Type.COMMITTED)

    def _finalize_stream(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._lock:
            stream = self._streams.get(request.name)
            if stream is None:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such stream")
                raise AssertionError
            stream.is_final = True
            return types.FinalizeWriteStreamResponse(row_count=stream.rows)

    def _append(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            table = request.write_stream.split("/")[5]
            if self._breaks(table, after=False):
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            with self._lock:
                error = self._apply(request)
            if self._breaks(table, after=True):
                context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            answer = types.AppendRowsResponse(append_result=types.AppendRowsResponse.AppendResult())
            if error is not None:
                answer = types.AppendRowsResponse(error={"code": error.value[0], "message": "refused"})
            yield answer

    def _breaks(self, table: str, *, after: bool) -> bool:
        with self._lock:
            for cut in self._cuts:
                if cut.after == after and table.startswith(cut.table):
                    cut.seen += 1
                    if cut.skip < cut.seen <= cut.skip + cut.times:
                        return True
        return False

    def _apply(self, request: Any) -> grpc.StatusCode | None:
        path, _, name = request.write_stream.partition("/streams/")
        if name == "_default":
            return self._upsert(path, request)
        stream = self._streams.get(request.write_stream)
        if stream is None:
            return grpc.StatusCode.NOT_FOUND
        if stream.is_final:
            return grpc.StatusCode.INVALID_ARGUMENT
        if request.offset is None or request.offset > stream.rows:
            return grpc.StatusCode.OUT_OF_RANGE
        if request.offset < stream.rows:
            return grpc.StatusCode.ALREADY_EXISTS
        data = types.AppendRowsRequest.pb(request).arrow_rows
        schema = pa.ipc.read_schema(pa.py_buffer(data.writer_schema.serialized_schema))
        batch = pa.ipc.read_record_batch(pa.py_buffer(data.rows.serialized_record_batch), schema)
        self._load(path, pa.Table.from_batches([batch]))
        stream.rows += batch.num_rows
        return None

    def _upsert(self, path: str, request: Any) -> grpc.StatusCode | None:
        """Apply rows with change types: cold, row by row."""
        table = self._tables.get(path.rpartition("/")[2], _Table())
        data = types.AppendRowsRequest.pb(request).proto_rows
        message = _message(data.writer_schema.proto_descriptor)
        names = {each.name for each in message.DESCRIPTOR.fields}
        if not {_CHANGE_TYPE, _CHANGE_SEQUENCE, *table.key} <= names or not table.key:
            return grpc.StatusCode.INVALID_ARGUMENT
        gone: list[tuple[Any, ...]] = []
        kept: dict[tuple[Any, ...], Any] = {}
        for content in data.rows.serialized_rows:
            row = message.FromString(content)
            key = tuple(getattr(row, name) for name in table.key)
            number = tuple(int(part, 16) for part in getattr(row, _CHANGE_SEQUENCE).split("/"))
            if number < table.newest.get(key, ()):
                continue
            table.newest[key] = number
            gone.append(key)
            kept.pop(key, None)
            if getattr(row, _CHANGE_TYPE) == "UPSERT":
                kept[key] = row
        _, project, _, dataset, _, name = path.split("/")
        reference = f"{project}.{dataset}.{name}"
        fields = self._fields(reference)
        if gone:
            kinds = {each.name: each.field_type for each in fields}
            conditions = (
                " and ".join(
                    f"{each} = {_literal(value, kinds[each])}" for each, value in zip(table.key, key, strict=True)
                )
                for key in gone
            )
            self._client.query(f"delete from `{reference}` where ({') or ('.join(conditions)})").result()
        if kept:
            schema = pa.schema([(each.name, _arrow_type(each)) for each in fields])
            rows = [{each.name: _python(row, each) for each in fields} for row in kept.values()]
            self._load(path, pa.Table.from_pylist(rows, schema))
        return None

    def _load(self, path: str, rows: pa.Table) -> None:
        """Give rows to the emulator by a load job: its own Storage Write API cannot take repeated structs.

        The job takes columns by their places, so that all have to be there.
        """
        _, project, _, dataset, _, name = path.split("/")
        fields = self._fields(f"{project}.{dataset}.{name}")
        arrays = [
            rows.column(each.name) if each.name in rows.column_names else pa.nulls(rows.num_rows, _arrow_type(each))
            for each in fields
        ]
        file = io.BytesIO()
        pq.write_table(pa.table(arrays, names=[each.name for each in fields]), file)
        file.seek(0)
        options = ParquetOptions()
        options.enable_list_inference = True
        config = bigquery.LoadJobConfig(
            source_format="PARQUET", write_disposition="WRITE_APPEND", parquet_options=options
        )
        self._client.load_table_from_file(file, f"{project}.{dataset}.{name}", job_config=config).result()
        self.appended.append((name, rows.num_rows))

    def _fields(self, reference: str) -> list[bigquery.SchemaField]:
        """Return the columns of a table; its metadata lacks those that a statement has added."""
        return list(self._client.query(f"select * from `{reference}` limit 0").result().schema)

    def _read_handlers(self) -> grpc.GenericRpcHandler:
        """The Storage Read API is the emulator's."""

        def session(request: bytes, _: grpc.ServicerContext) -> bytes:
            return self._channel.unary_unary(f"/{_SERVICE}.BigQueryRead/CreateReadSession")(request)

        def rows(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
            yield from self._channel.unary_stream(f"/{_SERVICE}.BigQueryRead/ReadRows")(request)

        handlers = {
            "CreateReadSession": grpc.unary_unary_rpc_method_handler(session),
            "ReadRows": grpc.unary_stream_rpc_method_handler(rows),
        }
        return grpc.method_handlers_generic_handler(f"{_SERVICE}.BigQueryRead", handlers)

    # What the fake adds to the REST API.

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any, bytes]:
        """Answer a request, with the emulator's help."""
        parts = urllib.parse.urlsplit(path).path.split("/")
        content: Any = {}
        if body and method == "POST" and "json" in headers.get("Content-Type", "json"):
            content = json.loads(body)
        if method == "GET" and parts[-2] == "jobs" and parts[-1] in self._jobs:
            return http.HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(self._jobs[parts[-1]]).encode()
        if "/upload/" in path and method == "POST":
            job = content["jobReference"]["jobId"]
            if job in self._jobs:
                return http.HTTPStatus.CONFLICT, {"Content-Type": "application/json"}, b'{"error": {"code": 409}}'
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, body, {name: each for name, each in headers.items() if name != "Host"})
        answer = connection.getresponse()
        result = answer.read()
        if "/upload/" in path and method == "POST" and answer.status == http.HTTPStatus.OK:
            self._jobs[content["jobReference"]["jobId"]] = {**content, "status": {"state": "DONE"}}
        if method == "POST" and parts[-1] == "tables" and answer.status == http.HTTPStatus.OK:
            key = content.get("tableConstraints", {}).get("primaryKey", {}).get("columns", [])
            with self._lock:
                self._tables[content["tableReference"]["tableId"]] = _Table(key)
        return answer.status, dict(answer.getheaders()), result


def _handler(server: EmulatedBigQuery) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65_537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = server.forward(self.command, self.path, dict(self.headers.items()), body)
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "date", "server", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

    return Handler


def _serialized(message: Any) -> bytes:
    return type(message).serialize(message)


def _message(descriptor: Any) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="rows.proto", package="rows", syntax="proto2")
    file.message_type.append(descriptor)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"rows.{descriptor.name}"))


def _literal(value: Any, kind: str) -> str:
    if isinstance(value, bytes):
        return "b'" + "".join(f"\\x{each:02x}" for each in value) + "'"
    if kind == "DATE":
        return f"date_add(date '1970-01-01', interval {value} day)"
    if kind == "TIMESTAMP":
        return f"timestamp_micros({value})"
    if isinstance(value, str):
        text = "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
        return text if kind == "STRING" else f"cast({text} as {kind})"
    return str(value)


_ARROW = {
    "BOOL": pa.bool_(), "BOOLEAN": pa.bool_(), "INT64": pa.int64(), "INTEGER": pa.int64(), "FLOAT64": pa.float64(),
    "FLOAT": pa.float64(), "STRING": pa.string(), "BYTES": pa.binary(), "DATE": pa.date32(), "TIME": pa.time64("us"),
    "DATETIME": pa.timestamp("us"), "TIMESTAMP": pa.timestamp("us", "UTC"), "NUMERIC": pa.decimal128(38, 9),
}  # fmt: skip


def _arrow_type(column: bigquery.SchemaField) -> pa.DataType:
    if column.field_type in ("RECORD", "STRUCT"):
        type_: pa.DataType = pa.struct([(each.name, _arrow_type(each)) for each in column.fields])
    else:
        type_ = _ARROW[column.field_type]
    return pa.list_(type_) if column.mode == "REPEATED" else type_


def _python(row: Any, column: bigquery.SchemaField) -> Any:
    """Return a field of a message as Python has it in Arrow."""
    if column.name not in row.DESCRIPTOR.fields_by_name:
        return [] if column.mode == "REPEATED" else None
    value = getattr(row, column.name)
    if column.mode == "REPEATED":
        return [_single(each, column) for each in value]
    return _single(value, column) if row.HasField(column.name) else None


def _single(value: Any, column: bigquery.SchemaField) -> Any:
    match column.field_type:
        case "RECORD" | "STRUCT":
            return {each.name: _python(value, each) for each in column.fields}
        case "DATE":
            return datetime.date(1970, 1, 1) + datetime.timedelta(days=value)
        case "TIMESTAMP":
            return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=value)
        case "DATETIME":
            return datetime.datetime.fromisoformat(value)
        case "TIME":
            return datetime.time.fromisoformat(value)
        case "NUMERIC":
            return decimal.Decimal(value)
        case _:
            return value
