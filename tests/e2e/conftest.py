"""A published database with slots, spools and captures on it."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.e2e.support import Stream
from tests.integration.conftest import quick_captures

__all__ = ["quick_captures"]


@pytest.fixture
def stream(database, tmp_path) -> Stream:
    """On the shared server."""
    made = Stream(database, tmp_path)
    made.create()
    return made


@pytest.fixture
def own_stream(make_server, tmp_path):
    """On a server of its own, with settings: `own_stream(wal_sender_timeout="2s")`; see `.database.server`."""

    def make(**settings: object) -> Stream:
        from tests.conftest import Database

        server = make_server(settings=settings)
        made = Stream(Database(server, server.create_database()), tmp_path)
        made.create()
        return made

    return make


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 24 MB of which all but 2 MB can be taken away and given back."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root to mount it")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
