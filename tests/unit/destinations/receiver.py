"""The other side of the http destination: a real server in this process that keeps tables, and can misbehave."""

from __future__ import annotations

import io
import json
import threading
import urllib.parse
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.changes.events import (
    Delete,
    Event,
    Insert,
    Relation,
    Row,
    Truncate,
    Unchanged,
    Unrepresentable,
    Update,
    iterate_events,
)
from penstock.changes.steps import Entry, Segment
from penstock.destinations.batch_events import copied_rows
from penstock.destinations.http import read_bodies
from penstock.destinations.mirror import MirrorTable
from penstock.lsn import Lsn, OrderKey, furthest, is_in, reaches
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json

NOW = datetime.fromtimestamp(0, UTC)


@dataclass
class Table:
    pipeline: str
    lineage: str
    table_id: int
    attempt: str
    parts: dict[str, list[Row]] = field(default_factory=dict)
    position: Lsn | None = None
    mirror: MirrorTable | None = None


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: bytes


class Receiver:
    """Keeps tables by path; `faults` are statuses to answer before anything is done."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.requests: list[Request] = []
        self.faults: list[int | str] = []
        self.retry_after: str | None = None
        self.lock = threading.RLock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = Request(self.path, dict(self.headers.items()), body)
                status, answer = receiver.handle(request)
                if status == 0:
                    self.close_connection = True
                    return
                content = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                if receiver.retry_after is not None:
                    self.send_header("Retry-After", receiver.retry_after)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/api"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        with self.lock:
            for table in self.tables.values():
                if table.mirror is not None and str(table.mirror.schema) == str(schema):
                    return table.mirror.rows()
        return None

    def handle(self, request: Request) -> tuple[int, Any]:
        with self.lock:
            self.requests.append(request)
            if self.faults:
                fault = self.faults.pop(0)
                if fault == "after":
                    self._dispatch(request)
                    return 503, None
                return (0, None) if fault == "cut" else (int(fault), None)
            return self._dispatch(request)

    def _dispatch(self, request: Request) -> tuple[int, Any]:
        path = request.path.removeprefix("/api")
        if path == "/start":
            return self._start(json.loads(request.body))
        _, _, namespace, name, kind, *rest = path.split("/")
        key = f"{namespace}/{name}"
        if kind == "changes":
            return self._changes(request)
        attempt = urllib.parse.unquote(rest[0])
        if len(rest) == 1:
            return self._begin(key, attempt, json.loads(request.body))
        table = self.tables[key]
        if table.attempt != attempt:
            return 409, None
        if rest[1] == "finish":
            return self._finish(table, json.loads(request.body))
        table.parts[rest[2]] = list(_copied(request))
        return 204, None

    def _start(self, record: dict[str, Any]) -> tuple[int, Any]:
        tables: list[dict[str, Any]] = []
        for each in self.tables.values():
            end = record["continues"].get(each.lineage)
            if each.pipeline != record["pipeline"] or each.position is None:
                continue
            if each.lineage == record["lineage"] or (end is not None and reaches(Lsn.parse(end), each.position)):
                tables.append({"table_id": each.table_id, "attempt": each.attempt, "position": str(each.position)})
                each.lineage = record["lineage"]
        return 200, {"tables": tables}

    def _begin(self, key: str, attempt: str, record: dict[str, Any]) -> tuple[int, Any]:
        table = self.tables.get(key)
        if table is not None and table.pipeline != record["pipeline"]:
            return 409, None
        if table is None:
            table = Table(record["pipeline"], record["lineage"], record["table"]["table_id"], attempt)
            self.tables[key] = table
        if table.attempt != attempt:
            table.attempt, table.parts, table.position = attempt, {}, None
            table.lineage, table.table_id = record["lineage"], record["table"]["table_id"]
        return 204, None

    def _finish(self, table: Table, record: dict[str, Any]) -> tuple[int, Any]:
        if table.position is None:
            rows = [row for part in record["parts"] for row in table.parts[part]]
            table.mirror = MirrorTable(schema_from_json(record["table"]), rows)
            table.position, table.parts = Lsn.parse(record["position"]), {}
        return 204, None

    def _changes(self, request: Request) -> tuple[int, Any]:
        table_id = int(request.headers["Penstock-Table-Id"])
        table = next((each for each in self.tables.values() if each.table_id == table_id), None)
        identity = tuple(urllib.parse.unquote(request.headers[f"Penstock-{each}"]) for each in ("Pipeline", "Lineage"))
        if table is None or table.position is None or table.mirror is None:
            return 409, None
        if identity != (table.pipeline, table.lineage):
            return 409, None
        if urllib.parse.unquote(request.headers["Penstock-Attempt"]) not in ("", table.attempt):
            return 409, None
        mirror = table.mirror.copy()
        arrow = "arrow" in request.headers["Content-Type"]
        for event in _arrow_events(request.body, mirror.schema) if arrow else _line_events(request.body):
            if isinstance(event, Relation) or not is_in(event.key.commit_lsn, table.position):
                mirror.apply(event)
        table.mirror, table.position = mirror, furthest(table.position, Lsn.parse(request.headers["Penstock-End"]))
        return 204, None


def _copied(request: Request) -> list[Row]:
    if "arrow" in request.headers["Content-Type"]:
        steps = list(read_bodies(io.BytesIO(request.body)))
        return [row for step in steps for row in copied_rows(step.rows, step.schema)]
    return [_row(line, "row", "unrepresentable", "unchanged") for line in map(json.loads, request.body.splitlines())]


class _Reader:
    def __init__(self, rows: Any, schema: TableSchema) -> None:
        self.rows, self.table = rows, schema

    def read(self, segment: Segment) -> Any:
        return self.rows

    def schema(self, segment: Segment) -> TableSchema:
        return self.table


def _arrow_events(body: bytes, schema: TableSchema) -> Any:
    for step in read_bodies(io.BytesIO(body)):
        if step.step == "truncate":
            yield Truncate(step.key, NOW, 0, (schema.table_id,), (str(schema),), False, False)
        elif step.step == "rows":
            key = OrderKey(Lsn(0), 0)
            segment = Segment(schema.table_id, str(schema), "v", "f", step.rows.num_rows, 0, key, key)
            events = iterate_events(_Reader(step.rows, step.schema), [Entry(0, Lsn(0), Lsn(0), steps=(segment,))])
            yield from (each for each in events if isinstance(each, Relation | Insert | Update | Delete))


def _line_events(body: bytes) -> Any:
    schema: TableSchema | None = None
    for line in map(json.loads, body.splitlines()):
        if line["op"] == "relation":
            schema = schema_from_json(line["definition"])
            yield Relation(OrderKey(Lsn(0), 0), schema)
        else:
            yield _line_event(line, schema)


def _line_event(line: dict[str, Any], schema: TableSchema | None) -> Event:
    key = OrderKey(Lsn.parse(line["commit_lsn"]), line["ordinal"])
    match line["op"]:
        case "insert":
            return Insert(key, NOW, 0, schema, _row(line, "row", "unrepresentable", "unchanged"))
        case "update":
            old = _row(line, "old", "old_unrepresentable", "old_unchanged") if "old" in line else None
            return Update(key, NOW, 0, schema, _row(line, "row", "unrepresentable", "unchanged"), old)
        case "delete":
            return Delete(key, NOW, 0, schema, _row(line, "old", "old_unrepresentable", "old_unchanged"))
        case _:
            return Truncate(key, NOW, 0, (), (), False, False)


def _row(line: dict[str, Any], name: str, unfit: str, unchanged: str) -> Row:
    row: dict[str, Any] = dict(line[name])
    for column in line.get(unfit, ()):
        row[column] = Unrepresentable(row[column])
    for column in line.get(unchanged, ()):
        row[column] = Unchanged
    if isinstance(row.get("due"), str):
        row["due"] = date.fromisoformat(row["due"])
    return row
