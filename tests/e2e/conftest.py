"""A published database with slots, spools and captures on it; pipelines that look at the catalog often."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import coordinator
from penstock.errors import ConfigError
from penstock.spark.java import find_java
from tests.e2e.support import Stream
from tests.integration.conftest import quick_captures, small_disk
from tests.support.spark_cluster import Cluster

__all__ = ["quick_captures", "small_disk"]


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the publication and the catalog more often than usual: many tests wait for it."""
    monkeypatch.setattr(coordinator, "REFRESH_SECONDS", 0.5)


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
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A standalone cluster with two workers of one core each."""
    try:
        java = find_java()
    except ConfigError as error:
        pytest.skip(f"needs Java ({error.hint})")
    made = Cluster(tmp_path, java.home)
    try:
        made.start(workers=2)
        yield made
    finally:
        made.close()
