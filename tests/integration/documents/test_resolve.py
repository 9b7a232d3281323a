"""From changed rows to documents: each case in which something was once missed elsewhere."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from penstock.changes.segment import Operation
from penstock.documents.build import build_documents, compile_build
from penstock.documents.catalog import load_catalog
from penstock.documents.images import Cells, Changes, RowChanges, merge_changes
from penstock.documents.relation_map import (
    RelationMap,
    TrackedRelation,
    link_update_schema,
    open_relation_map,
)
from penstock.documents.resolve import Resolver
from penstock.documents.side_tables import PostgresTables
from penstock.documents.statements import wait_until_visible
from penstock.errors import ConfigError, PenstockError
from penstock.lsn import Lsn
from penstock.schema import ReplicaIdentity
from penstock.source.connections import Role, SourceSettings, connect
from penstock.source.patterns import TableName
from penstock.specification import parse_specification
from tests.conftest import Database
from tests.integration.documents import world

Connection = psycopg.Connection[Any]
PEOPLE = "version: 1\nschema: w\ntable: people\nprimary_key: id\nfields:\n  - {text: name}\n"
ORDERS = "  - {has_many: orders, table: orders, foreign_key: person_id, primary_key: id, fields: [decimal: total]}\n"
TAGS = "{table: person_tags, left_key: person_id, right_key: tag_id}"


class ForgetfulMap(RelationMap):
    """Remembers, and never says anything: what happens without the measure."""

    def lookup(self, table: TrackedRelation, keys: Sequence[str]) -> list[tuple[str | None, ...]]:
        return []


@dataclass
class Shop:
    source: Connection
    state: Connection

    def resolver(self, *texts: str, forgetful: bool = False, **options: Any) -> Resolver:
        specifications = [parse_specification(text, f"index{number}") for number, text in enumerate(texts)]
        catalog = load_catalog(self.source, {name for each in specifications for name in each.tables()})
        relations = (ForgetfulMap if forgetful else RelationMap)(PostgresTables(lambda: self.state), "tests")
        resolver = Resolver(specifications, catalog, relations, **options)
        for table in relations.prepare(resolver.tracked):
            relations.seed(self.source, table, Lsn(0))
        world.take_recorded(self.source)
        return resolver

    def changes(self, resolver: Resolver, *statements: str, full: Sequence[str] = ()) -> Changes:
        with self.source.transaction():
            for each in statements:
                self.source.execute(each)
        identities = dict.fromkeys(full, ReplicaIdentity.FULL)
        return world.as_sent(world.take_recorded(self.source), identities, resolver.wanted)

    def resolve(self, resolver: Resolver, *statements: str, full: Sequence[str] = ()) -> list[str]:
        """The keys of the documents that these statements change; the links are remembered."""
        resolution = resolver.resolve(self.source, self.changes(resolver, *statements, full=full))
        found = [":".join(key) for part in resolution.documents for key in zip(*part.keys, strict=True)]
        resolver.remember(resolution)
        assert len(found) == len(set(found))
        return sorted(found)


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    settings = SourceSettings(database.dsn)
    with connect(settings, Role.CATALOG) as source, connect(settings, Role.STATE) as state:
        world.create(source)
        source.execute("insert into w.people (id, name, email) select n, 'p', n::text from generate_series(1, 5) n")
        source.execute("insert into w.orders values (10, 1, 'paid', 1), (11, 2, 'paid', 2)")
        source.execute("insert into w.lines values (10, 1, 's1', 1), (11, 1, 's2', 1)")
        source.execute("insert into w.tags values (1, 'a'), (2, 'b')")
        source.execute("insert into w.person_tags values (1, 1, 5), (2, 2, 5)")
        source.execute("insert into w.order_tags values (1, 10, 1), (2, 11, 2)")
        yield Shop(source, state)


def test_changes_of_the_root_name_its_document(shop: Shop) -> None:
    resolver = shop.resolver(PEOPLE)
    assert shop.resolve(resolver, "update w.people set name = 'x' where id < 3") == ["1", "2"]
    assert shop.resolve(resolver, "delete from w.people where id = 1") == ["1"]
    assert shop.resolve(resolver, "insert into w.people (id, email) values (9, '9')") == ["9"]


def test_a_changed_key_of_the_root_names_the_old_and_the_new_document(shop: Shop) -> None:
    assert shop.resolve(shop.resolver(PEOPLE), "update w.people set id = 7 where id = 1") == ["1", "7"]


@pytest.mark.trap(42)
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_deleted_child_changes_its_parent(shop: Shop, forgetful: bool) -> None:
    resolver = shop.resolver(PEOPLE + ORDERS, forgetful=forgetful)
    assert [str(each.name) for each in resolver.tracked] == ["w.orders"]
    assert shop.resolve(resolver, "delete from w.orders where id = 10") == ([] if forgetful else ["1"])


@pytest.mark.trap(42)
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_moved_child_changes_both_parents(shop: Shop, forgetful: bool) -> None:
    resolver = shop.resolver(PEOPLE + ORDERS, forgetful=forgetful)
    old = [] if forgetful else ["1"]
    assert shop.resolve(resolver, "update w.orders set person_id = 3 where id = 10") == [*old, "3"]
    again = [] if forgetful else ["3"]
    assert shop.resolve(resolver, "update w.orders set person_id = 4 where id = 10") == [*again, "4"]


@pytest.mark.trap(42)
def test_with_replica_identity_full_nothing_has_to_be_remembered(shop: Shop) -> None:
    shop.source.execute("alter table w.orders replica identity full")
    resolver = shop.resolver(PEOPLE + ORDERS)
    assert resolver.tracked == ()
    move = "update w.orders set person_id = 3 where id = 10"
    assert shop.resolve(resolver, move, full=["orders"]) == ["1", "3"]
    assert shop.resolve(resolver, "delete from w.orders where id = 10", full=["orders"]) == ["3"]


@pytest.mark.trap(42)
def test_replica_identity_full_is_never_the_key_of_a_document(shop: Shop) -> None:
    shop.source.execute("alter table w.people replica identity full")
    resolver = shop.resolver(PEOPLE)
    assert shop.resolve(resolver, "update w.people set name = null where id = 1", full=["people"]) == ["1"]


@pytest.mark.trap(42)
def test_parents_and_children_that_go_together_are_all_found(shop: Shop) -> None:
    text = PEOPLE + (
        "  - has_many: orders\n    table: orders\n    foreign_key: person_id\n    primary_key: id\n    fields:\n"
        "      - {has_many: lines, table: lines, foreign_key: order_id, primary_key: [order_id, no],"
        " fields: [integer: qty]}\n"
    )
    resolver = shop.resolver(text)
    assert shop.resolve(resolver, "delete from w.orders where id = 10") == ["1"]
    both = ["update w.lines set order_id = 12 where order_id = 11", "update w.orders set person_id = 4 where id = 11"]
    assert shop.resolve(resolver, "insert into w.orders values (12, 3, 'x', 1)", *both) == ["2", "3", "4"]


def test_a_target_that_changes_or_goes_changes_whoever_points_at_it(shop: Shop) -> None:
    text = (
        PEOPLE + "  - {belongs_to: team, column: team_code, table: teams, primary_key: code, fields: [text: label]}\n"
    )
    shop.source.execute("insert into w.teams values ('a', 'A')")
    shop.source.execute("update w.people set team_code = 'a' where id in (2, 3)")
    resolver = shop.resolver(text)
    assert shop.resolve(resolver, "update w.teams set label = 'B'") == ["2", "3"]
    assert shop.resolve(resolver, "delete from w.teams") == ["2", "3"]
    assert shop.resolve(resolver, "insert into w.teams values ('a', 'again')") == ["2", "3"]


@pytest.mark.trap(48)
def test_a_table_that_points_at_itself_resolves_both_ways(shop: Shop) -> None:
    boss = "  - {belongs_to: boss, column: boss_id, table: people, primary_key: id, fields: [text: name]}\n"
    team = "  - {has_many: team, table: people, foreign_key: boss_id, primary_key: id, fields: [text: name]}\n"
    shop.source.execute("update w.people set boss_id = 1 where id in (2, 3)")
    resolver = shop.resolver(PEOPLE + boss + team)
    assert shop.resolve(resolver, "update w.people set name = 'x' where id = 1") == ["1", "2", "3"]
    assert shop.resolve(resolver, "update w.people set boss_id = 4 where id = 2") == ["1", "2", "4"]
    assert shop.resolve(resolver, "delete from w.people where id = 3") == ["1", "3"]


@pytest.mark.trap(42, 48)
def test_both_sides_of_a_junction_and_the_junction_itself(shop: Shop) -> None:
    by_key = f"  - {{many_to_many: tags, table: tags, primary_key: id, through: {TAGS}, fields: [text: label]}}\n"
    resolver = shop.resolver(PEOPLE + by_key)
    assert resolver.tracked == (), "the junction's key says what it connects"
    assert shop.resolve(resolver, "update w.tags set label = 'x' where id = 1") == ["1"]
    assert shop.resolve(resolver, "insert into w.person_tags values (3, 1, 1)") == ["3"]
    assert shop.resolve(resolver, "delete from w.tags where id = 1") == ["1", "3"]

    text = "version: 1\nschema: w\ntable: orders\nfields:\n  - {ids: tags, table: tags, element_type: long,"
    text += " through: {table: order_tags, left_key: order_id, right_key: tag_id}}\n"
    resolver = shop.resolver(text)
    assert [str(each.name) for each in resolver.tracked] == ["w.order_tags"]
    assert shop.resolve(resolver, "update w.order_tags set order_id = 11 where id = 1") == ["10", "11"]
    assert shop.resolve(resolver, "delete from w.order_tags where id = 1") == ["11"]


@pytest.mark.trap(42)
def test_a_document_named_by_another_column_is_left_and_entered(shop: Shop) -> None:
    resolver = shop.resolver(PEOPLE.replace("fields", "doc_id: email\nfields"))
    assert [str(each.name) for each in resolver.tracked] == ["w.people"]
    assert shop.resolve(resolver, "update w.people set email = 'new' where id = 1") == ["1", "new"]
    assert shop.resolve(resolver, "delete from w.people where id = 1") == ["new"]


@pytest.mark.trap(49)
def test_a_change_that_leaves_or_enters_a_filter_is_resolved(shop: Shop) -> None:
    text = PEOPLE + ORDERS.replace("fields:", "filters: [{column: status, op: eq, value: paid}], fields:")
    resolver = shop.resolver(text)
    assert shop.resolve(resolver, "update w.orders set status = 'open' where id = 10") == ["1"]
    assert shop.resolve(resolver, "update w.orders set status = 'paid' where id = 10") == ["1"]


@pytest.mark.trap(32)
def test_an_emptied_table_concerns_the_whole_index(shop: Shop) -> None:
    resolver = shop.resolver(PEOPLE + ORDERS, PEOPLE)
    resolution = resolver.resolve(shop.source, shop.changes(resolver, "truncate w.orders cascade"))
    assert (list(resolution.documents), resolution.whole_indexes) == ([], {"index0"})
    resolver.remember(resolution)
    assert shop.state.execute("select count(*) from penstock_documents.relation_maps").fetchall() == [(1,)]
    name = shop.state.execute("select map_table from penstock_documents.relation_maps").fetchall()[0][0]
    assert shop.state.execute(f"select count(*) from penstock_documents.{name}").fetchall() == [(0,)]


@pytest.mark.trap(48)
def test_the_namespace_is_part_of_a_tables_identity(shop: Shop) -> None:
    shop.source.execute("create schema other create table people (id int primary key, name text)")
    resolver = shop.resolver(PEOPLE)
    changes = shop.changes(resolver, "update w.people set name = 'x' where id = 1")
    elsewhere = [
        RowChanges(TableName("other", "people"), each.operations, each.commit_lsn, each.ordinal, each.old, each.new)
        for each in changes.rows
    ]
    assert list(resolver.resolve(shop.source, Changes(tuple(elsewhere))).documents) == []


def test_changes_of_partitions_are_changes_of_their_table(shop: Shop) -> None:
    shop.source.execute("create table w.events (id int, person_id int, primary key (id)) partition by hash (id)")
    shop.source.execute("create table w.events_0 partition of w.events for values with (modulus 1, remainder 0)")
    shop.source.execute("insert into w.events values (1, 4)")
    resolver = shop.resolver(PEOPLE + "  - {count: events, table: events, foreign_key: person_id}\n")
    assert TableName("w", "events_0") in resolver.wanted
    deleted = _row("events_0", Operation.DELETE, old={"id": "1"})
    resolution = resolver.resolve(shop.source, Changes((deleted,)))
    assert [part.keys for part in resolution.documents] == [(["4"],)]


@pytest.mark.trap(32, 42)
def test_an_emptied_partition_leaves_what_is_known_of_the_others(shop: Shop) -> None:
    shop.source.execute("create table w.events (id int, person_id int, primary key (id)) partition by list (id)")
    for number in (0, 1):
        shop.source.execute(f"create table w.events_{number} partition of w.events for values in ({number})")
    shop.source.execute("insert into w.events values (0, 3), (1, 4)")
    resolver = shop.resolver(PEOPLE + "  - {count: events, table: events, foreign_key: person_id}\n")
    emptied = resolver.resolve(shop.source, Changes((), frozenset({TableName("w", "events_0")})))
    assert emptied.whole_indexes == {"index0"}
    resolver.remember(emptied)
    deleted = _row("events_1", Operation.DELETE, old={"id": "1"})
    assert [part.keys for part in resolver.resolve(shop.source, Changes((deleted,))).documents] == [(["4"],)]


def test_a_link_that_was_not_sent_is_read_from_the_row(shop: Shop) -> None:
    resolver = shop.resolver(PEOPLE + ORDERS)
    shop.source.execute("insert into w.orders values (12, 5, 'x', 1)")
    sent = _row("orders", Operation.UPDATE, old={"id": "12"}, new={"id": "12"}, absent=["person_id"])
    resolution = resolver.resolve(shop.source, Changes((sent,)))
    assert [part.keys for part in resolution.documents] == [(["5"],)]
    resolver.remember(resolution)
    assert shop.resolve(resolver, "delete from w.orders where id = 12") == ["5"]


@pytest.mark.trap(48)
def test_one_row_in_many_documents_comes_in_pieces(shop: Shop) -> None:
    text = (
        PEOPLE + "  - {belongs_to: team, column: team_code, table: teams, primary_key: code, fields: [text: label]}\n"
    )
    shop.source.execute("insert into w.teams values ('a', 'A')")
    shop.source.execute("alter table w.people disable trigger all")
    shop.source.execute(
        "insert into w.people (id, email, team_code) select n, n::text, 'a' from generate_series(100, 20099) n"
    )
    resolver = shop.resolver(text, chunk=3000)
    resolution = resolver.resolve(shop.source, shop.changes(resolver, "update w.teams set label = 'B'"))
    sizes = [len(part) for part in resolution.documents]
    assert sizes == [3000] * 6 + [2000]


def test_statements_do_not_grow_with_the_number_of_changes(shop: Shop) -> None:
    resolver = shop.resolver(PEOPLE + ORDERS)
    few = _statements(shop, resolver, "insert into w.orders select n, 1 + n % 5 from generate_series(100, 101) n")
    many = _statements(shop, resolver, "insert into w.orders select n, 1 + n % 5 from generate_series(200, 1199) n")
    assert few == many > 0
    pair = ["insert into w.orders values (2000, 1)", "delete from w.orders where id = 2000"]
    assert _statements(shop, resolver, *pair) == _statements(shop, resolver, *pair * 20), "nor with the transactions"


def test_without_a_map_a_table_that_needs_one_is_refused(shop: Shop) -> None:
    specification = parse_specification(PEOPLE + ORDERS, "people")
    resolver = Resolver([specification], load_catalog(shop.source, specification.tables()))
    with pytest.raises(ConfigError, match=r"cannot be followed without a relation map: w\.orders"):
        shop.resolve(resolver, "delete from w.orders where id = 10")
    shop.source.execute("alter table w.orders drop constraint orders_pkey cascade")
    with pytest.raises(ConfigError, match="has no replica identity"):
        Resolver([specification], load_catalog(shop.source, specification.tables()))


# The map itself


@pytest.fixture(params=["postgres", "sqlite"])
def make_map(request: pytest.FixtureRequest, shop: Shop, tmp_path: Path) -> Iterator[Callable[[str], RelationMap]]:
    """Maps by their owner, in either sort of store."""
    opened: list[RelationMap] = []

    def make(owner: str) -> RelationMap:
        if request.param == "postgres":
            return RelationMap(PostgresTables(lambda: shop.state), owner)
        opened.append(open_relation_map(f"sqlite:///{tmp_path}/state.db", owner))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def tracked(shop: Shop, make_map: Callable[[str], RelationMap]) -> tuple[RelationMap, TrackedRelation]:
    """The map of the orders, seeded."""
    specification = parse_specification(PEOPLE + ORDERS, "people")
    resolver = Resolver([specification], load_catalog(shop.source, specification.tables()))
    relations, table = make_map("tests"), resolver.tracked[0]
    assert relations.prepare([table]) == [table]
    relations.seed(shop.source, table, Lsn(0))
    return relations, table


def update_of(table: TrackedRelation, *rows: tuple[str, str | None, bool, int, int]) -> pa.Table:
    schema = link_update_schema(table)
    return pa.table([pa.array(each, field.type) for each, field in zip(zip(*rows, strict=True), schema, strict=True)],
                    schema=schema)  # fmt: skip


@pytest.mark.trap(42)
def test_the_newest_link_wins_whatever_comes_again(tracked: tuple[RelationMap, TrackedRelation]) -> None:
    relations, table = tracked
    assert sorted(relations.lookup(table, ["10", "11", "99"])) == [("1",), ("2",)]
    relations.apply(table, update_of(table, ("10", "5", True, 7, 3)))
    relations.apply(table, update_of(table, ("10", "4", True, 7, 2)))
    assert relations.lookup(table, ["10"]) == [("5",)]
    relations.apply(table, update_of(table, ("10", None, False, 7, 1)))
    assert relations.lookup(table, ["10"]) == [("5",)]
    relations.apply(table, update_of(table, ("10", None, False, 8, 1)))
    assert relations.lookup(table, ["10"]) == []


def test_within_a_batch_the_last_change_of_a_key_counts(tracked: tuple[RelationMap, TrackedRelation]) -> None:
    relations, table = tracked
    gone_and_back = [("10", None, False, 7, 1), ("10", "6", True, 7, 2)]
    made_and_gone = [("12", "6", True, 7, 3), ("12", None, False, 7, 4), ("11", None, True, 7, 5)]
    relations.apply(table, update_of(table, *gone_and_back, *made_and_gone))
    assert relations.lookup(table, ["10", "12"]) == [("6",)]
    assert relations.lookup(table, ["11"]) == [(None,)]


def test_other_columns_need_a_new_map(
    shop: Shop, tracked: tuple[RelationMap, TrackedRelation], make_map: Callable[[str], RelationMap]
) -> None:
    relations, table = tracked
    assert relations.prepare([table]) == []
    other = TrackedRelation(table.table, table.key, ("person_id", "status"))
    assert relations.prepare([other]) == [other]
    assert relations.prepare([other]) == [other], "not seeded yet"
    relations.seed(shop.source, other, Lsn(5))
    assert relations.prepare([other]) == []
    assert relations.lookup(other, ["10"]) == [("1", "paid")]
    assert make_map("another").prepare([other]) == [other], "everybody has maps of their own"
    with pytest.raises(PenstockError):
        relations.lookup(table, ["10"])


def test_a_crash_while_seeding_leaves_the_map_unseeded(
    shop: Shop, tracked: tuple[RelationMap, TrackedRelation]
) -> None:
    relations, _ = tracked
    broken = TrackedRelation(tracked[1].table, ("id",), ("status",))
    relations.prepare([broken])
    shop.source.execute("alter table w.orders rename to renamed")
    with pytest.raises(Exception, match="fill the relation map"):
        relations.seed(shop.source, broken, Lsn(5))
    assert relations.prepare([broken]) == [broken]


def test_another_relation_leaves_the_maps_that_are_there_alone(
    shop: Shop, tracked: tuple[RelationMap, TrackedRelation]
) -> None:
    relations, table = tracked
    relations.apply(table, update_of(table, ("10", "5", True, 7, 3)))
    other = TrackedRelation(table.table, table.key, ("status",))
    assert relations.prepare([table, other]) == [other]
    relations.seed(shop.source, other, Lsn(9))
    assert relations.lookup(table, ["10"]) == [("5",)]
    assert relations.lookup(other, ["10"]) == [("paid",)]
    assert relations.prepare([table]) == []


def test_a_cleared_map_knows_nothing(tracked: tuple[RelationMap, TrackedRelation]) -> None:
    relations, table = tracked
    relations.clear(table)
    assert relations.lookup(table, ["10", "11"]) == []
    assert relations.prepare([table]) == [], "it is seeded all the same"


def _row(
    table: str,
    operation: Operation,
    old: dict[str, str] | None = None,
    new: dict[str, str] | None = None,
    absent: Sequence[str] = (),
) -> RowChanges:
    def cells(image: dict[str, str] | None, name: str) -> Cells:
        known = image is not None and name in image
        return Cells(pa.array([image[name] if known else None], pa.string()), np.array([known]))

    names = {"id", "person_id", *absent}
    one = np.array([1], np.int64)
    return RowChanges(
        TableName("w", table),
        np.array([operation], np.int8),
        one,
        one,
        {name: cells(old, name) for name in names},
        {name: cells(new, name) for name in names},
    )


def _statements(shop: Shop, resolver: Resolver, *statements: str) -> int:
    """How many statements resolving takes, by libpq's own account of what it sends."""
    changes = merge_changes([shop.changes(resolver, each) for each in statements])
    with tempfile.TemporaryFile() as trace:
        for connection in (shop.source, shop.state):
            connection.pgconn.trace(trace.fileno())
        resolution = resolver.resolve(shop.source, changes)
        assert sum(len(part) for part in resolution.documents) > 0
        resolver.remember(resolution)
        for connection in (shop.source, shop.state):
            connection.pgconn.untrace()
        size = os.lseek(trace.fileno(), 0, os.SEEK_CUR)
        sent = os.pread(trace.fileno(), size, 0).decode()
    return len(re.findall(r"\tF\t\d+\t(?:Execute|Query)\t", sent))


