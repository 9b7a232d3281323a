"""The part of a store about commands: requests to the process that runs the pipeline, and its answers."""

from __future__ import annotations

import getpass
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from penstock.errors import StateError
from penstock.state.core import StoreCore
from penstock.state.phases import storable_text
from penstock.state.records import CommandRecord, Transaction

KEPT_ANSWERS = 200
"""Answered commands that are remembered per pipeline."""


class CommandKind(StrEnum):
    """What can be asked of a pipeline."""

    RESYNC = "resync"
    """Copy tables again."""
    ROLLBACK = "rollback"
    """Resume errored tables where they stopped."""
    PAUSE = "pause"
    RESUME = "resume"
    VERIFY = "verify"
    """Hold tables at one position, to compare them with the source."""
    REFRESH = "refresh"
    """Load the publication again."""
    REBUILD_INDEX = "rebuild_index"
    """Rebuild search indexes beside those that serve; `options["indexes"]` names them, none means all."""
    UNKNOWN = "unknown"
    """A command of another version of Penstock; it is refused."""

    @classmethod
    def _missing_(cls, value: object) -> CommandKind:
        return cls.UNKNOWN


_SWITCHES = (CommandKind.PAUSE, CommandKind.RESUME)
"""Commands whose last one is state: it is never forgotten."""


class CommandStatus(StrEnum):
    """The status of a command: pending → accepted → done or refused; or refused at once."""

    PENDING = "pending"
    ACCEPTED = "accepted"
    DONE = "done"
    REFUSED = "refused"
    """Also a status of another version of Penstock, which this one cannot act on."""

    @classmethod
    def _missing_(cls, value: object) -> CommandStatus:
        return cls.REFUSED


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its answer."""

    number: int
    kind: CommandKind
    tables: tuple[str, ...]
    """Names or patterns; empty means all. The process that runs the pipeline resolves them."""
    options: Mapping[str, Any]
    """JSON values only."""
    status: CommandStatus
    reason: str | None
    requested_by: str
    requested_at: datetime
    answered_at: datetime | None

    @property
    def answered(self) -> bool:
        """True if the command is done or refused."""
        return self.status in (CommandStatus.DONE, CommandStatus.REFUSED)


class CommandStore(StoreCore):
    """Requests to a pipeline that may run in another process, or not at all now."""

    def add_command(
        self,
        kind: CommandKind,
        tables: Sequence[str] = (),
        *,
        options: Mapping[str, Any] | None = None,
        requested_by: str | None = None,
    ) -> Command:
        """Add a command. Any process may, without the lease."""
        token, asker = uuid.uuid4().hex, requested_by or this_user()

        def work(transaction: Transaction) -> Command:
            known = transaction.rows(CommandRecord)
            mine = next((record for record in known if record.token == token), None)
            if mine is None:
                mine = CommandRecord(
                    number=1 + max((record.number for record in known), default=0),
                    token=token,
                    kind=kind.value,
                    tables=list(tables),
                    options=dict(options or {}),
                    status=CommandStatus.PENDING.value,
                    reason=None,
                    requested_by=asker,
                    requested_at=transaction.now(),
                    answered_at=None,
                    epoch=0,
                )
                transaction.put([mine])
            return _to_command(mine)

        return self.database.run(work)

    def take_commands(self) -> list[Command]:
        """Accept all pending commands, in order, and those an earlier process accepted but did not answer.

        So carrying out a command twice must do no harm. Called by the holder of the lease, about once a second.
        """
        epoch = self.held_lease().epoch

        def work(transaction: Transaction) -> list[Command]:
            waiting = transaction.rows(CommandRecord, status=CommandStatus.PENDING.value)
            # Accepted by an earlier process, which will never answer.
            orphaned = transaction.rows(CommandRecord, status=CommandStatus.ACCEPTED.value)
            taken = [*waiting, *(record for record in orphaned if record.epoch != epoch)]
            accepted = [replace(record, status=CommandStatus.ACCEPTED.value, epoch=epoch) for record in taken]
            transaction.put(accepted)
            return [_to_command(record) for record in sorted(accepted, key=lambda each: each.number)]

        # Called every second and nearly always without result: avoid the write transaction.
        if not self.read(_has_open):
            return []
        return self.write(work)

    def answer_command(self, number: int, status: CommandStatus, reason: str | None = None) -> Command:
        """Answer a command: done, or refused with the reason. A second answer changes nothing."""
        if status not in (CommandStatus.DONE, CommandStatus.REFUSED):
            raise ValueError("the answer to a command must be 'done' or 'refused'")
        text = None if reason is None else storable_text(reason)

        def work(transaction: Transaction) -> Command:
            found = next(iter(transaction.rows(CommandRecord, number=number)), None)
            if found is None:
                raise StateError(f"command {number} does not exist")
            if _to_command(found).answered:
                return _to_command(found)
            answer = replace(found, status=status.value, reason=text, answered_at=transaction.now())
            transaction.put([answer])
            _forget_old(transaction)
            return _to_command(answer)

        return self.write(work)

    def get_command(self, number: int) -> Command | None:
        """Return one command, or None. Reads the database."""
        return next((each for each in self.get_commands() if each.number == number), None)

    def get_commands(self) -> list[Command]:
        """Return all commands, oldest first; at least 100 answered ones are kept. Reads the database."""
        return self.read(lambda transaction: [_to_command(record) for record in transaction.rows(CommandRecord)])

    def is_paused(self) -> bool:
        """Return True if the last request to pause or resume was to pause. A restart does not end a pause."""
        asked = [
            command
            for command in self.get_commands()
            if command.kind in _SWITCHES and command.status is not CommandStatus.REFUSED
        ]
        return bool(asked) and asked[-1].kind is CommandKind.PAUSE


def _has_open(transaction: Transaction) -> bool:
    statuses = (CommandStatus.PENDING, CommandStatus.ACCEPTED)
    return any(transaction.rows(CommandRecord, status=status.value) for status in statuses)


def _forget_old(transaction: Transaction) -> None:
    answered = [record for record in transaction.rows(CommandRecord) if _to_command(record).answered]
    switches = [record for record in answered if record.kind in _SWITCHES and record.status == CommandStatus.DONE]
    for record in answered[:-KEPT_ANSWERS]:
        if record in switches[-1:]:
            continue
        transaction.delete(CommandRecord, number=record.number)


def _to_command(record: CommandRecord) -> Command:
    return Command(
        number=record.number,
        kind=CommandKind(record.kind),
        tables=tuple(record.tables),
        options=record.options,
        status=CommandStatus(record.status),
        reason=record.reason,
        requested_by=record.requested_by,
        requested_at=record.requested_at,
        answered_at=record.answered_at,
    )


def this_user() -> str:
    """Return the user and the machine, as commands name who asked."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
