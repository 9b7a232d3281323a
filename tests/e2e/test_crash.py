"""SIGKILL at any moment: every committed transaction is in the spool once, in commit order, none torn."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from penstock.capture import AssemblerSettings, CaptureProcess
from penstock.testing.server import wait_until_gone
from tests.e2e.support import HANG_SECONDS, Writers, insert_things, list_in_journal, wait_for, write_rows
from tests.support.oracle import capture_until, check_same
from tests.support.replay import Replayable, read_spool

SOAK_KILLS = int(os.environ.get("PENSTOCK_SOAK_KILLS", "50"))
SEED = int(os.environ.get("PENSTOCK_SEED", "1"))
SMALL_BLOCKS = AssemblerSettings(block_bytes=50_000, lane_bytes=1_000)


def kill_under_load(stream, kills: int, seed: int) -> Replayable:
    """Two captures of the same WAL: one is killed again and again, the other runs when all is over."""
    choose = random.Random(seed)
    stream.slot("killed")
    stream.slot("calm")
    settings = stream.settings("killed", work_mem="64kB", assembler=SMALL_BLOCKS)
    stream.reader("killed").readers.register("keeps_everything", stream.confirmed("killed"))
    with CaptureProcess(settings) as capture:
        with Writers(stream, 3, seed=seed, big=1):
            for _ in range(kills):
                before = capture.wait_until_streaming(HANG_SECONDS)
                # Sometimes before anything was captured, mostly after; never at the same moment.
                threading.Event().wait(choose.random() * 0.6)
                if choose.random() < 0.8:
                    wait_for(lambda: capture.status.captured != before.captured, "progress")  # noqa: B023
                pid = capture.pid
                assert pid is not None
                restarts = capture.restarts
                os.kill(pid, signal.SIGKILL)
                wait_for(lambda: capture.restarts > restarts, "the supervisor")  # noqa: B023
        stream.wait_captured(capture, stream.flushed_position())
        assert capture.restarts == kills
    spool = stream.check("killed")
    assert stream.confirmed("killed") == spool.entries[0].begin, "nothing was released, so nothing is acknowledged"
    capture_until(stream.settings("calm"), spool.entries[-1].end)
    check_same(stream.check("calm"), spool, "an undisturbed capture and the one that was killed")
    return spool


@pytest.mark.trap(1, 3)
def test_five_kills_under_load_lose_and_double_nothing(stream):
    kill_under_load(stream, 5, SEED)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_kills_under_load_lose_and_double_nothing(stream, record_property):
    spool = kill_under_load(stream, SOAK_KILLS, SEED)
    record_property("kills", SOAK_KILLS)
    record_property("transactions", len(spool.transactions()))
    record_property("changes", len(spool.changes))


@pytest.mark.trap(3)
def test_kill_while_streamed_transactions_are_open(stream):
    """What was streamed of open transactions is thrown away, and comes again from the beginning."""
    stream.slot()
    settings = stream.settings(work_mem="64kB", assembler=SMALL_BLOCKS)
    with CaptureProcess(settings) as capture, stream.database.connect() as one, stream.database.connect() as two:
        capture.wait_until_streaming()
        for connection in (one, two):
            connection.execute("begin")
        for turn in range(3):
            for connection in (one, two):
                insert_things(connection, 0, 400, 2000, random.Random(turn))
            write_rows(stream, 10, 20, seed=turn)
            open_folder = settings.spool.path / "open"
            wait_for(lambda: len(list(open_folder.glob("*"))) >= 2, "both transactions to be set aside")  # noqa: B023
            restarts = capture.restarts
            assert capture.pid is not None
            os.kill(capture.pid, signal.SIGKILL)
            wait_for(lambda: capture.restarts > restarts, "the supervisor")  # noqa: B023
            capture.wait_until_streaming()
        for connection in (two, one):
            list_in_journal(connection, 1200)
            connection.execute("commit")
        stream.wait_captured(capture, stream.flushed_position())
    spool = stream.check()
    assert [count for _, count in spool.transactions()][-2:] == [1201, 1201]


PARENT = """
import pickle, sys, time
from penstock.capture import CaptureProcess
capture = CaptureProcess(pickle.load(open(sys.argv[1], "rb")))
capture.start()
capture.wait_until_streaming()
print(capture.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.trap(8, 53)
def test_capture_ends_with_its_parent_and_frees_the_slot(stream, tmp_path):
    stream.slot()
    settings = stream.settings()
    (tmp_path / "settings").write_bytes(pickle.dumps(settings))
    write_rows(stream, 20, 20)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "settings")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert stream.walsender() is not None
        killed = time.monotonic()
        parent.kill()
        assert wait_until_gone([child], timeout=HANG_SECONDS)
        wait_for(lambda: stream.walsender() is None, "the slot to be free")
        assert time.monotonic() - killed < 20, "soon, not when the server gives it up"
    write_rows(stream, 20, 20, seed=2)
    with CaptureProcess(settings) as capture:
        stream.wait_captured(capture, stream.flushed_position())
        assert capture.restarts == 0
    stream.check()


def test_stopping_publishes_what_is_whole(stream):
    """A clean stop and a new start: the same spool goes on, with nothing between."""
    stream.slot()
    for turn in range(3):
        write_rows(stream, 30, 20, seed=turn)
        with CaptureProcess(stream.settings()) as capture:
            stream.wait_captured(capture, stream.flushed_position())
    spool = stream.check()
    assert read_spool(stream.folder / "one").comparable() == spool.comparable()
