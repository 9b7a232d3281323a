"""Publications on real servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest

from penstock.errors import ConfigError, PermissionDenied, PublicationMissing
from penstock.source import Role, SourceSettings, connect, load_table, publications
from penstock.source.membership import changes_between, load_membership
from penstock.source.patterns import select_tables
from penstock.source.publications import (
    EnsuredPublication,
    create_publication,
    ensure_publication,
    inspect_publication,
    published_attnums,
    published_tables,
)
from penstock.source.unidentified import find_unidentified

Connection = psycopg.Connection[Any]


@pytest.fixture
def connection(any_database: Any) -> Iterator[Connection]:
    with connect(SourceSettings(any_database.dsn), Role.CATALOG) as connection:
        yield connection


def names(connection: Connection, publication: str = "pub") -> list[str]:
    return [str(table) for table in published_tables(connection, publication)]


def test_a_missing_publication_is_named(connection: Connection) -> None:
    for call in (published_tables, load_membership):
        with pytest.raises(PublicationMissing, match="nope") as caught:
            call(connection, "nope")
        assert caught.value.hint
    with pytest.raises(PublicationMissing):
        ensure_publication(connection, "nope", ["*"], manage=False)
    assert inspect_publication(connection, "nope") is None


def test_a_table_that_is_renamed_meanwhile_stays_a_member(
    any_database: Any, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its changes are lost until it is added again, and its copy is thrown away."""
    any_database.execute("create table t (id int primary key)")
    ensure_publication(connection, "pub", ["public.*"])
    before = load_membership(connection, "pub")

    def select_and_rename(*arguments: Any) -> Any:
        found = select_tables(*arguments)
        any_database.execute("alter table t rename to t_2025; create table t (id int primary key)")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(publications, "select_tables", select_and_rename)
        ensure_publication(connection, "pub", ["public.*"])
    assert not changes_between(before, load_membership(connection, "pub"))
    ensure_publication(connection, "pub", ["public.*"])
    after = load_membership(connection, "pub")
    assert changes_between(before, after).added == after.tables.keys() - before.tables.keys()
    assert not changes_between(before, after).readded
    assert sorted(map(str, after.table_names().values())) == ["public.t", "public.t_2025"]


def test_a_managed_publication_follows_its_patterns(any_database: Any, connection: Connection) -> None:
    any_database.execute(
        """
        create schema sales; create schema "Odd";
        create table public.orders (id int primary key); create table sales.orders (id int primary key);
        create table sales.audit (id int); create table "Odd"."T able" (id int primary key);
        create unlogged table sales.scratch (id int); create view sales.looks as select 1 as one
        """
    )
    first = ensure_publication(connection, "pub", ["public.*", "sales.*", '"Odd".*'], ["*.audit"])
    assert first.created
    assert names(connection) == ["Odd.T able", "public.orders", "sales.orders"]
    assert first.publication.operations == {"insert", "update", "delete", "truncate"}
    assert first.publication.via_root
    again = ensure_publication(connection, "pub", ["public.*", "sales.*", '"Odd".*'], ["*.audit"])
    assert (again.created, again.added, again.removed) == (False, (), ())
    any_database.execute("create table public.later (id int primary key)")
    changed = ensure_publication(connection, "pub", ["public.*"])
    assert changed.added == ("public.later",)
    assert changed.removed == ("Odd.T able", "sales.orders")
    assert names(connection) == ["public.later", "public.orders"]
    left_alone = ensure_publication(connection, "pub", ["*"], manage=False)
    assert (left_alone.added, left_alone.removed) == ((), ())
    assert names(connection) == ["public.later", "public.orders"]


def test_tables_of_penstock_itself_are_never_published(any_database: Any, connection: Connection) -> None:
    any_database.execute("create schema penstock; create table penstock.pipelines (id int primary key)")
    any_database.execute("create schema penstock_documents; create table penstock_documents.maps (id int primary key)")
    any_database.execute("create table t (id int primary key)")
    ensure_publication(connection, "pub", ["*.*"])
    assert names(connection) == ["public.t"]


def test_a_pattern_that_matches_nothing_makes_an_empty_publication(connection: Connection) -> None:
    ensured = ensure_publication(connection, "pub", ["nothing.*"])
    assert ensured.created
    assert ensured.members == frozenset()
    assert names(connection) == []


def test_a_publication_for_all_tables_cannot_be_managed(any_database: Any, connection: Connection) -> None:
    any_database.execute("create table t (id int primary key); create publication pub for all tables")
    with pytest.raises(ConfigError, match="FOR ALL TABLES"):
        ensure_publication(connection, "pub", ["public.t"])
    assert names(connection) == ["public.t"]


