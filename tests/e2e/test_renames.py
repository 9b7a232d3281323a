"""Renamed tables: a folder belongs to one table, and each table ends up in the folder that has its name."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock import coordinator
from penstock.destinations.delta.destination import DeltaDestination
from penstock.destinations.delta.reader import DeltaReader
from penstock.destinations.folders import RenameRules, RenameTable
from penstock.destinations.parquet.destination import ParquetDestination
from penstock.destinations.parquet.reader import ParquetReader
from penstock.errors import PenstockError
from penstock.lsn import reaches
from penstock.state import CommandKind, Init, MemoryStore
from penstock.testing.destinations.script import LocalTasks
from penstock.testing.faults import FaultyDestination
from tests.e2e.support import Alone, Background, current_position, tables_alone, tables_settings, wait_for
from tests.support.drive_pipeline import DriveSettings
from tests.support.pipeline_process import PipelineProcess

FOLLOW, KEEP = RenameTable.FOLLOW, RenameTable.KEEP

ROTATED = "alter table t rename to t_2025; create table t (id int primary key, v text); insert into t values (7, 'new')"
MOVED = "create schema archive; alter table t set schema archive"
EXCHANGED = "alter table a rename to tmp; alter table b rename to a; alter table tmp rename to b"
CIRCLE = (
    "alter table a rename to tmp; alter table t rename to a; alter table b rename to t; alter table tmp rename to b"
)

RENAMES = pytest.mark.parametrize(
    ("statements", "tables"),
    [
        (ROTATED, ["public.a", "public.b", "public.t", "public.t_2025"]),
        (MOVED, ["archive.t", "public.a", "public.b"]),
        (EXCHANGED, ["public.a", "public.b", "public.t"]),
        (CIRCLE, ["public.a", "public.b", "public.t"]),
    ],
    ids=["rotated", "another schema", "exchanged", "in a circle"],
)
DESTINATIONS = pytest.mark.parametrize("kind", ["delta", "parquet"])


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "REFRESH_SECONDS", 0.2)


class House:
    """A database with three tables, and a lake that outlives its pipelines."""

    def __init__(self, database: Any, folder: Path, kind: str = "delta", rule: RenameTable | None = FOLLOW) -> None:
        self.database = database
        self.folder = folder
        self.lake = folder / "lake"
        self.kind = kind
        self.rules = RenameRules(rule)
        self.store = MemoryStore("e2e")
        self.options: dict[str, Any] = {}
        self.faulty = False
        self.destination: Any = None
        for number, name in enumerate("abt"):
            database.execute(f"create table {name} (id int primary key, v text)")
            database.execute(f"insert into {name} select i, '{name}' from generate_series(1, {10 + number}) i")

    @contextmanager
    def running(self) -> Iterator[Alone]:
        with self.prepared() as pipeline:
            pipeline.start()
            yield pipeline

    @contextmanager
    def prepared(self) -> Iterator[Alone]:
        """A pipeline that is not started."""
        settings = tables_settings(
            self.database, self.folder, tables=("public.*", "archive.*"), rename_tables=self.rules
        )
        made = DeltaDestination(self.lake, **self.options) if self.kind == "delta" else ParquetDestination(self.lake)
        self.destination = FaultyDestination(made) if self.faulty else made
        pipeline = tables_alone(settings, self.store, self.destination, LocalTasks())
        try:
            yield pipeline
        finally:
            pipeline.shutdown()

    def rename(self, statements: str) -> None:
        with self.database.connect() as connection, connection.transaction():
            connection.execute(statements)

    def source(self, table: str) -> list[tuple[int, str]]:
        return sorted(self.database.execute(f"select id, v from {table}"))

    def in_folder(self, folder: str) -> list[tuple[int, str]]:
        """The rows that are in a folder, as a reader who knows nothing but the folder finds them."""
        if self.kind == "delta":
            delta = DeltaTable(str(self.lake / folder))
            rows = QueryBuilder().register("t", delta).execute("select id, v from t").read_all()
            return sorted(zip(rows["id"].to_pylist(), rows["v"].to_pylist(), strict=True))
        reader = ParquetReader(self.lake)
        [table] = [each for each in reader.tables() if Path(reader.folder(each)) == self.lake / folder]
        return sorted((row["id"], row["v"]) for row in reader.read_table(table).to_pylist())

    def reader(self) -> Any:
        return DeltaReader(self.lake) if self.kind == "delta" else ParquetReader(self.lake)

    def wait(self, pipeline: Alone, tables: list[str]) -> None:
        """Wait until all these tables are followed, and everything so far is applied."""
        wait_for(lambda: is_ready(pipeline, tables), f"{tables} to be ready, there is {pipeline.phases}")
        end = current_position(self.database)
        wait_for(lambda: reaches(pipeline.status.applied, end), "apply to reach the end")

    def wait_named(self, pipeline: Alone, tables: list[str]) -> None:
        """Wait until readers find these tables, by their names."""
        wait_for(lambda: pipeline.phases.keys() == set(tables), "the names")
        wait_for(lambda: self.reader().tables() == sorted(tables), "the names at the destination")
        self.wait(pipeline, tables)

    def wait_moved(self, pipeline: Alone, tables: list[str]) -> None:
        """Wait until each of these tables is in the folder of its name."""
        wait_for(lambda: pipeline.phases.keys() == set(tables), "the names")
        wait_for(lambda: self.locations() == {self.id_of(each): each.replace(".", "/") for each in tables}, "the moves")
        self.wait(pipeline, tables)

    def locations(self) -> dict[int, str]:
        made = DeltaDestination(self.lake) if self.kind == "delta" else ParquetDestination(self.lake)
        known = self.store.get_table_replication_states()
        found = {table_id: str(Path(place).relative_to(self.lake)) for table_id, place in made.locations("e2e").items()}
        return {table_id: place for table_id, place in found.items() if table_id in known}

    def resync(self, pipeline: Alone, tables: list[str]) -> None:
        before = [len(self.copies(table)) for table in tables]
        pipeline.store.add_command(CommandKind.RESYNC, tuple(tables))
        wait_for(lambda: [len(self.copies(table)) for table in tables] == [each + 1 for each in before], "new copies")
        self.wait(pipeline, tables)

    def copies(self, table: str) -> list[str]:
        history = self.store.get_table_replication_history(self.id_of(table))
        return [record.phase.name for record in history if record.phase.name == "finished_copy"]

    def check(self, tables: list[str], folders: dict[str, str] | None = None) -> None:
        for table in tables:
            folder = (folders or {}).get(table, table.replace(".", "/"))
            assert self.in_folder(folder) == self.source(table), table
        assert self.reader().tables() == sorted(tables)
        for table in tables:
            found = sorted((row["id"], row["v"]) for row in self.reader().read_table(table).to_pylist())
            assert found == self.source(table), table

    def change(self, tables: list[str]) -> None:
        for table in tables:
            self.database.execute(f"insert into {table} values (100, 'later'); delete from {table} where id = 1")
            self.database.execute(f"update {table} set v = 'changed' where id = 7")

    def id_of(self, table: str) -> int:
        [(oid,)] = self.database.execute("select %s::regclass::oid::int8", [table])
        return oid


def is_ready(pipeline: Alone, tables: list[str]) -> bool:
    pipeline.wait(0)
    return {name: phase.name for name, phase in pipeline.phases.items()} == dict.fromkeys(tables, "ready")


@pytest.fixture
def house(database: Any, tmp_path: Path) -> Callable[..., House]:
    return lambda *arguments, **options: House(database, tmp_path, *arguments, **options)


ALL = ["public.a", "public.b", "public.t"]


@RENAMES
@DESTINATIONS
def test_renamed_tables_move_to_the_folders_of_their_names_while_the_pipeline_runs(
    each_database: Any, tmp_path: Path, kind: str, statements: str, tables: list[str]
) -> None:
    made = House(each_database, tmp_path, kind)
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
        with Background(each_database, lambda connection: connection.execute("update b set v = v || '.'"), 0.05):
            made.rename(statements)
            made.change(tables)
            made.wait_moved(pipeline, tables)
        made.wait(pipeline, tables)
        made.check(tables)
        made.resync(pipeline, tables)
        made.check(tables)


@RENAMES
@DESTINATIONS
def test_tables_that_were_renamed_while_the_pipeline_was_down_move_at_its_start(
    each_database: Any, tmp_path: Path, kind: str, statements: str, tables: list[str]
) -> None:
    made = House(each_database, tmp_path, kind)
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
    made.change(ALL)
    made.rename(statements)
    for table in tables:
        each_database.execute(f"insert into {table} values (200, 'later still')")
    with made.running() as pipeline:
        made.wait_moved(pipeline, tables)
        made.check(tables)
        each_database.execute(f"delete from {tables[-1]} where id > 3")
        made.wait(pipeline, tables)
        made.check(tables)
    with made.running() as pipeline:
        # Where they are is known to the next process.
        each_database.execute(f"delete from {tables[-1]} where id = 3")
        made.wait(pipeline, tables)
        made.check(tables)
        assert {len(made.copies(table)) for table in tables} <= {1, 2}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("method", ["drop_table_for_copy", "write_table_rows"])
@DESTINATIONS
def test_a_move_that_fails_halfway_is_done_again(
    house: Callable[..., House], kind: str, method: Any, when: str
) -> None:
    made = house(kind)
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
    made.rename(EXCHANGED)
    made.change(ALL)
    made.faulty = True
    error = PenstockError("a test stops here")
    with made.prepared() as pipeline:
        (made.destination.fail_before if when == "before" else made.destination.fail_after)(method, error, times=None)
        pipeline.start()
        wait_for(lambda: sum(phase.name == "errored" for phase in pipeline.phases.values()) == 2, "the failures")
    made.faulty = False
    with made.running() as pipeline:
        pipeline.store.add_command(CommandKind.ROLLBACK)
        made.wait_moved(pipeline, ALL)
        made.check(ALL)


def test_old_rows_stay_readable_until_the_copy_is_complete(house: Callable[..., House]) -> None:
    made = house()
    made.faulty = True
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
        old = made.source("t")
        with made.destination.hold("write_table_rows") as hold:
            made.rename(ROTATED)
            hold.wait_until_reached()
            wait_for(lambda: "public.t_2025" in pipeline.phases, "the name")
            assert made.in_folder("public/t") == old
            assert made.reader().folder("public.t_2025").endswith("public/t")
            # The new table waits for the folder.
            wait_for(lambda: isinstance(pipeline.phases.get("public.t"), Init), "the new table")
            assert [call.tables for call in made.destination.calls if call.method == "drop_table_for_copy"][3:] == [
                ("public.t_2025",)
            ]
        tables = [*ALL, "public.t_2025"]
        made.wait_moved(pipeline, tables)
        made.check(tables)


@DESTINATIONS
def test_a_table_that_keeps_its_folder_is_never_overwritten(house: Callable[..., House], kind: str) -> None:
    made = house(kind, KEEP)
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
        made.rename(ROTATED)
        tables = [*ALL, "public.t_2025"]
        own = {"public.t": f"public/t--oid{made.id_of('t')}", "public.t_2025": "public/t"}
        made.wait_named(pipeline, tables)
        made.check(tables, own)
        made.change(tables)
        made.resync(pipeline, tables)
        made.check(tables, own)
        assert [len(made.copies(table)) for table in ALL] == [2, 2, 2]
    made.rules = RenameRules(FOLLOW)
    with made.running() as pipeline:
        made.wait_moved(pipeline, tables)
        made.check(tables)


def test_exchanged_names_cost_nothing_where_folders_are_kept(house: Callable[..., House]) -> None:
    made = house(rule=KEEP)
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
        made.rename(EXCHANGED)
        made.wait_named(pipeline, ALL)
        made.change(ALL)
        made.wait(pipeline, ALL)
        made.check(ALL, {"public.a": "public/b", "public.b": "public/a"})
        assert [len(made.copies(table)) for table in ALL] == [1, 1, 1]


@pytest.mark.parametrize(("kind", "mode"), [("delta", "history"), ("delta", "soft_delete"), ("parquet", None)])
def test_a_rename_discards_nothing_that_only_the_destination_has(
    house: Callable[..., House], kind: str, mode: str | None
) -> None:
    made = house(kind, None)
    made.options = {} if mode is None else {"mode": mode}
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
        made.rename("alter table t rename to renamed")
        made.wait_named(pipeline, ["public.a", "public.b", "public.renamed"])
        assert len(made.copies("renamed")) == 1
        assert Path(made.reader().folder("public.renamed")) == made.lake / "public/t"


def test_a_single_table_can_have_its_own_rule(house: Callable[..., House]) -> None:
    made = house()
    made.rules = RenameRules(None, {"public.t": KEEP})
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
        made.rename("alter table t rename to t_2025; alter table a rename to a_2025")
        tables = ["public.a_2025", "public.b", "public.t_2025"]
        made.wait_named(pipeline, tables)
        made.wait(pipeline, tables)
        made.check(tables, {"public.t_2025": "public/t"})


def test_a_table_that_takes_the_name_of_a_dropped_one_takes_its_folder(house: Callable[..., House]) -> None:
    made = house()
    with made.running() as pipeline:
        made.wait(pipeline, ALL)
        made.rename("drop table t; alter table a rename to t")
        tables = ["public.b", "public.t"]
        made.wait_moved(pipeline, tables)
        made.check(tables)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "points",
    [("after_drop", "after_data_sync", "during_copy"), ("after_copy", "after_finished_copy", "after_sync_done")],
    ids=["before the copies", "after a copy"],
)
def test_whoever_is_killed_during_a_move_each_table_ends_up_in_its_folder(
    database: Any, tmp_path: Path, points: tuple[str, ...]
) -> None:
    made = House(database, tmp_path)
    settings = DriveSettings(
        dsn=database.dsn, folder=str(tmp_path), slot=f"e2e_{database.name[-12:]}", destination="delta"
    )
    made.lake = Path(settings.lake)
    process = PipelineProcess(settings)
    try:
        process.start()
        process.wait_phases("ready", 3)
        assert process.stop() == 0
        made.rename(EXCHANGED)
        for point in points:
            made.change(["a"] if point == points[0] else [])
            database.execute("insert into b select max(id) + 1, 'more' from b")
            process.start(armed=f"{point}=kill")
            assert process.wait_ended() == -signal.SIGKILL
        made.rename("alter table t rename to t_2025; create table t (id int primary key, v text)")
        tables = [*ALL, "public.t_2025"]
        process.start()
        process.wait_for("the moves", lambda seen: seen.phases == dict.fromkeys(tables, "ready"))
        process.wait_applied(current_position(database))
        assert process.stop() == 0
        made.check(tables)
    finally:
        process.close()
