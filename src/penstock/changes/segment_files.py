"""Segments where tasks run: the driver's own file, or its bytes over HTTP.

The spool stays on the driver's disk. On the same machine, or on a disk that all machines share, a task opens the file.
An equal path proves nothing, since every machine may have a `/var/lib/penstock`: the driver leaves a random number in
the spool, and a task that does not find it there, or finds a file of another size, asks the driver.

    with SegmentServer(spool, host="driver.example") as server:
        # In a task:
        with server.origin.open(path, size) as file:
            ...

The server answers to a token that only tasks know: it is part of what the driver sends to them, and never of an
address, a command line, a log line or a file. The connection is not encrypted.
"""

from __future__ import annotations

import hmac
import http.client
import io
import logging
import os
import re
import secrets
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa

from penstock.durable import aside
from penstock.errors import DestinationUnavailable
from penstock.private import private_folder
from penstock.retry import Backoff

PROOF = "served"
"""The file of a spool with the random number of its server."""
_SEGMENTS = "segments"
_WHOLE_BYTES = 1 << 20
"""A file of at most this size is one request; of a larger one, each read is."""
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 4
_CLIENT_SECONDS = 20.0
"""How long a task waits for the driver before it tries again."""
_IDLE_SECONDS = 120.0
"""How long the server keeps a connection without a request."""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the files of a spool come from. Pickles; its text does not show the token."""

    root: str
    """The spool's folder on the driver."""
    proof: str
    """The number in the file `served` of that folder."""
    host: str
    port: int
    token: str = field(repr=False)

    def open(self, path: str, size: int) -> Any:
        """Return a seekable file for pyarrow: the driver's own if this process sees it, otherwise one that reads from
        the driver.

        Raises `FileNotFoundError` if the driver has deleted it, and `DestinationUnavailable` if no request reaches the
        driver.
        """
        if self._is_here():
            try:
                file = pa.OSFile(path, "rb")
            except OSError:
                # Of a shared folder, names may arrive late.
                pass
            else:
                if file.size() == size:
                    return file
                file.close()
        name = Path(path).relative_to(self.root).as_posix()
        if size <= _WHOLE_BYTES:
            return pa.BufferReader(_fetch(self, name, 0, size))
        return pa.PythonFile(RangedFile(lambda offset, length: _fetch(self, name, offset, length), size), mode="r")

    def reach(self) -> None:
        """Raise `DestinationUnavailable` if this process neither sees the spool nor reaches the driver."""
        if not self._is_here():
            with suppress(FileNotFoundError):
                _fetch(self, f"{_SEGMENTS}/none/none", 0, 1)

    def _is_here(self) -> bool:
        try:
            return (Path(self.root) / PROOF).read_text() == self.proof
        except (OSError, UnicodeDecodeError):
            return False


class RangedFile(io.RawIOBase):
    """A file of which every read is one request."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int) -> None:
        """`read_range` receives an offset and a length inside the file, and returns that part."""
        self._read_range = read_range
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        wanted = left if size < 0 else min(size, left)
        if not wanted:
            return b""
        content = self._read_range(self._position, wanted)
        self._position += len(content)
        return content


class SegmentServer:
    """Serves the segments of one spool, read-only, until `close`; a context manager.

    While it runs, readers of this spool in this process give segments its `origin`.
    """

    def __init__(self, spool: Path, *, host: str, bind: str | None = None, port: int = 0) -> None:
        """`host` is the driver's name for tasks, `bind` the address to listen on; with port 0 any free one is used."""
        self._spool = private_folder(spool)
        self._server = _Server(_bare(bind or host), port, self._spool / _SEGMENTS, secrets.token_urlsafe(32))
        self.origin = Origin(
            str(spool), secrets.token_hex(16), _bare(host), self._server.server_address[1], self._server.token
        )
        self._thread = threading.Thread(target=self._server.serve_forever, name="segments", daemon=True)

    def __enter__(self) -> SegmentServer:
        with aside(self._spool / PROOF) as temporary:
            temporary.write_text(self.origin.proof)
            os.replace(temporary, self._spool / PROOF)
        self._thread.start()
        _origins[self.origin.root] = self.origin
        logger.info("segments are served to tasks host=%s port=%d", self.origin.host, self.origin.port)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def bytes_sent(self) -> int:
        """Bytes of segments that tasks have read from here."""
        return self._server.bytes_sent

    def close(self) -> None:
        """Stop answering."""
        if _origins.get(self.origin.root) == self.origin:
            del _origins[self.origin.root]
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_origins: dict[str, Origin] = {}


