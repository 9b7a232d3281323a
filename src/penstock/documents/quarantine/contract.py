"""What was refused: which document, why, since when, and how often. Never its body: only a hash of it.

A document in quarantine is not in the index as it should be; the body that was there before may still be. It leaves
in three ways. Its rows change, and the new body is taken. Somebody asks to try it again (`retry`): whoever drives the
pipeline finds it in `wanted`, builds it anew, and drops it when it was taken; if it was refused again, it stays, counts
one attempt more and is wanted no longer. Or somebody drops it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from penstock.documents.base import Rejection
from penstock.lsn import Lsn


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A document that was refused."""

    index: str
    id: str
    reason: str
    position: Lsn | None
    """Where the stream was; None if the index was being built."""
    body_hash: str
    """Tells whether it is the same body that is refused again."""
    first_at: datetime
    last_at: datetime
    attempts: int
    wanted: bool
    """Somebody asked to try it again, and nobody has yet."""


class QuarantineStore(Protocol):
    """Used by the pipeline and by commands at the same time; every call is durable when it returns."""

    def add(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Set documents aside. One that is there already counts one attempt more, and is wanted no longer."""
        ...

    def entries(self, index: str | None = None, *, limit: int | None = None) -> list[Quarantined]:
        """What is there, of one index or of all: those that were refused last come first."""
        ...

    def counts(self) -> Mapping[str, int]:
        """How many documents of each index are there; indexes with none are left out."""
        ...

    def retry(self, index: str, ids: Sequence[str] | None = None) -> list[str]:
        """Ask to build these documents anew, or all of an index; gives the ids of those that are there."""
        ...

    def wanted(self, index: str) -> list[str]:
        """The documents that somebody asked to try again."""
        ...

    def drop(self, index: str, ids: Sequence[str] | None = None) -> int:
        """Forget these documents, or all of an index; gives how many there were."""
        ...

    def close(self) -> None:
        """Close what it holds open."""
        ...
