"""How an engine groups changes, and what it does about documents that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.documents.base import Rejection
from penstock.errors import DocumentsRejected


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """A batch ends at so many changes, or so long after its first: whichever comes first."""

    max_changes: int = 256
    """At least 1. A transaction is never divided, so a batch can have more."""
    max_delay: float = 0.05
    """Seconds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_changes", max(1, self.max_changes))
        object.__setattr__(self, "max_delay", max(0.0, self.max_delay))


class FailurePolicy(StrEnum):
    """What happens when an index refuses a document."""

    STOP = "stop"
    """The run ends, nothing of the batch is confirmed, and it comes again: nothing is left out."""
    SKIP = "skip"
    """The document is set aside and the rest goes on; it returns when one of its rows changes, or by hand."""


@dataclass(frozen=True, slots=True)
class FailurePolicies:
    """The policy of each index."""

    default: FailurePolicy = FailurePolicy.STOP
    indexes: Mapping[str, FailurePolicy] = field(default_factory=dict[str, FailurePolicy])

    def of(self, index: str) -> FailurePolicy:
        """What was said for this index, or else for all."""
        return self.indexes.get(index, self.default)

    def stop_for(self, rejections: Sequence[Rejection]) -> None:
        """Raises `DocumentsRejected` if one of them is of an index that stops."""
        fatal = [each for each in rejections if self.of(each.index) is FailurePolicy.STOP]
        if fatal:
            first, count = fatal[0], len(fatal)
            raise DocumentsRejected(
                f"{count} document{'s were' if count > 1 else ' was'} refused; the first, of index {first.index!r}: "
                f"{first.reason}",
                index=first.index,
                id=first.id,
                count=count,
            )
