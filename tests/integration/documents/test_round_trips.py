"""What a batch asks of the server does not grow with the number of its changes."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import psycopg
import pytest

from penstock.documents.builder import PostgresDocuments
from penstock.documents.relation_map import open_relation_map
from penstock.lsn import Lsn
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import parse_specification
from tests.conftest import Database
from tests.integration.documents import world

INDEX = """
version: 1
schema: w
table: people
fields:
  - {text: name}
  - has_many: orders
    table: orders
    foreign_key: person_id
    primary_key: id
    fields:
      - {keyword: status}
      - {has_many: lines, table: lines, foreign_key: order_id, primary_key: [order_id, no], fields: [{keyword: sku}]}
"""


@pytest.fixture
def source(database: Database) -> Iterator[psycopg.Connection[Any]]:
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection)
        yield connection


def test_statements_of_a_batch_do_not_grow_with_its_changes(
    source: psycopg.Connection[Any], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fill(Random(1), source)
    source.execute("insert into w.people (id, name, email) select n, 'p', n::text from generate_series(100, 1100) n")
    source.execute("insert into w.orders select n, n from generate_series(100, 1100) n")
    settings = SourceSettings(database.dsn)
    with connect(settings, Role.CATALOG) as resolving, connect(settings, Role.CATALOG) as building:
        relations = open_relation_map("memory:", "trips")
        documents = PostgresDocuments(resolving, building, [parse_specification(INDEX, "people")], relations)
        for relation in relations.prepare(documents.resolver.tracked):
            relations.seed(source, relation, Lsn(0))
        world.take_recorded(source)
        statements: list[object] = []
        for kind in (psycopg.RawCursor, psycopg.RawServerCursor):
            original = kind.execute

            def execute(self: Any, query: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
                statements.append(query)
                return _original(self, query, *args, **kwargs)

            monkeypatch.setattr(kind, "execute", execute)

        def batch(first: int, last: int) -> tuple[int, int]:
            source.execute("update w.orders set status = 's' where id between %s and %s", [first, last])
            source.execute("update w.people set name = 'n' where id between %s and %s", [first + 5, last + 5])
            source.execute("update w.orders set person_id = person_id + 1 where id between %s and %s", [first, last])
            changes = world.as_sent(world.take_recorded(source), {}, documents.resolver.wanted)
            statements.clear()
            resolution = documents.resolve(changes)
            built = sum(documents.build(keys).num_rows for keys in resolution.documents)
            documents.remember(resolution)
            return built, len(statements)

        few, statements_of_few = batch(100, 101)
        many, statements_of_many = batch(200, 1000)
        assert many > 100 * few
        assert statements_of_many == statements_of_few
        relations.close()
