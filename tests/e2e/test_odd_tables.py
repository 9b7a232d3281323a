"""Tables as PostgreSQL's own regression scripts leave them: legal, and rarely thought of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import coordinator
from penstock.comparison.verification import verify_tables
from penstock.destinations.delta.destination import DeltaDestination
from penstock.lsn import reaches
from penstock.state import CommandKind, Errored, Ready, open_store
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for


class Odd:
    """A pipeline of all tables, into Delta."""

    def __init__(self, database: Any, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.store = open_store(f"sqlite:///{folder / 'state.db'}", "odd")
        database.execute("create publication odd for all tables with (publish_via_partition_root = true)")

    @contextmanager
    def running(self) -> Iterator[Alone]:
        settings = tables_settings(self.database, self.folder, "odd", manage_publication=False)
        destination = DeltaDestination(self.folder / "lake")
        with tables_alone(settings, self.store, destination, ProcessTasks()) as pipeline:
            yield pipeline

    def check(self, pipeline: Alone, *tables: str) -> None:
        """Wait until exactly these tables are followed and have everything, and compare them."""
        names = {f"public.{name}" for name in tables}
        end = current_position(self.database)
        self.store.add_command(CommandKind.REFRESH)
        looks = pipeline.coordinator.looks

        def settled() -> bool:
            pipeline.wait(0)
            phases = {name: phase.name for name, phase in pipeline.phases.items()}
            is_followed = phases == dict.fromkeys(names, "ready")
            return is_followed and pipeline.coordinator.looks > looks and reaches(pipeline.status.applied, end)

        try:
            wait_for(settled, "the tables", 60)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {pipeline.phases}") from None
        report = verify_tables(pipeline.settings, self.store, pipeline.destination, ProcessTasks())
        assert {each.table: each.result for each in report.tables} == dict.fromkeys(names, "equal"), report.to_json()


def test_a_table_is_skipped_while_it_has_no_columns(database: Any, tmp_path: Path) -> None:
    database.execute(
        """
        create table never (); insert into never default values;
        create table later (); alter table later replica identity full; insert into later default values;
        create table loses (a int, b int); alter table loses replica identity full; insert into loses values (1, 2)
        """
    )
    odd = Odd(database, tmp_path)
    with odd.running() as pipeline:
        odd.check(pipeline, "loses")
        database.execute("alter table later add id int; insert into later values (1), (2)")
        database.execute("alter table loses drop a, drop b; insert into loses default values; delete from loses")
        odd.check(pipeline, "later")
        database.execute("insert into loses default values; alter table loses add a text")
        database.execute(
            "update loses set a = 'x'; update later set id = 3 where id = 1; delete from later where id = 2"
        )
        odd.check(pipeline, "later", "loses")


def test_a_table_that_was_not_published_for_a_moment_is_copied_after_all(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unlogged table is not published. Between two looks at the publication, nothing tells that it was one."""
    database.execute("create table t (id int primary key); insert into t values (1)")
    odd = Odd(database, tmp_path)
    with monkeypatch.context() as patch, odd.running() as pipeline:
        patch.setattr(coordinator, "REFRESH_SECONDS", 3600.0)
        odd.check(pipeline, "t")
        database.execute("alter table t set unlogged; insert into t values (2)")
        odd.store.add_command(CommandKind.RESYNC, ["public.t"])
        wait_for(lambda: isinstance(pipeline.phases["public.t"], Errored), "the copy to fail")
        database.execute("alter table t set logged; insert into t values (3)")
        wait_for(lambda: isinstance(pipeline.phases["public.t"], Ready), "the copy", 20)
        odd.check(pipeline, "t")


def test_a_key_with_a_generated_column_is_not_half_a_key(any_database: Any, tmp_path: Path) -> None:
    """Servers before 18 omit the generated column, and the rest of the key need not be unique."""
    for table in ("by_key", "whole"):
        any_database.execute(
            f"""
            create table {table} (a int, c int, g int generated always as (c) stored, primary key (a, g));
            insert into {table} values (1, 5), (1, 6), (2, 5)
            """
        )
    any_database.execute("alter table whole replica identity full")
    odd = Odd(any_database, tmp_path)
    if any_database.server.major >= 18:
        any_database.execute("alter publication odd set (publish_generated_columns = stored)")
    with odd.running() as pipeline:
        odd.check(pipeline, "by_key", "whole")
        for table in ("by_key", "whole"):
            any_database.execute(f"update {table} set c = 7 where a = 1 and c = 5; delete from {table} where c = 6")
            any_database.execute(f"insert into {table} values (1, 8), (1, 9)")
        odd.check(pipeline, "by_key", "whole")


def test_very_many_columns(database: Any, tmp_path: Path) -> None:
    """Comparing them took time by the cube of their number: minutes."""
    columns = ", ".join(f"column_{number} int" for number in range(800))
    database.execute(f"create table wide ({columns}); insert into wide (column_7) values (7)")
    database.execute("alter table wide replica identity full")
    odd = Odd(database, tmp_path)
    with odd.running() as pipeline:
        database.execute("update wide set column_799 = 9; insert into wide (column_0) values (1)")
        odd.check(pipeline, "wide")
