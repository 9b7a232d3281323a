"""A published database with slots, spools and captures on it; pipelines that look at the catalog often."""

from __future__ import annotations

import pytest

from penstock import coordinator
from tests.e2e.support import Stream
from tests.integration.conftest import quick_captures, small_disk

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
