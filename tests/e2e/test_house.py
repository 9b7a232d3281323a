"""Capture keeps house while the server is away: copies get their answers, and what nobody needs goes."""

from __future__ import annotations

from pathlib import Path

from penstock.capture import CaptureProcess, Reading
from penstock.changes.steps import Segment
from penstock.lsn import reaches
from penstock.spool import Holds
from penstock.spool.folder import SpoolFolder
from tests.e2e.support import wait_for, write_rows


def test_house_is_kept_while_the_server_is_down(own_stream):
    stream = own_stream()
    stream.slot()
    reader = stream.reader()
    with CaptureProcess(stream.settings()) as capture:
        reader.readers.register("tables", stream.confirmed())
        write_rows(stream, 20, 50)
        stream.wait_captured(capture, stream.flushed_position())
        segments = [step for entry in reader.entries(reader.begin) for step in entry.steps if isinstance(step, Segment)]
        assert all(Path(segment.path).exists() for segment in segments)
        stream.database.server.stop()
        wait_for(lambda: capture.status.reading is Reading.RETRYING, "the connection to break")
        holds = Holds(SpoolFolder(stream.folder / "one"))
        holds.request("tables", 1)
        wait_for(lambda: holds.confirmed("tables", 1), "an answer to a copy")
        end = reader.captured
        reader.readers.advance("tables", end)
        wait_for(lambda: not any(Path(segment.path).exists() for segment in segments), "segments to go")
        assert capture.status.reading is not Reading.STREAMING
        stream.database.server.start()
        wait_for(lambda: capture.status.reading is Reading.STREAMING, "the connection")
        wait_for(lambda: reaches(stream.confirmed(), end), "the acknowledgement")
        write_rows(stream, 20, 50, seed=2)
        stream.wait_captured(capture, stream.flushed_position())
