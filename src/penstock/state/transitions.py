"""Which phase may follow which: the rules of coordination, as functions from values to values.

Workers, stores and the model that explores the protocol exhaustively all call these. A transition that is not allowed
raises `IllegalTransition`. Nothing here reads a clock, a store or a server.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from penstock.errors import RESYNC, IllegalTransition, Retry
from penstock.lsn import Lsn, furthest, reaches
from penstock.state.phases import (
    Catchup,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Ready,
    Resumption,
    RetryPolicy,
    StoredPhase,
    SyncDone,
    SyncWait,
    TableReplicationPhase,
    stored_form,
)

LONGEST_RETRY_SECONDS = 300.0
"""No retry is planned for later than this."""
_RESYNC = f"Copy the table again: {RESYNC}."
_TOO_LATE = f"The table held back progress for too long. Fix the cause, then copy the table again: {RESYNC}."


def discover(current: StoredPhase | None) -> StoredPhase:
    """A table is in the publication: a new one starts at Init, a known one keeps its phase."""
    return Init() if current is None else current


def start_copy(current: TableReplicationPhase, resumption: Resumption | None = None) -> DataSync:
    """A copy starts, or restarts after a failed attempt; with `resumption`, the next attempt can continue it."""
    if not isinstance(current, Init | DataSync | FinishedCopy):
        raise _illegal(current, DataSync.name, "only a table in Init can be copied")
    return DataSync(resumption)


def give_up_resuming(current: TableReplicationPhase) -> DataSync | Errored | None:
    """A copy that is interrupted starts again; None if the table has no copy that could be resumed.

    Store this *before* progress passes the changes that resuming needs. A running copy is not disturbed.
    """
    if isinstance(current, DataSync) and current.resumption is not None:
        return DataSync()
    if isinstance(current, Errored) and current.resumption is not None:
        return replace(current, previous=DataSync())
    return None


def finish_copy(current: TableReplicationPhase) -> FinishedCopy:
    """The whole copy is durable at the destination."""
    if not isinstance(current, DataSync):
        raise _illegal(current, FinishedCopy.name)
    return FinishedCopy()


def wait_for_apply(current: TableReplicationPhase) -> SyncWait:
    """The table sync worker is within one batch of the apply worker."""
    if not isinstance(current, FinishedCopy):
        raise _illegal(current, SyncWait.name)
    return SyncWait()


def hand_over(current: TableReplicationPhase, *, snapshot: Lsn, applied: Lsn, acknowledged: Lsn) -> Catchup:
    """The apply worker names the boundary at which it takes the table over: max(S, P, A).

    `snapshot` S: the copy has everything below. `applied` P: the apply worker has passed it. `acknowledged` A, the
    highest position ever stored or handed to capture: after a crash the server sends nothing below it.
    """
    if not isinstance(current, SyncWait):
        raise _illegal(current, Catchup.name)
    return Catchup(furthest(snapshot, applied, acknowledged))


def finish_catchup(current: TableReplicationPhase, durable: Lsn) -> SyncDone:
    """The table sync worker has reached the boundary of the hand-over; `durable` is the table's position."""
    if not isinstance(current, Catchup):
        raise _illegal(current, SyncDone.name)
    if not reaches(durable, current.lsn):
        raise _illegal(current, SyncDone.name, f"the table is durable only up to {durable}, not {current.lsn}")
    return SyncDone(current.lsn)


def may_be_ready(current: TableReplicationPhase, durable: Lsn) -> bool:
    """Return True if a table in SyncDone is Ready once it is durable up to `durable`."""
    return isinstance(current, SyncDone) and reaches(durable, current.lsn)


def become_ready(current: TableReplicationPhase, durable: Lsn) -> Ready:
    """The apply worker has taken the table over, at or after the boundary of the hand-over."""
    if not may_be_ready(current, durable):
        raise _illegal(current, Ready.name, f"the table is durable only up to {durable}")
    return Ready()


def fail(
    current: TableReplicationPhase,
    *,
    reason: str,
    solution: str | None,
    retry_policy: RetryPolicy,
    at: datetime,
    position: Lsn | None = None,
    after: Errored | None = None,
    resumes: bool = False,
) -> Errored:
    """The table stops. `position` is the boundary up to which it is durable; required in SyncDone and Ready.

    A table that fails again keeps its previous phase, the time of the first failure and its position, or that it is
    lost. So does a table that was rolled back from the error `after` and has not advanced since: a table that fails at
    every retry does not hold back progress forever. With `resumes`, a copy that can be resumed is; otherwise it starts
    again.
    """
    if isinstance(current, Errored):
        policy = RetryPolicy() if current.position_lost else retry_policy
        solution = current.solution if current.position_lost else solution
        attempts = current.attempts + 1
        return replace(current, reason=reason, solution=solution, retry_policy=policy, attempts=attempts)
    previous = stored_form(current if resumes else give_up_resuming(current) or current)
    assert not isinstance(previous, Errored)
    if isinstance(previous, SyncDone | Ready):
        if position is None:
            raise _illegal(current, Errored.name, "a table that fails in SyncDone or Ready needs a position")
        if isinstance(previous, SyncDone):
            position = furthest(position, previous.lsn)
    else:
        position = None
    if after is not None and after.position == position and not after.position_lost:
        return Errored(reason, solution, retry_policy, previous, after.since, position, attempts=after.attempts + 1)
    return Errored(reason, solution, retry_policy, previous, at, position)


