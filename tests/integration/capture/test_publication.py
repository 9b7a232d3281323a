"""A publication that is not there is never a silent gap."""

from __future__ import annotations

import pytest

from penstock.capture import CaptureProcess, CaptureSettings
from penstock.errors import PublicationMissing
from penstock.lsn import Lsn, reaches
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolReader, SpoolSettings


def settings(database, tmp_path) -> CaptureSettings:
    return CaptureSettings(
        SourceSettings(database.dsn), "early", "late", SpoolSettings(tmp_path / "spool", min_free_bytes=0)
    )


@pytest.mark.trap(9)
def test_a_publication_younger_than_the_changes_is_an_error(any_database, tmp_path):
    """The server fails on them before 18, and only warns and leaves them out from 18 on."""
    any_database.execute("create table t (id int primary key)")
    any_database.execute("select pg_create_logical_replication_slot('early', 'pgoutput')")
    any_database.execute("insert into t values (1)")
    any_database.execute("create publication late for table t")
    any_database.execute("insert into t values (2)")
    end = Lsn.parse(any_database.execute("select pg_current_wal_insert_lsn()")[0][0])
    with (
        CaptureProcess(settings(any_database, tmp_path)) as capture,
        pytest.raises(PublicationMissing, match="late"),
    ):
        capture.wait_captured(end, 60)
    # Nothing beyond the gap may be taken for captured: a reader would let the slot pass it.
    assert not reaches(SpoolReader(tmp_path / "spool").captured, end)


def test_a_publication_that_never_was_is_an_error(any_database, tmp_path):
    any_database.execute("select pg_create_logical_replication_slot('early', 'pgoutput')")
    with (
        CaptureProcess(settings(any_database, tmp_path)) as capture,
        pytest.raises(PublicationMissing, match="late"),
    ):
        capture.wait_until_streaming(60)
