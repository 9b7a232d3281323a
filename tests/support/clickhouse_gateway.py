"""ClickHouse's HTTP interface over its engine in this process, as far as a client of Penstock uses it.

There is no server to test with. Requests of the real client reach the real engine through this: user and password,
settings, tokens, Arrow in both directions, codes of errors. Clients may be in other processes.
"""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import clickhouse_connect
from clickhouse_connect.driver.exceptions import DatabaseError

USER, PASSWORD = "penstock", "s3cret/&"
_NOT_SETTINGS = frozenset(
    {"query", "query_id", "database", "session_id", "client_protocol_version", "enable_http_compression", "compress"}
    | {
        "wait_end_of_query",
        "send_progress_in_http_headers",
        "http_headers_progress_interval_ms",
        "cancel_http_readonly",
    }
    | {"http_write_exception_in_output_format", "cancel_http_readonly_queries_on_client_close"}
)
_INSERT = re.compile(r"\s*insert\s+into\s+(.+?)\s*(?:\((.*)\))?\s+format\s+(\w+)\s*", re.IGNORECASE | re.DOTALL)


@dataclass
class Gateway:
    """A running gateway."""

    url: str
    requests: list[str] = field(default_factory=list[str])
    """The statements that came."""
    refuse: tuple[int, str] | None = None
    """Code and name of an error that all requests get; None for none."""


@contextmanager
def open_gateway(engine: str) -> Iterator[Gateway]:
    """Serve the engine at a `chdb://` URL; yield the URL of the gateway, without a database."""
    gateway = Gateway("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            parameters = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
            wanted = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            if self.headers.get("Authorization") != f"Basic {wanted}":
                self._answer(b"Code: 516. DB::Exception: wrong (AUTHENTICATION_FAILED)", 516)
                return
            if gateway.refuse is not None:
                code, name = gateway.refuse
                self._answer(f"Code: {code}. DB::Exception: by order ({name})".encode(), code)
                return
            try:
                self._answer(_execute(engine, parameters, body, gateway.requests))
            except DatabaseError as error:
                self._answer(str(error).encode(), error.code or 1000)

        def do_GET(self) -> None:
            self.do_POST()

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts: list[bytes] = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _answer(self, content: bytes, code: int | None = None) -> None:
            self.send_response(200 if code is None else 500)
            if code is not None:
                self.send_header("X-ClickHouse-Exception-Code", str(code))
            self.send_header("X-ClickHouse-Timezone", "UTC")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield gateway
    finally:
        server.shutdown()
        server.server_close()


def _execute(engine: str, parameters: dict[str, str], body: bytes, requests: list[str]) -> bytes:
    settings = {name: value for name, value in parameters.items() if name not in _NOT_SETTINGS}
    query = parameters.get("query") or body.decode()
    requests.append(query)
    with closing(clickhouse_connect.get_client(dsn=engine)) as client:
        if database := parameters.get("database"):
            client.command(f"use `{database}`")  # as a server does: refused if it does not exist
        insert = _INSERT.fullmatch(query.partition("\n")[0] if parameters.get("query") else "")
        if insert is None:
            return client.raw_query(query, settings=settings)
        columns = [name.strip().strip("`") for name in insert[2].split(",")] if insert[2] else None
        client.raw_insert(insert[1], columns, body, settings, insert[3])
        return b""
