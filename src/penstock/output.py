"""Outputs: how they start and stop, the commands they answer, and the views they offer.

An `Output` says what to run: a name, a store, and where to write. It does nothing by itself. A coordinator opens it
over a stream and gets a `RunningOutput`, complete from the start: the threads of the output, their lifecycle and their
views. Tables (`penstock.tables`) and documents (`penstock.documents.output`) share all of this.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Protocol

from penstock.errors import LeaseLost, PenstockError
from penstock.lsn import Lsn
from penstock.observe.tally import Tally
from penstock.state import (
    Command,
    CommandKind,
    CommandStatus,
    IndexBuild,
    Store,
    TableReplicationPhase,
)
from penstock.stream import Published, Stream, StreamSettings
from penstock.workers import ApplyStatus, CopyStatus, SnapshotWait
from penstock.workers.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

REMINDER_SECONDS = 60.0
"""How often the log says that an output has not finished yet."""


class Output(Protocol):
    """One reader of a stream, and where it writes."""

    @property
    def output(self) -> str:
        """Its name among the outputs of the stream, and as a reader of the spool."""
        ...

    @property
    def settings(self) -> StreamSettings:
        """The stream's settings; those of the first output count."""
        ...

    @property
    def store(self) -> Store:
        """Its own store."""
        ...

    def opened(
        self, stream: Stream, lifecycle: Lifecycle, epoch: int, published: Published
    ) -> AbstractContextManager[RunningOutput]:
        """Run the output inside the block. The caller holds its lease, with this epoch, until after the block.

        On the way out the output finishes its current batch, and everything it has opened is closed. No thread that
        writes outlives the block.
        """
        ...


