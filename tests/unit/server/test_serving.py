"""The thread of a server: TLS, a port that is taken, and its end."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import logging
import select
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.config import ServerChoice, make_config
from penstock.errors import ConfigError
from penstock.server import guarding, serving
from penstock.server.guarding import Guard
from penstock.server.serving import Serving, require_server


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"here"})


def started(choice: ServerChoice) -> Serving:
    return Serving(choice, Guard(app, choice))


def certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    pem, secret = folder / "server.pem", folder / "server.key"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pem, secret


def test_it_serves_https_with_files(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path)
    server = started(ServerChoice(port=0, tls_certificate=pem, tls_key=key))
    try:
        assert server.listening.wait(60)
        assert server.address is not None
        context = ssl.create_default_context(cafile=str(pem))
        with urllib.request.urlopen(server.address, timeout=60, context=context) as answer:
            assert answer.read() == b"here"
    finally:
        server.stop()


def test_a_port_that_is_taken_is_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(serving, "Backoff", lambda first, longest: QuickBackoff())
    caplog.set_level(logging.WARNING, logger="penstock.server")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = started(ServerChoice(port=port))
        begun = time.monotonic()
        while "the server does not run" not in caplog.text:
            assert time.monotonic() < begun + 60
            threading.Event().wait(0.01)
        assert server.address is None
    try:
        assert server.listening.wait(60)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=60) as answer:
            assert answer.read() == b"here"
        assert "serving address=" in caplog.text, "the warning is taken back"
    finally:
        server.stop()
    assert server.address is None


class QuickBackoff:
    log_level = logging.WARNING

    def next_delay(self) -> float:
        return 0.01

    def reset(self) -> None:
        """Nothing is remembered."""


def test_a_connection_in_use_is_kept_and_an_idle_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.4)
    server = started(ServerChoice(port=0))
    try:
        assert server.listening.wait(60)
        connection = http.client.HTTPConnection(str(server.address).removeprefix("http://"), timeout=60)
        connection.connect()
        used = connection.sock
        begun = time.monotonic()
        while time.monotonic() < begun + 2:
            connection.request("GET", "/")
            assert connection.getresponse().read() == b"here"
            threading.Event().wait(0.02)
        assert connection.sock is used, "it was opened again"
        assert used.recv(1) == b"", "it was closed when it was idle"
    finally:
        server.stop()


@contextmanager
def flooded(choice: ServerChoice, count: int, kept: int) -> Iterator[tuple[Serving, list[socket.socket]]]:
    """A server to which this many clients connect and send nothing, once it has closed all but those that it keeps."""
    server = started(choice)
    clients: list[socket.socket] = []
    try:
        assert server.listening.wait(60)
        host, port = str(server.address).partition("://")[2].split(":")
        for _ in range(count):
            clients.append(socket.create_connection((host, int(port)), timeout=60))
        begun = time.monotonic()
        while len(still_open(clients)) > kept:
            assert time.monotonic() < begun + 5, "the server keeps more connections than it says"
            threading.Event().wait(0.02)
        yield server, clients
    finally:
        for client in clients:
            client.close()
        server.stop()


def test_idle_connections_leave_files_for_the_pipeline_and_do_not_keep_others_out() -> None:
    with flooded(ServerChoice(port=0), 3 * serving.CONNECTIONS, serving.CONNECTIONS) as (server, clients):
        with urllib.request.urlopen(str(server.address), timeout=60) as answer:
            assert answer.read() == b"here", "a new connection has precedence over idle ones"
        assert len(still_open(clients)) >= serving.CONNECTIONS - 1, "only as many as needed were closed"


def test_handshakes_that_never_end_leave_files_for_the_pipeline(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path)
    with flooded(ServerChoice(port=0, tls_certificate=pem, tls_key=key), 2 * serving.SOCKETS, serving.SOCKETS):
        pass


@pytest.mark.parametrize("length", [b"", b"content-length"], ids=["stream", "whole"])
def test_a_client_that_never_reads_is_let_go(monkeypatch: pytest.MonkeyPatch, length: bytes) -> None:
    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.4)
    monkeypatch.setattr(guarding, "SEND_SECONDS", 0.2)
    size = 1 << 20

    async def send_much(scope: Any, receive: Any, send: Any) -> None:
        headers = [(length, str(8 * size).encode())] if length else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in range(8):
            await send({"type": "http.response.body", "body": b"x" * size, "more_body": part < 7})

    choice = ServerChoice(port=0)
    server = Serving(choice, Guard(send_much, choice))
    try:
        assert server.listening.wait(60)
        host, port = str(server.address).removeprefix("http://").split(":")
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect((host, int(port)))
            client.sendall(f"GET / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
            assert client.recv(1) == b"H"
            begun = time.monotonic()
            while server._server.server_state.connections:
                assert time.monotonic() < begun + 5, "the connection is open as long as the client likes"
                threading.Event().wait(0.02)
    finally:
        server.stop()


def still_open(clients: list[socket.socket]) -> list[socket.socket]:
    """Those that the server has not closed."""
    poll = select.poll()
    for client in clients:
        poll.register(client, select.POLLIN)
    closed = {found for found, _ in poll.poll(0)}
    return [client for client in clients if client.fileno() not in closed]


def test_answers_are_sent_at_once() -> None:
    with serving._bound("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only then"


def test_files_that_cannot_be_read_are_refused_before_the_start(tmp_path: Path) -> None:
    config = make_config(
        {
            "pipeline": {"id": "shop"},
            "source": {"url": "postgresql://localhost/shop"},
            "destination": {"type": "memory"},
            "server": {"tls_certificate": "missing.pem", "tls_key": "missing.key"},
        },
        tmp_path,
    )
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.pem"):
        require_server(config)
