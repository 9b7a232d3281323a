"""What the catalog says of partitions: which of them may have brought rows that the stream does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.source.shapes import TableShape, load_shapes, silent_changes
from penstock.testing.postgres import PostgresServer
from tests.conftest import Database

CREATED = "create table created partition of parted for values from (0) to (10); insert into created values (1)"
ATTACHED = """
    begin; create table attached (like parted); insert into attached values (11);
    alter table parted attach partition attached for values from (10) to (20); commit
"""


def shape_of(database: Database) -> TableShape:
    with database.connect() as connection:
        ((table,),) = connection.execute("select 'parted'::regclass::oid::int8").fetchall()
        return load_shapes(connection, [table])[table]


def changes_since(before: TableShape, database: Database) -> list[str]:
    return [change.text for change in silent_changes(before, shape_of(database), {})]


@pytest.mark.trap(17)
@pytest.mark.parametrize("major", [15, 18])
def test_a_partition_that_was_attached_where_it_was_created_is_noticed(
    make_server: Callable[..., PostgresServer], major: int
) -> None:
    """In one transaction, the catalog tells it by the numbers of commands from one that was created as a partition."""
    server = make_server(major=major)
    database = Database(server, server.create_database())
    database.execute("create table parted (id int) partition by range (id)")
    before = shape_of(database)
    database.execute(CREATED)
    assert changes_since(before, database) == []
    database.execute(ATTACHED)
    assert changes_since(before, database) == ["partition public.attached was attached"]
    # The rows of the catalog keep the number of the command that did not delete them.
    database.execute("begin; drop table attached; rollback")
    assert changes_since(before, database) == ["partition public.attached was attached"]
    server.kill()
    server.start()
    # Recovery has reset the numbers, so both are possible.
    found = changes_since(before, database)
    assert sorted(found) == ["partition public.attached was attached", "partition public.created was attached"]


def test_partitions_are_known_while_others_alter_them(database: Any) -> None:
    database.execute("create table parted (id int) partition by range (id)")
    before = shape_of(database)
    database.execute(CREATED)
    with database.connect() as connection, connection.transaction():
        connection.execute("drop table created")
        # In doubt it was attached: what is open may be rolled back.
        assert changes_since(before, database) == ["partition public.created was attached"]
