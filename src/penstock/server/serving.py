"""Running the server: a thread with its own event loop, started again if it ends.

A port that is taken, or an error of the server, costs the pipeline nothing: the log has a warning, and the server is
tried again.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from penstock.config import Config, ServerChoice
from penstock.errors import ConfigError
from penstock.operations.running import Running
from penstock.registry import requires_extra
from penstock.retry import Backoff

logger = logging.getLogger(__name__)

CONNECTIONS = 200
"""With more connections, the one that has been idle for longest is closed."""
SOCKETS = CONNECTIONS + 50
"""With more sockets, new ones are closed: connections whose TLS handshake is not complete, or that arrive at once."""
REQUEST_SECONDS = 10.0
"""A connection without a complete request for this long is closed."""
STOP_SECONDS = 3.0
"""The pipeline waits no longer than this for the server to end."""
_BACKLOG = 128
_HEADER_BYTES = 16 << 10


def require_server(config: Config) -> None:
    """Raise `ConfigError` before the pipeline starts if the extra is missing, or a file for TLS cannot be read."""
    if config.server is None:
        return
    with requires_extra("web", "[server]"):
        for package in ("prometheus_client", "starlette", "uvicorn"):
            importlib.import_module(package)
    for path in (config.server.tls_certificate, config.server.tls_key):
        if path is None:
            continue
        try:
            path.open("rb").close()
        except OSError as error:
            reason = f"server: cannot read {path}: {error.strerror}"
            raise ConfigError(reason, hint="Check the path, its owner and its mode.") from None


@contextmanager
def serving(config: Config, running: Running) -> Iterator[Serving | None]:
    """Serve the pipeline inside the block, if its config has `[server]`; yield None otherwise."""
    if config.server is None:
        yield None
        return
    # Imported here: commands and pipelines without a server do not need the extra.
    from penstock.server.app import make_app
    from penstock.server.guarding import Guard
    from penstock.server.monitor import Monitor

    with Monitor(config, running) as monitor:
        serving = Serving(config.server, Guard(make_app(monitor), config.server))
        try:
            yield serving
        finally:
            monitor.ending.set()
            serving.stop()


class Serving:
    """The thread of a server."""

    def __init__(self, choice: ServerChoice, app: Any) -> None:
        self._choice = choice
        self._app = app
        self._stop = threading.Event()
        self._server: Any = None
        self._has_failed = False
        self.address: str | None = None
        """Where it listens; None while it does not."""
        self.listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the server; does not wait long for clients."""
        self._stop.set()
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        backoff = Backoff(first=1.0, longest=60.0)
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                self._serve()
                reason = "it ended"
            except OSError as error:
                reason = error.strerror or type(error).__name__
            except BaseException as error:
                reason = type(error).__name__
                logger.debug("the server failed", exc_info=True)
            self.address = None
            self.listening.clear()
            if self._stop.is_set():
                return
            if time.monotonic() - begun > 60:
                backoff.reset()
            self._has_failed = True
            level, delay = backoff.log_level, backoff.next_delay()
            where = f"{self._choice.host}:{self._choice.port}"
            logger.log(level, "the server does not run, retrying address=%s in=%.0fs reason=%s", where, delay, reason)
            self._stop.wait(delay)

    def _serve(self) -> None:
        import uvicorn

        choice = self._choice
        with _bound(choice.host, choice.port) as sock:
            settings = uvicorn.Config(
                self._app,
                http=impatient_protocol(),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                # asyncio calls `accept` of the socket, other loops may not.
                loop="asyncio",
                backlog=_BACKLOG,
                h11_max_incomplete_event_size=_HEADER_BYTES,
                timeout_keep_alive=max(1, int(REQUEST_SECONDS)),
                timeout_graceful_shutdown=1,
                ssl_certfile=choice.tls_certificate,
                ssl_keyfile=choice.tls_key,
            )
            self._server = uvicorn.Server(settings)
            host, port = sock.getsockname()[:2]
            scheme = "http" if choice.tls_certificate is None else "https"
            self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
            if not _is_loopback(host) and choice.token is not None and choice.tls_certificate is None:
                logger.warning("the server's token travels without TLS; set tls_certificate, or put a proxy before it")
            # Who was told that it does not run is told that it does.
            logger.log(logging.WARNING if self._has_failed else logging.INFO, "serving address=%s", self.address)
            self._has_failed = False
            self.listening.set()
            if not self._stop.is_set():
                self._server.run(sockets=[sock])


def impatient_protocol() -> type[Any]:
    """Return uvicorn's HTTP protocol, with limits for connections, and for the time without a complete request."""
    from h11 import LocalProtocolError
    from uvicorn.protocols.http.h11_impl import H11Protocol

    http = logging.getLogger(f"{__name__}.http")
    http.addFilter(_what_clients_do)

    class Impatient(H11Protocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.logger = http
            self._idle_since = time.monotonic()

        @property
        def idle_seconds(self) -> float:
            """For how long there is no request to answer; closing a connection also counts, if the client delays it."""
            if self.cycle is not None and not self.cycle.response_complete and not self.transport.is_closing():
                self._idle_since = time.monotonic()
            return time.monotonic() - self._idle_since

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > CONNECTIONS:
                # A new one is worth more: health checks get an answer although a client keeps many connections.
                each_one = cast("set[Impatient]", self.connections)
                max(each_one, key=lambda each: each.idle_seconds).give_up()
            self._look()

        def give_up(self) -> None:
            # At once: several may be made before the loop tells that this one is lost.
            self.connections.discard(self)
            self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            try:
                super().send_400_response(msg)
            except LocalProtocolError:
                # As after a HEAD with a malformed body: asyncio would log this error with its traceback.
                self.give_up()

        def on_response_complete(self) -> None:
            self._idle_since = time.monotonic()
            super().on_response_complete()

        def _look(self) -> None:
            if self not in self.connections:
                return
            if self.idle_seconds > REQUEST_SECONDS:
                self.give_up()
            else:
                self.loop.call_later(REQUEST_SECONDS / 4, self._look)

    return Impatient


def _what_clients_do(record: logging.LogRecord) -> bool:
    """Log malformed requests at level info: no client can fill the log with warnings and errors of uvicorn."""
    record.levelno = min(record.levelno, logging.INFO)
    record.levelname = logging.getLevelName(record.levelno)
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


class Listener(socket.socket):
    """A listening socket that bounds how many files its connections use: the pipeline needs files, too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; raise `BlockingIOError`, as if there were none, if too many are open."""
        accepted, address = super().accept()
        self._accepted = weakref.WeakSet(each for each in self._accepted if each.fileno() >= 0)
        if len(self._accepted) >= SOCKETS:
            accepted.close()
            raise BlockingIOError
        self._accepted.add(accepted)
        return accepted, address


def _bound(host: str, port: int) -> Listener:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    # With its protocol: otherwise asyncio leaves Nagle's algorithm on, and each answer takes 40 ms more.
    sock = Listener(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
