"""A spool or a disk that is full, a publication that is quiet, a transaction that is too large: capture lives on."""

from __future__ import annotations

from random import Random

import pytest

from penstock.capture import CaptureProcess, Reading
from penstock.lsn import Lsn, is_in, reaches
from tests.e2e.support import (
    HANG_SECONDS,
    following,
    insert_things,
    list_in_journal,
    wait_for,
    watch_connection,
    write_rows,
)

FULL_SECONDS = 10.0


@pytest.mark.trap(6)
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_full_spool_stops_reading_and_not_answering(own_stream, streaming):
    """The server gives silent readers up after 2 s; ours stays silent about nothing for 10 s."""
    stream = own_stream(wal_sender_timeout="2s")
    stream.slot()
    settings = stream.settings(work_mem="64kB", streaming=streaming, queue_bytes=200_000, spool={"max_bytes": 100_000})
    reader = stream.reader()
    reader.readers.register("stopped", stream.confirmed())
    with CaptureProcess(settings) as capture:
        # Far more than spool, queue and sockets hold together.
        write_rows(stream, 3_000, 5_000, per_transaction=100)
        wait_for(lambda: capture.status.reading is Reading.SPOOL_FULL, "a full spool")
        watch_connection(stream, capture, Reading.SPOOL_FULL, FULL_SECONDS if streaming else 6.0)
        end = stream.flushed_position()
        stuck = capture.status.captured
        assert stuck is not None
        assert not reaches(stuck, end)
        seen: list[int] = []
        while not reaches(reader.readers.position("stopped") or 0, end):
            position = reader.readers.position("stopped")
            assert position is not None
            assert reader.wait(position, HANG_SECONDS)
            for entry in reader.entries(position):
                seen += [step.rows for step in _segments(entry) if step.table == "public.things"]
                position = entry.end
            reader.readers.advance("stopped", position)
        assert sum(seen) == 3_000
        assert capture.restarts == 0
        wait_for(lambda: reaches(stream.confirmed(), end), "the slot to follow")


@pytest.mark.trap(6)
def test_connection_that_breaks_while_the_spool_is_full_is_made_again(stream):
    """The decoder waits for room when the connection goes: room still comes, and so does a new connection."""
    stream.slot()
    readers = stream.reader().readers
    readers.register("stopped", stream.confirmed())
    with CaptureProcess(stream.settings(spool={"max_bytes": 100_000})) as capture:
        write_rows(stream, 100, 5_000, per_transaction=100)
        wait_for(lambda: capture.status.reading is Reading.SPOOL_FULL, "a full spool")
        before = wait_for(stream.walsender, "a connection")
        # Less than the queue holds: reading goes on, and notices the end.
        write_rows(stream, 10, 10)
        sent = stream.position()
        wait_for(lambda: reaches(_sent(stream, before), sent), "the changes to be sent")
        stream.database.execute("select pg_terminate_backend(%s)", [before])
        wait_for(lambda: stream.walsender() not in (None, before), "another connection")
        wait_for(lambda: capture.status.reading is Reading.SPOOL_FULL, "the spool, which is still full")
        end = stream.flushed_position()

        def advance() -> bool:
            readers.advance("stopped", stream.reader().captured or sent)
            return reaches(capture.status.captured or 0, end)

        wait_for(advance, "the rest of the changes")
        assert capture.restarts == 0


def _sent(stream, walsender):
    rows = stream.database.execute("select sent_lsn::text from pg_stat_replication where pid = %s", [walsender])
    return Lsn.parse(rows[0][0])


def _segments(entry):
    return [step for step in entry.steps if hasattr(step, "rows")]


@pytest.mark.trap(5)
def test_idle_slot_moves_while_others_write(stream):
    """100 MB of WAL without a published change: a reader that follows lets the slot go on."""
    stream.slot()
    with CaptureProcess(stream.settings()) as capture, following(stream):
        capture.wait_until_streaming()
        start = stream.position()
        with stream.database.connect() as connection:
            connection.execute("alter table unpublished alter payload set storage external")
            for _ in range(10):
                connection.execute(
                    "insert into unpublished select id, repeat('x', 10000) from generate_series(1, 1000) id"
                )
        end = stream.position()
        assert end - start > 100_000_000
        wait_for(lambda: reaches(stream.confirmed(), end - 1_000_000), "the slot to move")
        assert capture.restarts == 0


@pytest.mark.trap(5)
def test_quiet_slot_does_not_pass_what_a_reader_still_needs(stream):
    """Keepalives move the captured position; the slot stays where the slowest reader is."""
    stream.slot()
    start = stream.confirmed()
    stream.reader().readers.register("slow", start)
    with CaptureProcess(stream.settings()) as capture, following(stream):
        write_rows(stream, 10, 10)
        end = stream.flushed_position()
        stream.wait_captured(capture, end)
        follower = stream.reader().readers
        wait_for(lambda: reaches(follower.position("follower") or 0, end), "the other reader")
    assert stream.confirmed() == start
    stream.check()


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_transaction_larger_than_the_spool_gets_through(stream, streaming):
    stream.slot()
    settings = stream.settings(work_mem="64kB", streaming=streaming, queue_bytes=100_000, spool={"max_bytes": 100_000})
    stream.reader().readers.register("stopped", stream.confirmed())
    with CaptureProcess(settings) as capture:
        with stream.database.connect() as connection, connection.transaction():
            list_in_journal(connection, insert_things(connection, 1, 2_000, 2_000, Random(1)))
        big = stream.flushed_position()
        stream.wait_captured(capture, big)
        wait_for(lambda: capture.status.reading is Reading.SPOOL_FULL, "a full spool")
        write_rows(stream, 50, 10)
        stream.reader().readers.advance("stopped", stream.reader().captured or big)
        end = stream.flushed_position()
        stream.wait_captured(capture, end)
        assert capture.restarts == 0
    steps = [step for entry in stream.reader().entries(big) for step in _segments(entry)]
    assert sum(step.rows for step in steps if not is_in(step.first.commit_lsn, big)) == 51


@pytest.mark.parametrize(
    ("min_free_bytes", "streaming"), [(0, True), (1 << 20, False)], ids=["streamed, no room", "whole, some room left"]
)
def test_full_disk_is_waited_for(own_stream, small_disk, min_free_bytes, streaming):
    """Full beyond the server's patience: said, the connection kept, and nothing lost when there is room again."""
    stream = own_stream(wal_sender_timeout="2s")
    stream.slot()
    stream.folder = small_disk.folder
    filler = small_disk.folder / "filler"
    filler.write_bytes(bytes(21 << 20))
    settings = stream.settings(
        work_mem="64kB", streaming=streaming, queue_bytes=200_000, spool={"min_free_bytes": min_free_bytes}
    )
    with CaptureProcess(settings) as capture:
        write_rows(stream, 1_600, 2_500, per_transaction=400)
        wait_for(lambda: capture.status.reading is Reading.DISK_FULL, "a full disk")
        watch_connection(stream, capture, Reading.DISK_FULL, 5.0)
        filler.unlink()
        end = stream.flushed_position()
        stream.wait_captured(capture, end)
        wait_for(lambda: capture.status.reading is Reading.STREAMING, "going on")
        assert capture.restarts == 0
    stream.check()
