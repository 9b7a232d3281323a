"""Who a real server says it is, before and after a promotion."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from penstock.errors import LineageChanged, PositionAhead, ServerUnavailable
from penstock.lsn import Lsn, reaches
from penstock.source import Role, SourceSettings, connect, connect_replication
from penstock.source.lineage import SystemIdentity, identify_system
from penstock.testing.postgres import PostgresServer

pytestmark = pytest.mark.trap(10)


def test_a_server_names_itself_and_future_positions_are_refused(any_database: Any) -> None:
    replication = connect_replication(SourceSettings(any_database.dsn), Role.CHECK)
    try:
        system = identify_system(replication)
        assert system.database == any_database.name
        assert system.timeline == 1
        assert system.switches == ()
        with pytest.raises(PositionAhead):
            system.require_reached(Lsn(system.position + (1 << 40)))
    finally:
        replication.finish()


def test_a_promotion_is_followed_only_from_positions_before_it(make_server: Callable[..., PostgresServer]) -> None:
    server = make_server()
    settings = SourceSettings(server.dsn())
    replication = connect_replication(settings)
    before = identify_system(replication)
    replication.finish()
    # Recovery that ends by itself starts a new timeline, as the promotion of a standby does.
    server.stop()
    server.write_file("recovery.signal", "")
    server.write_file("postgresql.auto.conf", "restore_command = 'false'\n")
    server.start()
    with connect(settings, Role.CHECK) as connection:
        while connection.execute("select pg_is_in_recovery()").fetchone() == (True,):
            time.sleep(0.01)
        connection.execute("select pg_switch_wal()")
    replication = connect_replication(settings)
    try:
        after = identify_system(replication)
        assert (after.system_identifier, after.timeline) == (before.system_identifier, 2)
        (switch,) = after.switches
        assert switch.timeline == 1
        assert reaches(switch.left_at, before.position)
        stored = before.ancestry("penstock").current
        after.ancestry("penstock").require(stored, switch.left_at)
        with pytest.raises(LineageChanged, match="failover"):
            after.ancestry("penstock").require(stored, Lsn(switch.left_at + 1))
    finally:
        replication.finish()


def test_a_standby_that_has_not_replayed_everything_is_waited_for(make_server: Callable[..., PostgresServer]) -> None:
    """An address may lead to it before it is promoted; until then, some of its WAL may be unread."""
    primary = make_server()
    with closing(primary.standby()) as standby:
        standby.write_file("postgresql.auto.conf", read_settings(standby) + "recovery_min_apply_delay = '1h'\n")
        standby.start()
        primary.execute("create table later (id int)")
        end = Lsn.parse(primary.execute("select pg_current_wal_flush_lsn()::text")[0][0])
        while not reaches(received(standby), end):
            time.sleep(0.01)
        primary.kill()
        standby.restart()
        with pytest.raises(ServerUnavailable, match="a standby that has replayed its WAL up to"):
            identified(standby).require_reached(end)
        standby.execute("select pg_promote()")
        identified(standby).require_reached(end)


def identified(server: PostgresServer) -> SystemIdentity:
    replication = connect_replication(SourceSettings(server.dsn()), Role.CHECK)
    try:
        return identify_system(replication)
    finally:
        replication.finish()


def read_settings(server: PostgresServer) -> str:
    return (server.data_dir / "postgresql.auto.conf").read_text()


def received(standby: PostgresServer) -> Lsn:
    return Lsn.parse(standby.execute("select coalesce(pg_last_wal_receive_lsn(), '0/0')::text")[0][0])
