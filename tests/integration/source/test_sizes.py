"""Sizes of tables, on every version."""

from __future__ import annotations

from typing import Any

from penstock.source import Role, SourceSettings, connect
from penstock.source.catalog import load_sizes, sort_by_size


def test_sizes_of_plain_partitioned_and_unknown_tables(any_database: Any) -> None:
    any_database.execute(
        """
        create table plain as select i, repeat('x', 100) from generate_series(1, 1000) i;
        create table parted (id int) partition by range (id);
        create table low partition of parted for values from (0) to (50);
        create table high partition of parted for values from (50) to (100);
        insert into parted select generate_series(0, 99);
        create table never as select 1 as id;
        create table nothing (id int) partition by list (id);
        analyze plain, low, high;
        """
    )
    names = ("plain", "parted", "low", "never", "nothing")
    oids = {name: any_database.execute("select %s::regclass::oid::int8", [name])[0][0] for name in names}
    with connect(SourceSettings(any_database.dsn), Role.CATALOG) as connection:
        sizes = load_sizes(connection, [*oids.values(), 1])
    found = {name: sizes.get(oid) for name, oid in oids.items()}
    plain, parted, low, never = (found[name] for name in ("plain", "parted", "low", "never"))
    assert plain is not None
    assert plain.rows == 1000
    assert plain.bytes > 100_000
    assert parted is not None
    assert low is not None
    assert (parted.rows, low.rows) == (100, 50)
    assert parted.bytes == 2 * low.bytes
    # Servers before 14 had no way to say that they do not know; the first analyze by itself may come at any time.
    assert never is not None
    assert never.bytes > 0
    assert found["nothing"] is None


def test_small_tables_come_first_and_no_lock_is_waited_for(any_database: Any) -> None:
    any_database.execute(
        """
        create table parted (id int, word text) partition by range (id);
        create table low partition of parted for values from (0) to (50) partition by list (id);
        create table lowest partition of low default;
        create table high partition of parted for values from (50) to (100000);
        insert into parted select i, repeat('x', 500) from generate_series(0, 2000) i;
        create table medium as select i, repeat('x', 500) as word from generate_series(1, 200) i;
        create table toasted (id int, word text);
        alter table toasted alter column word set storage external;
        insert into toasted select i, repeat('x', 100000) from generate_series(1, 100) i;
        create table empty (id int);
        create table nothing (id int) partition by list (id);
        """
    )
    # Not in a string of statements, which would be a transaction.
    any_database.execute("vacuum analyze")
    names = ("toasted", "parted", "nothing", "medium", "empty")
    oids = {any_database.execute("select %s::regclass::oid::int8", [name])[0][0]: name for name in names}
    with (
        any_database.connect() as other,
        connect(SourceSettings(any_database.dsn), Role.CATALOG, parameters={"lock_timeout": "100"}) as connection,
        other.transaction(),
    ):
        other.execute("lock table parted, medium in access exclusive mode")
        ordered = [oids[oid] for oid in sort_by_size(connection, list(oids))]
    assert sorted(ordered[:2]) == ["empty", "nothing"]
    assert ordered[2:] == ["medium", "parted", "toasted"]
