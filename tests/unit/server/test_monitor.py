"""Readiness: false within ten seconds of a stall, and true again on recovery."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.capture import CaptureStatus, Reading
from penstock.config import make_config
from penstock.errors import StateError
from penstock.headroom import Headroom
from penstock.lsn import Lsn
from penstock.operations.lag import Behind
from penstock.operations.progress import Notice, OutputLook
from penstock.server import monitor
from penstock.server.monitor import HISTORY_SECONDS, HISTORY_STEP, Monitor, Unmoved, describe, history_point
from penstock.state import Errored, Init, Ready, RetryPolicy
from penstock.workers import ApplyStatus, Outage

LOOK = OutputLook(
    output="tables",
    paused=False,
    phases={},
    copies=(),
    changes=10,
    changes_per_second=1.0,
    applied=Lsn(100),
    behind=Behind(0, 0.0),
)


@dataclass
class Output:
    output: str = "tables"
    status: ApplyStatus = field(default_factory=lambda: ApplyStatus(Lsn(100), Lsn(90), 10, 1, 0))


@dataclass
class Pipeline:
    """The parts of `Running` that are watched."""

    look: OutputLook = LOOK
    looked_at: float = 0.0
    capture: CaptureStatus = field(default_factory=lambda: CaptureStatus(Reading.STREAMING, Lsn(100)))
    source_age: float = 0.5
    received: Behind = field(default_factory=lambda: Behind(0, 0.0))
    events: list[Any] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=lambda: [Output()])
    headroom: Headroom = field(default_factory=Headroom)

    @property
    def last(self) -> tuple[float, tuple[OutputLook, ...]]:
        return self.looked_at, (self.look,)


class Watched:
    """A monitor whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pipeline = Pipeline()
        config = make_config(
            {
                "pipeline": {"id": "shop"},
                "source": {"url": "postgresql://localhost/shop"},
                "destination": {"type": "memory"},
                "server": {"ready_lag": "30s"},
            }
        )
        self.monitor = Monitor(config, self.pipeline, lambda: self.now)  # pyright: ignore[reportArgumentType]

    def after(self, seconds: float, **changes: Any) -> tuple[str, ...]:
        """Why the pipeline is not ready, when this time has passed second by second."""
        for name, value in changes.items():
            setattr(self.pipeline, name, value)
        for _ in range(int(seconds)):
            self.now += 1
            self.pipeline.looked_at = self.now
            self.monitor.moment = self.monitor.look()
        return self.monitor.unready


@pytest.fixture
def watched() -> Watched:
    found = Watched()
    assert found.after(1) == ()
    return found


def test_a_quiet_pipeline_is_ready(watched: Watched) -> None:
    assert watched.after(3600) == ()


def test_events_are_listed_by_their_times(watched: Watched) -> None:
    noticed = [(50.0, "copied", "a"), (10.0, "stopped", "b"), (50.0, "copied", "c"), (60.0, "left", "d")]
    watched.pipeline.events = [(at, Notice(event, event, "tables", table)) for at, event, table in noticed]
    assert [(each["at"][-11:-6], each["table"]) for each in watched.monitor.events] == [
        *(("01:00", "d"), ("00:50", "c"), ("00:50", "a"), ("00:10", "b")),
    ]


def test_one_stopped_table_leaves_it_ready_and_the_last_one_does_not(watched: Watched) -> None:
    ready = Ready()
    stopped = Errored("cannot be written", None, RetryPolicy(), ready, datetime(2026, 1, 31, tzinfo=UTC), Lsn(90))
    assert watched.after(1, look=replace(LOOK, phases={"a": stopped, "b": ready})) == ()
    every = ("tables: every table has stopped",)
    assert watched.after(1, look=replace(LOOK, phases={"a": stopped, "b": stopped})) == every
    assert watched.after(1, look=replace(LOOK, phases={"a": stopped, "b": Init()})) == ()


def test_changes_that_are_not_applied_make_it_unready_within_ten_seconds(watched: Watched) -> None:
    behind = replace(LOOK, behind=Behind(5000, 3.0))
    assert watched.after(5, look=behind) == ()
    assert watched.after(4) == ("tables: nothing was applied for 9.0 s, and 4.9 kB of WAL wait",)
    assert watched.after(1, look=replace(behind, applied=Lsn(200), changes=20)) == ()


def test_a_copy_that_advances_is_no_stall(watched: Watched) -> None:
    for number in range(20):
        assert watched.after(1, look=replace(LOOK, behind=Behind(5000, 3.0), changes=10 + number)) == ()


