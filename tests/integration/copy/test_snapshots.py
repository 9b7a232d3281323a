"""The keeper of a snapshot on real servers."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from penstock.errors import SnapshotBlocked, SnapshotLost
from penstock.source import Role, SourceSettings, connect
from penstock.source.slots import create_slot
from penstock.source.snapshots import SLOT_PREFIX, enter_snapshot, take_snapshot


def slots(database: Any) -> list[Any]:
    return database.execute("select slot_name from pg_replication_slots where slot_name like %s", [f"{SLOT_PREFIX}%"])


@pytest.mark.trap(9)
def test_the_snapshot_outlives_its_slot_and_shows_what_was_before(any_database: Any) -> None:
    any_database.execute("create table t (id int)")
    any_database.execute("insert into t select generate_series(1, 10)")
    settings = SourceSettings(any_database.dsn)
    with take_snapshot(settings) as snapshot:
        any_database.execute("insert into t values (11)")
        any_database.execute("delete from t where id = 1")
        wait_until_gone(any_database)
        snapshot.check()
        for _ in range(2):
            with snapshot.connect() as inside:
                assert inside.execute("select count(*), min(id) from public.t").fetchone() == (10, 1)
        assert snapshot.age >= 0
    with connect(settings, Role.COPY) as connection, pytest.raises(SnapshotLost):
        enter_snapshot(connection, snapshot.name)
    with pytest.raises(SnapshotLost):
        snapshot.check()


def test_a_session_that_is_cut_off_when_all_was_read_is_no_error(database: Any) -> None:
    with take_snapshot(SourceSettings(database.dsn)) as snapshot, snapshot.connect() as inside:
        pid = inside.info.backend_pid
        assert database.execute("select pg_terminate_backend(%s, 30000)", [pid]) == [(True,)]


def wait_until_gone(database: Any) -> None:
    """A temporary slot ends with its session, which ends soon after we hung up."""
    deadline = threading.Event()
    for _ in range(500):
        if not slots(database):
            return
        deadline.wait(0.01)
    assert not slots(database)


def test_the_position_is_a_boundary_between_in_and_out(database: Any) -> None:
    """What the snapshot shows and what a slot sends from its position on, together are everything, once."""
    database.execute("create table t (id int)")
    database.execute("create publication pub for table t")
    with connect(SourceSettings(database.dsn), Role.SLOT) as connection:
        create_slot(connection, f"s_{database.name}")
    stop = threading.Event()

    def write() -> None:
        with database.connect() as connection:
            number = 0
            while not stop.is_set():
                number += 1
                connection.execute("insert into t values (%s)", [number])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        snapshots = [take_snapshot(SourceSettings(database.dsn)) for _ in range(3)]
    finally:
        stop.set()
        thread.join()
    starts = database.execute(
        "select ('x' || encode(substr(data, 2, 8), 'hex'))::bit(64)::bigint "
        "from pg_logical_slot_peek_binary_changes(%s, null, null, 'proto_version', '1', 'publication_names', 'pub') "
        "where get_byte(data, 0) = ascii('B')",
        [f"s_{database.name}"],
    )
    for snapshot in snapshots:
        with snapshot.connect() as inside:
            visible = inside.execute("select count(*) from public.t").fetchone()
        assert visible == (sum(start < int(snapshot.position) for (start,) in starts),)
        snapshot.close()


def test_open_transactions_are_named_and_nothing_is_left_behind(any_database: Any) -> None:
    any_database.execute("create table t (id int)")
    settings = SourceSettings(any_database.dsn)
    told: list[list[str]] = []
    with any_database.connect(autocommit=False) as blocker:
        blocker.execute("insert into t values (1)")
        pid = str(blocker.info.backend_pid)
        with pytest.raises(SnapshotBlocked, match=f"pid {pid}") as caught:
            take_snapshot(settings, timeout=2.5, on_wait=lambda found: told.append([str(each) for each in found]))
        wait_until_gone(any_database)
    assert any(pid in text for text in caught.value.blockers)
    assert any(pid in text for text in told[0])
    with take_snapshot(settings, timeout=30) as snapshot:
        snapshot.check()


def test_a_keeper_whose_session_was_ended_is_noticed(database: Any) -> None:
    with take_snapshot(SourceSettings(database.dsn)) as snapshot:
        database.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
            "where application_name like '%%:snapshot' and datname = current_database()"
        )
        with pytest.raises(SnapshotLost):
            snapshot.check()


def test_the_keeper_has_no_timeouts(database: Any) -> None:
    database.execute(f"alter database {database.name} set idle_in_transaction_session_timeout = 50")
    with psycopg.connect(database.dsn) as victim:
        victim.execute("select 1")
        threading.Event().wait(0.3)
        with pytest.raises(psycopg.Error):
            victim.execute("select 1")
    with take_snapshot(SourceSettings(database.dsn)) as snapshot:
        threading.Event().wait(0.3)
        snapshot.check()


def test_whoever_waits_can_give_up_and_nothing_is_left_behind(any_database: Any) -> None:
    any_database.execute("create table t (id int)")

    class NotWanted(Exception):
        """Somebody asked to stop."""

    def check() -> None:
        raise NotWanted

    with any_database.connect(autocommit=False) as blocker:
        blocker.execute("insert into t values (1)")
        with pytest.raises(NotWanted):
            take_snapshot(SourceSettings(any_database.dsn), check=check)
        wait_until_gone(any_database)