def lose_position(current: TableReplicationPhase) -> Errored:
    """The hold has ended. Store this *before* progress passes the table; afterwards only a new copy is legal."""
    if not isinstance(current, Errored) or current.position is None:
        raise _illegal(current, "errored with its position lost", "it has no position")
    # The earlier solution may suggest a rollback, which is no longer legal.
    return replace(current, position_lost=True, retry_policy=RetryPolicy(), solution=_TOO_LATE)


def roll_back(current: TableReplicationPhase) -> Init | DataSync | SyncDone:
    """Return the phase from which an Errored table resumes, on request or at a timed retry.

    Never another Errored, and never Ready: a table with a position comes back as SyncDone at that position, and becomes
    Ready when the apply worker has caught up. A copy that can be resumed continues. Any other table starts again from
    Init. A table whose position is lost can only be resynced.
    """
    if not isinstance(current, Errored):
        raise IllegalTransition(
            f"the table is {current.name}, and only an errored table can be rolled back",
            hint=f"To copy it again, run: {RESYNC}.",
            current=current.name,
            wanted="an earlier phase",
        )
    if current.position_lost:
        raise IllegalTransition(
            "the changes since the error are lost, so resuming would leave a gap", hint=_RESYNC, current=current.name
        )
    if current.resumption is not None:
        return DataSync(current.resumption)
    return Init() if current.position is None else SyncDone(current.position)


def retry_is_due(current: TableReplicationPhase, now: datetime) -> bool:
    """Return True if it is time to retry the table."""
    if not isinstance(current, Errored) or current.position_lost:
        return False
    policy = current.retry_policy
    if policy.retry is not Retry.TIMED or policy.next_retry is None:
        return False
    # A retry that lies further ahead was planned before the clock was set back.
    return not now < policy.next_retry <= now + timedelta(seconds=LONGEST_RETRY_SECONDS)


def resync(reason: str | None = None) -> Init:
    """A new copy, on request or for a `reason` that Penstock found; legal in every phase."""
    return Init(reason)


def after_crash(current: TableReplicationPhase, start: Lsn) -> StoredPhase:
    """Return the phase at the next start, at which replication continues at `start`.

    A table that was handed over, or is errored, keeps its phase. A copy is resumed if the changes that this needs come
    again, and starts again otherwise.
    """
    stored = stored_form(current)
    if isinstance(stored, DataSync | Errored):
        resumption = stored.resumption
        if resumption is not None and not reaches(resumption.since, start):
            stored = give_up_resuming(stored) or stored
    if isinstance(stored, DataSync) and stored.resumption is not None:
        return stored
    return stored if isinstance(stored, SyncDone | Ready | Errored) else Init()


def is_legal(current: TableReplicationPhase | None, new: TableReplicationPhase) -> bool:
    """Return True if `new` may follow `current`; every phase may follow itself."""
    if current == new or isinstance(new, Init):
        return True
    match new:
        case DataSync(resumption):
            continues = isinstance(current, Errored) and resumption is not None and current.resumption == resumption
            return continues or isinstance(current, Init | DataSync | FinishedCopy)
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
    """Return `new` if a store may set it; the phases between FinishedCopy and SyncDone are never stored."""
    if isinstance(new, SyncWait | Catchup):
        raise _illegal(current, new.name, "this phase is never stored")
    through_memory = isinstance(current, FinishedCopy) and isinstance(new, SyncDone)
    if not through_memory and not is_legal(current, new):
        raise _illegal(current, new.name)
    return new


def _may_be_errored(current: TableReplicationPhase, new: Errored) -> bool:
    before = current.previous if isinstance(current, Errored) else stored_form(current)
    # Resuming may be given up at any time.
    is_previous = new.previous == before or (isinstance(before, DataSync) and new.previous == DataSync())
    if isinstance(current, Errored):
        kept = (current.position, current.since) == (new.position, new.since)
        return is_previous and kept and new.position_lost >= current.position_lost
    # A position is held before it is lost: the loss is stored before progress passes the table.
    return is_previous and not new.position_lost


def _illegal(current: TableReplicationPhase | None, wanted: str, why: str = "") -> IllegalTransition:
    name = "nothing" if current is None else current.name
    reason = f": {why}" if why else ""
    return IllegalTransition(f"a table cannot go from {name} to {wanted}{reason}", current=name, wanted=wanted)
