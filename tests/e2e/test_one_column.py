"""Tables without a key whose only column is of any type, with NULLs: rows are found again by that one cell."""

from __future__ import annotations

import pytest
from psycopg import sql

from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import tables_alone, tables_settings
from tests.e2e.test_delta import wait_applied, wait_ready
from tests.support.readback import check_equal
from tests.support.samples import available_samples

FEW = 4
"""Values of each type."""


def make_tables(connection) -> list[str]:
    """Create a table per type, with NULLs and rows that are there twice."""
    names: list[str] = []
    for number, sample in enumerate(available_samples(connection)):
        name = f"only_{number}"
        create = sql.SQL("create table {} (cell {})").format(sql.Identifier(name), sql.SQL(sample.type))
        connection.execute(create)
        connection.execute(sql.SQL("alter table {} replica identity full").format(sql.Identifier(name)))
        for value in [None, None, *sample.values[:FEW], *sample.values[:FEW]]:
            insert(connection, name, value)
        names.append(name)
    return names


def insert(connection, name: str, value: str | None) -> None:
    literal = sql.Literal(value) if value is not None else sql.SQL("null")
    connection.execute(sql.SQL("insert into {} values ({})").format(sql.Identifier(name), literal))


def change(connection, name: str) -> None:
    """Change and delete rows that are NULL and rows that are not, one of several equal ones, one at a time."""
    table = sql.Identifier(name)
    one = sql.SQL("(select ctid from {} where cell is {} limit 1)")
    null, value = (one.format(table, sql.SQL(which)) for which in ("null", "not null"))
    some = sql.SQL("(select cell from {} where cell is not null limit 1)").format(table)
    insert(connection, name, None)
    for statement in (
        sql.SQL("update {0} set cell = {2} where ctid = {1}").format(table, null, some),
        sql.SQL("update {0} set cell = null where ctid = {1}").format(table, value),
        sql.SQL("delete from {0} where ctid = {1}").format(table, null),
        sql.SQL("delete from {0} where ctid = {1}").format(table, value),
    ):
        connection.execute(statement)


@pytest.mark.trap(29, 31)
@pytest.mark.parametrize("kind", ["mirror", "soft_delete", "parquet"])
def test_the_only_column_may_be_null(each_database, tmp_path, kind):
    database = each_database
    with database.connect() as connection:
        names = make_tables(connection)
    lake = tmp_path / "lake"
    destination = ParquetDestination(lake) if kind == "parquet" else DeltaDestination(lake, mode=kind)
    settings = tables_settings(database, tmp_path, manage_publication=True)
    with tables_alone(settings, MemoryStore("e2e"), destination, LocalTasks()) as pipeline:
        wait_ready(pipeline, len(names))
        for _ in range(2):
            with database.connect() as connection, connection.transaction():
                for name in names:
                    change(connection, name)
            wait_applied(pipeline, database)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}
    check_equal(database.dsn, ParquetReader(lake) if kind == "parquet" else LakeReadBack(lake), names)
