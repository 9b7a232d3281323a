"""One OpenSearch server for all processes of a test run, coordinated by locks in a shared folder.

The first process that needs the server starts it; others wait. Every user holds a lock, which the system releases when
a process dies. The process that started the server stops it after all others have released their locks.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.testing.opensearch import ExistingOpenSearch, OpenSearchServer


@contextmanager
def shared_opensearch(folder: Path) -> Iterator[ExistingOpenSearch]:
    """Return the server shared by all processes that pass this folder."""
    address = folder / "opensearch.url"
    with (folder / "opensearch.users").open("w") as users:
        with _locked(folder / "opensearch.start"):
            server = _known(address)
            own = None
            if server is None:
                own = server = OpenSearchServer().start()
                address.write_text(server.url)
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield server
        finally:
            fcntl.flock(users, fcntl.LOCK_UN)
            if own is not None:
                _end(own, address, users, folder)


def _known(address: Path) -> ExistingOpenSearch | None:
    """Return the running server, if it still answers."""
    try:
        server = ExistingOpenSearch(address.read_text())
        server.request("GET", "/", timeout=30)
    except OSError:
        return None
    return server


def _end(own: OpenSearchServer, address: Path, users: IO[str], folder: Path) -> None:
    # No new user may arrive between the end of the last one and that of the server.
    while True:
        with _locked(folder / "opensearch.start"):
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
