"""Named points in the code at which a test can kill, delay or fail this process.

    PENSTOCK_FAILPOINTS="after_finished_copy=kill"                      SIGKILL on reaching the point
    PENSTOCK_FAILPOINTS="after_progress=kill:2,before_snapshot=sleep:1" SIGKILL the second time; wait 1 s, every time
    PENSTOCK_FAILPOINTS="before_rollback=error"                         raise `FailpointReached` once

The environment is read once, on import. If nothing is armed, `reach` only looks at an empty dict.
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
    "before_lease": "nothing has been changed",
    "after_lease": "only the lease is held",
    "before_slot": "stored positions are deleted, the new slot does not exist yet",
    "after_slot": "the slot exists, nothing has been captured",
    "after_drop": "a table's earlier copy is fenced, its phase is unchanged",
    "after_data_sync": "DataSync is stored, the table's changes are not held yet",
    "before_snapshot": "the table's changes are held",
    "after_snapshot": "the snapshot is exported, no row is copied",
    "during_copy": "the ranges are planned, tasks are about to write them",
    "after_copy": "the rows are durable at the destination, the schema is not stored",
    "before_finished_copy": "the schema is stored",
    "after_finished_copy": "FinishedCopy is stored, catch-up begins",
    "in_sync_wait": "the worker is about to ask the apply worker where to hand over",
    "in_catchup": "the apply worker has named the boundary, the table worker is catching up to it",
    "before_sync_done": "the table's position is stored, SyncDone is not",
    "after_sync_done": "SyncDone is stored, the apply worker has not taken the table over",
    "after_write": "a batch is durable at the destination, progress is not stored",
    "before_solo_write": "a table is about to be written by itself, its position is where it was",
    "after_solo_write": "a table that was written by itself is durable, its position is not recorded",
    "before_columns": "a table without changes is about to get the columns of the catalog",
    "before_partitions": "a table has reached the snapshot of the partitions that are copied",
    "during_partitions": "tasks are about to copy partitions and to remove rows",
    "after_partitions": "the partitions are copied, the table's shape is not stored",
    "before_progress": "positions have moved in memory",
    "after_progress": "progress is stored, nothing is acknowledged or handed over",
    "after_hand_over": "tables have their boundaries",
    "after_ready": "Ready is stored",
    "after_acknowledge": "the spool's reader has advanced, the slot follows",
    "before_errored": "a table has failed",
    "before_recopy": "a table has to be copied again because of its schema",
    "after_errored": "Errored is stored with its position",
    "before_lose_position": "the hold of an errored table has expired",
    "after_lose_position": "the lost position is stored, progress has not moved past it",
    "after_finished_ranges": "some ranges of a copy are durable and recorded, tasks go on to the next",
    "before_reread": "all ranges of a resumed copy are read, rows that changed meanwhile are not",
    "before_give_up_resuming": "a copy has held back progress for too long",
    "before_rollback": "a retry is due",
    "after_rollback": "SyncDone or Init is stored, the workers do not know it yet",
    "after_recopy": "Init is stored because rows changed without a message",
    "after_resync": "Init is stored because of a resync",
    "after_removed": "the state of a table that left the publication is deleted",
}
"""Every point of a tables output, with the state it is reached in."""

DOCUMENT_POINTS = {
    "after_documents": "the documents of a batch are durable, the relation map is not updated",
    "after_links": "the relation map is updated, progress is not stored",
    "after_documents_progress": "progress is stored, nothing is acknowledged",
    "after_documents_acknowledge": "the spool's reader has advanced",
    "after_maps": "the relation maps are seeded, no index build has started",
    "after_build_wanted": "an index build is requested, its new generation does not exist yet",
    "after_reindex": "the new generation exists, the store does not know it yet",
    "after_build_planned": "the ranges of a build are stored, none is finished",
    "after_range": "the documents of some ranges are durable, the store does not know it yet",
    "before_removals": "all ranges are finished, documents removed meanwhile are not checked again yet",
    "before_seeded": "the new generation is complete, the old one still serves",
    "after_seeded": "the new generation serves, the store does not know it yet",
    "after_fan_out": "the documents of a large fan-out are durable, the store does not know it yet",
}
"""Every point of a documents output."""


class _Kind(StrEnum):
    KILL = "kill"
    ERROR = "error"
    SLEEP = "sleep"


@dataclass(slots=True)
class _Action:
    kind: _Kind
    number: float
    """Which arrival triggers the action; for `sleep`, the seconds."""
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
    """Run the action armed for a point of `POINTS` or `DOCUMENT_POINTS`; do nothing if there is none."""
    if _actions and (action := _actions.get(name)) is not None:
        action.happen(name)


def arm(text: str) -> None:
    """Replace all armed actions with those in `text`, written as in the environment; empty disarms everything."""
    actions = dict(_parse(each.strip()) for each in text.split(",") if each.strip())
    _actions.clear()
    _actions.update(actions)


def _parse(text: str) -> tuple[str, _Action]:
    name, _, action = text.partition("=")
    kind, _, number = action.partition(":")
    if name not in POINTS | DOCUMENT_POINTS:
        raise ConfigError(f"{VARIABLE} names an unknown point: {name!r}", hint="See penstock.failpoints.")
    try:
        return name, _Action(_Kind(kind), float(number or 1))
    except ValueError:
        raise ConfigError(
            f"{VARIABLE} has an unknown action: {action!r}",
            hint="Use kill, kill:2, error, error:2 or sleep:0.5.",
        ) from None


arm(os.environ.get(VARIABLE, ""))
