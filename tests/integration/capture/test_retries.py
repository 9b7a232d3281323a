"""Retries start over after progress: errors weeks apart do not add up."""

from __future__ import annotations

import threading

import pytest

from penstock.capture import Capture, CaptureSettings, Reading
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolReader, SpoolSettings


@pytest.mark.trap(11)
def test_the_back_off_starts_over_after_a_keepalive(database, tmp_path):
    database.execute("create table t (id int primary key)")
    database.execute("create publication p for table t")
    database.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
    settings = CaptureSettings(
        SourceSettings(database.dsn), "s", "p", SpoolSettings(tmp_path / "spool", min_free_bytes=0)
    )
    stop, streaming, retrying = threading.Event(), threading.Event(), threading.Event()
    events = {Reading.STREAMING: streaming, Reading.RETRYING: retrying}
    capture = Capture(settings, stop, lambda status: events.get(status.reading, threading.Event()).set())
    thread = threading.Thread(target=capture.run)
    thread.start()
    try:
        reader = SpoolReader(tmp_path / "spool")
        for _ in range(3):
            assert streaming.wait(60)
            streaming.clear()
            captured = reader.captured
            # Nothing is published: only a keepalive says that the connection works.
            database.execute("create table if not exists other (id int)")
            database.execute("insert into other values (1)")
            assert reader.wait(captured, 60)
            retrying.clear()
            database.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = 's'")
            assert retrying.wait(60)
            assert capture._backoff.attempt == 1
    finally:
        stop.set()
        thread.join()
