"""What is particular to the store in a file."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError, LeaseHeld, LeaseLost, StateNewer, StateUnavailable, StateUnusable
from penstock.state import Init, MemoryStore, SqliteStore, open_store
from penstock.state import sqlite as sqlite_module
from penstock.state.sql import Migration, load_migrations
from penstock.state.sqlite import SqliteDatabase, Turns

NEWEST = load_migrations("sqlite")[-1].number
NEXT = Migration(NEWEST + 1, "more", "create table more (x integer);\n")


def test_a_url_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite:///here.db", f"sqlite:///{tmp_path / 'there.db'}"):
        open_store(url, "p").close()
    assert {path.name for path in tmp_path.glob("*.db")} == {"here.db", "there.db"}
    assert isinstance(open_store("memory:", "p"), MemoryStore)


@pytest.mark.parametrize("url", ["sqlite:here.db", "sqlite:///", "mysql://x", "", "sqlite://host/x"])
def test_a_url_that_names_nothing_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(url, "p")
    assert "sqlite:////" in refused.value.hint


def test_a_slash_too_few_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError) as refused:
        open_store(f"sqlite://{tmp_path}/folder/x.db", "p")
    assert f"sqlite:///{tmp_path}/folder/x.db" in refused.value.hint


@pytest.mark.parametrize("before", [1, 2, 3])
def test_another_process_may_create_the_tables_before_any_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    path, connect = tmp_path / "state.db", sqlite_module._connect
    statements: list[str] = []

    def create_tables(statement: str) -> None:
        statements.append(statement)
        if len(statements) == before:
            monkeypatch.setattr(sqlite_module, "_connect", connect)
            SqliteStore(path, "first").close()

    def connect_traced(path: Path, busy_seconds: float) -> sqlite3.Connection:
        connection = connect(path, busy_seconds)
        connection.set_trace_callback(create_tables)
        return connection

    monkeypatch.setattr(sqlite_module, "_connect", connect_traced)
    SqliteStore(path, "second").close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateUnusable, match="no/where"):
        SqliteStore(tmp_path / "no" / "where" / "x.db")


@pytest.mark.parametrize("name", ["", "x" * 101, "a\nb"])
def test_a_pipeline_needs_a_name(name: str) -> None:
    with pytest.raises(ConfigError):
        MemoryStore(name)


def test_newer_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    SqliteStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma user_version = 99")
    with pytest.raises(StateNewer, match="version 99") as refused:
        SqliteStore(path)
    assert (refused.value.found, refused.value.known) == (99, NEWEST)


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table theirs (x)")
    with pytest.raises(StateUnusable, match="another program"):
        SqliteStore(path)
    (tmp_path / "y.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(StateUnusable):
        SqliteStore(tmp_path / "y.db")


def test_state_in_use_is_not_migrated(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    migrations = [*load_migrations("sqlite"), NEXT]
    with SqliteStore(path) as store:
        store.acquire_lease()
        with pytest.raises(LeaseHeld, match="must be migrated"):
            SqliteDatabase(path, "default").migrate(migrations)
        store.update_table_replication_state(1, Init())
    database = SqliteDatabase(path, "default")
    database.migrate(migrations)
    database.migrate(migrations)
    database.close()
    with pytest.raises(StateNewer):
        SqliteStore(path)


def test_a_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    SqliteStore(path).close()
    broken = Migration(NEWEST + 1, "broken", "create table half (x integer);\ncreate table table;\n")
    with pytest.raises(StateUnusable, match="cannot migrate"):
        SqliteDatabase(path, "default").migrate([*load_migrations("sqlite"), broken])
    with SqliteStore(path) as store:
        assert store.get_table_replication_states() == {}


def test_a_file_that_somebody_locks_is_an_error_in_time(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with SqliteStore(path, busy_seconds=0.01) as store, closing(sqlite3.connect(path)) as other:
        store.acquire_lease()
        other.execute("begin immediate")
        with pytest.raises(StateUnavailable, match="locked"):
            store.update_table_replication_state(1, Init())
        other.execute("rollback")
        store.update_table_replication_state(1, Init())


def test_a_lease_is_renewed_although_its_process_writes_without_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with SqliteStore(path, busy_seconds=0.01) as store, SqliteStore(path, "other", busy_seconds=0.01) as idle:
        store.acquire_lease()
        lease = idle.acquire_lease()
        database, order = lease._database, list[str]()
        asked = threading.Event()

        def renew() -> None:
            database.run(lambda transaction: order.append("renewed"))

        def write(transaction: Any) -> None:
            # The renewal asks while this one writes, and can wait no longer than 10 ms for SQLite's lock.
            if not asked.is_set():
                renewing.start()
                while len(store.database._turns._waiting) < 2:  # pyright: ignore[reportAttributeAccessIssue]
                    pass
                asked.set()
            order.append("wrote")

        renewing = threading.Thread(target=renew)
        for _ in range(3):
            store.database.run(write)
        renewing.join(30)
        assert order == ["wrote", "renewed", "wrote", "wrote"]


def test_a_turn_that_is_given_up_goes_to_the_next(tmp_path: Path) -> None:
    turns, order = Turns(), list[int]()

    def take(number: int) -> None:
        with turns.take():
            order.append(number)
            if number == 2:
                raise InterruptedError

    waiting: list[threading.Thread] = []
    with turns.take():
        for number in (1, 3, 4):
            waiting.append(threading.Thread(target=take, args=[number]))
            waiting[-1].start()
            while len(turns._waiting) < 1 + len(waiting):
                pass
    for each in waiting:
        each.join(30)
    with pytest.raises(InterruptedError):
        take(2)
    take(5)
    assert order == [1, 3, 4, 2, 5]


def test_a_full_disk_is_an_error_that_time_heals(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with SqliteStore(path) as store:
        store.acquire_lease()
        assert isinstance(store.database, SqliteDatabase)
        connection = store.database._open_connection()
        (pages,) = connection.execute("pragma page_count").fetchone()
        connection.execute(f"pragma max_page_count = {pages}")
        with pytest.raises(StateUnavailable, match="full"):
            store.update_table_replication_state(1, Init("x" * 100_000))
        connection.execute(f"pragma max_page_count = {2 * pages + 100}")
        store.update_table_replication_state(1, Init("x" * 100_000))


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_jumps_leaves_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    class Jumped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(hours=hours)

    path = tmp_path / "x.db"
    with SqliteStore(path) as store, SqliteStore(path) as other:
        lease = store.acquire_lease()
        monkeypatch.setattr(sqlite_module, "datetime", Jumped)
        store.update_table_replication_state(1, Init())
        if hours < 0:
            with pytest.raises(LeaseHeld):
                other.acquire_lease()
        else:
            # It has expired by the clock that all processes share, and whoever had it is fenced off.
            other.acquire_lease()
            with pytest.raises(LeaseLost):
                store.update_table_replication_state(1, Init())
            assert lease.lost


def test_every_commit_is_synced_and_readers_do_not_wait(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "x.db") as store, closing(sqlite3.connect(tmp_path / "x.db")) as other:
        assert isinstance(store.database, SqliteDatabase)
        connection = store.database._open_connection()
        assert connection.execute("pragma journal_mode").fetchone() == ("wal",)
        assert connection.execute("pragma synchronous").fetchone() == (2,)
        other.execute("begin immediate")
        assert store.get_table_replication_states() == {}


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "x.db")
    store.close()
    store.close()
    with pytest.raises(StateUnusable, match="closed"):
        store.get_table_replication_states()


def test_both_dialects_have_the_same_migrations() -> None:
    names = [[(each.number, each.name) for each in load_migrations(dialect)] for dialect in ("sqlite", "postgres")]
    assert names[0] == names[1]
    assert [number for number, _ in names[0]] == list(range(1, len(names[0]) + 1))
