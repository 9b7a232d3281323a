"""The phases of a table, from discovery to `Ready`: plain values, and how they are stored.

    Init → DataSync → FinishedCopy → SyncWait → Catchup{lsn} → SyncDone{lsn} → Ready          Errored{…}

`SyncWait` and `Catchup` exist in memory only: they are a conversation between two threads, which a crash ends.
`transitions.py` has the legal transitions, `positions.py` the rules for progress; docs/concepts/phases.md explains
both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar, TypeAlias

from penstock.errors import Retry, StateError
from penstock.lsn import Lsn


class Owner(StrEnum):
    """Who sets a phase."""

    PIPELINE = "pipeline"
    """The start of the pipeline, changes of the publication, and commands."""
    TABLE_SYNC = "table_sync"
    APPLY = "apply"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What happens after an error: a retry at `next_retry` (`Retry.TIMED`), or nothing until the operator decides."""

    retry: Retry = Retry.OPERATOR
    next_retry: datetime | None = None

    def __post_init__(self) -> None:
        if (self.retry is Retry.TIMED) != (self.next_retry is not None):
            raise ValueError("a retry has a time if and only if it is timed")


@dataclass(frozen=True, slots=True)
class Init:
    """Discovered, or waiting to be copied again."""

    reason: str | None = None
    """Why Penstock copies it again automatically; None if it is new, or if the copy was requested."""
    name: ClassVar[str] = "init"
    owner: ClassVar[Owner] = Owner.PIPELINE


@dataclass(frozen=True, slots=True)
class Resumption:
    """What lets the next attempt continue an interrupted copy, instead of starting again."""

    copy: str
    """Names the copy: the destination keeps its finished ranges under this name."""
    since: Lsn
    """Progress stays here, so the changes since then come again; every snapshot of the copy is after it."""


@dataclass(frozen=True, slots=True)
class DataSync:
    """Being copied."""

    resumption: Resumption | None = None
    """None if an interrupted copy starts again."""
    name: ClassVar[str] = "data_sync"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """The copy is durable; the table sync worker applies the changes since the snapshot."""

    name: ClassVar[str] = "finished_copy"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class SyncWait:
    """The table sync worker is close to the apply worker and waits for the boundary of the hand-over."""

    name: ClassVar[str] = "sync_wait"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class Catchup:
    """The apply worker takes the table over at `lsn`; the table sync worker brings it exactly there."""

    lsn: Lsn
    name: ClassVar[str] = "catchup"
    owner: ClassVar[Owner] = Owner.APPLY


@dataclass(frozen=True, slots=True)
class SyncDone:
    """Everything below `lsn` is durable at the destination; the apply worker continues from there."""

    lsn: Lsn
    name: ClassVar[str] = "sync_done"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class Ready:
    """The apply worker applies the changes of the table."""

    name: ClassVar[str] = "ready"
    owner: ClassVar[Owner] = Owner.APPLY


Sound: TypeAlias = Init | DataSync | FinishedCopy | SyncDone | Ready
"""The stored phases other than Errored; an error interrupts one of these."""


@dataclass(frozen=True, slots=True)
class Errored:
    """The table stopped; the others continue. It can resume at `position`, unless that is None or lost."""

    reason: str
    solution: str | None
    retry_policy: RetryPolicy
    previous: Sound
    """The phase in which it failed; never another Errored."""
    since: datetime
    """When it first failed; `error_hold` counts from then."""
    position: Lsn | None = None
    """Where the table is durable and holds back progress; None if it has to be copied anyway."""
    position_lost: bool = False
    """Progress has passed the table, so its changes are lost: only a new copy is legal."""
    attempts: int = 0
    """Number of retries so far, for the back-off."""
    name: ClassVar[str] = "errored"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC
    """The apply worker sets it, too, for its tables."""

    def __post_init__(self) -> None:
        followed = isinstance(self.previous, SyncDone | Ready)
        if isinstance(self.previous, Errored) or followed != (self.position is not None):
            raise ValueError("a table has a position if and only if it failed in SyncDone or Ready")
        if self.position_lost and self.position is None:
            raise ValueError("a position cannot be lost if there is none")
        object.__setattr__(self, "reason", storable_text(self.reason))
        object.__setattr__(self, "solution", None if self.solution is None else storable_text(self.solution))

    @property
    def holds(self) -> bool:
        """True if progress waits for this table."""
        return self.position is not None and not self.position_lost

    @property
    def resumption(self) -> Resumption | None:
        """What lets a copy continue that failed."""
        return self.previous.resumption if isinstance(self.previous, DataSync) else None


