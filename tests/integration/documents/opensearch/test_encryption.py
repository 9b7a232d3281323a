"""An encrypted connection to a search server, through a gateway that ends the encryption."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from penstock.errors import DestinationRefused, DestinationUnavailable
from penstock.sinks.opensearch import OpenSearchSink
from penstock.testing.opensearch import ExistingOpenSearch
from tests.integration.documents.opensearch.conftest import Looker, mapping_of, write


class Gateway:
    """Takes encrypted connections and passes on what is in them."""

    def __init__(self, target: str, certificate: Path, *, asks_who: bool = False) -> None:
        self._target = urlsplit(target)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, certificate.with_suffix(".key"))
        if asks_who:
            self._context.load_verify_locations(certificate)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://localhost:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._threads:
            each.join(10)

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(plain,)))
            self._threads[-1].start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            client = self._context.wrap_socket(plain, server_side=True)
        except OSError:
            plain.close()
            return
        assert self._target.hostname is not None
        with client, socket.create_connection((self._target.hostname, self._target.port or 80)) as server:
            back = threading.Thread(target=_pass_on, args=(server, client))
            back.start()
            _pass_on(client, server)
            back.join(10)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of localhost, signed by itself, with its key beside it."""
    path = tmp_path_factory.mktemp("tls") / "localhost.crt"
    command = "openssl req -new -x509 -days 2 -nodes -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        [*command.split(), "-out", path, "-keyout", path.with_suffix(".key")], check=True, capture_output=True
    )
    return path


@pytest.fixture(params=[False, True], ids=["anybody", "who is asked"])
def gateway(request: pytest.FixtureRequest, opensearch: ExistingOpenSearch, certificate: Path) -> Iterator[Gateway]:
    made = Gateway(opensearch.url, certificate, asks_who=request.param)
    yield made
    made.close()


def test_a_certificate_that_is_trusted_is_enough(gateway: Gateway, certificate: Path, looker: Looker) -> None:
    own = {"client_certificate": str(certificate), "client_key": str(certificate.with_suffix(".key"))}
    for options in ({"ca_file": str(certificate)}, {"verify_certificates": False}):
        sink = OpenSearchSink(gateway.url, replicas=0, **options, **own)
        sink.ensure_index(mapping_of(looker.index))
        assert write(sink, looker.index, {"a": {"n": 1}}) == []
        sink.close()


@pytest.mark.remedy("DestinationRefused")
def test_without_the_certificate_that_a_server_asks_for_it_is_refused_and_with_it_it_writes(
    opensearch: ExistingOpenSearch, certificate: Path, looker: Looker
) -> None:
    gateway = Gateway(opensearch.url, certificate, asks_who=True)
    sink = OpenSearchSink(gateway.url, ca_file=str(certificate))
    with pytest.raises(DestinationRefused, match="encrypted") as caught:
        sink.ensure_index(mapping_of(looker.index))
    sink.close()
    assert "certificates" in caught.value.hint
    own = {"client_certificate": str(certificate), "client_key": str(certificate.with_suffix(".key"))}
    sink = OpenSearchSink(gateway.url, ca_file=str(certificate), replicas=0, **own)
    sink.ensure_index(mapping_of(looker.index))
    assert write(sink, looker.index, {"a": {"n": 1}}) == []
    sink.close()
    gateway.close()


def test_a_server_that_ends_while_the_connection_is_made_is_waited_for(certificate: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    tries: list[bytes] = []

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                tries.append(connection.recv(65536))
                connection.close()

    server = threading.Thread(target=hang_up)
    server.start()
    sink = OpenSearchSink(f"https://localhost:{listener.getsockname()[1]}", ca_file=str(certificate), retry_seconds=0.5)
    with pytest.raises(DestinationUnavailable):
        sink.ensure_index(mapping_of("people"))
    sink.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    server.join(10)
    assert len(tries) > 1


def test_a_certificate_that_nobody_trusts_is_refused_at_once(
    opensearch: ExistingOpenSearch, certificate: Path, looker: Looker
) -> None:
    gateway = Gateway(opensearch.url, certificate)
    sink = OpenSearchSink(gateway.url, password="topsecret", user="me")
    with pytest.raises(DestinationRefused, match="certificate") as caught:
        sink.ensure_index(mapping_of(looker.index))
    assert "topsecret" not in str(caught.value)
    sink.close()
    gateway.close()
