"""What can be said about an output of documents."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.documents.policy import BatchPolicy, FailurePolicies


@dataclass(frozen=True, slots=True)
class DocumentsSettings:
    """How changes are grouped, and how much is done at once."""

    batch: BatchPolicy = field(default_factory=lambda: BatchPolicy(max_changes=10_000))
    failure_policies: FailurePolicies = field(default_factory=FailurePolicies)
    skip_backfill: bool = False
    """Nothing is built from tables, whatever the sink says: only changes are followed."""
    piece_changes: int = 20_000
    """A transaction with more is resolved in pieces, and confirmed as a whole."""
    chunk_documents: int = 1_000
    """Documents of one statement, and of one write to the sink."""
    wave_chunks: int = 32
    """Chunks of one job; how many keys are in memory at the same time follows from it."""
    local_documents: int = 2_000
    """As many documents, and no more, are built without a job. These take 0.1 s; a Spark job takes as long to start on
    an idle machine, and over a second on a busy one."""
    fan_out_documents: int = 20_000
    """Of one index and one piece of changes. If there are more, they are built beside the stream: others do not wait
    for them."""
    range_bytes: int = 8 << 20
    """Of the root table, TOAST included, in one range of a backfill: a second or two of work."""