def test_column_lists_and_row_filters_are_those_that_the_server_applies(
    any_database: Any, connection: Connection
) -> None:
    any_database.execute(
        """
        create table a (id int primary key, x text, y text, g int generated always as (1) stored);
        create table b (id int primary key, kind text);
        create schema s; create table s.c (id int primary key);
        create publication pub for table a (y, id), b where (kind = 'it''s' and id > 5);
        create publication everything for all tables;
        """
    )
    tables = {table.name: table for table in published_tables(connection, "pub")}
    assert tables["a"].column_attnums == (1, 3)
    assert tables["a"].row_filter is None
    assert tables["b"].column_attnums is None
    assert tables["b"].row_filter == "((kind = 'it''s'::text) AND (id > 5))"
    everything = published_tables(connection, "everything")
    assert [(str(table), table.column_attnums) for table in everything] == [
        ("public.a", None),
        ("public.b", None),
        ("s.c", None),
    ]
    publication = inspect_publication(connection, "everything")
    assert publication is not None
    catalog = load_table(connection, everything[0].oid)
    assert catalog is not None
    assert published_attnums(catalog, everything[0], publication) == (1, 2, 3)
    assert published_attnums(catalog, tables["a"], publication) == (1, 3)


def test_a_filter_does_not_count_when_its_schema_is_published(any_database: Any, connection: Connection) -> None:
    any_database.execute(
        """
        create table t (id int primary key); create table other (id int primary key);
        create publication pub for table t where (id > 5), tables in schema public
        """
    )
    assert [(table.name, table.row_filter) for table in published_tables(connection, "pub")] == [
        ("other", None),
        ("t", None),
    ]


def test_generated_columns_count_when_they_are_published(any_database: Any, connection: Connection) -> None:
    if any_database.server.major < 18:
        pytest.skip("generated columns are published from 18 on")
    any_database.execute(
        """
        create table t (
            id int primary key, g int generated always as (1) stored, v int generated always as (2) virtual
        );
        create publication pub for table t with (publish_generated_columns = stored)
        """
    )
    publication = inspect_publication(connection, "pub")
    (table,) = published_tables(connection, "pub")
    catalog = load_table(connection, table.oid)
    assert publication is not None
    assert catalog is not None
    assert publication.generated_columns
    assert published_attnums(catalog, table, publication) == (1, 2)
    assert catalog.attributes[2].generated == "v"


@pytest.mark.trap(17)
@pytest.mark.parametrize("via_root", [True, False])
def test_partitions_are_sent_as_root_or_leaf(any_database: Any, connection: Connection, via_root: bool) -> None:
    any_database.execute(
        """
        create table top (id int primary key) partition by range (id);
        create table leaf1 partition of top for values from (0) to (10);
        create table leaf2 partition of top for values from (10) to (20)
        """
    )
    ensured = ensure_publication(connection, "pub", ["public.*"], via_root=via_root)
    assert ensured.added == ("public.top",)
    expected = ["public.top"] if via_root else ["public.leaf1", "public.leaf2"]
    assert names(connection) == expected
    narrowed = ensure_publication(connection, "pub", ["public.leaf1"])
    assert narrowed.added == ("public.leaf1",)
    assert narrowed.removed == ("public.top",)


@pytest.mark.trap(18)
def test_a_table_removed_and_added_again_is_seen(any_database: Any, connection: Connection) -> None:
    any_database.execute(
        """
        create table a (id int primary key); create table b (id int primary key); create table c (id int primary key);
        create publication pub for table a, b
        """
    )
    oid = {name: any_database.execute("select %s::regclass::oid::int8", [name])[0][0] for name in "abc"}
    before = load_membership(connection, "pub")
    assert before.names[oid["a"]] == "public.a"
    for statement in ("analyze", "vacuum full pg_publication_rel", "vacuum freeze pg_publication"):
        any_database.execute(statement)
    any_database.execute("insert into a values (1); alter table b add column x int; create index on a (id)")
    assert not changes_between(before, load_membership(connection, "pub"))
    any_database.execute("alter publication pub add table c")
    change = changes_between(before, load_membership(connection, "pub"))
    assert (change.added, change.removed, change.readded) == ({oid["c"]}, set(), set())
    any_database.execute("alter publication pub drop table a; alter publication pub add table a")
    any_database.execute("alter publication pub drop table c")
    change = changes_between(before, load_membership(connection, "pub"))
    assert (change.added, change.removed, change.readded) == (set(), set(), {oid["a"]})


