"""A network between a client and a server, which tests disturb: cut, refused, delayed, throttled, stalled, half open.

    with Proxy(server.port) as proxy:
        dsn = proxy.dsn(server.dsn(name))
        proxy.cut()
        proxy.delay = 0.2

A proxy of our own instead of Toxiproxy: it is small, needs no Go toolchain on a fresh machine, and can leave a
connection half open.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

_CHUNK_BYTES = 1 << 16
_HOST = "127.0.0.1"


class Proxy:
    """Forwards the connections of a port. All attributes and methods may be used at any time, from any thread."""

    def __init__(self, port: int) -> None:
        """`port` is the server's."""
        self._target = port
        self._listener = socket.create_server((_HOST, 0))
        self._links: list[_Link] = []
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._silent = False
        self.refuse = False
        """Close new connections at once."""
        self.delay = 0.0
        """Seconds by which everything that arrives is late."""
        self.bytes_per_second: float | None = None
        """The limit of each connection and direction; None for no limit."""
        self.attempts: list[float] = []
        """When clients tried to connect."""
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        """The port for clients."""
        return self._listener.getsockname()[1]

    def dsn(self, direct: str) -> str:
        """Return the connection URL of a server's database, through the proxy."""
        return direct.replace(f":{self._target}/", f":{self.port}/")

    def cut(self) -> None:
        """Break all connections, as a network does: without a word."""
        with self._lock:
            for each in self._links:
                each.cut()

    def stall(self) -> None:
        """Hold everything back until `flow`; nothing is lost."""
        self._flowing.clear()

    def flow(self) -> None:
        """Deliver what `stall` held back."""
        self._flowing.set()

    def abandon(self) -> None:
        """Swallow everything on the connections that exist, without closing them."""
        with self._lock:
            for each in self._links:
                each.is_abandoned = True

    def fall_silent(self) -> None:
        """Swallow everything on all connections, also on new ones, until `speak`; neither end notices."""
        with self._lock:
            self._silent = True
        self.abandon()

    def speak(self) -> None:
        """Forward new connections again, and break those whose bytes were swallowed."""
        with self._lock:
            self._silent = False
            for each in self._links:
                if each.is_abandoned:
                    each.cut()

    def close(self) -> None:
        """Break all connections and end all threads."""
        self.flow()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for each in self._links:
            each.close()

    def carry(self, content: bytes) -> None:
        """Wait for as long as the network takes for some bytes."""
        self._flowing.wait()
        rate = self.bytes_per_second
        seconds = self.delay + (0.0 if rate is None else len(content) / rate)
        if seconds:
            time.sleep(seconds)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.attempts.append(time.monotonic())
                self._forget_ended()
                if self.refuse:
                    client.close()
                    continue
                try:
                    server = socket.create_connection((_HOST, self._target))
                except OSError:
                    # The server is away: its clients see that, too.
                    client.close()
                    continue
                self._links.append(_Link(self, client, server, is_abandoned=self._silent))

    def _forget_ended(self) -> None:
        ended = [each for each in self._links if not each.is_alive]
        for each in ended:
            each.close()
            self._links.remove(each)


class _Link:
    """A connection through the proxy. Each direction has its thread: one that is full does not hold up another."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket, *, is_abandoned: bool) -> None:
        self._proxy = proxy
        self._ends = (client, server)
        self.is_abandoned = is_abandoned
        directions = ((client, server), (server, client))
        self._threads = [threading.Thread(target=self._forward, args=each, name="link") for each in directions]
        for each in self._threads:
            each.daemon = True
            each.start()

    @property
    def is_alive(self) -> bool:
        return any(each.is_alive() for each in self._threads)

    def cut(self) -> None:
        for each in self._ends:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        for each in self._threads:
            each.join()
        for each in self._ends:
            each.close()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(_CHUNK_BYTES):
                self._proxy.carry(content)
                if not self.is_abandoned:
                    target.sendall(content)
        if not self.is_abandoned:
            self.cut()
