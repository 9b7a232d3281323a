"""What the supervisor does about each end of a run: scripted ends, and real processes without a pipeline."""

from __future__ import annotations

import io
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    ConfigError,
    LeaseHeld,
    LeaseLost,
    LineageChanged,
    LostInFailover,
    NotReady,
    PenstockError,
    PositionAhead,
    ServerUnavailable,
    SlotDiscarded,
    SlotLost,
    SlotUndecodable,
    SparkGone,
)
from penstock.operations.signals import Ending
from penstock.operations.supervision import (
    HEALTHY_SECONDS,
    NEEDS_A_PERSON,
    START_AGAIN,
    Child,
    RunEnd,
    Supervised,
    Supervisor,
    SupervisorFile,
    exit_status,
)
from penstock.retry import Backoff
from penstock.state.lease import Holder, this_process
from penstock.stream import OnLostSlot

PATIENCE = 60.0
KILLED = RunEnd(-signal.SIGKILL, None, 0.0)
CLEAN = RunEnd(0, None, 0.0)


def away(healthy: float = 0.0, text: str = "cannot connect") -> RunEnd:
    return RunEnd(START_AGAIN, ServerUnavailable(text), healthy)


class Scripted:
    """A child that has already ended."""

    def __init__(self, end: RunEnd) -> None:
        self._end = end

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def poll(self) -> int | None:
        return self._end.status

    def end(self) -> RunEnd:
        return self._end


