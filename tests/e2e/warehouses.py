"""A small pipeline from a real Postgres into a warehouse: copy, changes, schema changes and truncates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.destinations.base import Destination, ReadableDestination
from penstock.destinations.batch_events import copied_rows
from penstock.schema import TableSchema
from penstock.state import MemoryStore
from penstock.testing.destinations.script import LocalTasks
from tests.e2e.support import tables_alone, tables_settings, wait_for
from tests.e2e.test_delta import wait_applied, wait_ready

COLUMNS = (
    "id, name, price, ratio, is_open, day, at, stamp, clock, data, tags, doc::text as doc, code::text as code, small"
)
TABLES = """
    create table things (
        id int8 primary key, name text, price numeric(10, 2), ratio float8, is_open bool, day date, at timestamp,
        stamp timestamptz, clock time, data bytea, tags text[], doc jsonb, code uuid, small int2
    );
    create table lines (line text, level int4);
    alter table lines replica identity full;
    alter table things alter column name set storage external;
"""
FILL = """
    insert into things
    select n, repeat('x', 3000) || n, n / 4.0, n / 8.0, n % 2 = 0, date '2024-02-28' + n,
        timestamp '2024-01-01' + n * interval '1 s',
        timestamptz '2024-01-01 12:00+02' - n * interval '1 h', time '23:00' + n * interval '1 s',
        decode('00ff', 'hex'),
        case when n % 3 = 0 then null when n % 3 = 1 then '{}' else array['a', null, 'ü'] end,
        '{"a": [1, 2]}', gen_random_uuid(), n
    from generate_series(1, 40) n;
    insert into lines select 'same', n % 3 from generate_series(1, 20) n;
"""
CHANGES = """
    update things set price = price + 1, tags = array['new'] where id <= 10;
    update things set id = id + 100 where id between 11 and 15;
    delete from things where id between 16 and 20;
    insert into things (id) values (200);
    delete from lines where ctid in (select ctid from lines where level = 0 limit 2);
    update lines set level = 9 where ctid in (select ctid from lines where level = 1 limit 3);
"""


def follow_a_real_server(
    database: Any, destination: Destination, folder: Path, schema_of: Callable[[str], TableSchema]
) -> None:
    """Copy, changes, omitted large values, a schema change and a truncate; every row is compared.

    `schema_of` returns the schema that the destination has of a table.
    """
    with database.connect() as connection:
        connection.execute(TABLES)
        connection.execute(FILL)
    settings = tables_settings(database, folder, manage_publication=True)
    with tables_alone(settings, MemoryStore("e2e"), destination, LocalTasks()) as pipeline:
        wait_ready(pipeline, 2)
        check(database, destination, schema_of, COLUMNS)
        with database.connect() as connection:
            connection.execute(CHANGES)
        wait_applied(pipeline, database)
        check(database, destination, schema_of, COLUMNS)
        with database.connect() as connection:
            connection.execute("alter table things rename column ratio to share; alter table things add note text")
            connection.execute("update things set note = 'noted' where id < 5")
        wait_applied(pipeline, database)
        columns = COLUMNS.replace("ratio", "share") + ", note"
        check(database, destination, schema_of, columns)
        with database.connect() as connection, connection.transaction():
            connection.execute("truncate things, lines")
            connection.execute("insert into things (id, name) values (1, 'after')")
        wait_applied(pipeline, database)
        check(database, destination, schema_of, columns)
        wait_ready(pipeline, 2)


def check(database: Any, destination: Any, schema_of: Callable[[str], TableSchema], columns: str) -> None:
    """Wait until both tables equal the server's, as Python values: Penstock may be copying one of them again."""
    for table, listed in (("things", columns), ("lines", "line, level")):
        wait_for(lambda: _rows_at_destination(destination, schema_of, table) == _rows(database, table, listed), table)  # noqa: B023


def _rows(database: Any, table: str, listed: str) -> list[str]:
    with database.connect() as connection:
        cursor = connection.execute(f"select {listed} from {table}")
        names = [column.name for column in cursor.description]
        return sorted(_printed(dict(zip(names, row, strict=True))) for row in cursor.fetchall())


def _rows_at_destination(destination: Any, schema_of: Callable[[str], TableSchema], table: str) -> list[str]:
    assert isinstance(destination, ReadableDestination)
    pinned = destination.pin(schema_of(f"public.{table}"))
    assert pinned is not None
    batches = [batch for part in pinned.parts for batch in pinned.reader.read(part)]
    pinned.close()
    return sorted(_printed(dict(row)) for batch in batches for row in copied_rows(batch, pinned.schema))


def _printed(row: dict[str, Any]) -> str:
    return repr(sorted((name, str(value)) for name, value in row.items()))
