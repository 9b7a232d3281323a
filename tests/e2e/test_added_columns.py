"""Columns that are added while a table is followed: NULL for the rows that are there is right, or they get the value
that the source has in them, or the table is copied again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.comparison.verification import verify_tables
from penstock.destinations.base import Destination
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.errors import ValuesNotSent
from penstock.lsn import reaches
from penstock.state import CommandKind, MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for
from tests.support.readback import ReadBack, check_equal


@pytest.fixture(params=[False, True], ids=["by the catalog", "by the trigger"])
def pipeline(database: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Alone]:
    """Two tables with rows, ready."""
    for table in ("t", "other"):
        database.execute(f"create table {table} (id int primary key, note text)")
        database.execute(f"insert into {table} select i, 'n' || i from generate_series(1, 20) i")
    with started(database, tmp_path, ParquetDestination(tmp_path / "lake"), ddl_trigger=request.param) as made:
        yield made


@contextmanager
def started(database: Any, folder: Path, destination: Destination, *, ddl_trigger: bool) -> Iterator[Alone]:
    """A pipeline of two tables that are ready."""
    settings = tables_settings(database, folder, "added", ddl_trigger=ddl_trigger)
    with tables_alone(settings, MemoryStore("added"), destination, ProcessTasks()) as made:
        wait_ready(made)
        yield made


def wait_ready(pipeline: Alone) -> None:
    wait_for(
        lambda: pipeline.wait(0) or [phase.name for phase in pipeline.phases.values()] == ["ready"] * 2, "ready tables"
    )


def check(database: Any, pipeline: Alone, folder: Path, read: Callable[[Path], ReadBack] = ParquetReader) -> None:
    wait_ready(pipeline)
    end = current_position(database)
    wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply to reach the end")
    check_equal(database.dsn, read(folder / "lake"), ["t", "other"])


def copies(pipeline: Alone, database: Any) -> int:
    (table_id,) = database.execute("select 't'::regclass::oid::int8")[0]
    history = pipeline.store.get_table_replication_history(table_id)
    return sum(record.phase.name == "data_sync" for record in history)


def test_a_column_without_a_default_is_followed(database: Any, pipeline: Alone, tmp_path: Path) -> None:
    database.execute("alter table t add column c int")
    database.execute("insert into t values (100, 'new', 1)")
    # A default for rows to come concerns no others.
    database.execute("alter table t alter column c set default 5")
    database.execute("insert into t values (101, 'newer')")
    check(database, pipeline, tmp_path)
    assert copies(pipeline, database) == 1


@pytest.mark.remedy("ValuesNotSent")
@pytest.mark.trap(25)
@pytest.mark.parametrize(
    ("definition", "is_constant"),
    [
        ("c int default 5", True),
        ("c uuid default gen_random_uuid()", False),
        ("c int generated always as identity", False),
        ("c timestamptz not null default now()", True),
    ],
)
def test_a_log_says_which_values_of_an_added_column_are_known(
    database: Any, pipeline: Alone, tmp_path: Path, definition: str, is_constant: bool
) -> None:
    database.execute(f"alter table t add column {definition}")
    database.execute("insert into t (id, note) values (100, 'new')")
    database.execute("insert into other values (100, 'new')")
    if is_constant:
        check(database, pipeline, tmp_path)
        report = verify_tables(pipeline.settings, pipeline.store, pipeline.destination, ProcessTasks())
        assert {each.result for each in report.tables} == {"equal"}
    else:
        with pytest.raises(ValuesNotSent, match=r"public\.t: the server did not send .* for the added column c"):
            check(database, pipeline, tmp_path)
    assert copies(pipeline, database) == 1
    pipeline.store.add_command(CommandKind.RESYNC, tables=("public.t",))
    wait_for(lambda: copies(pipeline, database) == 2, "the new copy")
    check(database, pipeline, tmp_path)
    assert copies(pipeline, database) == 2
    # Further rows, and a further column, need no third one.
    database.execute("insert into t (id, note) values (101, 'newer')")
    database.execute("alter table t add column d int")
    database.execute("update t set d = 1 where id = 101")
    check(database, pipeline, tmp_path)
    assert copies(pipeline, database) == 2


@pytest.mark.trap(17, 25)
@pytest.mark.parametrize("ddl_trigger", [False, True], ids=["by the catalog", "by the trigger"])
@pytest.mark.parametrize("mode", ["mirror", "soft_delete"])
def test_delta_tables_get_the_constants_that_the_source_has(
    database: Any, tmp_path: Path, ddl_trigger: bool, mode: str
) -> None:
    """Of a plain table, and of a partitioned one; while rows are changed around it, in the same transaction too."""
    database.execute("create table t (id int primary key, note text)")
    database.execute("create table other (id int primary key, note text) partition by range (id)")
    database.execute("create table low partition of other for values from (0) to (10)")
    database.execute("create table high partition of other for values from (10) to (1000)")
    for table in ("t", "other"):
        database.execute(f"insert into {table} select i, 'n' || i from generate_series(1, 20) i")
    destination = DeltaDestination(tmp_path / "lake", mode=mode)
    with started(database, tmp_path, destination, ddl_trigger=ddl_trigger) as pipeline:
        for table in ("t", "other"):
            database.execute(f"update {table} set note = 'before' where id % 3 = 0")
            with database.connect() as connection, connection.transaction():
                connection.execute(f"update {table} set note = 'in the same' where id % 5 = 0")
                connection.execute(f"alter table {table} add c int not null default 5, add d text default 'it''s'")
                connection.execute(f"update {table} set c = 6 where id in (4, 5, 14)")
                connection.execute(f"delete from {table} where id in (6, 16)")
            database.execute(f"alter table {table} add e timestamptz default now()")
            database.execute(f"alter table {table} add f numeric(10, 2) default 5, add g int[] default '{{1,null}}'")
            database.execute(f"alter table {table} add h bytea default '\\x00ff', add i time default '12:30'")
            database.execute(f"alter table {table} alter c set default 9")
            database.execute(f"insert into {table} (id, note) values (100, 'new')")
        check(database, pipeline, tmp_path, LakeReadBack)
        assert copies(pipeline, database) == 1
        database.execute("update t set d = 'x' where id < 5")
        database.execute("update other set d = 'x' where id < 5")
        check(database, pipeline, tmp_path, LakeReadBack)
        report = verify_tables(pipeline.settings, pipeline.store, destination, ProcessTasks())
        assert [(each.table, each.result) for each in report.tables] == [
            ("public.other", "equal"),
            ("public.t", "equal"),
        ]


def test_delta_tables_are_copied_again_where_the_source_has_no_constant(database: Any, tmp_path: Path) -> None:
    for table in ("t", "other"):
        database.execute(f"create table {table} (id int primary key, note text)")
        database.execute(f"insert into {table} select i, 'n' || i from generate_series(1, 20) i")
    with started(database, tmp_path, DeltaDestination(tmp_path / "lake"), ddl_trigger=False) as pipeline:
        database.execute("alter table t add c uuid default gen_random_uuid()")
        database.execute("insert into t (id, note) values (100, 'new')")
        wait_for(lambda: pipeline.wait(0) or copies(pipeline, database) == 2, "the new copy")
        check(database, pipeline, tmp_path, LakeReadBack)
