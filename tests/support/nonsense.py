"""Something in front of a search server that answers nonsense for a while: a gateway, a proxy, a maintenance page.

    with NonsenseProxy(server.url, Random(7)) as proxy:
        sink = OpenSearchSink(proxy.url)
        proxy.kind = "HTML"
        proxy.kind = None

Some kinds forward the request and spoil the answer, the others never forward it.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_PAGE = b"<html><body>We will be back soon.</body></html>"


class Request(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def documents(self) -> int:
        """How many documents a bulk request carries; 0 for other requests."""
        return self.body.count(b'"version_type"') if "/_bulk" in self.path else 0


class Reply(NamedTuple):
    status: int
    body: bytes
    sent: int | None = None
    """How many bytes of the body are sent before the connection is cut; None for all."""


Forward = Callable[[], Reply]


def _short_list(request: Request, forward: Forward) -> Reply:
    reply = forward()
    if not request.documents or reply.status != 200:
        return reply
    said: dict[str, Any] = json.loads(reply.body)
    return Reply(200, json.dumps({**said, "items": said["items"][:-1]}).encode())


def _cut_body(request: Request, forward: Forward) -> Reply:
    reply = forward()
    return reply._replace(sent=len(reply.body) // 2)


def _too_large(request: Request, forward: Forward) -> Reply:
    return Reply(413, b'{"error": "too large"}') if request.documents > 1 else forward()


def _always_too_large(request: Request, forward: Forward) -> Reply:
    return Reply(413, _PAGE) if request.documents else forward()


def _lost_answer(request: Request, forward: Forward) -> Reply:
    forward()
    return Reply(502, _PAGE)


KINDS: Mapping[str, Callable[[Request, Forward], Reply]] = {
    "HTML": lambda *_: Reply(200, _PAGE),
    "{}": lambda *_: Reply(200, b"{}"),
    "error object": lambda *_: Reply(200, b'{"error": "an upstream failed"}'),
    "short list": _short_list,
    "404": lambda *_: Reply(404, _PAGE),
    "413": _too_large,
    "413 for every document": _always_too_large,
    "429": lambda *_: Reply(429, b'{"error": {"type": "rejected_execution_exception"}, "status": 429}'),
    "cut body": _cut_body,
    "502 after the work": _lost_answer,
    "503": lambda *_: Reply(503, b""),
}
"""Every kind of nonsense, by name."""


class NonsenseProxy:
    """Forwards requests to a search server; while `kind` is set, some or all answers are nonsense."""

    def __init__(self, url: str, random: Random) -> None:
        self._target = urlsplit(url).netloc
        self._random = random
        self._lock = threading.Lock()
        self.kind: str | None = None
        self.share = 1.0
        """How many of the answers are nonsense while `kind` is set."""
        self.told: Counter[str] = Counter()
        """The number of nonsensical answers, by kind."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="nonsense", daemon=True)
        self._thread.start()

    def __enter__(self) -> NonsenseProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: Request) -> Reply:
        """Forward a request, or not, and return what the client gets."""
        with self._lock:
            kind = self.kind if self.kind is not None and self._random.random() < self.share else None
            if kind is not None:
                self.told[kind] += 1
        if kind is None:
            return self._forward(request)
        return KINDS[kind](request, lambda: self._forward(request))

    def _forward(self, request: Request) -> Reply:
        connection = http.client.HTTPConnection(self._target, timeout=120)
        try:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
            connection.request(request.method, request.path, request.body, headers)
            answer = connection.getresponse()
            return Reply(answer.status, answer.read())
        except OSError:
            return Reply(502, _PAGE)
        finally:
            connection.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with suppress(ConnectionError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                reply = proxy.answer(Request(self.command, self.path, dict(self.headers.items()), body))
                self.send_response(reply.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body[: reply.sent])
                self.close_connection = self.close_connection or reply.sent is not None

            do_GET = do_POST = do_PUT = do_DELETE = _any  # noqa: N815 (the names that the class looks for)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (so named by the class)
                """Stay silent."""

        return Handler


_OWN = ("host", "connection", "content-length", "accept-encoding", "transfer-encoding")
