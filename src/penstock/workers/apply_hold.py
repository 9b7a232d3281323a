"""Holds the apply worker at a boundary, so that `verify` can compare all tables of an output there.

`verify` sends one command per step: `hold` (apply up to the server's current position, and no further), `advance` to
the position of a snapshot taken since, `renew` while the comparison runs, and `release`. Apply is held for seconds. If
the process that runs `verify` dies, the hold ends after a while. The option `asker` names the comparison: only one may
hold at a time, because a second one would move the boundary of the first.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

from penstock.errors import PenstockError
from penstock.lsn import Lsn, furthest, reaches
from penstock.state import Command, CommandStatus, Store
from penstock.workers.apply import ApplyWorker
from penstock.workers.board import Board
from penstock.workers.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long apply is held if the comparison does not renew the hold."""


class HoldStep(StrEnum):
    """The option `step` of a `verify` command."""

    HOLD = "hold"
    ADVANCE = "advance"
    """With the option `position`."""
    RENEW = "renew"
    RELEASE = "release"


class ApplyHold:
    """The hold of one output's apply worker. Used by the coordinator's thread alone.

    A batch that started before the limit was set may end beyond a `hold`, but never beyond an `advance`: its end was
    captured before the snapshot was taken.
    """

    def __init__(
        self,
        apply: ApplyWorker,
        board: Board,
        store: Store,
        lifecycle: Lifecycle,
        *,
        server_position: Callable[[], Lsn],
        name_of: Callable[[int], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._apply = apply
        self._board = board
        self._store = store
        self._lifecycle = lifecycle
        self._server_position = server_position
        self._name_of = name_of
        self._clock = clock
        self._waiting: Command | None = None
        self._asker: str | None = None
        self._deadline = 0.0

    @property
    def active(self) -> bool:
        """Return True if apply is held, or will be."""
        return self._apply.limit is not None

    def take(self, command: Command) -> None:
        """Carry out a step, or start to; `answer` reports when it is done."""
        step, asker = HoldStep(str(command.options["step"])), command.options.get("asker")
        if self.active and asker != self._asker:
            raise PenstockError(
                "another comparison is running",
                hint=f"Wait until it ends; if its process has died, its hold expires after {PATIENCE_SECONDS:g} s.",
            )
        if step is not HoldStep.HOLD and not self.active:
            raise PenstockError("the apply worker is no longer held", hint="Start the comparison again.")
        if self._lifecycle.paused and step is not HoldStep.RELEASE:
            raise PenstockError("the pipeline is paused", hint="`penstock resume` resumes it.")
        self._deadline = self._clock() + PATIENCE_SECONDS
        match step:
            case HoldStep.HOLD:
                # Apply may pass it while the server is asked. Any boundary before the snapshot will do.
                self._hold(command, furthest(self._server_position(), self._board.applied))
            case HoldStep.ADVANCE:
                position = Lsn.parse(str(command.options["position"]))
                if not reaches(position, self._board.applied):
                    raise PenstockError(f"the apply worker is already past {position}")
                self._hold(command, position)
            case HoldStep.RENEW:
                self._answer(command)
            case HoldStep.RELEASE:
                self._release()
                self._answer(command)

    def answer(self) -> None:
        """Answer steps whose boundary is reached; end a hold that was not renewed."""
        limit = self._apply.limit
        if limit is None:
            return
        waiting = self._waiting
        if waiting is not None and reaches(self._board.applied, limit):
            self._waiting = None
            self._answer(waiting, json.dumps({"left_out": self._left_out(limit)}))
        elif waiting is not None:
            # The comparison is waiting for an answer; reaching the boundary may take long.
            self._deadline = self._clock() + PATIENCE_SECONDS
        elif self._clock() > self._deadline:
            logger.warning("apply released at %s: the comparison did not renew its hold", limit)
            self._release()

    def _hold(self, command: Command, limit: Lsn) -> None:
        if self._waiting is not None:
            self._store.answer_command(self._waiting.number, CommandStatus.REFUSED, "replaced by a later request")
        self._apply.limit = limit
        self._waiting = command
        self._asker = command.options.get("asker")

    def _release(self) -> None:
        self._apply.limit = None
        self._waiting = None

    def _left_out(self, limit: Lsn) -> Mapping[str, str]:
        """Return the tables that are not exactly at the boundary, and why."""
        positions = self._board.positions()
        left: dict[str, str] = {}
        for table_id, phase in self._board.phases().items():
            if self._apply.is_apart(table_id):
                left[self._name_of(table_id)] = "being rewritten"
            elif positions.get(table_id) != limit:
                left[self._name_of(table_id)] = phase.name if table_id not in positions else "just copied"
        return left

    def _answer(self, command: Command, answer: str | None = None) -> None:
        self._store.answer_command(command.number, CommandStatus.DONE, answer)
