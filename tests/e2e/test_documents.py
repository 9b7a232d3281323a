"""Documents as an output of a stream: from nothing, and while the database changes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.documents.sinks import MemorySink
from penstock.source.connections import Role, SourceSettings, connect
from tests.e2e.documents import ORDERS, PEOPLE, Site, run, specifications
from tests.integration.documents import world


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Site:
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection)
        world.fill(Random(1), connection)
    sink = MemorySink()
    return Site(database, tmp_path, specifications(people=PEOPLE, orders=ORDERS), sink, sink.documents)


def test_indexes_are_filled_and_then_follow(site: Site) -> None:
    output = site.output()
    with run(output):
        site.wait_settled(output)
        site.check()
        random = Random(2)
        with connect(SourceSettings(site.database.dsn), Role.CATALOG) as connection:
            for _ in range(30):
                world.random_transaction(random, connection, 5)
        site.wait_settled(output)
        site.check()
