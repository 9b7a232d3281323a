"""Servers that restart, connections that break, slots and publications that vanish: a named error, or nothing lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.capture import CaptureProcess, Reading
from penstock.errors import (
    LineageChanged,
    PenstockError,
    PositionAhead,
    PublicationMissing,
    ServerUnavailable,
    SlotInUse,
    SlotLost,
    SlotMissing,
)
from penstock.lsn import Lsn
from tests.e2e.support import PUBLICATION, Stream, Writers, wait_for, watch_connection, write_rows
from tests.support.oracle import capture_until
from tests.support.proxy import Proxy


@pytest.fixture
def proxy(stream) -> Iterator[Proxy]:
    """The stream's captures connect through it."""
    with Proxy(stream.database.server.port) as made:
        stream.url = made.dsn(stream.database.dsn)
        yield made


def outcome(capture: CaptureProcess) -> PenstockError:
    """What ended capture for good."""

    def look() -> PenstockError | None:
        try:
            capture.check()
        except PenstockError as error:
            return error
        return None

    return wait_for(look, "capture to give up")


@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_server_restarts_while_capturing(own_stream, mode):
    stream = own_stream()
    server = stream.database.server
    stream.slot()
    with CaptureProcess(stream.settings(work_mem="64kB")) as capture:
        for turn in range(2):
            write_rows(stream, 60, 2_000, seed=turn)
            capture.wait_until_streaming()
            if mode == "kill":
                server.kill()
                server.start()
            else:
                server.restart(mode)
            write_rows(stream, 60, 2_000, seed=10 + turn)
        stream.wait_captured(capture, stream.flushed_position())
        assert capture.restarts == 0, "the process outlives the server"
    stream.check()


@pytest.mark.trap(11, 12)
def test_network_cuts_under_load_lose_nothing(stream, proxy):
    """Each cut is followed by a quick new connection, because there was progress in between."""
    stream.slot()
    with CaptureProcess(stream.settings(work_mem="64kB")) as capture:
        with Writers(stream, 2, big=1):
            for _ in range(3):
                before = capture.wait_until_streaming()
                wait_for(lambda: capture.status.captured != before.captured, "progress")  # noqa: B023
                proxy.cut()
                wait_for(lambda: capture.status.reading is Reading.RETRYING, "a lost connection")
                assert isinstance(capture.status.error, ServerUnavailable | None)
        stream.wait_captured(capture, stream.flushed_position())
        assert capture.restarts == 0
    stream.check()


@pytest.mark.trap(11)
def test_retries_get_rarer_and_quick_again_after_progress(stream, proxy):
    stream.slot()

    def retry_gaps(count: int) -> list[float]:
        proxy.refuse = True
        proxy.attempts.clear()
        proxy.cut()
        wait_for(lambda: len(proxy.attempts) >= count, "attempts")
        proxy.refuse = False
        return [after - before for before, after in itertools.pairwise(proxy.attempts[:count])]

    with CaptureProcess(stream.settings()) as capture:
        capture.wait_until_streaming()
        for turn in range(2):
            write_rows(stream, 5, 5, seed=turn)
            stream.wait_captured(capture, stream.flushed_position())
            gaps = retry_gaps(4)
            assert gaps[0] < 1.0, "starts over"
            assert gaps[-1] > 2 * gaps[0], "backs off"
            assert capture.restarts == 0
            wait_for(lambda: capture.status.reading is Reading.STREAMING, "a new connection")
        stream.wait_captured(capture, stream.flushed_position())
    stream.check()


def test_connection_that_falls_silent_is_made_again(own_stream):
    """Open at our side, gone at the other, as behind a router that forgot it: nothing but time tells."""
    stream = own_stream(wal_sender_timeout="2s")
    with Proxy(stream.database.server.port) as proxy:
        stream.url = proxy.dsn(stream.database.dsn)
        stream.slot()
        with CaptureProcess(stream.settings()) as capture:
            write_rows(stream, 5, 5)
            stream.wait_captured(capture, stream.flushed_position())
            proxy.abandon()
            write_rows(stream, 5, 5, seed=2)
            stream.wait_captured(capture, stream.flushed_position())
            assert capture.restarts == 0
        stream.check()


@pytest.mark.trap(6)
def test_quiet_connection_is_kept(own_stream):
    """Nothing to read for longer than anybody's patience, and nobody hangs up."""
    stream = own_stream(wal_sender_timeout="2s", autovacuum="off")
    stream.slot()
    with CaptureProcess(stream.settings()) as capture:
        capture.wait_until_streaming()
        watch_connection(stream, capture, Reading.STREAMING, 8.0)
        write_rows(stream, 5, 5)
        stream.wait_captured(capture, stream.flushed_position())
    stream.check()


