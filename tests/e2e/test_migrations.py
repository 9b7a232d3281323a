"""Migrations of real applications, with rows written between their statements, are followed without a command.

`PENSTOCK_MIGRATIONS` names folders with histories (docs/soak/README.md says how to get some); without it, a short
history of our own runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest

from penstock.comparison.verification import verify_tables
from penstock.destinations.delta.destination import DeltaDestination
from penstock.lsn import reaches
from penstock.source.connections import PINNED_PARAMETERS
from penstock.state import CommandKind, Errored, MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.lake import LakeReadBack
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for
from tests.support.migrations import Step, Table, Writer, load_tables, read_history, split_statements
from tests.support.readback import check_table
from tests.support.replay import Discrepancy

FOLDERS_VARIABLE, LIMIT_VARIABLE, SEED_VARIABLE = (
    "PENSTOCK_MIGRATIONS",
    "PENSTOCK_SOAK_MIGRATIONS",
    "PENSTOCK_SOAK_SEED",
)
EVERYTHING = 15
"""All tables are compared after so many steps; otherwise those that were written."""
PATIENCE = 90.0
OWN = """
    create type state as enum ('new', 'done');
    create table users (id serial primary key, name text not null, state state default 'new');
    create table posts (id uuid primary key, user_id int references users, body text, at timestamptz default now());
    alter table users add email varchar(50) not null default '';
    create table tags (post_id uuid not null, tag text not null);
    alter table posts add search tsvector;
    alter table users rename name to full_name;
    alter type state add value 'gone' before 'done';
    alter table users alter email type text using lower(email);
    alter table posts rename to articles;
    alter table tags add primary key (post_id, tag);
    update articles set body = body || ' (edited)';
    alter table articles add counter bigint generated always as identity, drop search;
    create schema archive;
    alter table tags set schema archive;
    alter table users drop state;
    alter table users add state int default 7;
    drop table articles cascade;
    create table articles (id int primary key, body jsonb);
    alter type state rename value 'gone' to 'archived';