TableReplicationPhase: TypeAlias = Init | DataSync | FinishedCopy | SyncWait | Catchup | SyncDone | Ready | Errored
StoredPhase: TypeAlias = Sound | Errored
"""The phases that are stored."""

_PLAIN: dict[str, type[FinishedCopy | Ready]] = {kind.name: kind for kind in (FinishedCopy, Ready)}


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """An entry in a table's history."""

    phase: StoredPhase
    at: datetime
    epoch: int
    """The lease under which it was set."""


def is_persisted(phase: TableReplicationPhase) -> bool:
    """Return True if the phase survives a crash."""
    return not isinstance(phase, SyncWait | Catchup)


def stored_form(phase: TableReplicationPhase) -> StoredPhase:
    """Return the phase that the store has while a table is in `phase`."""
    return FinishedCopy() if isinstance(phase, SyncWait | Catchup) else phase


def phase_to_json(phase: StoredPhase) -> dict[str, Any]:
    """Return the details of a phase besides its name, as JSON values."""
    if isinstance(phase, Init):
        return {} if phase.reason is None else {"reason": storable_text(phase.reason)}
    if isinstance(phase, DataSync):
        resumption = phase.resumption
        return {} if resumption is None else {"copy": resumption.copy, "since": str(resumption.since)}
    if isinstance(phase, SyncDone):
        return {"lsn": str(phase.lsn)}
    if isinstance(phase, Errored):
        policy = phase.retry_policy
        return {
            "reason": phase.reason,
            "solution": phase.solution,
            "retry": policy.retry.value,
            "next_retry": None if policy.next_retry is None else _to_text(policy.next_retry),
            "previous": {"phase": phase.previous.name, **phase_to_json(phase.previous)},
            "since": _to_text(phase.since),
            "position": None if phase.position is None else str(phase.position),
            "position_lost": phase.position_lost,
            "attempts": phase.attempts,
        }
    return {}


def phase_from_json(name: str, details: dict[str, Any]) -> StoredPhase:
    """Return the phase with this name and the details from `phase_to_json`."""
    if name != Errored.name:
        return _sound_from_json(name, details)
    next_retry, position = details["next_retry"], details["position"]
    return Errored(
        reason=details["reason"],
        solution=details["solution"],
        retry_policy=RetryPolicy(Retry(details["retry"]), None if next_retry is None else _from_text(next_retry)),
        previous=_sound_from_json(details["previous"]["phase"], details["previous"]),
        since=_from_text(details["since"]),
        position=None if position is None else Lsn.parse(position),
        position_lost=details["position_lost"],
        attempts=details["attempts"],
    )


def storable_text(text: str) -> str:
    """Replace characters that a store cannot hold: NUL and lone surrogates."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _sound_from_json(name: str, details: dict[str, Any]) -> Sound:
    if name == Init.name:
        return Init(details.get("reason"))
    if name == DataSync.name:
        return DataSync(Resumption(details["copy"], Lsn.parse(details["since"])) if "copy" in details else None)
    if name == SyncDone.name:
        return SyncDone(Lsn.parse(details["lsn"]))
    if name not in _PLAIN:
        raise StateError(f"unknown phase in the state: {name!r}")
    return _PLAIN[name]()


def _to_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat()


def _from_text(text: str) -> datetime:
    return datetime.fromisoformat(text)
