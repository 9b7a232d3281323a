"""Who a real server says it is, before and after a promotion."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import LineageChanged, PositionAhead
from penstock.lsn import Lsn, reaches
from penstock.source import Role, SourceSettings, connect, connect_replication
from penstock.source.lineage import identify_system
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