def test_every_version_of_the_server_will_do(any_database: Database) -> None:
    settings = SourceSettings(any_database.dsn)
    with connect(settings, Role.CATALOG) as source, connect(settings, Role.STATE) as state:
        world.create(source)
        source.execute("insert into w.people (id, name, email) values (1, 'a', 'x'), (2, 'b', 'y')")
        source.execute("insert into w.orders values (10, 1, 'paid', 1.50)")
        shop = Shop(source, state)
        resolver = shop.resolver(PEOPLE + ORDERS)
        assert shop.resolve(resolver, "update w.orders set person_id = 2") == ["1", "2"]
        specification = parse_specification(PEOPLE + ORDERS, "people")
        query = compile_build(specification, load_catalog(source, specification.tables()))
        built = build_documents(source, query, [["1", "2"]])
        assert built.column("body").to_pylist() == [
            '{"name":"a","orders":[]}',
            '{"name":"b","orders":[{"total":1.50}]}',
        ]
        wait_until_visible(source, [source.execute("select txid_current() & 4294967295").fetchone()[0]])


def test_many_may_open_relation_maps_in_an_empty_database_at_once(database: Database) -> None:
    def work(number: int) -> None:
        open_relation_map(database.dsn, f"p{number}").close()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert database.execute("select count(*) from penstock_documents.relation_maps") == [(0,)]