@pytest.mark.trap(18)
@pytest.mark.parametrize(
    "statement",
    [
        "drop publication pub; create publication pub for table a, b",
        "alter publication pub set (publish = 'insert'); alter publication pub set (publish = 'insert, update')",
        "alter publication pub rename to other; alter publication other rename to pub",
    ],
)
def test_a_publication_that_was_away_may_have_missed_changes_of_all(
    any_database: Any, connection: Connection, statement: str
) -> None:
    any_database.execute(
        "create table a (id int primary key); create table b (id int primary key);create publication pub for table a, b"
    )
    before = load_membership(connection, "pub")
    any_database.execute(statement)
    assert changes_between(before, load_membership(connection, "pub")).readded == before.tables.keys()


@pytest.mark.trap(18)
def test_schemas_and_partitions_are_followed_too(any_database: Any, connection: Connection) -> None:
    any_database.execute(
        """
        create schema s; create table s.t (id int primary key);
        create table top (id int primary key) partition by range (id);
        create table leaf partition of top for values from (0) to (10);
        create publication pub for table top, tables in schema s
        """
    )
    before = load_membership(connection, "pub")
    assert set(before.names.values()) == {"s.t", "public.leaf"}
    any_database.execute("alter publication pub drop tables in schema s; alter publication pub add tables in schema s")
    change = changes_between(before, load_membership(connection, "pub"))
    assert {before.names[oid] for oid in change.readded} == {"s.t"}
    any_database.execute("alter publication pub drop table top; alter publication pub add table top")
    change = changes_between(before, load_membership(connection, "pub"))
    assert {before.names[oid] for oid in change.readded} == {"s.t", "public.leaf"}


def test_creating_without_privilege_is_named(any_database: Any, connection: Connection) -> None:
    any_database.execute("create table t (id int primary key)")
    role = f"r_{any_database.name}"
    connection.execute(f"create role {role}".encode())
    connection.execute(f"set role {role}".encode())
    try:
        with pytest.raises(PermissionDenied):
            create_publication(connection, "pub", [])
    finally:
        connection.execute("reset role")
        connection.execute(f"drop role {role}".encode())


UNIDENTIFIED = """
    create table public.keyed (id int primary key); create table public.keyless (id int);
    create table public.whole (id int); alter table public.whole replica identity full;
    create table public.late (id int primary key deferrable);
    create table public.nothing (id int primary key); alter table public.nothing replica identity nothing;
    create table public.unique (id int not null, n int, part int); create unique index "order" on public.unique (id);
    create unique index on public.unique (n); create unique index on public.unique (part) where part > 0;
    create table public."Odd ""one" (id int);
    create table public.parts (id int) partition by range (id);
    create table public.part partition of public.parts for values from (0) to (10);
    create table public.keyed_parts (id int primary key) partition by range (id);
    create table public.keyed_part partition of public.keyed_parts for values from (0) to (10)
"""


def test_tables_whose_updates_the_server_would_reject_are_left_out_until_their_remedy_is_run(
    any_database: Any, connection: Connection
) -> None:
    any_database.execute(UNIDENTIFIED)
    every = ["keyed", "keyless", "late", "nothing", "unique", '"Odd ""one"', "parts", "keyed_parts"]
    for table in every:
        any_database.execute(f"insert into public.{table} values (1)")

    def ensure(named: Sequence[str] = ()) -> EnsuredPublication:
        return ensure_publication(connection, "pub", ["public.*"], unidentified=named)

    def write(tables: Sequence[str]) -> None:
        for table in tables:
            any_database.execute(f"update public.{table} set id = 2; update public.{table} set id = 1")

    ensured = ensure()
    assert ensured.members == {"public.keyed", "public.whole", "public.keyed_parts"}
    assert ensured.left_out.keys() == {
        *("public.keyless", "public.late", "public.nothing", "public.unique", "public.parts", 'public.Odd "one')
    }
    write(every)
    # one that a person names is published
    named = ensure(["public.keyless"])
    assert named.added == ("public.keyless",)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        any_database.execute("update keyless set id = 3")
    # and one that is a member and loses its identity is removed
    any_database.execute("alter table keyed replica identity nothing")
    again = ensure()
    assert again.removed == ("public.keyed", "public.keyless")
    write(every)
    statements = {name: error.statements for name, error in again.left_out.items()}
    assert statements["public.keyed"] == ("alter table public.keyed replica identity default;",)
    assert statements["public.unique"] == ('alter table public."unique" replica identity using index "order";',)
    assert statements["public.late"] == ("alter table public.late replica identity full;",)
    for name, error in again.left_out.items():
        assert name in error.message
        assert error.hint.endswith(f"Run: {' '.join(statements[name])}")
        any_database.execute(error.hint.partition("Run: ")[2])
    healed = ensure()
    assert healed.left_out == {}
    assert len(healed.members) == 9
    write(every)
    assert ensure().added == ()


