"""A schema that a table had before comes back: the destination still learns of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.errors import PenstockError
from penstock.lsn import reaches
from penstock.state import CommandKind, MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for
from tests.support.readback import check_equal


@pytest.fixture
def store(database: Any) -> MemoryStore:
    database.execute("create table t (id int primary key, v text); insert into t values (1, 'a')")
    return MemoryStore("earlier")


def make(database: Any, folder: Path, store: MemoryStore) -> Alone:
    destination = ParquetDestination(folder / "lake")
    return tables_alone(tables_settings(database, folder, "earlier"), store, destination, ProcessTasks())


def wait_until_applied(database: Any, pipeline: Alone) -> None:
    end = current_position(database)
    wait_for(
        lambda: (
            pipeline.wait(0)
            or (
                [phase.name for phase in pipeline.phases.values()] == ["ready"]
                and reaches(pipeline.status.applied, end)
            )
        ),
        "a table that is ready and has all changes",
    )


def test_a_column_that_is_dropped_after_a_crash_between_its_rows_and_its_schema(
    database: Any, tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(database, tmp_path, store) as pipeline:
        wait_until_applied(database, pipeline)
        with monkeypatch.context() as crashing:

            def crash(*_: object) -> None:
                raise PenstockError("killed")

            crashing.setattr(store, "store_table_schema", crash)
            database.execute("alter table t add column added int")
            database.execute("insert into t values (2, 'b', 7)")
            wait_for(lambda: pipeline.error is not None, "the crash")
    database.execute("alter table t drop column added")
    database.execute("insert into t values (3, 'c')")
    with make(database, tmp_path, store) as pipeline:
        wait_until_applied(database, pipeline)
    assert check_equal(database.dsn, ParquetReader(tmp_path / "lake"), ["t"]) == 3


def test_a_column_that_is_renamed_back_and_forth_around_a_new_copy(
    database: Any, tmp_path: Path, store: MemoryStore
) -> None:
    with make(database, tmp_path, store) as pipeline:
        wait_until_applied(database, pipeline)
        database.execute("insert into t values (2, 'b')")
        wait_until_applied(database, pipeline)
        database.execute("alter table t rename column v to w")
        asked = store.add_command(CommandKind.RESYNC, ["public.t"])
        wait_for(lambda: store.get_command(asked.number).answered, "an answer")
        wait_until_applied(database, pipeline)
        database.execute("alter table t rename column w to v")
        database.execute("insert into t values (3, 'c')")
        wait_until_applied(database, pipeline)
        database.execute("alter table t rename column v to w")
        database.execute("insert into t values (4, 'd')")
        wait_until_applied(database, pipeline)
    assert check_equal(database.dsn, ParquetReader(tmp_path / "lake"), ["t"]) == 4
