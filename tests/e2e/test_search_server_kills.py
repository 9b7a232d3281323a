"""Random indexes in a real search server, while the pipeline and the server are killed: in the end all is equal."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.sinks.opensearch import OpenSearchSink
from penstock.specification import parse_specification
from penstock.testing.opensearch import OpenSearchServer
from tests.e2e.documents import documents_of
from tests.e2e.support import current_position
from tests.e2e.test_documents_kills import KILLS, SEED, Driven, Load, driven, kill_at_random

MakeServer = Callable[..., OpenSearchServer]


def check(found: Driven, server: OpenSearchServer) -> None:
    """Quiet now: all arrives, and every document in the server equals the one of the database."""
    server.start()
    if not found.process.running:
        found.process.start()
    found.process.wait_phases("seeded", len(found.indexes))
    found.process.wait_applied(current_position(found.database))
    found.process.wait_phases("seeded", len(found.indexes))
    specifications = [parse_specification(text, name) for name, text in found.indexes.items()]
    with closing(OpenSearchSink(server.url)) as sink:
        for name, wanted in documents_of(found.database.dsn, specifications).items():
            ids = [id_ for chunk in sink.scan(name) for id_ in chunk]
            assert sorted(ids) == sorted(wanted), (name, found.indexes[name])
            assert sink.fetch(name, ids) == wanted, (name, found.indexes[name])


def kill_both_at_random(found: Driven, server: OpenSearchServer, load: Load, random: Random, kills: int) -> None:
    """SIGKILL to the pipeline, and sometimes to the server under it."""
    for number in range(kills):
        if number % 4 == 1:
            found.process.start()
            load.wait(random.randint(5, 60))
            server.kill()
            load.wait(random.randint(5, 60))
            server.launch()
            load.wait(random.randint(5, 60))
            found.process.kill()
        kill_at_random(found, load, random)


def sink_on(server: OpenSearchServer) -> dict[str, Any]:
    return {"type": "opensearch", "url": server.url, "replicas": 0}


@pytest.mark.timeout(900)
@pytest.mark.trap(42, 43, 44, 45, 47)
def test_documents_in_a_search_server_survive_kills_on_both_sides(
    database: Any, pressed: OpenSearchServer, tmp_path: Path
) -> None:
    random = Random(f"search-{SEED}")
    server = pressed.start()
    with driven(database, tmp_path, random, sink=sink_on(server)) as found:
        with Load(database.dsn, SEED) as load:
            kill_both_at_random(found, server, load, random, 2)
        check(found, server)
        with Load(database.dsn, SEED + 1) as load:
            found.rebuild()
            load.wait(60)
        check(found, server)
        assert found.process.stop() == 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.trap(42, 43, 44, 45, 47)
@pytest.mark.parametrize("number", range(-(-KILLS // 10)))
def test_documents_in_a_search_server_survive_many_kills(
    database: Any, make_opensearch: MakeServer, tmp_path: Path, number: int
) -> None:
    random = Random(f"search-{SEED}-{number}")
    server = make_opensearch()
    limits = {"fan_out_documents": random.choice([3, 1000]), "chunk_documents": random.choice([2, 1000])}
    with driven(database, tmp_path, random, documents=limits, sink=sink_on(server)) as found:
        for round_ in range(2):
            with Load(database.dsn, SEED + number + round_) as load:
                kill_both_at_random(found, server, load, random, 5)
            check(found, server)
            found.process.kill()
