"""The coordinator: the one object that owns a running stream.

    with Coordinator([tables, documents]) as coordinator:
        coordinator.wait()

Starting acquires the leases of all outputs, opens the stream and starts the outputs. One stack unwinds this in reverse,
on any exit and after any failed step of a start: outputs finish their batches, capture stops, leases are released.

One thread carries out commands, follows the publication and starts table sync workers, for all outputs of the stream.
Only this thread queries the source's catalog while the outputs apply changes. An output that fails stops alone. If it
could not start because of an error that time heals, a thread starts it later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self

from penstock import failpoints
from penstock.capture import CaptureStatus
from penstock.errors import PenstockError, Retry
from penstock.headroom import Headroom
from penstock.output import FailedOutput, Output, RunningOutput
from penstock.retry import Backoff
from penstock.stream import Published, Stream, open_stream
from penstock.workers.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0
"""How often the coordinator checks the publication."""
COMMAND_SECONDS = 0.5
"""How often it checks for commands."""
TICK_SECONDS = 0.1
"""How soon a table sync worker that has ended is replaced by the next one."""


class Coordinator:
    """All outputs of one stream; each has its own store, destination and positions."""

    def __init__(self, outputs: Sequence[Output], *, await_tasks: Callable[[], object] = lambda: None) -> None:
        """The settings of the first output are those of the stream.

        `await_tasks` is called when capture runs, before the outputs start: it waits until tasks can run, or raises.
        """
        self._await_tasks = await_tasks
        names = [each.output for each in outputs]
        if len(set(names)) < len(names):
            raise ValueError("the outputs of a stream must have different names")
        self._outputs = tuple(outputs)
        self._running: list[RunningOutput] = []
        self._is_started = False
        self._is_stopping = False
        self._published: Published | None = None
        """As of the last refresh."""
        self._stack = ExitStack()
        self._unpublished: Mapping[str, PenstockError] = {}
        self._headroom = Headroom()
        self._stream: Stream | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __iter__(self) -> Iterator[RunningOutput]:
        """The running outputs; none before the start."""
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def errors(self) -> Mapping[str, BaseException]:
        """The outputs that an error has stopped, by name."""
        return {each.output: each.error for each in self._running if each.error is not None}

    @property
    def unpublished(self) -> Mapping[str, PenstockError]:
        """Tables that should be published and cannot be, with the server's reason. Penstock retries them."""
        return self._unpublished

    @property
    def headroom(self) -> Headroom:
        """What the stream has left for its spool and for WAL on the server."""
        return self._headroom

    @property
    def capture(self) -> CaptureStatus | None:
        """The last report of capture; None before the start."""
        return None if self._stream is None else self._stream.capture

    def start(self) -> None:
        """Return when changes flow; copies continue. If a step fails, undo the steps before it and raise.

        An output that has run before and cannot start now fails alone, unless no other one starts.

        A coordinator starts once: a second call raises `RuntimeError` and does not affect the running stream.
        """
        if self._is_started:
            raise RuntimeError("a coordinator can be started only once: create another one to start the outputs again")
        self._is_started = True
        with ExitStack() as stack:
            leases = [stack.enter_context(_leased(each)) for each in self._outputs]
            stream = stack.enter_context(
                open_stream(self._outputs[0].settings, {each.output: each.store for each in self._outputs})
            )
            self._stream = stream
            published = self._published = stream.refresh()
            self._await_tasks()
            for output, lease in zip(self._outputs, leases, strict=True):
                try:
                    running = stack.enter_context(output.opened(stream, lease.lifecycle, lease.epoch, published))
                except PenstockError as error:
                    if not self._may_fail_alone(output):
                        raise
                    running = FailedOutput(output, lease.lifecycle, stream.start_of(output.output), error)
                self._running.append(running)
            if len(self.errors) == len(self._running):
                self.check()
            self._unpublished = stream.unpublished
            for number, lease in enumerate(leases):
                error = self._running[number].error
                if isinstance(error, PenstockError) and error.retry is Retry.TIMED:
                    stack.enter_context(self._starting_later(stream, number, lease))
            stack.enter_context(self._coordinating(stream))
            self._stack = stack.pop_all()

    def _may_fail_alone(self, output: Output) -> bool:
        """Return True if the others start without this output: it has run before. A first start succeeds as a whole."""
        return len(self._outputs) > 1 and output.store.get_replication_progress() is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all outputs have ended; return False on timeout.

        Raises the error of the first output that has one, when the last output has ended. `errors` shows it earlier.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for output in self._running:
            if not output.join(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return False
        self.check()
        return True

    def check(self) -> None:
        """Raise the error of the first output that has one."""
        for error in self.errors.values():
            raise error

    def stop(self) -> None:
        """Ask all outputs to end, without waiting. A copy that is stopped from now on does not fail its table."""
        self._is_stopping = True
        for output in self._running:
            output.lifecycle.stop.set()

    def shutdown(self) -> None:
        """Finish the current batches, record progress, and stop everything. May be called twice."""
        self.stop()
        self._stack.close()

    # The threads

    @contextmanager
    def _starting_later(self, stream: Stream, number: int, lease: _Lease) -> Iterator[None]:
        """Start an output again and again, until it runs or fails for good; what it has opened is closed at the end."""
        ending = threading.Event()
        with ExitStack() as opened:
            thread = threading.Thread(
                target=lambda: self._start_later(stream, number, lease, opened, ending), name="start-later", daemon=True
            )
            thread.start()
            try:
                yield
            finally:
                ending.set()
                thread.join()

    def _start_later(
        self, stream: Stream, number: int, lease: _Lease, opened: ExitStack, ending: threading.Event
    ) -> None:
        output, backoff = self._outputs[number], Backoff(first=1.0, longest=60.0)
        assert self._published is not None
        while not ending.wait(backoff.next_delay()):
            if lease.lifecycle.lost.is_set():
                return
            lifecycle = lease.lifecycle = Lifecycle(output.output)
            try:
                running = opened.enter_context(output.opened(stream, lifecycle, lease.epoch, self._published))
            except Exception as error:
                if isinstance(error, PenstockError) and error.retry is Retry.TIMED:
                    logger.debug("output cannot start yet output=%s error=%s", output.output, error)
                    continue
                running = FailedOutput(output, lifecycle, stream.start_of(output.output), error)
            else:
                logger.info("output has started output=%s", output.output)
            self._running[number] = running
            if self._is_stopping:
                lifecycle.stop.set()
            return

    @contextmanager
    def _coordinating(self, stream: Stream) -> Iterator[None]:
        ending = threading.Event()

        def run() -> None:
            try:
                self._coordinate(stream, ending)
            except BaseException as error:
                for output in self._running:
                    output.lifecycle.fail(error)

        thread = threading.Thread(target=run, name="coordinator", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def _coordinate(self, stream: Stream, ending: threading.Event) -> None:
        refreshing = Backoff(first=REFRESH_SECONDS, longest=60.0)
        refresh_at = time.monotonic() + REFRESH_SECONDS
        tended = [_Tended(self._running, number) for number in range(len(self._running))]
        while not ending.wait(TICK_SECONDS):
            stream.check()
            for each in tended:
                each.answer_commands()
            wanted = [each for each in self._running if each.refresh_wanted.is_set()]
            if time.monotonic() >= refresh_at or wanted:
                for output in wanted:
                    output.refresh_wanted.clear()
                delay = self._refresh(stream, tended, refreshing)
                refresh_at = time.monotonic() + delay
            for each in tended:
                each.tend(source_answers=not refreshing.attempt)

    def _refresh(self, stream: Stream, tended: Sequence[_Tended], backoff: Backoff) -> float:
        """Check the publication; return the seconds until the next check. If this fails, changes are still applied."""
        try:
            published = stream.refresh()
        except PenstockError as error:
            level, delay = backoff.log_level, backoff.next_delay()
            logger.log(level, "cannot read the publication, retrying in=%.1fs error=%s", delay, error)
            return delay
        backoff.reset()
        self._published = published
        self._unpublished = stream.unpublished
        self._headroom = stream.headroom
        for each in tended:
            each.attempt(lambda output: output.refresh(published))
        return REFRESH_SECONDS


class _Tended:
    """An output, as the coordinator's thread treats it: its errors affect no other output, and transient ones are
    retried."""

    def __init__(self, outputs: Sequence[RunningOutput], number: int) -> None:
        """An output that starts late takes the place of the one that could not start."""
        self._outputs, self._number = outputs, number
        self._backoff = Backoff(first=0.5, longest=30.0)
        self._next_at = 0.0
        self._commands_at = 0.0

    @property
    def _output(self) -> RunningOutput:
        return self._outputs[self._number]

    def answer_commands(self) -> None:
        now = time.monotonic()
        if now >= self._commands_at or self._output.is_urgent:
            self._commands_at = now + COMMAND_SECONDS
            # Even if it has stopped: the caller waits for an answer.
            if not self._output.lifecycle.lost.is_set():
                self.attempt(lambda output: output.answer_commands(), stopped=True)

    def tend(self, *, source_answers: bool) -> None:
        self.attempt(lambda output: output.tend(source_answers=source_answers))

    def attempt(self, step: Any, *, stopped: bool = False) -> None:
        if time.monotonic() < self._next_at or (self._output.lifecycle.stop.is_set() and not stopped):
            return
        try:
            step(self._output)
            self._backoff.reset()
        except PenstockError as error:
            if error.retry is not Retry.TIMED:
                self._output.lifecycle.fail(error)
                return
            level, delay = self._backoff.log_level, self._backoff.next_delay()
            self._next_at = time.monotonic() + delay
            text = "cannot maintain the output, retrying output=%s in=%.1fs error=%s"
            logger.log(level, text, self._output.output, delay, error)
        except Exception as error:
            self._output.lifecycle.fail(error)


@dataclass(slots=True)
class _Lease:
    lifecycle: Lifecycle
    """That of the output which runs now, or is being started."""
    epoch: int = 0


@contextmanager
def _leased(output: Output) -> Iterator[_Lease]:
    """Hold the output's lease inside the block; yield its lifecycle and the epoch of the lease."""
    held = _Lease(Lifecycle(output.output))
    failpoints.reach("before_lease")
    held.epoch = output.store.acquire_lease(on_lost=lambda error: held.lifecycle.lose(error)).epoch
    try:
        failpoints.reach("after_lease")
        yield held
    finally:
        output.store.release_lease()
