"""Types and tables as a real catalog has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock.schema import PostgresType, ReplicaIdentity, TypeKind
from penstock.source import (
    RelationColumn,
    Role,
    SourceSettings,
    connect,
    identify_columns,
    load_attributes,
    load_table,
    load_types,
    schema_from_catalog,
)
from penstock.source import catalog as catalog_module


@pytest.fixture
def connection(any_database: Any) -> Iterator[psycopg.Connection[Any]]:
    with connect(SourceSettings(any_database.dsn), Role.CATALOG) as connection:
        yield connection


def table_oid(database: Any, name: str) -> int:
    return int(database.execute("select %s::regclass::oid::int8", [name])[0][0])


def column_types(database: Any, connection: psycopg.Connection[Any], name: str) -> dict[str, PostgresType]:
    attributes = [each for each in load_attributes(connection, table_oid(database, name)) if not each.dropped]
    types = load_types(connection, [attribute.type_oid for attribute in attributes])
    return {attribute.name: types[attribute.type_oid] for attribute in attributes}


def test_types_are_loaded_with_all_that_they_consist_of(any_database: Any, connection: psycopg.Connection[Any]) -> None:
    any_database.execute(
        """
        create schema "odd Schema";
        create type "odd Schema"."Mood" as enum ('happy', 'sad');
        create domain price as numeric(10, 2);
        create domain net_price as price check (value > 0);
        create domain numbers as int[];
        create domain many as numbers;
        create type pair as (a int, b text);
        create type floats as range (subtype = float8);
        create table t (
            mood "odd Schema"."Mood", moods "odd Schema"."Mood"[], net net_price, nets net_price[], many many,
            lots numbers[], pair pair, pairs pair[], whole int4range, multi int4multirange, floats floats, ranges
            daterange[], boxes box[], vector int2vector, plain varchar(7)[]
        )
        """
    )
    types = column_types(any_database, connection, "t")
    assert types["mood"].kind is TypeKind.ENUM
    assert str(types["mood"]) == "odd Schema.Mood"
    assert types["moods"].kind is TypeKind.ARRAY
    assert types["moods"].element == types["mood"]
    net = types["net"]
    assert (net.kind, net.name, net.base_modifier) == (TypeKind.DOMAIN, "net_price", -1)
    assert net.base is not None
    assert net.base.base is not None
    assert (net.base.name, net.base.base.name) == ("price", "numeric")
    assert net.base.base_modifier == (10 << 16 | 2) + 4
    assert types["nets"].element == net
    assert types["many"].base is not None
    assert types["many"].base.base is not None
    assert types["many"].base.base.kind is TypeKind.ARRAY
    assert types["lots"].element == types["many"].base
    assert types["pair"].kind is TypeKind.COMPOSITE
    assert types["pairs"].element == types["pair"]
    assert types["whole"].kind is TypeKind.RANGE
    assert types["multi"].kind is TypeKind.MULTIRANGE
    assert types["floats"].kind is TypeKind.RANGE
    assert types["ranges"].element is not None
    assert types["ranges"].element.kind is TypeKind.RANGE
    assert types["boxes"].element is not None
    assert types["boxes"].element.delimiter == ";"
    assert types["vector"].kind is TypeKind.BASE
    assert types["plain"].element is not None
    assert types["plain"].element.name == "varchar"


def test_types_of_extensions_are_loaded(any_database: Any, connection: psycopg.Connection[Any]) -> None:
    if len(any_database.execute("select from pg_available_extensions where name in ('citext', 'hstore')")) < 2:
        pytest.skip("this server has neither citext nor hstore")
    any_database.execute("create extension citext; create extension hstore")
    any_database.execute("create table t (label citext, labels citext[], tags hstore)")
    types = column_types(any_database, connection, "t")
    assert (types["label"].kind, types["label"].name, types["label"].is_builtin) == (TypeKind.BASE, "citext", False)
    assert types["labels"].element == types["label"]
    assert types["tags"].name == "hstore"


def test_known_types_are_not_asked_for_again_and_dropped_ones_are_left_out(
    any_database: Any, connection: psycopg.Connection[Any]
) -> None:
    any_database.execute("create domain d as text[]")
    oid = any_database.execute("select 'd'::regtype::oid::int8")[0][0]
    first = load_types(connection, [oid, 23])
    any_database.execute("drop domain d")
    assert load_types(connection, [oid, 25], known=first).keys() == {oid, 25}
    assert load_types(connection, [oid, 23]).keys() == {23}
    assert load_types(connection, []) == {}


@pytest.mark.trap(15)
def test_columns_are_identified_by_number(any_database: Any, connection: psycopg.Connection[Any]) -> None:
    any_database.execute("create table t (id int primary key, a text, b text, g int generated always as (id) stored)")
    oid = table_oid(any_database, "t")
    message = [RelationColumn("id", 23), RelationColumn("a", 25), RelationColumn("b", 25)]
    assert identify_columns(message, load_attributes(connection, oid)) == [1, 2, 3]
    any_database.execute("alter table t drop column a; alter table t add column a text")
    attributes = load_attributes(connection, oid)
    assert [each.attnum for each in attributes if each.dropped] == [2]
    # the old message, and the one after the change
    assert identify_columns(message, attributes) == [1, 2, 3]
    message = [RelationColumn("id", 23), RelationColumn("b", 25), RelationColumn("a", 25)]
    assert identify_columns(message, attributes) == [1, 3, 5]
    any_database.execute("alter table t rename column b to c")
    assert identify_columns(message, load_attributes(connection, oid)) == [1, 3, 5]


@pytest.mark.parametrize(
    ("ddl", "identity", "key", "primary"),
    [
        ("(a int, b int, primary key (b, a))", ReplicaIdentity.DEFAULT, (2, 1), (2, 1)),
        ("(a int, b int)", ReplicaIdentity.DEFAULT, (), ()),
        ("(a int primary key deferrable, b int)", ReplicaIdentity.DEFAULT, (), (1,)),
        ("(a int primary key, b int); alter table t replica identity full", ReplicaIdentity.FULL, (), (1,)),
        ("(a int primary key, b int); alter table t replica identity nothing", ReplicaIdentity.NOTHING, (), (1,)),
        (
            """
            (a int, x int, b int not null, primary key (a) include (x));
            create unique index i on t (b) include (x);
            alter table t replica identity using index i
            """,
            ReplicaIdentity.INDEX,
            (3,),
            (1,),
        ),
    ],
)
def test_replica_identity_and_primary_key(
    any_database: Any,
    connection: psycopg.Connection[Any],
    ddl: str,
    identity: ReplicaIdentity,
    key: tuple[int, ...],
    primary: tuple[int, ...],
) -> None:
    any_database.execute(f"create table t {ddl}")
    table = load_table(connection, table_oid(any_database, "t"))
    assert table is not None
    assert (table.replica_identity, table.identity_attnums, table.primary_key_attnums) == (identity, key, primary)


def test_a_schema_from_the_catalog_has_published_columns_in_order(
    any_database: Any, connection: psycopg.Connection[Any]
) -> None:
    any_database.execute(
        """
        create table t (
            x text, id int primary key, gone int, g int generated always as (1) stored, price numeric(9, 3)
        );
        alter table t drop column gone
        """
    )
    table = load_table(connection, table_oid(any_database, "t"))
    assert table is not None
    types = load_types(connection, [attribute.type_oid for attribute in table.live_attributes])
    schema = schema_from_catalog(table, types)
    assert [(column.name, column.attnum) for column in schema.columns] == [("x", 1), ("id", 2), ("price", 5)]
    assert [column.name for column in schema.key] == ["id"]
    assert schema.columns[1].primary_key_position == 1
    assert [column.name for column in schema_from_catalog(table, types, [2, 4]).columns] == ["id", "g"]


@pytest.mark.trap(17)
def test_partitions_know_their_parent_and_their_root(any_database: Any, connection: psycopg.Connection[Any]) -> None:
    any_database.execute(
        """
        create table top (id int, region int, extra text, primary key (id, region)) partition by list (region);
        create table middle partition of top for values in (1) partition by range (id);
        create table leaf (extra text, region int not null, id int not null);
        alter table middle attach partition leaf for values from (0) to (100);
        create table lone (id int)
        """
    )
    oids = {name: table_oid(any_database, name) for name in ("top", "middle", "leaf", "lone")}
    tables = {name: load_table(connection, oid) for name, oid in oids.items()}
    top, middle, leaf, lone = (tables[name] for name in ("top", "middle", "leaf", "lone"))
    assert top is not None
    assert middle is not None
    assert leaf is not None
    assert lone is not None
    assert (top.kind, top.is_partition, top.partition_parent_oid) == ("p", False, None)
    assert top.partition_root_oid == oids["top"]
    assert (middle.partition_parent_oid, middle.partition_root_oid) == (oids["top"], oids["top"])
    assert (leaf.partition_parent_oid, leaf.partition_root_oid) == (oids["middle"], oids["top"])
    assert [attribute.name for attribute in leaf.attributes] == ["extra", "region", "id"]
    assert leaf.primary_key_attnums == (3, 2)
    assert lone.partition_root_oid is None


@pytest.mark.trap(17, 25)
@pytest.mark.parametrize("table", ["plain", "parted"])
def test_what_rows_from_before_have_in_an_added_column_is_known(
    any_database: Any, connection: psycopg.Connection[Any], table: str
) -> None:
    """Of a partitioned table its partitions have it."""
    any_database.execute(
        """
        create table plain (id int);
        create table parted (id int) partition by range (id);
        create table middle partition of parted for values from (0) to (9) partition by range (id);
        create table leaf partition of middle for values from (0) to (9)
        """
    )
    constants = {
        "number": ("int", "5"),
        "words": ("text[]", '{a,"b c",NULL}'),
        "quoted": ("text", 'x"\\y, {z}'),
        "empty": ("text", ""),
        "null": ("text", "NULL"),
        "bytes": ("bytea", "\\x00ff"),
        "span": ("interval", "1 day 02:00:00"),
        "padded": ("char(3)", "a  "),
        "box": ("box", "(2,2),(1,1)"),
    }
    for name, (type_, value) in constants.items():
        any_database.execute(f"alter table {table} add \"{name}\" {type_} default '{value}'")
    any_database.execute(f"alter table {table} add later int")
    any_database.execute(f"alter table {table} alter later set default 7")
    found = {
        each.name: (each.backfilled, each.missing)
        for each in load_attributes(connection, table_oid(any_database, table))
    }
    assert found.pop("id") == found.pop("later") == (False, None)
    assert found == {name: (True, value) for name, (_, value) in constants.items()}
    any_database.execute(f"alter table {table} add drawn uuid default gen_random_uuid()")
    [drawn] = [each for each in load_attributes(connection, table_oid(any_database, table)) if each.name == "drawn"]
    assert (drawn.backfilled, drawn.missing) == (True, None)


@pytest.mark.trap(17)
@pytest.mark.parametrize("table", ["plain", "parted"])
def test_a_rewrite_makes_the_catalog_forget_what_rows_from_before_have(
    any_database: Any, connection: psycopg.Connection[Any], table: str
) -> None:
    """Then every default is in doubt: it may be in all rows, or only in new ones."""
    any_database.execute(
        """
        create table plain (id int);
        create table parted (id int) partition by range (id);
        create table leaf partition of parted for values from (0) to (9)
        """
    )
    any_database.execute(f"insert into {table} values (1)")
    any_database.execute(f"alter table {table} add c int default 5, add d int")
    any_database.execute(f"vacuum full {table}")
    found = {each.name: each for each in load_attributes(connection, table_oid(any_database, table))}
    assert {name: (each.backfilled, each.missing) for name, each in found.items()} == {
        "id": (False, None),
        "c": (True, None),
        "d": (False, None),
    }


def test_a_table_that_is_dropped_while_it_is_read_is_none(
    any_database: Any, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    any_database.execute("create table t (id int); create table bare ()")
    oid, bare = table_oid(any_database, "t"), table_oid(any_database, "bare")
    read = catalog_module._load_attributes

    def read_late(*arguments: Any) -> Any:
        any_database.execute("drop table if exists t")
        return read(*arguments)

    monkeypatch.setattr(catalog_module, "_load_attributes", read_late)
    assert load_table(connection, oid) is None
    assert load_table(connection, bare) is not None


def test_a_table_that_does_not_exist_is_none(connection: psycopg.Connection[Any]) -> None:
    assert load_table(connection, 4_000_000_000) is None
    assert load_attributes(connection, 4_000_000_000) == []
