"""A pipeline from a real Postgres into BigQuery: the emulator, with the fake for change types and offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.destinations.batch_events import copied_rows
from penstock.destinations.bigquery import BigQueryDestination
from penstock.state import MemoryStore
from penstock.testing.bigquery import EmulatedBigQuery, why_not
from penstock.testing.destinations.script import LocalTasks
from tests.e2e.support import tables_alone, tables_settings
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


@pytest.fixture(scope="module")
def emulator() -> Iterator[EmulatedBigQuery]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with EmulatedBigQuery() as server:
        yield server


def test_bigquery_follows_a_real_server(database, emulator, tmp_path):
    """Copy, changes, omitted large values, a schema change and a truncate; every row is compared."""
    with database.connect() as connection:
        connection.execute(TABLES)
        connection.execute(FILL)
    destination = BigQueryDestination(
        emulator.project,
        "shop",
        max_staleness="0s",
        endpoint=emulator.endpoint,
        storage_endpoint=emulator.storage_endpoint,
    )
    destination.probe()
    settings = tables_settings(database, tmp_path, manage_publication=True)
    with tables_alone(settings, MemoryStore("e2e"), destination, LocalTasks()) as pipeline:
        wait_ready(pipeline, 2)
        check(database, destination, pipeline, COLUMNS)
        with database.connect() as connection:
            connection.execute(CHANGES)
        wait_applied(pipeline, database)
        check(database, destination, pipeline, COLUMNS)
        with database.connect() as connection:
            connection.execute("alter table things rename column ratio to share; alter table things add note text")
            connection.execute("update things set note = 'noted' where id < 5")
        wait_applied(pipeline, database)
        columns = COLUMNS.replace("ratio", "share") + ", note"
        check(database, destination, pipeline, columns)
        with database.connect() as connection, connection.transaction():
            connection.execute("truncate things, lines")
            connection.execute("insert into things (id, name) values (1, 'after')")
        wait_applied(pipeline, database)
        check(database, destination, pipeline, columns)
        assert {phase.name for phase in pipeline.phases.values()} == {"ready"}


def check(database: Any, destination: BigQueryDestination, pipeline: Any, columns: str) -> None:
    """Compare both tables with the server, as Python values."""
    for table, listed in (("things", columns), ("lines", "line, level")):
        with database.connect() as connection:
            cursor = connection.execute(f"select {listed} from {table}")
            names = [column.name for column in cursor.description]
            wanted = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        record = next(each for each in destination._records.values() if each.source == f"public.{table}")
        pinned = destination.pin(record.layout.schema)
        batches = [batch for part in pinned.parts for batch in pinned.reader.read(part)]
        found = [dict(row) for batch in batches for row in copied_rows(batch, pinned.schema)]
        pinned.close()
        assert sorted(found, key=_sorted) == sorted(wanted, key=_sorted)


def _sorted(row: dict[str, Any]) -> str:
    return repr(sorted((name, str(value)) for name, value in row.items()))
