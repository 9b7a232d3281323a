"""What may follow what: the rules of coordination as functions from values to values.

Workers, stores and the model that explores the protocol exhaustively all call these; none of them has a copy. A step
that is not allowed raises `IllegalTransition`. Nothing here reads a clock, a store or a server.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from penstock.errors import RESYNC, IllegalTransition, Retry
from penstock.lsn import Lsn, furthest, is_in, reaches
from penstock.state.phases import (
    Catchup,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Ready,
    RetryPolicy,
    StoredPhase,
    SyncDone,
    SyncWait,
    TableReplicationPhase,
    stored_form,
)

_RESYNC = f"Copy the table again: {RESYNC}."
_TOO_LATE = f"It held back progress for too long. When the cause is gone, copy the table again: {RESYNC}."


def discover(current: StoredPhase | None) -> StoredPhase:
    """A table is in the publication: one that is new starts at Init, a known one stays what it is."""
    return Init() if current is None else current


def start_copy(current: TableReplicationPhase) -> DataSync:
    """A copy begins, or begins again after an attempt that did not get through."""
    if not isinstance(current, Init | DataSync | FinishedCopy):
        raise _illegal(current, DataSync.name, "only a table that was reset to Init is copied")
    return DataSync()


def finish_copy(current: TableReplicationPhase) -> FinishedCopy:
    """All of the copy is durable at the destination."""
    if not isinstance(current, DataSync):
        raise _illegal(current, FinishedCopy.name)
    return FinishedCopy()


def wait_for_apply(current: TableReplicationPhase) -> SyncWait:
    """The worker is within one batch of apply."""
    if not isinstance(current, FinishedCopy):
        raise _illegal(current, SyncWait.name)
    return SyncWait()


def hand_over(current: TableReplicationPhase, *, snapshot: Lsn, applied: Lsn, acknowledged: Lsn) -> Catchup:
    """Apply names the boundary from which it takes the table: max(S, P, A).

    `snapshot` S: the copy already has what is below. `applied` P: apply has already passed that. `acknowledged` A,
    the highest position ever stored or handed to capture: after a crash the server sends nothing below it.
    """
    if not isinstance(current, SyncWait):
        raise _illegal(current, Catchup.name)
    return Catchup(furthest(snapshot, applied, acknowledged))


def finish_catchup(current: TableReplicationPhase, durable: Lsn) -> SyncDone:
    """The worker has brought the table to the boundary that apply named; `durable` is how far it is."""
    if not isinstance(current, Catchup):
        raise _illegal(current, SyncDone.name)
    if not reaches(durable, current.lsn):
        raise _illegal(current, SyncDone.name, f"the table is durable up to {durable} only, not {current.lsn}")
    return SyncDone(current.lsn)


def may_be_ready(current: TableReplicationPhase, durable: Lsn) -> bool:
    """Whether a table in SyncDone is Ready now that apply has it durable up to `durable`."""
    return isinstance(current, SyncDone) and reaches(durable, current.lsn)


def become_ready(current: TableReplicationPhase, durable: Lsn) -> Ready:
    """Apply has taken the table over, and holds it at a boundary not before the hand-over."""
    if not may_be_ready(current, durable):
        raise _illegal(current, Ready.name, f"apply has it durable up to {durable}")
    return Ready()


def apply_takes(current: TableReplicationPhase, commit_lsn: int) -> bool:
    """Whether a change whose commit record starts at `commit_lsn` is apply's to write, and not the worker's."""
    if isinstance(current, SyncDone):
        return not is_in(commit_lsn, current.lsn)
    return isinstance(current, Ready)


def fail(
    current: TableReplicationPhase,
    *,
    reason: str,
    solution: str | None,
    retry_policy: RetryPolicy,
    at: datetime,
    position: Lsn | None = None,
    after: Errored | None = None,
) -> Errored:
    """The table stops. `position` is how far it is durable; needed where apply follows it, ignored before that.

    A table that fails again keeps what it had: where it was, since when, and its position, or that it is lost. The
    same holds for one that was rolled back from the error `after` and has not moved since: a table that fails at
    every retry does not hold progress for ever.
    """
    if isinstance(current, Errored):
        policy = RetryPolicy() if current.position_lost else retry_policy
        solution = current.solution if current.position_lost else solution
        attempts = current.attempts + 1
        return replace(current, reason=reason, solution=solution, retry_policy=policy, attempts=attempts)
    previous = stored_form(current)
    assert not isinstance(previous, Errored)
    if isinstance(previous, SyncDone | Ready):
        if position is None:
            raise _illegal(current, Errored.name, "a table that is followed keeps its position when it fails")
        if isinstance(previous, SyncDone):
            position = furthest(position, previous.lsn)
    else:
        position = None
    if after is not None and after.position == position and not after.position_lost:
        return Errored(reason, solution, retry_policy, previous, after.since, position, attempts=after.attempts + 1)
    return Errored(reason, solution, retry_policy, previous, at, position)


def lose_position(current: TableReplicationPhase) -> Errored:
    """The hold is over. To be stored *before* progress passes the table; afterwards only a new copy is legal."""
    if not isinstance(current, Errored) or current.position is None:
        raise _illegal(current, "errored with its position lost", "it holds no position")
    # What was advised before may lead to a rollback, which is not legal any more.
    return replace(current, position_lost=True, retry_policy=RetryPolicy(), solution=_TOO_LATE)


def roll_back(current: TableReplicationPhase) -> Init | SyncDone:
    """The phase from which an Errored table goes on, by a person's or a timer's decision.

    Never another Errored, and never Ready: a table that apply followed comes back as SyncDone at the position it
    holds, from where apply takes it, and is Ready again when nothing is missing. Before that there is nothing to go
    back to but the beginning. When its position is lost, only `resync` helps.
    """
    if not isinstance(current, Errored):
        raise _illegal(current, "an earlier phase", "only an errored table is rolled back")
    if current.position_lost:
        raise IllegalTransition(
            "the changes since the error are gone: going on would leave a gap", hint=_RESYNC, current=current.name
        )
    return Init() if current.position is None else SyncDone(current.position)


def retry_is_due(current: TableReplicationPhase, now: datetime) -> bool:
    """Whether a timed retry should roll the table back now."""
    if not isinstance(current, Errored) or current.position_lost:
        return False
    policy = current.retry_policy
    return policy.retry is Retry.TIMED and policy.next_retry is not None and policy.next_retry <= now


def resync(current: StoredPhase | None) -> Init:
    """A new copy, legal from everywhere: asked for by a person, or because changes were lost."""
    del current
    return Init()


def after_crash(current: TableReplicationPhase) -> StoredPhase:
    """What a table is at the next start: what was not handed over is copied again, all else stays."""
    stored = stored_form(current)
    return stored if isinstance(stored, SyncDone | Ready | Errored) else Init()


def is_legal(current: TableReplicationPhase | None, new: TableReplicationPhase) -> bool:
    """Whether `new` may follow `current`; staying the same always may."""
    if current == new or isinstance(new, Init):
        return True
    match new:
        case DataSync():
            return isinstance(current, Init | DataSync | FinishedCopy)
        case FinishedCopy():
            return isinstance(current, DataSync)
        case SyncWait():
            return isinstance(current, FinishedCopy)
        case Catchup():
            return isinstance(current, SyncWait)
        case SyncDone():
            return (isinstance(current, Catchup) and current.lsn == new.lsn) or (
                isinstance(current, Errored) and current.holds and current.position == new.lsn
            )
        case Ready():
            return isinstance(current, SyncDone)
        case Errored():
            return current is not None and _may_be_errored(current, new)


def check_stored(current: StoredPhase | None, new: TableReplicationPhase) -> StoredPhase:
    """What a store lets through: legal steps, where those between FinishedCopy and SyncDone were in memory."""
    if isinstance(new, SyncWait | Catchup):
        raise _illegal(current, new.name, "it is not stored: it lives in the memory of the workers")
    through_memory = isinstance(current, FinishedCopy) and isinstance(new, SyncDone)
    if not through_memory and not is_legal(current, new):
        raise _illegal(current, new.name)
    return new


def _may_be_errored(current: TableReplicationPhase, new: Errored) -> bool:
    if isinstance(current, Errored):
        kept = (current.previous, current.position, current.since) == (new.previous, new.position, new.since)
        return kept and new.position_lost >= current.position_lost
    # A lost position follows a held one: nobody may skip the step that is stored before progress moves.
    return stored_form(current) == new.previous and not new.position_lost


def _illegal(current: TableReplicationPhase | None, wanted: str, why: str = "") -> IllegalTransition:
    name = "nothing" if current is None else current.name
    reason = f": {why}" if why else ""
    return IllegalTransition(f"a table cannot go from {name} to {wanted}{reason}", current=name, wanted=wanted)
