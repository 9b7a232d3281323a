"""A reader that is behind must not hold up the shutdown of the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.capture import CaptureProcess, CaptureSettings
from penstock.lsn import Lsn
from penstock.source import SourceSettings
from penstock.spool import SpoolReader, SpoolSettings
from penstock.testing.postgres import PostgresServer


@pytest.mark.trap(6)
@pytest.mark.parametrize("acknowledge", [True, False], ids=["behind", "only-looking"])
def test_the_server_stops_although_changes_are_not_acknowledged(
    make_server: Callable[..., PostgresServer], tmp_path: Path, acknowledge: bool
) -> None:
    """At a fast shutdown a walsender waits until its client has *flushed* all that was sent, if it ever said so."""
    server = make_server()
    server.execute("create table t (id int primary key); create publication p for table t")
    server.execute("select pg_create_logical_replication_slot('behind', 'pgoutput')")
    (start,) = server.execute("select confirmed_flush_lsn::text from pg_replication_slots")[0]
    reader = SpoolReader(tmp_path)
    reader.readers.register("stuck", Lsn.parse(start))
    settings = CaptureSettings(
        SourceSettings(server.dsn()), "behind", "p", SpoolSettings(tmp_path), acknowledge=acknowledge
    )
    with CaptureProcess(settings) as capture:
        capture.wait_until_streaming()
        server.execute("insert into t values (1)")
        (now,) = server.execute("select pg_current_wal_flush_lsn()::text")[0]
        assert capture.wait_captured(Lsn.parse(now), 60)
        server.stop("fast", timeout=20)
        server.start()
        server.execute("insert into t values (2)")
        (now,) = server.execute("select pg_current_wal_flush_lsn()::text")[0]
        assert capture.wait_captured(Lsn.parse(now), 60)
    (confirmed,) = server.execute("select confirmed_flush_lsn::text from pg_replication_slots")[0]
    assert confirmed == start, "nothing was acknowledged"
    assert sum(entry.rows for entry in reader.entries(Lsn.parse(start))) == 2
