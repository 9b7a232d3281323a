"""Sizes of tables, on every version."""

from __future__ import annotations

from typing import Any

from penstock.source import Role, SourceSettings, connect
from penstock.source.sizes import load_sizes


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