def test_dropped_slot_is_an_error(stream):
    slot = stream.slot()
    with CaptureProcess(stream.settings()) as capture:
        capture.wait_until_streaming()
        walsender = stream.walsender()
        stream.database.execute("select pg_terminate_backend(%s)", [walsender])

        def drop() -> bool:
            try:
                stream.database.execute("select pg_drop_replication_slot(%s)", [slot])
            except Exception:
                stream.database.execute("select pg_terminate_backend(%s)", [stream.walsender() or 0])
                return False
            return True

        wait_for(drop, "the slot to go")
        error = outcome(capture)
        assert isinstance(error, SlotMissing)
        assert slot in str(error)
        assert "copy the tables again" in error.hint


@pytest.mark.trap(9)
def test_dropped_publication_is_an_error(any_database, tmp_path):
    """Some versions fail, others only warn and send nothing: both stop capture, with changes left in the slot."""
    stream = Stream(any_database, tmp_path)
    stream.create()
    stream.slot()
    with CaptureProcess(stream.settings()) as capture:
        capture.wait_until_streaming()
        write_rows(stream, 5, 5)
        stream.wait_captured(capture, stream.flushed_position())
        any_database.execute(f"drop publication {PUBLICATION}")
        write_rows(stream, 5, 5, seed=2)
        error = outcome(capture)
        assert isinstance(error, PublicationMissing)
        assert PUBLICATION in str(error)


@pytest.mark.trap(8)
def test_slot_in_use_names_the_other_reader_and_waits(stream):
    stream.slot()
    write_rows(stream, 5, 5)
    first = stream.settings()
    with CaptureProcess(first) as holder:
        holder.wait_until_streaming()
        walsender = stream.walsender()
        second = replace(first, spool=replace(first.spool, path=stream.folder / "second"))
        with CaptureProcess(second) as waiting:
            status = wait_for(
                lambda: waiting.status if waiting.status.reading is Reading.RETRYING else None, "a refusal"
            )
            assert isinstance(status.error, SlotInUse)
            assert str(walsender) in str(status.error)
            holder.stop()
            wait_for(lambda: waiting.status.reading is Reading.STREAMING, "its turn")
            stream.wait_captured(waiting, stream.flushed_position())
    stream.check("second")


@pytest.mark.trap(10)
def test_position_ahead_of_the_server_is_refused(stream):
    """START_REPLICATION there delivers nothing and says nothing."""
    stream.slot()
    stream.reader().readers.register("restored", Lsn(stream.position() + (1 << 40)))
    with CaptureProcess(stream.settings()) as capture:
        assert isinstance(outcome(capture), PositionAhead)


@pytest.mark.trap(10)
def test_slot_that_somebody_else_moved_is_refused(stream):
    """What lies between the spool's end and the slot is gone."""
    slot = stream.slot()
    write_rows(stream, 5, 5)
    capture_until(stream.settings(), stream.flushed_position())
    write_rows(stream, 5, 5, seed=2)
    idle = stream.database.idle_slot(slot)
    stream.database.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", [idle])
    with CaptureProcess(stream.settings()) as capture:
        assert isinstance(outcome(capture), SlotLost)


@pytest.mark.trap(10)
def test_spool_of_another_server_is_refused(stream, own_stream):
    """Positions of one server mean nothing on another."""
    stream.slot()
    write_rows(stream, 5, 5)
    capture_until(stream.settings(), stream.flushed_position())
    other = own_stream()
    other.slot()
    settings = other.settings()
    with CaptureProcess(settings) as capture:
        assert isinstance(outcome(capture), LineageChanged)


@pytest.mark.trap(10)
def test_lost_slot_is_an_error(own_stream):
    stream = own_stream(max_slot_wal_keep_size="1MB", max_wal_size="32MB", min_wal_size="32MB")
    stream.slot()
    for _ in range(6):
        write_rows(stream, 10, 10)
        stream.database.execute("select pg_switch_wal()")
    stream.database.execute("checkpoint")
    wait_for(lambda: stream.database.execute("select wal_status from pg_replication_slots")[0][0] == "lost", "the loss")
    with CaptureProcess(stream.settings()) as capture:
        error = outcome(capture)
        assert isinstance(error, SlotLost)
        assert "max_slot_wal_keep_size" in error.hint
