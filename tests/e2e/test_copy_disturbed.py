"""What people do to a table while it is copied: the copy waits or begins anew, says so, and ends equal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.copy import CopySettings
from penstock.destinations.parquet import ParquetDestination, ParquetReader
from penstock.errors import Retry
from penstock.lsn import reaches
from penstock.source.connections import Role
from penstock.source.snapshots import SLOT_PREFIX
from penstock.state import CommandKind, Errored, MemoryStore
from penstock.state.transitions import is_legal
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import Alone, current_position, tables_alone, tables_settings, wait_for
from tests.support import least_privilege
from tests.support.readback import check_equal

ROWS = 600
WAY = ["init", "data_sync", "finished_copy", "sync_done", "ready"]
ANEW = ["init", "data_sync", "errored", *WAY]


class DisturbedTasks(ProcessTasks):
    """Tasks of a copy, between which somebody does something; once."""

    def __init__(self, table: str, after: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._description = f"copy {table}"
        self._after = after
        self._act: Callable[[], None] | None = act

    def run(self, items: Sequence[Any], function: Callable[[Any], Any], *, description: str) -> list[Any]:
        act = self._act
        if description != self._description or act is None:
            return super().run(items, function, description=description)
        assert len(items) > 2
        self._act = None
        done = super().run(items[: self._after], function, description=description)
        act()
        return done + super().run(items[self._after :], function, description=description)


class Site:
    """A database with the table `busy`, which is copied in several ranges, and another that nobody disturbs."""

    def __init__(self, database: Any, folder: Path) -> None:
        self.database = database
        self.store = MemoryStore("disturbed")
        self._lake = folder / "lake"
        self._folder = folder
        self.pipeline: Alone | None = None
        database.execute(
            "create table busy (id int primary key, version int, note text);"
            "create table other (id int primary key, version int, note text)"
        )
        for table in ("busy", "other"):
            database.execute(
                f"insert into {table} select i, 0, repeat('n', i % 1000) from generate_series(1, {ROWS}) i"
            )

    def start(self, tasks: ProcessTasks | None = None, *, lock_timeout: float = 60.0) -> Alone:
        copy = CopySettings(range_bytes=64 << 10, lock_timeout=lock_timeout)
        settings = tables_settings(self.database, self._folder, "disturbed", copy=copy)
        self.pipeline = tables_alone(settings, self.store, ParquetDestination(self._lake), tasks or ProcessTasks())
        self.pipeline.start()
        return self.pipeline

    def change(self, table: str = "busy") -> None:
        """Some of everything."""
        with self.database.connect() as connection, connection.transaction():
            for statement in (
                "update {} set version = version + 1 where id % 7 = 0",
                "delete from {} where id % 11 = 0",
                "update {} set id = id + 10000 where id % 13 = 0 and id < 10000",
                "insert into {} (id, version) select coalesce(max(id), 0) + 1, 1 from {}",
            ):
                connection.execute(statement.format(table, table))

    def wait_until_equal(self) -> None:
        assert self.pipeline is not None
        pipeline = self.pipeline
        # Both: for a moment, a table that takes the name of another one is not known yet.
        ready = {"public.busy": "ready", "public.other": "ready"}
        wait_for(lambda: self.phases() == ready, "tables to be ready")
        for table in ("busy", "other"):
            self.change(table)
        end = current_position(self.database)
        wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply to reach the end")
        check_equal(self.database.dsn, ParquetReader(self._lake), ["busy", "other"])

    def phases(self) -> dict[str, str]:
        assert self.pipeline is not None
        self.pipeline.wait(0)
        return {name: phase.name for name, phase in self.pipeline.phases.items()}

    def wait_failed(self) -> Errored:
        """Wait until the copy of `busy` has failed once; it is retried."""

        def failures() -> list[Errored]:
            self.phases()
            return [phase for phase in self.history("busy") if isinstance(phase, Errored)]

        failed, *_ = wait_for(failures, "the copy to fail")
        assert failed.retry_policy.retry is Retry.TIMED
        return failed

    def history(self, table: str) -> list[Any]:
        """The phases of a table, each of which may follow the one before."""
        (table_id,) = self.database.execute("select %s::regclass::oid::int8", [table])[0]
        phases = [record.phase for record in self.store.get_table_replication_history(table_id)]
        stored = [phase for phase in phases if phase is not None]
        for before, after in pairwise(stored):
            # SyncWait and Catchup are never stored.
            assert is_legal(before, after) or (before.name, after.name) == ("finished_copy", "sync_done")
        return stored


@pytest.fixture
def site(database: Any, tmp_path: Path) -> Iterator[Site]:
    made = Site(database, tmp_path)
    yield made
    if made.pipeline is not None:
        made.pipeline.shutdown()


REWRITES = {
    "another type": "alter table busy alter column version type bigint",
    "another type, by an expression": "alter table busy alter column note type int using length(note)",
    "a column with a volatile default": "alter table busy add column token uuid default gen_random_uuid()",
    "a column dropped": "alter table busy drop column note",
    "a column renamed": "alter table busy rename column note to remark",
    "truncate": "truncate busy",
    "truncate and other rows": "truncate busy; insert into busy select i, 9, 'new' from generate_series(1, 50) i",
    "vacuum full": "vacuum full busy",
    "cluster": "cluster busy using busy_pkey",
    "a table of that name instead": "alter table busy rename to gone; drop table gone cascade; "
    "create table busy (id int primary key, version int, note text); insert into busy values (1, 1, 'x')",
}


@pytest.mark.remedy("TableRewritten")
@pytest.mark.trap(19, 20, 21, 23)
@pytest.mark.parametrize(
    ("what", "after"), [*((what, 1) for what in REWRITES), ("truncate", 0), ("another type", 0), ("vacuum full", 0)]
)
def test_a_rewrite_begins_the_copy_anew_and_it_ends_equal(site: Site, what: str, after: int) -> None:
    """Whether some ranges were read already or none."""
    disturbed = threading.Event()

    def act() -> None:
        site.change()
        for statement in REWRITES[what].split("; "):
            site.database.execute(statement)
        if "instead" not in what:
            site.change()
        disturbed.set()

    site.start(DisturbedTasks("public.busy", after, act))
    assert disturbed.wait(60)
    wait_for(lambda: "public.busy" in site.phases(), "the table")
    site.wait_until_equal()
    assert [phase.name for phase in site.history("other")] == WAY
    history = site.history("busy")
    if "instead" in what:
        # Another table, for all that Postgres knows; what was copied of the first is gone with it.
        assert [phase.name for phase in history] == WAY
        return
    assert [phase.name for phase in history] == ANEW
    (failed,) = [phase for phase in history if isinstance(phase, Errored)]
    assert "public.busy" in failed.reason
    assert "after the snapshot of its copy was taken" in failed.reason
    assert failed.retry_policy.retry is Retry.TIMED
    assert failed.solution is not None
    assert "restarts automatically" in failed.solution


@pytest.mark.trap(21, 23, 32)
@pytest.mark.parametrize("what", ["truncate", "truncate and other rows", "vacuum full", "cluster"])
def test_what_happens_behind_the_last_range_is_no_reason_to_begin_anew(site: Site, what: str) -> None:
    def act() -> None:
        site.change()
        for statement in REWRITES[what].split("; "):
            site.database.execute(statement)
        site.change()

    site.start(DisturbedTasks("public.busy", 1000, act))
    site.wait_until_equal()
    assert [phase.name for phase in site.history("busy")] == WAY


@pytest.mark.trap(21, 25)
def test_a_column_that_is_filled_behind_the_last_range_begins_the_copy_anew(site: Site) -> None:
    """No range sees it, and no change carries what the rows have got."""

    def act() -> None:
        site.database.execute(REWRITES["a column with a volatile default"])
        site.change()
        assert site.pipeline is not None
        pipeline, end = site.pipeline, current_position(site.database)
        # So that it is the worker that meets it, and not apply.
        wait_for(lambda: pipeline.wait(0) or reaches(pipeline.status.applied, end), "apply to pass")

    site.start(DisturbedTasks("public.busy", 1000, act))
    site.wait_until_equal()
    assert [phase.name for phase in site.history("busy")] == ["init", "data_sync", "finished_copy", "errored", *WAY]


@pytest.mark.trap(21)
def test_ddl_does_not_wait_for_the_whole_copy(site: Site) -> None:
    """The lock of one range keeps DDL waiting, and not that of the copy."""
    waited: list[str] = []

    def act() -> None:
        with site.database.connect() as connection:
            connection.execute("set lock_timeout = '20s'")
            connection.execute("alter table busy alter column version set default 5")
            waited.append(site.phases()["public.busy"])

    site.start(DisturbedTasks("public.busy", 1, act))
    site.wait_until_equal()
    assert waited == ["data_sync"]
    assert [phase.name for phase in site.history("busy")] == WAY


@pytest.mark.remedy("SnapshotLost")
@pytest.mark.trap(20)
def test_a_copy_whose_snapshot_ends_begins_anew(site: Site) -> None:
    def act() -> None:
        holders = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
        assert site.database.execute(f"{holders} and application_name like %s", [f"%:{Role.SNAPSHOT}"])
        site.change()

    site.start(DisturbedTasks("public.busy", 1, act))
    failed = site.wait_failed()
    assert "snapshot" in failed.reason
    assert failed.solution is not None
    assert "The copy restarts automatically" in failed.solution
    site.wait_until_equal()


@pytest.mark.remedy("TableLocked")
def test_a_lock_that_blocks_a_copy_is_ended_by_the_command_that_is_printed(site: Site) -> None:
    locking = site.database.connect(autocommit=False)

    def act() -> None:
        locking.execute("lock table busy in access exclusive mode")

    site.start(DisturbedTasks("public.busy", 1, act), lock_timeout=0.2)
    failed = site.wait_failed()
    assert failed.solution is not None
    assert "pg_terminate_backend(pid)" in failed.solution
    site.database.execute("select pg_terminate_backend(%s)", [locking.info.backend_pid])
    locking.close()
    site.wait_until_equal()


@pytest.mark.remedy("StatementInterrupted")
def test_a_copy_whose_statement_is_cancelled_goes_on_once_nobody_cancels_it(site: Site) -> None:
    locking = site.database.connect(autocommit=False)

    def act() -> None:
        locking.execute("lock table busy in access exclusive mode")

    def cancel() -> list[tuple[Any, ...]]:
        return site.database.execute(
            "select pg_cancel_backend(pid) from pg_stat_activity"
            " where %s = any(pg_blocking_pids(pid)) and datname = current_database()",
            [locking.info.backend_pid],
        )

    site.start(DisturbedTasks("public.busy", 1, act))
    wait_for(cancel, "the copy to wait for the lock")
    failed = site.wait_failed()
    assert "canceling statement" in failed.reason
    assert failed.solution is not None
    assert "exempt the Penstock role" in failed.solution
    locking.rollback()
    locking.close()
    site.wait_until_equal()


@pytest.mark.trap(9)
@pytest.mark.parametrize("kind", ["session", "prepared transaction"])
def test_a_snapshot_that_waits_says_for_whom_and_goes_on(
    site: Site, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    pipeline = site.start()
    site.wait_until_equal()
    caplog.clear()
    blocker = site.database.connect(autocommit=False)
    blocker.execute("insert into busy values (-1, -1, 'late')")
    identity = str(blocker.info.backend_pid)
    if kind != "session":
        identity = f"held_{site.database.name}"
        blocker.execute(f"prepare transaction '{identity}'")
    with caplog.at_level("WARNING"):
        site.store.add_command(CommandKind.RESYNC, tables=("public.busy",))
        (wait,) = wait_for(lambda: list(pipeline.waits.values()), "the wait to be seen")
        assert list(pipeline.waits) == ["public.busy"]
        (found,) = [each for each in wait.blockers if each.identity == identity]
        assert found.kind == kind
        # Only a member of pg_monitor sees the times of other roles' sessions.
        assert found.seconds is not None or least_privilege.is_wanted()
        (line,) = [message for message in caplog.messages if "waits for open transactions" in message]
        assert line.startswith("the snapshot of public.busy waits for open transactions")
        assert identity in line
    # Nobody else waits.
    before = pipeline.status.changes
    site.change("other")
    wait_for(lambda: pipeline.status.changes > before, "changes of the other table")
    assert site.phases() == {"public.busy": "data_sync", "public.other": "ready"}
    if kind == "session":
        blocker.commit()
    else:
        site.database.execute(f"commit prepared '{identity}'")
    blocker.close()
    site.wait_until_equal()
    assert pipeline.waits == {}
    assert [phase.name for phase in site.history("busy")] == [*WAY, *WAY]


@pytest.mark.trap(9)
def test_a_pipeline_whose_slot_waits_says_for_whom_and_goes_on(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with site.database.connect(autocommit=False) as blocker, caplog.at_level("WARNING"):
        blocker.execute("insert into busy values (-1, -1, 'late')")
        starting = threading.Thread(target=site.start)
        starting.start()
        line = wait_for(lambda: next((text for text in caplog.messages if "waits for" in text), None), "a word")
        assert line is not None
        assert f"pid {blocker.info.backend_pid}" in line
        assert "open for" in line or least_privilege.is_wanted()
        blocker.commit()
    starting.join(60)
    site.wait_until_equal()
    assert [phase.name for phase in site.history("busy")] == WAY


def test_a_pipeline_stops_although_a_snapshot_waits(site: Site) -> None:
    pipeline = site.start()
    site.wait_until_equal()
    with site.database.connect(autocommit=False) as blocker:
        blocker.execute("insert into busy values (-1, -1, 'late')")
        site.store.add_command(CommandKind.RESYNC, tables=("public.busy",))
        wait_for(lambda: pipeline.waits, "the wait to be seen")
        pipeline.shutdown()
        assert not any(thread.name.startswith("table-sync") for thread in threading.enumerate())
        slots = "select count(*) from pg_replication_slots where slot_name like %s and database = %s"
        gone = [f"{SLOT_PREFIX}%", site.database.name]
        wait_for(lambda: site.database.execute(slots, gone) == [(0,)], "the snapshot's slot to go")
        # Not an error of the table: it is copied at the next start.
        assert site.history("busy")[-1].name == "data_sync"