class Delays(Backoff):
    """Delays of no time, which are counted."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__(first=1.0, longest=8.0, random=random.Random(1))
        self._seen = seen

    def next_delay(self) -> float:
        self._seen.append(min(8.0, 2.0**self.attempt))
        super().next_delay()
        return 0.0


def supervise(ends: Sequence[RunEnd], spool: Path, before: Callable[[int], object] = lambda number: None) -> Any:
    seen: list[float] = []
    left = list(ends)

    def start() -> Any:
        before(len(ends) - len(left))
        return Scripted(left.pop(0))

    end = Supervisor(start, spool, Ending(), backoff=lambda is_crash: Delays(seen)).run()
    assert not left
    return end, seen


def test_a_run_that_time_can_heal_is_started_again_with_growing_delays(tmp_path: Path) -> None:
    end, delays = supervise([away(), away(), KILLED, away(), KILLED, CLEAN], tmp_path)
    assert end is CLEAN
    # Each class of error, and each signal, has delays of its own.
    assert delays == [1.0, 2.0, 1.0, 4.0, 2.0]


def test_a_run_that_worked_for_a_while_starts_the_delays_over(tmp_path: Path) -> None:
    _, delays = supervise([away(), away(), away(HEALTHY_SECONDS), away(), CLEAN], tmp_path)
    assert delays == [1.0, 2.0, 1.0, 2.0]


def test_a_run_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    """A machine without memory or processes for a while, or an upgrade that replaces the interpreter."""

    def lack(number: int) -> None:
        if number < len(lacking):
            lacking.pop()
            raise BlockingIOError(11, "Resource temporarily unavailable")

    lacking = [1, 2]
    end, delays = supervise([KILLED, CLEAN], tmp_path, before=lack)
    assert end is CLEAN
    assert delays == [1.0, 2.0, 1.0]


def test_delays_are_bounded(tmp_path: Path) -> None:
    _, delays = supervise([*[KILLED] * 6, CLEAN], tmp_path)
    assert delays == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize("status", NEEDS_A_PERSON)
def test_an_error_that_needs_a_person_ends_the_supervisor(status: int, tmp_path: Path) -> None:
    last = RunEnd(status, LineageChanged("another server"), 0.0)
    assert supervise([KILLED, last], tmp_path)[0] is last


def test_the_file_counts_restarts_and_says_why_and_goes_with_the_supervisor(tmp_path: Path) -> None:
    file = SupervisorFile(tmp_path)
    found: list[Supervised | None] = []
    supervise([KILLED, away(), CLEAN], tmp_path, before=lambda number: found.append(file.read()))
    assert [each and (each.restarts, each.last_end, each.next_start) for each in found] == [
        (0, None, None),
        (1, "killed by SIGKILL", None),
        (2, "cannot connect", None),
    ]
    assert file.read() is None


def test_the_file_of_a_supervisor_that_was_killed_does_not_count(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = this_process()
    file = SupervisorFile(tmp_path)
    file.write(Supervised(Holder(here.host, ended.pid, here.machine, "1"), restarts=3))
    assert file.read() is None
    file.write(Supervised(here, restarts=3))
    assert file.read() == Supervised(here, restarts=3)


def test_an_error_is_reported_once_and_not_at_each_attempt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervise([away(), away(), away(text="starting up"), away(text="starting up"), KILLED, CLEAN], tmp_path)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [each.partition("reason=")[2].partition(" hint=")[0] for each in told] == [
        "cannot connect",
        "starting up",
        "killed by SIGKILL",
    ]


def test_a_standby_does_not_hide_the_supervisor_whose_pipeline_runs(tmp_path: Path) -> None:
    file = SupervisorFile(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        first = file.read()
        assert first is not None
        assert (first.holder.pid, first.restarts) == (other.pid, 3)
        seen: list[Supervised | None] = []
        supervise([away(), CLEAN], tmp_path, before=lambda number: seen.append(file.read()))
        assert [*seen, file.read()] == [first, first, first]
        other.kill()
    # It is gone: the next one takes its place, and removes only itself.
    seen.clear()
    supervise([away(), CLEAN], tmp_path, before=lambda number: seen.append(file.read()))
    assert [each and each.holder for each in seen] == [this_process(), this_process()]
    assert file.read() is None


def test_a_killed_child_leaves_a_terminal_that_can_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Child(["/bin/sh", "-c", "exit 75"]) as child:
        child.end()
    assert terminal.getvalue() == ""
    with Child(["/bin/sh", "-c", "kill -9 $$"]) as child:
        assert child.end().status == -signal.SIGKILL
    assert terminal.getvalue() == "\x1b[?25h\n"


def test_a_signal_ends_the_wait_for_the_next_start(tmp_path: Path) -> None:
    ending = Ending()

    def start() -> Any:
        threading.Timer(0.0, ending.stop.set).start()
        return Scripted(away())

    end = Supervisor(start, tmp_path, ending, backoff=lambda is_crash: Backoff(first=3600, longest=3600)).run()
    assert (end.status, end.error) == (0, None)


@pytest.mark.parametrize(
    ("error", "on_lost_slot", "status"),
    [
        (ServerUnavailable("x"), OnLostSlot.ERROR, START_AGAIN),
        (LeaseHeld("x"), OnLostSlot.ERROR, START_AGAIN),
        (LeaseLost("x"), OnLostSlot.ERROR, START_AGAIN),
        (SparkGone("x"), OnLostSlot.ERROR, START_AGAIN),
        (SlotLost("x"), OnLostSlot.ERROR, 1),
        (SlotLost("x"), OnLostSlot.RECREATE, START_AGAIN),
        (SlotUndecodable("x"), OnLostSlot.ERROR, 1),
        (SlotDiscarded("x"), OnLostSlot.ERROR, START_AGAIN),
        (PositionAhead("x"), OnLostSlot.RECREATE, START_AGAIN),
        (LostInFailover("x"), OnLostSlot.ERROR, 1),
        (LostInFailover("x"), OnLostSlot.RECREATE, START_AGAIN),
        (LineageChanged("x"), OnLostSlot.RECREATE, 1),
        (NotReady("x"), OnLostSlot.ERROR, 1),
        (ConfigError("x"), OnLostSlot.ERROR, 1),
        (PenstockError("x"), OnLostSlot.ERROR, 1),
    ],
)
def test_the_class_of_an_error_decides_about_a_new_start(
    error: PenstockError, on_lost_slot: OnLostSlot, status: int
) -> None:
    assert exit_status(error, on_lost_slot) == status


REPORTING = """
from penstock.errors import ServerUnavailable
from penstock.operations.supervision import Link
import sys
link = Link()
link.started()
link.failed(ServerUnavailable("gone", hint="wait", port=1))
sys.exit(75)
"""
SUPERVISING = """
import pathlib, sys
from penstock.operations.supervision import Supervised, SupervisorFile
from penstock.state.lease import this_process
SupervisorFile(pathlib.Path(sys.argv[1])).write(Supervised(this_process(), restarts=3))
print("ready", flush=True)
input()
"""
WAITING = """
import signal, sys
from penstock.operations.supervision import Link
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
Link().started()
print("ready", flush=True)
signal.pause()
"""


def test_a_child_reports_its_error_with_its_hint_and_facts() -> None:
    with Child([sys.executable, "-c", REPORTING]) as child:
        end = child.end()
    assert end.status == START_AGAIN
    assert end.healthy_seconds > 0.0
    assert isinstance(end.error, ServerUnavailable)
    assert (end.error.message, end.error.hint, end.error.port) == ("gone", "wait", 1)


def test_a_child_stops_when_its_supervisor_is_killed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", WAITING], stdin=theirs.fileno(), stdout=subprocess.PIPE)
    assert child.stdout is not None
    with ours, child.stdout:
        assert child.stdout.readline() == b"ready\n"
        # What the kernel does with the descriptors of a process that is killed.
        ours.close()
        assert child.wait(PATIENCE) == 0


def test_what_a_child_left_behind_does_not_hold_up_the_supervisor(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with Child(["/bin/sh", "-c", f"sleep 3600 <&0 & echo $! > {file}"]) as child:
        try:
            assert child.end().status == 0
        finally:
            os.kill(int(file.read_text()), signal.SIGKILL)
