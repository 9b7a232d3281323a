"""Random specifications, random transactions: no document that changed is ever missed."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from penstock.documents.build import BuildQuery, build_documents, compile_build
from penstock.documents.catalog import load_catalog
from penstock.documents.relation_map import RelationMap, open_relation_map
from penstock.documents.resolve import Resolver
from penstock.documents.side_tables import PostgresTables
from penstock.lsn import Lsn
from penstock.schema import ReplicaIdentity
from penstock.source.connections import Role, SourceSettings, connect
from penstock.specification import IndexSpecification
from tests.conftest import Database
from tests.integration.documents import world

Documents = dict[str, Any]


@pytest.fixture
def source(database: Database):
    with connect(SourceSettings(database.dsn), Role.CATALOG) as connection:
        world.create(connection)
        yield connection


@pytest.fixture
def maps(database: Database):
    """One of each sort."""
    with connect(SourceSettings(database.dsn), Role.STATE) as connection:
        in_memory = open_relation_map("memory:", "oracle")
        yield [RelationMap(PostgresTables(lambda: connection), "oracle"), in_memory]
        in_memory.close()


@dataclass
class Follower:
    """Keeps documents as an engine would: resolve, build, write, remember."""

    connection: psycopg.Connection[Any]
    relations: RelationMap
    specifications: list[IndexSpecification]
    identities: dict[str, ReplicaIdentity]
    resolver: Resolver = field(init=False)
    queries: dict[str, BuildQuery] = field(init=False)
    documents: dict[str, Documents] = field(init=False)
    keys: dict[tuple[str, str], list[str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.documents = {}
        self.begin()

    def begin(self) -> None:
        """Start with the specifications as they are now; indexes that are new are seeded."""
        names = {name for each in self.specifications for name in each.tables()}
        catalog = load_catalog(self.connection, names)
        self.resolver = Resolver(self.specifications, catalog, self.relations, chunk=7)
        self.queries = {each.name: compile_build(each, catalog) for each in self.specifications}
        position = self.connection.execute("select last_value from audit.log_seq_seq").fetchall()[0][0]
        for relation in self.relations.prepare(self.resolver.tracked):
            self.relations.seed(self.connection, relation, Lsn(position))
        for name in self.queries.keys() - self.documents.keys():
            self.documents[name] = self.full_build(name)

    def full_build(self, index: str) -> Documents:
        """Every document of an index that there is."""
        specification = next(each for each in self.specifications if each.name == index)
        names = ", ".join(f"{name}::text" for name in self.queries[index].key_columns)
        rows = self.connection.execute(f"select {names} from {specification.table}").fetchall()
        return self.build(index, [list(part) for part in zip(*rows, strict=True)]) if rows else {}

    def build(self, index: str, keys: list[list[str]]) -> Documents:
        built = build_documents(self.connection, self.queries[index], keys)
        ids, bodies = built.column("id").to_pylist(), built.column("body").to_pylist()
        self.keys |= {(index, each): list(key) for each, key in zip(ids, zip(*keys, strict=True), strict=True)}
        return dict(zip(ids, bodies, strict=True))

    def follow(self, recorded: list[world.Recorded], *, crash: bool) -> dict[str, set[str]]:
        """Process a batch; gives the ids that were resolved. After a `crash` the links are not remembered."""
        changes = world.as_sent(recorded, self.identities, self.resolver.wanted)
        resolution = self.resolver.resolve(self.connection, changes)
        found: dict[str, set[str]] = {name: set() for name in self.queries}
        for part in list(resolution.documents):
            self.write(part.index, built := self.build(part.index, [list(each) for each in part.keys]))
            assert not found[part.index].intersection(built), "a document was resolved twice"
            found[part.index] |= built.keys()
        for index in resolution.whole_indexes:
            known = [self.keys[index, each] for each in self.documents[index]]
            if known:
                self.write(index, self.build(index, [list(part) for part in zip(*known, strict=True)]))
            self.write(index, self.full_build(index))
            found[index] |= self.documents[index].keys()
        if not crash:
            self.resolver.remember(resolution)
        return found

    def write(self, index: str, built: Documents) -> None:
        self.documents[index] |= built

    def present(self, index: str) -> Documents:
        return {each: body for each, body in self.documents[index].items() if body is not None}


def begin(connection: psycopg.Connection[Any], maps: list[RelationMap], random: Random) -> Follower:
    identities = {
        name: ReplicaIdentity.FULL if random.random() < 0.25 else ReplicaIdentity.DEFAULT for name in world.COLUMNS
    }
    connection.execute("truncate " + ", ".join(f"w.{name}" for name in world.COLUMNS))
    for name, identity in identities.items():
        connection.execute(f"alter table w.{name} replica identity {identity.name.lower()}")
    world.fill(random, connection)
    world.take_recorded(connection)
    specifications = [world.random_specification(random, f"index{number}") for number in range(random.randint(1, 2))]
    relations = random.choice(maps)
    relations.prepare([])
    return Follower(connection, relations, specifications, identities)


# The larger number takes some minutes.
EXAMPLES = pytest.mark.parametrize("examples", [12, pytest.param(150, marks=pytest.mark.soak)])


@EXAMPLES
@pytest.mark.trap(42, 48, 49)
def test_every_document_that_changed_is_resolved(
    source: psycopg.Connection[Any], maps: list[RelationMap], examples: int
) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(seed=st.integers(0, 2**32), sizes=st.lists(st.integers(1, 6), min_size=8, max_size=16))
    def check(seed: int, sizes: list[int]) -> None:
        note(f"seed={seed} sizes={sizes}")
        random = Random(seed)
        follower = begin(source, maps, random)
        for size in sizes:
            before = {name: follower.full_build(name) for name in follower.queries}
            world.random_transaction(random, source, size)
            recorded = world.take_recorded(source)
            found = follower.follow(recorded, crash=False)
            for name in follower.queries:
                after = follower.full_build(name)
                ids = before[name].keys() | after.keys()
                changed = {each for each in ids if before[name].get(each) != after.get(each)}
                assert changed <= found[name], (follower.specifications, recorded)

    check()


@EXAMPLES
@pytest.mark.trap(42, 43)
def test_documents_converge_when_the_engine_is_behind_and_crashes(
    source: psycopg.Connection[Any], maps: list[RelationMap], examples: int
) -> None:
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), database=None)
    @given(seed=st.integers(0, 2**32), transactions=st.integers(8, 20))
    def check(seed: int, transactions: int) -> None:
        note(f"seed={seed} transactions={transactions}")
        random = Random(seed)
        follower = begin(source, maps, random)
        waiting: list[list[world.Recorded]] = []
        for _ in range(transactions):
            world.random_transaction(random, source, random.randint(1, 5))
            waiting.append(world.take_recorded(source))
            while waiting and random.random() < 0.4:
                count = random.randint(1, len(waiting))
                batch = [change for part in waiting[:count] for change in part]
                crash = random.random() < 0.3
                follower.follow(batch, crash=crash)
                if not crash:
                    del waiting[:count]
            if random.random() < 0.05:
                # The new index is ahead of the changes that wait; those of the others must not notice.
                follower.specifications.append(world.random_specification(random, f"index{len(follower.queries)}"))
                follower.begin()
        follower.follow([change for part in waiting for change in part], crash=False)
        for name in follower.queries:
            wanted = {each: body for each, body in follower.full_build(name).items() if body is not None}
            assert follower.present(name) == wanted, follower.specifications

    check()