class RunningOutput(ABC):
    """An output that runs, or has run."""

    def __init__(self, output: str, settings: StreamSettings, store: Store, lifecycle: Lifecycle) -> None:
        self.output = output
        self.settings = settings
        self.store = store
        self.lifecycle = lifecycle
        self.tally = Tally()
        """Counts what its threads do, for metrics."""
        self.refresh_wanted = threading.Event()
        """Set when a command asks to refresh the publication."""
        if store.is_paused():
            lifecycle.pause()
            logger.warning("output is paused: run penstock resume to continue output=%s", output)
        self._threads: list[threading.Thread] = []
        self._commands: list[Command] = []
        self._pauses: list[Command] = []

    # Lifecycle

    @property
    @abstractmethod
    def status(self) -> ApplyStatus:
        """The positions of the output."""

    @property
    def error(self) -> BaseException | None:
        """The error that stopped it, or None."""
        return self.lifecycle.error

    @property
    def paused(self) -> bool:
        """True if it is paused and has finished the batch that it was writing."""
        return self.lifecycle.resting

    def join(self, timeout: float | None = None) -> bool:
        """Wait until its threads have ended; return False on timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                return False
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; return False on timeout. Raise the error that stopped the output."""
        if not self.join(timeout):
            return False
        if self.error is not None:
            raise self.error
        return True

    def drain(self) -> None:
        """Stop, finish the current batch, and wait for all threads, however long they take.

        The lease is released afterwards, and then the next process may write.
        """
        self.lifecycle.stop.set()
        while not self.join(REMINDER_SECONDS):
            logger.warning("output is still finishing its current batch output=%s", self.output)
        # The next process starts paused because the store says so.
        with suppress(PenstockError):
            while self._pauses:
                self.store.answer_command(self._pauses[0].number, CommandStatus.DONE)
                del self._pauses[0]

    def start_thread(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` in a thread; an error in it stops the output."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.lifecycle.fail(error)

        thread = threading.Thread(target=run, name=f"{name}-{self.output}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # For the coordinator's thread

    @abstractmethod
    def refresh(self, published: Published) -> None:
        """Adapt to changes of the publication."""

    @abstractmethod
    def tend(self, *, source_answers: bool) -> None:
        """Do periodic work between two checks for commands; skip work that needs the source if it does not answer."""

    @property
    def is_urgent(self) -> bool:
        """True if a caller is waiting for the next command."""
        return False

    def answer_commands(self) -> None:
        """Carry out the pending commands. A command that cannot be carried out is rejected and changes nothing."""
        self._commands += self.store.take_commands()
        while self._commands:
            # The command stays in the list until its answer is stored: no other process would take it over.
            if self.error is not None:
                self._refuse(self._commands[0], f"{self.output} has stopped: {_reason(self.error)}")
            else:
                self._answer(self._commands[0])
            del self._commands[0]
        while self._pauses and (self.paused or not self.lifecycle.paused or self.error is not None):
            self.store.answer_command(self._pauses[0].number, CommandStatus.DONE)
            del self._pauses[0]

    @abstractmethod
    def carry_out(self, command: Command) -> bool:
        """Carry out a command of its own kind, as a whole or not at all; False if it is answered later.

        Raises `PenstockError` for a command that is refused.
        """

    def _answer(self, command: Command) -> None:
        try:
            match command.kind:
                case CommandKind.PAUSE:
                    self.lifecycle.pause()
                    self._pauses.append(command)
                    is_done = False
                case CommandKind.RESUME:
                    self.lifecycle.resume()
                    is_done = True
                case CommandKind.REFRESH:
                    self.refresh_wanted.set()
                    is_done = True
                case _:
                    is_done = self.carry_out(command)
        except LeaseLost:
            raise
        except PenstockError as error:
            self._refuse(command, _reason(error))
        except Exception as error:
            logger.exception("a command failed number=%d kind=%s", command.number, command.kind.value)
            self._refuse(command, f"unexpected {type(error).__name__}; the log has details")
        else:
            if is_done:
                self.store.answer_command(command.number, CommandStatus.DONE)

    def _refuse(self, command: Command, reason: str) -> None:
        self.store.answer_command(command.number, CommandStatus.REFUSED, reason)

    # Views: empty if they do not apply to an output

    @property
    def table_ids(self) -> Mapping[str, int]:
        """The number that identifies each table, whatever its name is, by name."""
        return {}

    @property
    def phases(self) -> Mapping[str, TableReplicationPhase]:
        """The phase of each table, by name."""
        return {}

    @property
    def copies(self) -> Mapping[str, CopyStatus]:
        """Each table's last copy by this process, by name, from when it is planned."""
        return {}

    @property
    def waits(self) -> Mapping[str, SnapshotWait]:
        """The tables whose copies wait for open transactions to end, by name."""
        return {}

    @property
    def indexes(self) -> Mapping[str, IndexBuild]:
        """The last build of each index."""
        return {}

    @property
    def stopped(self) -> Mapping[str, PenstockError]:
        """The indexes that no longer fit the database, and why; the others go on."""
        return {}


class FailedOutput(RunningOutput):
    """An output that could not start: it refuses commands, with the reason, and does nothing else."""

    def __init__(self, definition: Output, lifecycle: Lifecycle, position: Lsn, error: Exception) -> None:
        super().__init__(definition.output, definition.settings, definition.store, lifecycle)
        self._position = position
        lifecycle.fail(error)

    @property
    def status(self) -> ApplyStatus:
        return ApplyStatus(self._position, self._position, 0, 0, 0)

    def refresh(self, published: Published) -> None:
        """Do nothing."""

    def tend(self, *, source_answers: bool) -> None:
        """Do nothing."""

    def carry_out(self, command: Command) -> bool:
        """Refuse the command; not called, because the output has an error."""
        raise unknown_command(command)


def unknown_command(command: Command, hint: str = "") -> PenstockError:
    """Return the error for a command that an output does not support."""
    return PenstockError(f"this output does not support the command {command.kind.value!r}", hint=hint)


def _reason(error: BaseException) -> str:
    if not isinstance(error, PenstockError):
        return type(error).__name__
    return ". ".join(filter(None, (str(error), error.hint)))
