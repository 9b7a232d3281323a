"""The coordinator, over outputs and a stream that are made up: starts, failures, commands and the way out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from penstock import coordinator as module
from penstock.coordinator import Coordinator
from penstock.errors import CaptureStopped, DestinationRefused, LeaseHeld, PermissionDenied, StateUnusable
from penstock.headroom import Headroom
from penstock.lsn import Lsn
from penstock.output import RunningOutput, unknown_command
from penstock.source.membership import Membership, RowVersion
from penstock.state import Command, CommandKind, CommandStatus, MemoryStore
from penstock.state.records import CommandRecord
from penstock.stream import Published
from penstock.workers import ApplyStatus, Lifecycle
from tests.e2e.support import wait_for

PUBLISHED = Published(Membership(RowVersion(1, "1"), {}, {}), {}, {})


class FakeStream:
    """A stream that does what it is told."""

    def __init__(self) -> None:
        self.refreshes = 0
        self.refusal: Exception | None = None
        self.end: Exception | None = None
        self.unpublished: dict[str, Any] = {}
        self.headroom = Headroom()

    def refresh(self) -> Published:
        self.refreshes += 1
        if self.refusal is not None and self.refreshes > 1:
            raise self.refusal
        return PUBLISHED

    def check(self) -> None:
        if self.end is not None:
            raise self.end


class Running(RunningOutput):
    """Counts how often it was looked after; its thread waits to be stopped, and then for `finish`."""

    def __init__(self, output: Fake, lifecycle: Lifecycle) -> None:
        super().__init__(output.output, output.settings, output.store, lifecycle)
        self.finish = threading.Event()
        self.finish.set()
        self.tended = 0
        self.refreshed = 0
        self.trouble: Exception | None = None

    @property
    def status(self) -> ApplyStatus:
        return ApplyStatus(Lsn(1), Lsn(1), 0, 0, 0)

    def run(self) -> None:
        self.lifecycle.stop.wait()
        self.finish.wait()

    def refresh(self, published: Published) -> None:
        self.refreshed += 1

    def tend(self, *, source_answers: bool) -> None:
        self.tended += 1
        if self.trouble is not None:
            raise self.trouble

    def carry_out(self, command: Command) -> bool:
        raise unknown_command(command)


class Fake:
    """An output that writes down what happens to it."""

    settings: Any = None

    def __init__(self, name: str, events: list[str]) -> None:
        self.output = name
        self.store = MemoryStore(name)
        self.events = events
        self.fails_to: str | None = None
        release = self.store.release_lease

        def released() -> None:
            events.append(f"{name}: lease released")
            release()

        self.store.release_lease = released  # type: ignore[method-assign]

    @contextmanager
    def opened(self, stream: Any, lifecycle: Lifecycle, epoch: int, published: Published) -> Iterator[Running]:
        if self.fails_to == "start":
            raise DestinationRefused("no")
        running = Running(self, lifecycle)
        running.start_thread("apply", running.run)
        try:
            yield running
        finally:
            running.drain()
            self.events.append(f"{self.output}: drained")
            if self.fails_to == "shut down":
                raise OSError("the connection was gone already")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> FakeStream:
    made = FakeStream()

    @contextmanager
    def opened(settings: Any, outputs: Any) -> Iterator[FakeStream]:
        events.append("capture started")
        try:
            yield made
        finally:
            events.append("capture stopped")

    monkeypatch.setattr(module, "open_stream", opened)
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(module, "COMMAND_SECONDS", 0.01)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    return made


@pytest.fixture
def outputs(events: list[str]) -> list[Fake]:
    return [Fake("tables", events), Fake("second", events)]


@pytest.mark.usefixtures("stream")
def test_everything_is_undone_in_reverse(outputs: list[Fake], events: list[str]) -> None:
    with Coordinator(outputs) as coordinator:
        assert [each.output for each in coordinator] == ["tables", "second"]
    assert events == [
        "capture started",
        "second: drained",
        "tables: drained",
        "capture stopped",
        "second: lease released",
        "tables: lease released",
    ]


@pytest.mark.usefixtures("stream")
def test_a_start_that_fails_halfway_leaves_nothing_behind(outputs: list[Fake], events: list[str]) -> None:
    outputs[1].fails_to = "start"
    with pytest.raises(DestinationRefused):
        Coordinator(outputs).start()
    assert events == [
        "capture started",
        "tables: drained",
        "capture stopped",
        "second: lease released",
        "tables: lease released",
    ]
    assert all(each.store.get_lease() is None for each in outputs)


@pytest.mark.usefixtures("stream")
def test_a_destination_that_fails_to_shut_down_keeps_nothing_running(outputs: list[Fake], events: list[str]) -> None:
    outputs[1].fails_to = "shut down"
    coordinator = Coordinator(outputs)
    coordinator.start()
    with pytest.raises(OSError, match="gone already"):
        coordinator.shutdown()
    assert events[1:] == [
        "second: drained",
        "tables: drained",
        "capture stopped",
        "second: lease released",
        "tables: lease released",
    ]
    coordinator.shutdown()


@pytest.mark.usefixtures("stream")
def test_a_lease_is_held_for_as_long_as_something_may_write(outputs: list[Fake], monkeypatch: Any) -> None:
    monkeypatch.setattr("penstock.output.REMINDER_SECONDS", 0.01)
    coordinator = Coordinator(outputs)
    coordinator.start()
    running: Any = next(iter(coordinator))
    running.finish.clear()
    ending = threading.Thread(target=coordinator.shutdown)
    ending.start()
    assert not running.join(0.2)
    assert outputs[0].store.get_lease() is not None
    running.finish.set()
    ending.join(10)
    assert outputs[0].store.get_lease() is None


@pytest.mark.usefixtures("stream")
def test_a_second_start_is_refused_and_leaves_the_first_alone(outputs: list[Fake], events: list[str]) -> None:
    with Coordinator(outputs) as coordinator:
        with pytest.raises(RuntimeError, match="started only once"):
            coordinator.start()
        with pytest.raises(LeaseHeld):
            Coordinator(outputs).start()
        assert events == ["capture started"]
        assert not coordinator.wait(0)


@pytest.mark.usefixtures("stream")
def test_an_output_that_fails_stops_alone(outputs: list[Fake]) -> None:
    with Coordinator(outputs) as coordinator:
        first, second = coordinator
        assert isinstance(first, Running)
        assert isinstance(second, Running)
        first.trouble = DestinationRefused("not any more")
        wait_for(lambda: first.error, "the first to stop")
        assert first.join(10)
        tended = second.tended
        wait_for(lambda: second.tended > tended + 3, "the second to go on")
        assert coordinator.errors == {"tables": first.error}
        assert not coordinator.wait(0)
        with pytest.raises(DestinationRefused):
            coordinator.check()
        asked = outputs[0].store.add_command(CommandKind.PAUSE)
        wait_for(lambda: outputs[0].store.get_command(asked.number).answered, "an answer")
        assert "has stopped" in (outputs[0].store.get_command(asked.number).reason or "")
        second.lifecycle.stop.set()
        with pytest.raises(DestinationRefused):
            coordinator.wait(10)


def test_capture_that_ended_for_good_stops_all_outputs(outputs: list[Fake], stream: FakeStream) -> None:
    with Coordinator(outputs) as coordinator:
        stream.end = CaptureStopped("gone")
        with pytest.raises(CaptureStopped):
            coordinator.wait(10)
        assert len(coordinator.errors) == 2


@pytest.mark.parametrize("refusal", [PermissionDenied("must be owner"), StateUnusable("anything else")])
def test_a_refresh_never_ends_a_pipeline(outputs: list[Fake], stream: FakeStream, refusal: Exception) -> None:
    stream.refusal = refusal
    with Coordinator(outputs) as coordinator:
        first, _ = coordinator
        assert isinstance(first, Running)
        wait_for(lambda: stream.refreshes > 3 and first.tended > 3, "several refreshes")
        assert not coordinator.errors
        stream.refusal = None
        refreshed = first.refreshed
        wait_for(lambda: first.refreshed > refreshed, "a refresh that works")


@pytest.mark.usefixtures("stream")
def test_an_unknown_command_is_refused(outputs: list[Fake]) -> None:
    store = outputs[0].store
    asked = store.add_command(CommandKind.REFRESH)

    def forge(transaction: Any) -> None:
        (record,) = transaction.rows(CommandRecord)
        transaction.put([replace(record, kind="of_another_version")])

    store.database.run(forge)
    with Coordinator(outputs) as coordinator:
        wait_for(lambda: store.get_command(asked.number).answered, "an answer")
        assert store.get_command(asked.number).status is CommandStatus.REFUSED
        assert not coordinator.errors


@pytest.mark.usefixtures("stream")
def test_a_pause_is_answered_when_the_batch_is_finished(outputs: list[Fake]) -> None:
    store = outputs[0].store
    with Coordinator(outputs) as coordinator:
        first, _ = coordinator
        assert isinstance(first, Running)
        with first.lifecycle.working() as may_work:
            assert may_work
            asked = store.add_command(CommandKind.PAUSE)
            wait_for(lambda: first.lifecycle.paused, "the pause")
            tended = first.tended
            wait_for(lambda: first.tended > tended + 3, "some rounds")
            assert not store.get_command(asked.number).answered
            assert not first.paused
        wait_for(lambda: store.get_command(asked.number).answered, "the answer")
        with first.lifecycle.working() as may_work:
            assert not may_work


@pytest.mark.usefixtures("stream")
def test_a_pause_outlasts_its_process_also_if_that_ends_before_the_batch(outputs: list[Fake]) -> None:
    store = outputs[0].store
    with Coordinator(outputs) as coordinator:
        first, _ = coordinator
        with first.lifecycle.working():
            asked = store.add_command(CommandKind.PAUSE)
            wait_for(lambda: first.lifecycle.paused, "the pause")
            coordinator.shutdown()
    assert store.get_command(asked.number).status is CommandStatus.DONE
    with Coordinator(outputs) as coordinator:
        first, second = coordinator
        assert (first.lifecycle.paused, second.lifecycle.paused) == (True, False)
        store.add_command(CommandKind.RESUME)
        wait_for(lambda: not first.lifecycle.paused, "the end of the pause")
    with Coordinator(outputs) as coordinator:
        assert not next(iter(coordinator)).lifecycle.paused