def test_generated_columns_of_an_identity_count(database: Any) -> None:
    """PostgreSQL 18 rejects updates of tables whose identity has generated columns that are not published."""
    database.execute(
        """
        create table whole (id int, g int generated always as (id) stored); alter table whole replica identity full;
        create table keyed (id int primary key, g int generated always as (id) stored);
        alter table keyed replica identity full; insert into whole values (1); insert into keyed values (1)
        """
    )
    connection = database.connect()
    left_out = ensure_publication(connection, "pub", ["*.*"]).left_out
    assert left_out.keys() == {"public.whole", "public.keyed"}
    assert left_out["public.keyed"].hint.endswith("Run: alter table public.keyed replica identity default;")
    assert "source.generated_columns = true" in left_out["public.whole"].hint
    database.execute("update whole set id = 2; update keyed set id = 2")
    assert not ensure_publication(connection, "pub", ["*.*"], generated_columns=True).left_out
    database.execute("update whole set id = 3; update keyed set id = 3")
    connection.close()


@pytest.mark.trap(17)
@pytest.mark.parametrize("via_root", [True, False])
def test_membership_is_what_the_server_lists(any_database: Any, connection: Connection, via_root: bool) -> None:
    any_database.execute(
        """
        create schema s; create table plain (id int primary key); create table s.inside (id int primary key);
        create unlogged table s.scratch (id int primary key); create view s.looks as select 1 as one;
        create table top (id int primary key) partition by range (id);
        create table middle partition of top for values from (0) to (10) partition by range (id);
        create table leaf partition of middle for values from (0) to (5);
        create table s.other_leaf partition of top for values from (10) to (20);
        create table parent (id int primary key); create table child () inherits (parent)
        """
    )
    publications = {
        "members": "for table plain, only parent",
        "roots": "for table top",
        "middles": "for table middle, s.other_leaf",
        "roots_and_leaves": "for table top, leaf",
        "everything": "for all tables",
        "empty": "",
    }
    if any_database.server.major >= 15:
        publications |= {
            "schemas": "for tables in schema s",
            "root_and_schema": "for table top, tables in schema s",
            "public_schema": "for tables in schema public",
        }
    for name, members in publications.items():
        any_database.execute(f"create publication {name} {members} with (publish_via_partition_root = {via_root})")
        listed = any_database.execute(
            "select schemaname || '.' || tablename from pg_publication_tables where pubname = %s", [name]
        )
        assert sorted(load_membership(connection, name).names.values()) == sorted(table for (table,) in listed), name


def test_membership_and_a_refresh_wait_for_no_lock_of_a_table(any_database: Any, connection: Connection) -> None:
    any_database.execute("create table a (id int primary key); create table b (id int primary key)")
    ensure_publication(connection, "pub", ["public.*"])
    connection.execute("set lock_timeout = 100")
    with any_database.connect() as locking, locking.transaction():
        locking.execute("lock table a in access exclusive mode")
        assert load_membership(connection, "pub").names.keys()
        any_database.execute("create table c (id int primary key)")
        assert ensure_publication(connection, "pub", ["public.*"]).added == ("public.c",)
        # One that is locked itself is for the next time, and keeps no other out.
        any_database.execute("create table d (id int primary key); create table e (id int primary key)")
        locking.execute("lock table d in access exclusive mode")
        ensured = ensure_publication(connection, "pub", ["public.*"])
        assert (ensured.added, ensured.refused.keys()) == (("public.e",), {"public.d"})
    assert ensure_publication(connection, "pub", ["public.*"]).added == ("public.d",)


def test_a_publication_that_appears_meanwhile_is_used(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed after it had sent the statement, and its session ended later than it did."""
    database.execute("create table one (id int primary key); create table two (id int primary key)")
    inspect, looks = publications.inspect_publication, []

    def inspect_too_early(connection: Any, name: str) -> Any:
        looks.append(inspect(connection, name))
        if len(looks) == 1:
            database.execute("create publication pub for table one")
        return looks[-1]

    monkeypatch.setattr(publications, "inspect_publication", inspect_too_early)
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        ensured = publications.ensure_publication(connection, "pub", ["public.*"])
    assert not ensured.created
    assert ensured.members == {"public.one", "public.two"}


def test_a_partition_that_is_attached_between_two_statements_is_judged_once(any_database: Any) -> None:
    """It is then in the list of tables, and in the tree of one of them."""
    any_database.execute("create table t (id int primary key) partition by range (id)")
    any_database.execute("create table t_1 partition of t for values from (0) to (9)")
    with psycopg.connect(any_database.dsn) as connection:
        oids = [each for (each,) in connection.execute("select oid from pg_class where relname in ('t', 't_1')")]
        assert find_unidentified(connection, oids) == {}
