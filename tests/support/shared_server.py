"""One server for all processes of a test run, coordinated by locks in a shared folder.

The first process that needs the server starts it; others wait. Every user holds a lock, which the system releases when
a process dies. The process that started the server stops it after all others have released their locks.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.destinations.kafka.registry import SchemaRegistry
from penstock.errors import PenstockError
from penstock.testing.apicurio import SchemaRegistryServer
from penstock.testing.kafka import KafkaServer, commits_a_transaction
from penstock.testing.opensearch import ExistingOpenSearch, OpenSearchServer
from penstock.testing.server import OwnServer


@contextmanager
def shared_opensearch(folder: Path) -> Iterator[ExistingOpenSearch]:
    """Return the server shared by all processes that pass this folder."""

    def start() -> tuple[OpenSearchServer, str]:
        server = OpenSearchServer().start()
        return server, server.url

    with _shared(folder / "opensearch", start, _answers) as url:
        yield ExistingOpenSearch(url)


@contextmanager
def shared_kafka(folder: Path) -> Iterator[str]:
    """Return the address of the broker shared by all processes that pass this folder."""

    def start() -> tuple[KafkaServer, str]:
        server = KafkaServer().start()
        return server, server.bootstrap_servers

    with _shared(folder / "kafka", start, commits_a_transaction) as servers:
        yield servers


@contextmanager
def shared_registry(folder: Path) -> Iterator[str]:
    """Return the address of the schema registry shared by all processes that pass this folder."""

    def start() -> tuple[SchemaRegistryServer, str]:
        server = SchemaRegistryServer().start()
        return server, server.url

    with _shared(folder / "registry", start, _has_subjects) as url:
        yield url


@contextmanager
def _shared(path: Path, start: Callable[[], tuple[OwnServer, str]], is_running: Callable[[str], bool]) -> Iterator[str]:
    address, locking = path.with_suffix(".address"), path.with_suffix(".start")
    with path.with_suffix(".users").open("w") as users:
        with _locked(locking):
            own = None
            found = address.read_text() if address.exists() else ""
            if not found or not is_running(found):
                own, found = start()
                address.write_text(found)
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield found
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            if own is not None:
                _end(own, address, users, locking)


def _answers(url: str) -> bool:
    try:
        ExistingOpenSearch(url).request("GET", "/", timeout=30)
    except OSError:
        return False
    return True


def _has_subjects(url: str) -> bool:
    try:
        SchemaRegistry(url).check()
    except PenstockError:
        return False
    return True


def _end(own: OwnServer, address: Path, users: IO[str], locking: Path) -> None:
    # No new user may arrive between the end of the last one and that of the server.
    while True:
        with _locked(locking):
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                address.unlink()
                own.close()
                return
        fcntl.flock(users, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_UN)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
