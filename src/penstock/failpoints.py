"""Places at which a test can end, delay or fail this process: the points between two steps that must not be confused.

    PENSTOCK_FAILPOINTS="after_finished_copy=kill"                      SIGKILL when it is reached
    PENSTOCK_FAILPOINTS="after_progress=kill:2,before_snapshot=sleep:1" the second time; a second's pause, each time
    PENSTOCK_FAILPOINTS="before_rollback=error"                         raise `FailpointReached`, once

The environment is read once, when this module is imported. Where it has nothing, `reach` is a look into an empty dict.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.errors import ConfigError, FailpointReached

VARIABLE = "PENSTOCK_FAILPOINTS"

POINTS = {
    "before_lease": "nothing has been touched",
    "after_lease": "the lease is held, nothing else",
    "before_slot": "stored positions are deleted, the new slot is not there",
    "after_slot": "the slot is there, nothing has been captured",
    "after_drop": "a table's earlier copy is fenced, its phase is the old one",
    "after_data_sync": "DataSync is stored, its changes are not held",
    "before_snapshot": "its changes are held",
    "after_snapshot": "the keeper has the snapshot, no row is copied",
    "during_copy": "the ranges are planned, tasks are about to write them",
    "after_copy": "the rows are durable at the destination, the schema is not stored",
    "before_finished_copy": "the schema is stored",
    "after_finished_copy": "FinishedCopy is stored, catching up begins",
    "in_sync_wait": "the worker is about to ask apply where to hand over",
    "in_catchup": "apply has named the boundary, the worker is on its way",
    "before_sync_done": "the table's position is stored, SyncDone is not",
    "after_sync_done": "apply has not taken the table over",
    "after_write": "a batch is durable at the destination, progress is not stored",
    "before_progress": "positions have moved in memory",
    "after_progress": "progress is stored, nothing is acknowledged, nothing handed over",
    "after_hand_over": "tables have their boundaries",
    "after_ready": "Ready is stored",
    "after_acknowledge": "the spool's reader has advanced, the slot follows",
    "before_errored": "a table has failed",
    "after_errored": "Errored is stored with its position",
    "before_lose_position": "the hold is over",
    "after_lose_position": "that is stored, progress has not passed",
    "before_rollback": "a retry is due",
    "after_rollback": "SyncDone or Init is stored, the workers do not know it",
    "after_resync": "Init is stored because somebody asked for a new copy",
    "after_removed": "the state of a table that left is deleted",
}
"""Every point of a pipeline of tables, with what is true when it is reached."""

DOCUMENT_POINTS = {
    "after_documents": "the documents of changes are durable, what rows hang on is not remembered",
    "after_links": "what rows hang on is remembered, progress is not stored",
    "after_documents_progress": "progress is stored, nothing is acknowledged",
    "after_documents_acknowledge": "the spool's reader has advanced",
    "after_maps": "the maps of relations are seeded, no index is being built for them",
    "after_build_wanted": "an index is to be built anew, its fresh generation is not there",
    "after_reindex": "the fresh generation is there, the store does not know it",
    "after_build_planned": "the ranges of a build are stored, none is done",
    "after_range": "documents of ranges are durable, the store does not know it",
    "before_removals": "all ranges are done, what went meanwhile is not looked at again",
    "before_seeded": "the fresh generation is complete, the old one serves",
    "after_seeded": "the fresh generation serves, the store does not know it",
    "after_fan_out": "the documents of a change with many are durable, the store does not know it",
}
"""Every point of an output of search documents."""


class _Kind(StrEnum):
    KILL = "kill"
    ERROR = "error"
    SLEEP = "sleep"


@dataclass(slots=True)
class _Action:
    kind: _Kind
    number: float
    """At which time it happens; for `sleep` the seconds."""
    reached: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def happen(self, name: str) -> None:
        with self.lock:
            self.reached += 1
            due = self.reached == self.number
        if self.kind is _Kind.SLEEP:
            time.sleep(self.number)
        elif due and self.kind is _Kind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif due:
            raise FailpointReached(f"failpoint {name!r}", point=name)


_actions: dict[str, _Action] = {}


def reach(name: str) -> None:
    """Say that a point of `POINTS` or `DOCUMENT_POINTS` is reached; nothing happens unless a test asked for it."""
    if _actions and (action := _actions.get(name)) is not None:
        action.happen(name)


def arm(text: str) -> None:
    """Replace what is to happen by what `text` says, in the notation of the environment; empty for nothing."""
    actions = dict(_parse(each.strip()) for each in text.split(",") if each.strip())
    _actions.clear()
    _actions.update(actions)


def _parse(text: str) -> tuple[str, _Action]:
    name, _, action = text.partition("=")
    kind, _, number = action.partition(":")
    if name not in POINTS | DOCUMENT_POINTS:
        raise ConfigError(f"{VARIABLE} names a point that does not exist: {name!r}", hint="See penstock.failpoints.")
    try:
        return name, _Action(_Kind(kind), float(number or 1))
    except ValueError:
        raise ConfigError(
            f"{VARIABLE} has an action that is not known: {action!r}",
            hint="Use kill, kill:2, error, error:2 or sleep:0.5.",
        ) from None


arm(os.environ.get(VARIABLE, ""))