"""


class Run(ExitStack):
    """A history over a pipeline into Delta; a context manager."""

    def __init__(self, database: Any, folder: Path, seed: int) -> None:
        super().__init__()
        self.database = database
        self.folder = folder
        self.random = Random(seed)
        self.readback = LakeReadBack(folder / "lake")
        options = " ".join(f"-c {name}={value}" for name, value in PINNED_PARAMETERS.items())
        self.server = self.enter_context(psycopg.connect(database.dsn, autocommit=True, options=options))
        self.connection = self.enter_context(database.connect())
        self.writer = Writer(self.connection, self.random)
        self.application = self.enter_context(database.connect())
        self.known: dict[str, Table] = {}
        self.refused: list[str] = []
        """Statements that the server refused, with its reason."""
        self.compared = 0

    def pipeline(self) -> Alone:
        settings = tables_settings(
            self.database, self.folder, "migrations", tables=("*.*",), manage_publication=True, max_table_sync_workers=8
        )
        return tables_alone(settings, MemoryStore("e2e"), DeltaDestination(self.folder / "lake"), ProcessTasks())

    def do(self, step: Step) -> set[str]:
        """Run a step; return the tables that it or the writer wrote to."""
        written: set[str] = set()
        for statement in step.statements:
            try:
                self._execute(statement)
            except psycopg.Error as error:
                self.refused.append(f"{step.name}: {str(error).partition(chr(10))[0]}")
            written |= self._write()
        return written

    def _execute(self, statement: str) -> None:
        """Run a statement of the application; if our rows are in its way, without them."""
        try:
            self.application.execute(statement.encode())
        except (psycopg.errors.IntegrityError, psycopg.errors.DataError):
            tables = ", ".join(table.identifier.as_string() for table in self.known.values())
            self.connection.execute(f"truncate {tables}".encode())
            self.application.execute(statement.encode())

    def _write(self) -> set[str]:
        """Write to the tables whose columns changed, and to some others."""
        tables = load_tables(self.connection)
        for table in tables.values():
            if not table.has_identity:
                self.connection.execute(f"alter table {table.identifier.as_string()} replica identity full".encode())
        changed = [name for name, table in tables.items() if self.known.get(name) != table]
        others = self.random.sample(sorted(tables), min(2, len(tables)))
        self.known = tables
        return {name for name in {*changed, *others} if self.writer.write(tables[name])}

    def check(self, pipeline: Alone, tables: set[str] | None) -> None:
        """Wait until these tables equal their source; all, by default."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._wait(pipeline)
            try:
                for name in sorted(self.known if tables is None else tables & self.known.keys()):
                    check_table(self.server, self.readback, name)
                    self._check_columns(name, is_written=tables is not None)
                    self.compared += 1
                if tables is None:
                    self._verify(pipeline)
                return
            except (Discrepancy, KeyError):
                # What the stream does not say is noticed at the next look at the catalog.
                if time.monotonic() > deadline:
                    raise
                pipeline.store.add_command(CommandKind.REFRESH)
                time.sleep(0.2)

    def _verify(self, pipeline: Alone) -> None:
        report = verify_tables(pipeline.settings, pipeline.store, pipeline.destination, ProcessTasks())
        results = {each.table: each.result for each in report.tables}
        if results != dict.fromkeys(self.known, "equal"):
            raise Discrepancy(f"verify says { ({name: each for name, each in results.items() if each != 'equal'}) }")

    def _check_columns(self, name: str, *, is_written: bool) -> None:
        found = [column.name for column in self.readback.schema(name).columns]
        rows = self.connection.execute(
            "select attname from pg_attribute where attrelid = %s::oid and attnum > 0 and not attisdropped"
            " and attgenerated = '' order by attnum",
            [self.known[name].oid],
        )
        expected = [column for (column,) in rows]
        if is_written and found != expected:
            raise Discrepancy(f"{name} has the columns {found} instead of {expected}")

    def _wait(self, pipeline: Alone) -> None:
        end = current_position(self.database)
        pipeline.store.add_command(CommandKind.REFRESH)

        tables = {table.oid: name for name, table in self.known.items()}

        def done() -> bool:
            pipeline.wait(0)
            # By their numbers: a table that was dropped may have had the name of another.
            phases = pipeline.store.get_table_replication_states()
            stopped = {
                tables[each]: phase.reason
                for each, phase in phases.items()
                if each in tables and isinstance(phase, Errored)
            }
            assert not stopped, stopped
            is_ready = {phase.name for phase in phases.values()} <= {"ready"}
            return is_ready and phases.keys() == tables.keys() and reaches(pipeline.status.applied, end)

        wait_for(done, "all tables to be ready")


def run_history(run: Run, steps: list[Step]) -> None:
    with run.pipeline() as pipeline:
        for number, step in enumerate(steps, 1):
            written = run.do(step)
            try:
                run.check(pipeline, None if number % EVERYTHING == 0 or number == len(steps) else written)
            except (AssertionError, TimeoutError, KeyError) as error:
                raise AssertionError(f"after {step.name}: {error}") from error


def histories() -> Iterator[Any]:
    folders = [Path(each) for each in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if each]
    for folder in folders:
        yield pytest.param(folder, marks=[pytest.mark.soak, pytest.mark.timeout(7200)], id=folder.name)


def test_migrations_are_followed_without_a_command(database: Any, tmp_path: Path) -> None:
    with Run(database, tmp_path, 1) as run:
        run_history(run, [Step(text[:40], (text,)) for text in split_statements(OWN)])
    assert not run.refused


@pytest.mark.parametrize("history", list(histories()))
def test_histories_of_applications_are_followed(
    history: Path, database: Any, tmp_path: Path, record_property: Any
) -> None:
    seed = int(os.environ.get(SEED_VARIABLE, "1"))
    steps = read_history(history)[: int(os.environ.get(LIMIT_VARIABLE, "100000"))]
    run = Run(database, tmp_path, seed)
    try:
        with run:
            run_history(run, steps)
    finally:
        print("refused by the server:", *run.refused, sep="\n")
        record_property("history", history.name)
        record_property("steps", len(steps))
        record_property("statements", sum(len(step.statements) for step in steps))
        record_property("refused by the server", len(run.refused))
        record_property("rows written", run.writer.written)
        record_property("tables compared", run.compared)
