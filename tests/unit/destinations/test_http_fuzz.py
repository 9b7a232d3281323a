"""Whatever a receiver answers, the http destination goes on, retries, or says by a named error what is wrong."""

from __future__ import annotations

import io
import json
import os
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.destinations.http import HttpDestination
from penstock.destinations.http.client import Endpoint, Refused
from penstock.errors import PenstockError

SECRET = "hunter2secret"
os.environ["PENSTOCK_FUZZED_TOKEN"] = SECRET
STATUSES = st.sampled_from(
    [b"200 OK", b"204 No", b"302 Found", b"401 No", b"409 No", b"418 x", b"429 x", b"503 x", b"999 x"]
)
HEADERS = st.lists(
    st.sampled_from(
        [
            *(b"Retry-After: \xb2", b"Retry-After: " + b"9" * 400, b"Retry-After: -1", b"Content-Length: x"),
            *(
                b"Content-Length: 99999999999",
                b"Transfer-Encoding: chunked",
                b"Location: http://elsewhere",
                b"no colon",
            ),
            *(b"Content-Encoding: gzip", b"X: " + b"y" * 70_000, b": empty", b"Set-Cookie: \xff\x00"),
        ]
    )
    | st.binary(max_size=12).map(lambda each: each.replace(b"\n", b"")),
    max_size=3,
)
BODIES = st.binary(max_size=20) | st.sampled_from([b"[" * 100_000, b"{}", b"null", b'{"tables": 1e999}', b"5\r\nabc"])
ANSWERS = st.builds(
    lambda status, headers, body: b"HTTP/1.1 " + b"\r\n".join([status, *headers]) + b"\r\n\r\n" + body,
    STATUSES,
    HEADERS,
    BODIES,
) | st.binary(max_size=40)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["0/16B3748", "x", "\xb2"])
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["tables", "table_id", "attempt", "position"]), inner, max_size=4)
    ),
    max_leaves=8,
)


class _Answering(socketserver.BaseRequestHandler):
    answer = b""

    def handle(self) -> None:
        self.request.settimeout(5.0)
        received = b""
        while not received.endswith(b"{}"):
            if not (more := self.request.recv(65536)):
                return
            received += more
        self.request.sendall(self.answer)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socketserver.TCPServer(("127.0.0.1", 0), _Answering) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@given(answer=ANSWERS)
@example(answer=b"HTTP/1.1 503 x\r\nRetry-After: \xb2\r\n\r\n")
@example(answer=b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000)
@example(answer=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffffff\r\n")
def test_any_answer_is_accepted_retried_or_refused(port: int, answer: bytes) -> None:
    _Answering.answer = answer
    destination = HttpDestination(
        f"http://127.0.0.1:{port}", auth_env="PENSTOCK_FUZZED_TOKEN", retry_seconds=0.0, timeout=5.0
    )
    endpoint: Endpoint = destination._endpoint  # pyright: ignore[reportPrivateUsage]
    said = repr(endpoint)
    try:
        endpoint.post("/start", io.BytesIO(b"{}"), {}, what="public.orders")
    except (PenstockError, Refused) as error:
        said += f"{error} {getattr(error, 'hint', '')} {getattr(error, 'facts', '')}"
    assert SECRET not in said


@given(JSON)
@example({"tables": [{"table_id": float("inf"), "attempt": 1, "position": "0/1"}]})
@example({"tables": [{"table_id": 1, "attempt": 1, "position": 1}]})
@example({"tables": [{"table_id": 1, "attempt": "a", "position": "0/1"}, {"table_id": 2}]})
def test_any_positions_are_taken_or_refused_as_a_whole(answer: Any) -> None:
    destination = HttpDestination("http://127.0.0.1:1", records_position=True)
    try:
        destination._take_positions(json.loads(json.dumps(answer)))  # pyright: ignore[reportPrivateUsage]
    except PenstockError:
        assert destination.position(1) is None
