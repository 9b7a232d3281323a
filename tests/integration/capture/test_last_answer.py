"""The last answer of capture reaches the server, also if the server is sending."""

from __future__ import annotations

from typing import Any

from penstock.capture.session import ReplicationSession, StartOptions
from penstock.lsn import Lsn
from penstock.source.connections import SourceSettings
from tests.e2e.support import wait_for


def test_an_answer_is_not_lost_with_messages_that_nobody_reads(database: Any) -> None:
    """A connection that is closed with unread data is reset, and the server discards what it has not read either."""
    database.execute("create table t (id int primary key, note text)")
    database.execute("create publication p for table t")
    database.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    session = ReplicationSession(SourceSettings(database.dsn), StartOptions("s", ("p",), streaming=False))
    session.start(Lsn(0))
    database.execute("insert into t select i, repeat('x', 1000) from generate_series(1, 20000) i")
    [(position,)] = database.execute("select pg_current_wal_flush_lsn()::text")
    # The server waits until somebody reads what it has sent.
    wait_for(
        lambda: database.execute(
            "select 1 from pg_stat_activity join pg_replication_slots on pid = active_pid"
            " where slot_name = 's' and wait_event in ('WalSenderWriteData', 'ClientWrite')"
        ),
        "the server to wait",
    )
    session.finish(Lsn.parse(position))
    # Slots of other tests on the same server are none of its business.
    slot = "from pg_replication_slots where slot_name = 's'"
    wait_for(lambda: database.execute(f"select 1 {slot} and not active"), "the end of the session")
    assert database.execute(f"select confirmed_flush_lsn::text {slot}") == [(position,)]
