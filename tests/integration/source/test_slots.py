"""Replication slots on real servers: created, in use, dropped, lost."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import pq

from penstock.errors import (
    ConfigError,
    PublicationMissing,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SlotUnusable,
    SourceError,
    UnsupportedServer,
    WalLevelTooLow,
)
from penstock.source import Role, SourceSettings, connect, connect_replication
from penstock.source.faults import Place, from_notice, from_result
from penstock.source.slots import (
    Slot,
    create_slot,
    drop_slot,
    find_blockers,
    inspect_slot,
    require_usable,
    wait_until_created,
)
from penstock.testing.postgres import PostgresServer

Connection = psycopg.Connection[Any]
MakeServer = Callable[..., PostgresServer]


@pytest.fixture
def connection(any_database: Any) -> Iterator[Connection]:
    with connect(SourceSettings(any_database.dsn), Role.SLOT) as connection:
        yield connection


@pytest.fixture
def slot_name(any_database: Any) -> str:
    return f"slot_{any_database.name}"


def start(url: str, slot: str, publication: str = "pub") -> pq.abc.PGconn:
    """Start to read from a slot; raises as capture would."""
    replication = connect_replication(SourceSettings(url))
    place = Place.of(replication)
    command = f"START_REPLICATION SLOT {slot} LOGICAL 0/0 (proto_version '1', publication_names '{publication}')"
    result = replication.exec_(command.encode())
    if result.status != pq.ExecStatus.COPY_BOTH:
        replication.finish()
        raise from_result(result, place, "start replication", slot=slot, publication=publication)
    return replication


def test_a_slot_is_created_inspected_and_dropped(any_database: Any, connection: Connection, slot_name: str) -> None:
    assert inspect_slot(connection, slot_name) is None
    with pytest.raises(SlotMissing):
        require_usable(None, slot_name)
    slot = create_slot(connection, slot_name)
    assert (slot.plugin, slot.database, slot.active, slot.temporary) == ("pgoutput", any_database.name, False, False)
    assert slot.restart_lsn is not None
    assert slot.confirmed_flush_lsn is not None
    assert slot.wal_status == "reserved"
    assert require_usable(slot, slot_name, database=any_database.name) is slot
    with pytest.raises(SlotUnusable):
        require_usable(slot, slot_name, database="another")
    with pytest.raises(SlotUnusable, match="already exists"):
        create_slot(connection, slot_name)
    assert drop_slot(connection, slot_name)
    assert not drop_slot(connection, slot_name)


def test_a_temporary_slot_ends_with_its_connection(any_database: Any, connection: Connection, slot_name: str) -> None:
    with connect(SourceSettings(any_database.dsn), Role.SLOT) as other:
        assert create_slot(other, slot_name, temporary=True).temporary
    deadline = time.monotonic() + 10
    while inspect_slot(connection, slot_name) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert inspect_slot(connection, slot_name) is None


def test_names_that_the_server_refuses_are_refused_before(connection: Connection) -> None:
    for name in ("", "Upper", "with-dash", "x" * 64):
        with pytest.raises(ConfigError):
            create_slot(connection, name)


def test_failover_slots_need_a_server_that_has_them(any_database: Any, connection: Connection, slot_name: str) -> None:
    if any_database.server.major >= 17:
        assert create_slot(connection, slot_name, failover=True).failover
    else:
        with pytest.raises(UnsupportedServer):
            create_slot(connection, slot_name, failover=True)


def test_foreign_slots_are_refused(any_database: Any, connection: Connection, slot_name: str) -> None:
    any_database.execute("select pg_create_physical_replication_slot(%s)", [slot_name])
    try:
        with pytest.raises(SlotUnusable, match="physical"):
            require_usable(inspect_slot(connection, slot_name), slot_name)
    finally:
        drop_slot(connection, slot_name)


@pytest.mark.trap(8)
def test_a_slot_in_use_names_the_reader(any_database: Any, connection: Connection, slot_name: str) -> None:
    any_database.execute("create publication pub")
    create_slot(connection, slot_name)
    reader = start(any_database.dsn, slot_name)
    with pytest.raises(SlotInUse) as caught:
        start(any_database.dsn, slot_name)
    assert caught.value.pid == reader.backend_pid
    slot = inspect_slot(connection, slot_name)
    assert slot is not None
    assert (slot.active, slot.active_pid) == (True, reader.backend_pid)
    waits: list[float] = []

    def stop_reading(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            reader.finish()
        time.sleep(seconds)

    with pytest.raises(SlotInUse) as caught:
        drop_slot(connection, slot_name, timeout=0)
    assert caught.value.pid == reader.backend_pid
    assert drop_slot(connection, slot_name, sleep=stop_reading)
    assert len(waits) >= 2


def test_reading_from_a_missing_slot_is_named(any_database: Any, slot_name: str) -> None:
    with pytest.raises(SlotMissing):
        start(any_database.dsn, slot_name)


@pytest.mark.trap(9)
def test_a_publication_younger_than_the_slot_fails_while_decoding(
    any_database: Any, connection: Connection, slot_name: str
) -> None:
    """pgoutput looks it up in the past, at the first change: an error, from 18 on a warning and a gap."""
    create_slot(connection, slot_name)
    any_database.execute("create table t (id int primary key)")
    any_database.execute("insert into t values (1)")
    any_database.execute("create publication pub for table t")
    assert type(read_until_error(any_database.dsn, slot_name)) is PublicationMissing


def read_until_error(url: str, slot: str) -> SourceError | None:
    """Read until the server ends the stream or warns of a loss; gives the error as capture would."""
    reader = start(url, slot)
    place = Place.of(reader)
    noticed: list[SourceError | None] = []
    reader.notice_handler = lambda notice: noticed.append(from_notice(notice, place, "decode", publication="pub"))
    deadline = time.monotonic() + 10
    try:
        while not any(noticed) and time.monotonic() < deadline:
            reader.consume_input()
            size, _data = reader.get_copy_data(1)
            if size < 0:
                result = reader.get_result()
                assert result is not None
                return from_result(result, place, "decode", slot=slot, publication="pub")
            if size == 0:
                time.sleep(0.01)
        return next(filter(None, noticed), None)
    finally:
        reader.finish()


def test_a_wait_for_open_transactions_ends_and_names_them(
    any_database: Any, connection: Connection, slot_name: str
) -> None:
    any_database.execute("create table t (id int primary key)")
    with any_database.connect(autocommit=False) as writer:
        writer.execute("insert into t values (1)")
        pid = writer.info.backend_pid
        with pytest.raises(SlotUnusable) as caught:
            create_slot(connection, slot_name, timeout=0.5)
        assert f"pid {pid}" in str(caught.value)
        assert any(blocker.identity == str(pid) for blocker in find_blockers(connection))
        writer.rollback()
    assert inspect_slot(connection, slot_name) is None
    any_database.execute("begin; insert into t values (2); prepare transaction 'held'")
    assert any(blocker.identity == "held" for blocker in find_blockers(connection))
    any_database.execute("rollback prepared 'held'")
    assert create_slot(connection, slot_name, timeout=30).name == slot_name


def test_a_slot_that_is_being_made_says_for_whom_it_waits(
    any_database: Any, connection: Connection, slot_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    any_database.execute("create table t (id int primary key)")
    with any_database.connect(autocommit=False) as writer:
        writer.execute("insert into t values (1)")
        making = threading.Thread(target=create_slot, args=(connection, slot_name))
        with caplog.at_level("WARNING"):
            making.start()
            deadline = time.monotonic() + 60
            while not caplog.messages and time.monotonic() < deadline:
                time.sleep(0.01)
        assert re.fullmatch(
            rf"slot {slot_name} waits for open transactions count=1: pid {writer.info.backend_pid} .*open for \d+ s\)",
            caplog.messages[0],
        ), caplog.messages
        writer.rollback()
    making.join(60)
    slot = inspect_slot(connection, slot_name)
    assert slot is not None
    assert not slot.active


@pytest.mark.trap(10)
@pytest.mark.parametrize("major", [15, 18])
def test_a_slot_whose_wal_was_removed_is_lost(make_server: MakeServer, major: int) -> None:
    server = make_server(
        major=major,
        settings={"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB", "min_wal_size": "32MB"},
    )
    server.execute("create publication pub")
    with connect(SourceSettings(server.dsn()), Role.SLOT) as connection:
        create_slot(connection, "victim")
        for _ in range(4):
            connection.execute("select pg_switch_wal(), pg_logical_emit_message(false, 'x', 'y')")
            connection.execute("checkpoint")
        slot = inspect_slot(connection, "victim")
        assert slot is not None
        assert slot.wal_status == "lost"
        with pytest.raises(SlotLost) as caught:
            require_usable(slot, "victim")
        assert "max_slot_wal_keep_size" in caught.value.hint
        with pytest.raises(SlotLost):
            start(server.dsn(), "victim")
        assert drop_slot(connection, "victim")


def test_a_server_without_logical_wal_is_named(make_server: MakeServer) -> None:
    server = make_server(settings={"wal_level": "replica"})
    with connect(SourceSettings(server.dsn()), Role.SLOT) as connection, pytest.raises(WalLevelTooLow) as caught:
        create_slot(connection, "too_low")
    assert "wal_level" in caught.value.hint


def test_no_free_slots_is_named(make_server: MakeServer) -> None:
    server = make_server(settings={"max_replication_slots": "1"})
    with connect(SourceSettings(server.dsn()), Role.SLOT) as connection:
        create_slot(connection, "first")
        with pytest.raises(SlotUnusable) as caught:
            create_slot(connection, "second")
    assert "max_replication_slots" in caught.value.hint


def test_slot_for_two_phase_commits_is_refused():
    """The server would send prepared transactions in messages of a later protocol."""
    slot = Slot("two", "pgoutput", "postgres", False, None, None, None, "reserved", two_phase=True)
    with pytest.raises(SlotUnusable, match="two-phase"):
        require_usable(slot, "two")


def test_a_slot_that_another_session_creates_is_waited_for(
    any_database: Any, connection: Connection, slot_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The session of a process that was killed creates it, when open transactions have ended."""
    with psycopg.connect(any_database.dsn) as blocker, psycopg.connect(any_database.dsn, autocommit=True) as other:
        blocker.execute("create table changed (id int)")
        arguments = [slot_name, "pgoutput"]
        creating = threading.Thread(
            target=other.execute, args=["select pg_create_logical_replication_slot(%s, %s)", arguments]
        )
        creating.start()
        while inspect_slot(connection, slot_name) is None:
            time.sleep(0.01)
        found: list[Slot | None] = []
        waiting = threading.Thread(target=lambda: found.append(wait_until_created(connection, slot_name)))
        waiting.start()
        while "waiting for the session that creates the slot" not in caplog.text:
            time.sleep(0.01)
        assert not found
        blocker.commit()
        creating.join()
        waiting.join()
    assert found[0] is not None
    assert found[0].confirmed_flush_lsn is not None
    drop_slot(connection, slot_name)
