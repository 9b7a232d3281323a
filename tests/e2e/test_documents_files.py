"""Documents without a search server: in files they follow the database as they do in an index."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.documents.output import DocumentsSettings
from penstock.sinks.registry import create_sink
from penstock.source.connections import Role, SourceSettings, connect
from penstock.state import CommandKind, MemoryStore
from tests.e2e.documents import ORDERS, PEOPLE, Site, run, specifications
from tests.integration.documents import world

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("kind", ["ndjson", "parquet", "delta"])
def test_documents_follow_rebuild_and_resume(kind: str, database: Any, tmp_path: Path) -> None:
    random = Random(5)

    def read(index: str) -> dict[str, Any]:
        sink = create_sink(kind, {"path": str(tmp_path / "documents")})
        return {id_: document for ids in sink.scan(index) for id_, document in sink.fetch(index, ids).items()}

    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection, recorded=False)
        world.fill(random, connection)
        settings = DocumentsSettings(chunk_documents=7, range_bytes=8192)
        indexes = specifications(people=PEOPLE, orders=ORDERS)
        store = MemoryStore("e2e:documents")
        for _ in range(2):
            sink = create_sink(kind, {"path": str(tmp_path / "documents")})
            site = Site(database, tmp_path, indexes, sink, read, settings, store)
            output = site.output()
            with run(output):
                site.wait_settled(output)
                for _ in range(20):
                    world.random_transaction(random, connection, 5)
                output.store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": ["people"]})
                for _ in range(20):
                    world.random_transaction(random, connection, 5)
                site.wait_settled(output)
                site.check()
            for _ in range(5):
                world.random_transaction(random, connection, 5)
