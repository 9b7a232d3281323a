"""Generated columns by a setting: copy and stream agree, and only the tables that have some are copied again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.delta.destination import DeltaDestination
from penstock.errors import ConfigError
from penstock.state import DataSync, MemoryStore
from penstock.testing.destinations.script import LocalTasks
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Alone, tables_alone, tables_settings
from tests.e2e.test_delta import wait_applied
from tests.e2e.test_inexact_keys import wait_phases

READY = {"plain": "ready", "sums": "ready"}


def test_the_setting_copies_only_tables_with_generated_columns(database: Any, tmp_path: Path) -> None:
    database.execute(
        """
        create table plain (id int primary key);
        create table sums (id int primary key, twice int generated always as (id * 2) stored);
        insert into plain values (1); insert into sums values (1)
        """
    )
    store = MemoryStore("e2e")

    def pipeline(generated: bool | None) -> Alone:
        settings = tables_settings(database, tmp_path, manage_publication=True, generated_columns=generated)
        return tables_alone(settings, store, DeltaDestination(tmp_path / "lake"), LocalTasks())

    def rows() -> list[dict[str, Any]]:
        found = LakeReadBack(tmp_path / "lake").read_table("public.sums").to_pylist()
        return [{name: row[name] for name in row if name != "_unrepresentable"} for row in found]

    def copies() -> dict[str, int]:
        names = {version.table_id: version.schema.name for version in store.get_table_schemas()}
        history = {table_id: store.get_table_replication_history(table_id) for table_id in names}
        return {
            names[table_id]: sum(isinstance(record.phase, DataSync) for record in records)
            for table_id, records in history.items()
        }

    with pipeline(None) as running:
        wait_phases(running, READY)
        assert rows() == [{"id": 1}]
    with pipeline(True) as running:
        database.execute("insert into sums values (2); insert into plain values (2)")
        wait_applied(running, database)
        wait_phases(running, READY)
        wait_applied(running, database)
        assert sorted(rows(), key=str) == [{"id": 1, "twice": 2}, {"id": 2, "twice": 4}]
        assert copies() == {"plain": 1, "sums": 2}
        # Another owner changes nothing.
        publication = running.definition.settings.publication
        ((owner,),) = database.execute("select pubowner::regrole::text from pg_publication")
        for other in ("current_user", owner):
            database.execute(f"alter publication {publication} owner to {other}")
    with pipeline(False) as running:
        database.execute("insert into sums values (3)")
        wait_applied(running, database)
        wait_phases(running, READY)
        assert sorted(rows(), key=str) == [{"id": 1}, {"id": 2}, {"id": 3}]
        assert copies() == {"plain": 1, "sums": 2}


def test_an_older_server_refuses_the_setting(any_database: Any, tmp_path: Path) -> None:
    if any_database.execute("show server_version_num")[0][0] >= "180000":
        pytest.skip("it has generated columns")
    any_database.execute("create table plain (id int primary key)")
    settings = tables_settings(any_database, tmp_path, manage_publication=True, generated_columns=True)
    with pytest.raises(ConfigError, match="needs PostgreSQL 18"):
        tables_alone(settings, MemoryStore("e2e"), DeltaDestination(tmp_path / "lake"), LocalTasks()).start()