def origin_of(spool: Path) -> Origin | None:
    """Return where tasks get the segments of a spool from; None if no server of this process serves it."""
    return _origins.get(str(spool))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Other pipelines may listen on the same port of this machine: they must not share it.
    allow_reuse_port = False

    def __init__(self, bind: str, port: int, folder: Path, token: str) -> None:
        self.folder = folder
        self.token = token
        self.bytes_sent = 0
        self.counting = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        super().__init__((bind, port), _Handler)

    def server_bind(self) -> None:
        # `HTTPServer` also looks up the name of the address, for which some machines wait many seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A task that was cancelled leaves in the middle of an answer.
        logger.debug("a task's request failed error=%s", type(sys.exception()).__name__)


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "penstock", ""
    timeout = _IDLE_SECONDS
    # Otherwise the content waits until the head is acknowledged.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            return self._refuse(HTTPStatus.FORBIDDEN)
        span = _RANGE.fullmatch(self.headers.get("Range", ""))
        path = self._file()
        if path is None or span is None:
            return self._refuse(HTTPStatus.NOT_FOUND if path is None else HTTPStatus.BAD_REQUEST)
        first, last = int(span[1]), int(span[2])
        try:
            # Open until all is sent, even if the spool deletes it meanwhile.
            file = path.open("rb")
        except OSError:
            return self._refuse(HTTPStatus.NOT_FOUND)
        with file:
            if not first <= last < os.fstat(file.fileno()).st_size:
                return self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Length", str(last - first + 1))
            self.end_headers()
            file.seek(first)
            left = last - first + 1
            while left:
                content = file.read(min(left, _CHUNK_BYTES))
                if not content:
                    # Shorter than it was: the missing bytes tell the task.
                    self.close_connection = True
                    return None
                # Before the task has them: once it has read a file, the file is counted.
                with self.server.counting:
                    self.server.bytes_sent += len(content)
                self.wfile.write(content)
                left -= len(content)
        return None

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        logger.debug("a task asked for a segment path=%s status=%s", self.path, code)

    def log_error(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        logger.debug(format, *args)

    def _file(self) -> Path | None:
        """Return the requested file; None if it is not a file of a segment."""
        parts = unquote(self.path).removeprefix("/").split("/")
        if len(parts) != 3 or parts[0] != _SEGMENTS or any(part in ("", ".", "..") for part in parts):
            return None
        path = self.server.folder / parts[1] / parts[2]
        return path if path.resolve().is_relative_to(self.server.folder.resolve()) else None

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


_links = threading.local()


def _fetch(origin: Origin, name: str, offset: int, length: int) -> bytes:
    """Return a part of a file of the driver. Raises as `Origin.open` does."""
    if not length:
        return b""
    headers = {"Authorization": f"Bearer {origin.token}", "Range": f"bytes={offset}-{offset + length - 1}"}
    backoff = Backoff(first=0.1)
    while True:
        link = _link(origin)
        try:
            link.request("GET", f"/{quote(name)}", headers=headers)
            answer = link.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            link.close()
            if backoff.attempt + 1 >= _ATTEMPTS:
                raise _unreachable(origin, type(error).__name__) from None
            time.sleep(backoff.next_delay())
            continue
        if answer.status == HTTPStatus.PARTIAL_CONTENT and len(content) == length:
            return content
        link.close()
        if answer.status == HTTPStatus.NOT_FOUND:
            raise FileNotFoundError(name)
        raise _unreachable(origin, f"it answers {answer.status}")


def _link(origin: Origin) -> http.client.HTTPConnection:
    """Return this thread's connection to a driver; it connects with the first request, and again after `close`."""
    known = getattr(_links, "known", None)
    if known is None or known[0] != origin:
        if known is not None:
            known[1].close()
        known = _links.known = origin, http.client.HTTPConnection(origin.host, origin.port, timeout=_CLIENT_SECONDS)
    return known[1]


def _unreachable(origin: Origin, reason: str) -> DestinationUnavailable:
    return DestinationUnavailable(
        f"a task on {socket.gethostname()} cannot read changes from the driver, {origin.host}:{origin.port}: {reason}",
        hint="Executors must reach the driver under spark.driver.host; to open one port in a firewall, set "
        "segment_port in [spark].",
    )


def _bare(host: str) -> str:
    """Return a host as sockets take it: Spark writes IPv6 addresses in brackets."""
    return host.removeprefix("[").removesuffix("]")
