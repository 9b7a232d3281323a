"""The phases of a table, from its discovery to being followed for good: plain values, and how they are stored.

    Init → DataSync → FinishedCopy → SyncWait → Catchup{lsn} → SyncDone{lsn} → Ready          Errored{…}

`SyncWait` and `Catchup` live in memory only: they are a conversation between two threads, and after a crash there is
nobody to continue it. What may follow what is in `transitions.py`, what holds back progress in `positions.py`;
docs/concepts/phases.md tells the whole story.
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
    """The start of a pipeline, the publication's changes, and commands of people."""
    TABLE_SYNC = "table_sync"
    APPLY = "apply"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What happens after an error: `Retry.TIMED` at `next_retry`, or `Retry.OPERATOR` (a person decides)."""

    retry: Retry = Retry.OPERATOR
    next_retry: datetime | None = None

    def __post_init__(self) -> None:
        if (self.retry is Retry.TIMED) != (self.next_retry is not None):
            raise ValueError("a timed retry, and only that, has a time")


@dataclass(frozen=True, slots=True)
class Init:
    """Discovered, or to be copied again."""

    name: ClassVar[str] = "init"
    owner: ClassVar[Owner] = Owner.PIPELINE


@dataclass(frozen=True, slots=True)
class DataSync:
    """A copy runs."""

    name: ClassVar[str] = "data_sync"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class FinishedCopy:
    """The copy is durable; its worker applies what has changed since the snapshot."""

    name: ClassVar[str] = "finished_copy"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class SyncWait:
    """The worker is close enough and waits to hear where apply takes over."""

    name: ClassVar[str] = "sync_wait"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class Catchup:
    """Apply takes the table over at `lsn`; the worker has to bring it exactly there."""

    lsn: Lsn
    name: ClassVar[str] = "catchup"
    owner: ClassVar[Owner] = Owner.APPLY


@dataclass(frozen=True, slots=True)
class SyncDone:
    """All below `lsn` is durable at the destination; apply takes the table from there."""

    lsn: Lsn
    name: ClassVar[str] = "sync_done"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC


@dataclass(frozen=True, slots=True)
class Ready:
    """Apply follows the table."""

    name: ClassVar[str] = "ready"
    owner: ClassVar[Owner] = Owner.APPLY


Sound: TypeAlias = Init | DataSync | FinishedCopy | SyncDone | Ready
"""What a table can be in the store when it is not Errored, and so what an error can have interrupted."""


@dataclass(frozen=True, slots=True)
class Errored:
    """The table stopped, the others went on. With a `position` it can continue there, until that is lost."""

    reason: str
    solution: str | None
    retry_policy: RetryPolicy
    previous: Sound
    """Where it was when it failed; never another Errored."""
    since: datetime
    """When it first failed; what `error_hold` counts from."""
    position: Lsn | None = None
    """The boundary up to which the table is durable, and which it holds back progress at; None if it has to be copied
    anyway."""
    position_lost: bool = False
    """Progress has passed the table, so its changes are gone: only a new copy is legal."""
    attempts: int = 0
    """Retries so far, for the back-off."""
    name: ClassVar[str] = "errored"
    owner: ClassVar[Owner] = Owner.TABLE_SYNC
    """Apply sets it too, for tables that it follows."""

    def __post_init__(self) -> None:
        followed = isinstance(self.previous, SyncDone | Ready)
        if isinstance(self.previous, Errored) or followed != (self.position is not None):
            raise ValueError("a table that apply followed keeps a position when it fails, any other has none")
        if self.position_lost and self.position is None:
            raise ValueError("there is no position to lose")
        object.__setattr__(self, "reason", storable_text(self.reason))
        object.__setattr__(self, "solution", None if self.solution is None else storable_text(self.solution))

    @property
    def holds(self) -> bool:
        """Whether progress waits for this table."""
        return self.position is not None and not self.position_lost


TableReplicationPhase: TypeAlias = Init | DataSync | FinishedCopy | SyncWait | Catchup | SyncDone | Ready | Errored
StoredPhase: TypeAlias = Sound | Errored
"""The phases that are persisted."""

_PLAIN: dict[str, type[Init | DataSync | FinishedCopy | Ready]] = {
    kind.name: kind for kind in (Init, DataSync, FinishedCopy, Ready)
}


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """An entry in a table's history."""

    phase: StoredPhase
    at: datetime
    epoch: int
    """Of the lease under which it was set."""


def is_persisted(phase: TableReplicationPhase) -> bool:
    """Whether the phase survives a crash."""
    return not isinstance(phase, SyncWait | Catchup)


def stored_form(phase: TableReplicationPhase) -> StoredPhase:
    """What the store has while a table is in `phase`."""
    return FinishedCopy() if isinstance(phase, SyncWait | Catchup) else phase


def phase_to_json(phase: StoredPhase) -> dict[str, Any]:
    """What belongs to a phase besides its name, in plain values."""
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
    """The phase of this name with what `phase_to_json` gave."""
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
    """Text of unknown origin without what no store takes: NUL and half characters."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _sound_from_json(name: str, details: dict[str, Any]) -> Sound:
    if name == SyncDone.name:
        return SyncDone(Lsn.parse(details["lsn"]))
    if name not in _PLAIN:
        raise StateError(f"the state names a phase that is not known: {name!r}")
    return _PLAIN[name]()


def _to_text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat()


def _from_text(text: str) -> datetime:
    return datetime.fromisoformat(text)