def test_a_lag_above_the_bound_makes_it_unready(watched: Watched) -> None:
    assert watched.after(1, look=replace(LOOK, behind=Behind(5000, 31.0), changes=11)) == ("tables: the lag is 31 s",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"look": replace(LOOK, paused=True)}, "tables: paused"),
        ({"look": replace(LOOK, error="SlotLost")}, "tables: stopped"),
        ({"look": replace(LOOK, outage=Outage("away", "", 0.0))}, "tables: waiting"),
        ({"capture": CaptureStatus(Reading.SPOOL_FULL, Lsn(100))}, "capture: spool full"),
        ({"capture": CaptureStatus(Reading.RETRYING, Lsn(100))}, "capture: retrying"),
        ({"source_age": 9.0}, "the source has not answered for 9.0 s"),
    ],
)
def test_what_does_not_stream_is_unready_at_once(watched: Watched, change: dict[str, Any], reason: str) -> None:
    before = {name: getattr(watched.pipeline, name) for name in change}
    assert watched.after(1, **change) == (reason,)
    assert watched.after(1, **before) == ()


def test_a_capture_that_receives_nothing_makes_it_unready(watched: Watched) -> None:
    assert watched.after(5, received=Behind(800, 5.0)) == ()
    assert watched.after(4, received=Behind(900, 9.0)) != ()
    assert watched.after(1, received=Behind(0, 0.0)) == ()


def test_a_process_that_reports_nothing_is_unready(watched: Watched) -> None:
    watched.now += 9
    assert watched.monitor.unready == ("the process does not report its state",)
    watched.monitor.moment = watched.monitor.look()
    assert watched.monitor.unready == ("the process does not report its state",)


def test_the_history_is_bounded(watched: Watched) -> None:
    assert watched.monitor._history.maxlen == HISTORY_SECONDS / HISTORY_STEP
    point = history_point(watched.monitor.moment)
    assert point["outputs"]["tables"] == {"changes_per_second": 1.0, "lag_bytes": 0, "lag_seconds": 0.0}


def test_something_that_has_nothing_to_do_is_not_stuck() -> None:
    unmoved = Unmoved()
    assert unmoved.seconds(0, "a", is_idle=False) == 0
    assert unmoved.seconds(5, "a", is_idle=False) == 5
    assert unmoved.seconds(6, "a", is_idle=True) == 0
    assert unmoved.seconds(7, "a", is_idle=False) == 1
    assert unmoved.seconds(8, "b", is_idle=False) == 0


def test_free_text_is_scrubbed_and_names_are_not(watched: Watched) -> None:
    object.__setattr__(watched.monitor.config, "secrets", frozenset({"public", "hunter2-planted"}))
    found = watched.monitor.discreet(
        {"table": "public.orders", "error": {"reason": "cannot use hunter2-planted"}, "problems": ["hunter2-planted"]}
    )
    assert found == {"table": "public.orders", "error": {"reason": "cannot use ***"}, "problems": ["***"]}
    assert describe(watched.monitor)["ready"] is True


def test_the_status_is_loaded_rarely_and_less_often_if_that_takes_long(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, loads, takes = 0.0, 0, 0.1

    def load(config: Any, running_here: Any) -> str:
        nonlocal now, loads
        now, loads = now + takes, loads + 1
        return f"status {loads}"

    monkeypatch.setattr(monitor, "pipeline_status", load)
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now)
    assert [watched.monitor.status() for _ in range(3)] == ["status 1"] * 3
    now += 4.9
    assert watched.monitor.status() == "status 1"
    now, takes = now + 0.2, 10.0
    assert watched.monitor.status() == "status 2"
    now += 39
    assert watched.monitor.status() == "status 2", "four times as long as it took"
    now += 2
    assert watched.monitor.status() == "status 3"


def test_nobody_waits_for_a_status_that_takes_long(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    going_on, loads = threading.Event(), 0

    def load(config: Any, running_here: Any) -> str:
        nonlocal loads
        loads += 1
        if loads > 1:
            assert going_on.wait(60)
        return f"status {loads}"

    monkeypatch.setattr(monitor, "pipeline_status", load)
    monkeypatch.setattr(monitor, "STATUS_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "STATUS_SHARE", 0)
    monkeypatch.setattr(monitor, "STATUS_PATIENCE", 0.01)
    assert watched.monitor.status() == "status 1"
    assert [watched.monitor.status() for _ in range(3)] == ["status 1"] * 3, "the source does not answer"
    assert loads == 2, "one loads it for all"
    monkeypatch.setattr(monitor, "STATUS_PATIENCE", 60.0)
    monkeypatch.setattr(monitor, "STATUS_SECONDS", 3600.0)
    going_on.set()
    assert watched.monitor.status() == "status 2"
    assert watched.monitor.status() == "status 2"


def test_an_error_of_a_status_reaches_those_who_ask_and_the_next_try_may_succeed(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [StateError("it is locked"), "status"]

    def load(config: Any, running_here: Any) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(monitor, "pipeline_status", load)
    with pytest.raises(StateError):
        watched.monitor.status()
    assert watched.monitor.status() == "status"
