"""The interfaces of the document engine: where changes come from, what builds documents, and where they go.

    ChangeCapture ─▶ queue ─▶ resolve ─▶ build ─▶ Sink ─▶ flush ─▶ ack

Others may implement `ChangeCapture`, `DocumentBuilder`, `Sink` and `Observer`; `penstock.documents.engine` drives them.
Methods with a default are optional for classes that derive from the Protocol.

**At least once.** A change is confirmed only when its documents are durable and its links are stored. Changes that were
not confirmed are delivered again after a restart. That is safe: documents are built from the current rows, identified
by their key, and carry a version, so an older body never replaces a newer one.

**Whole transactions.** Changes arrive in pieces that end where a transaction ends, and each piece is confirmed as a
whole. A position never lies inside a transaction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from penstock.documents.images import Changes
from penstock.documents.mapping import IndexMapping
from penstock.documents.resolve import Resolution, ResolvedKeys
from penstock.errors import ConfigError, DocumentsRejected
from penstock.source.patterns import TableName

WRITTEN = pa.schema(
    [
        pa.field("index", pa.string(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("body", pa.large_string()),
    ]
)
"""What a sink is handed: JSON as text, or null to remove the document."""
SCAN_CHUNK = 5_000


class Ack(Protocol):
    """Confirms a piece of changes. To drop it means not to confirm: the changes come again after a restart."""

    def confirm(self) -> None:
        """All documents of these changes are durable; called at most once, from any thread, in any order.

        The source's own position moves past a piece when it and all before it are confirmed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of one or more whole transactions, with what confirms them."""

    changes: Changes
    ack: Ack

    @property
    def count(self) -> int:
        """Rows; an emptied table counts as one."""
        return sum(len(rows) for rows in self.changes.rows) + len(self.changes.truncated)


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """A table whose current rows are asked for."""

    table: TableName
    columns: tuple[str, ...]
    """What names the documents of every index that has this table as its root."""


class ChangeCapture(Protocol):
    """A way to learn of changes: logical replication, polling."""

    def prepare(self) -> None:
        """Make what has to exist before any snapshot is read: the publication, then the slot. Safe on every start."""

    def live(self) -> Iterator[Change]:
        """Changes as they happen, from where the mechanism itself left off.

        No position is handed in: where to resume is the mechanism's to remember. It must not move its durable position
        past a change that was not confirmed. May give changes of tables that nobody asked for; does not interpret
        them. Ends only when the mechanism does.
        """
        ...

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        """The current rows of tables, as changes that insert them (`Changes.is_snapshot`); ends when all are through.

        The engine decides whether and when. Safe to run again from the start, which happens after a crash; confirming
        these changes need not move anything. The default is for mechanisms that cannot: nothing.
        """
        return iter(())

    def lag(self) -> int | None:
        """How many bytes the durable position is behind the source; None where that means nothing.

        Asked by a supervisor on a timer, from another thread than `live`, and on a connection of its own.
        """
        return None


@dataclass(frozen=True, slots=True)
class BackfillScope:
    """An index and what it is seeded from."""

    index: str
    table: SnapshotTable


class DocumentBuilder(Protocol):
    """Knows how rows become documents."""

    def resolve(self, changes: Changes, scope: frozenset[str] | None = None) -> Resolution:
        """The documents that these changes concern, of all indexes or of those in `scope`.

        Complete: for rows that came, went, changed, or hang on something else now. Waits until the changes can be
        seen. A document is named at most once.
        """
        ...

    def build(self, keys: ResolvedKeys) -> pa.Table:
        """One row per key (`penstock.documents.build.BUILT`), from the rows as they are now.

        A null body says that the document must not exist, because the source said so.
        """
        ...

    def remember(self, resolution: Resolution) -> None:
        """The documents of a resolution are durable in every index. Called before the changes are confirmed."""

    def every_key(self, index: str) -> Iterator[ResolvedKeys]:
        """The keys of all documents that an index should have now."""
        ...

    def backfill_scopes(self) -> Sequence[BackfillScope]:
        """Every index with the table that it is seeded from."""
        return ()

    def index_mappings(self) -> Sequence[IndexMapping]:
        """Every index as it should be created; needs no database."""
        return ()


@dataclass(frozen=True, slots=True)
class Rejection:
    """A document that a sink refuses for good, such as one that does not fit the mapping."""

    index: str
    id: str
    reason: str
    body_hash: str = ""
    """Tells bodies apart without showing them."""


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What became of all that was written since the last flush: durable, but for these."""

    rejections: tuple[Rejection, ...] = ()


class Sink(Protocol):
    """Where documents go. Called from one thread at a time, except for `write` in tasks."""

    def write(self, batch: pa.Table) -> None:
        """Take documents (`WRITTEN`); they may be kept in memory until `flush`.

        In tasks the sink is a copy of the one on the driver. A later write of an id wins unless its version is lower;
        removing what is not there is fine.
        """
        ...

    def flush(self, caught_up: bool) -> FlushReport:
        """Make everything durable that was written before. If it raises, nothing is known to be.

        What can be tried again (429, 503) is tried again in here; only what is refused for good is reported.
        `caught_up` says that nothing waits behind it: a good moment to make documents visible to searches.
        """
        ...

    def upsert(self, index: str, id: str, version: int, body: str) -> None:  # noqa: A002 (the index's own word)
        """One document; the same as a `write` with one row."""
        self.write(pa.Table.from_pylist([{"index": index, "id": id, "version": version, "body": body}], WRITTEN))

    def delete(self, index: str, id: str, version: int) -> None:  # noqa: A002 (the index's own word)
        """Remove one document; the same as a `write` with one row."""
        self.write(pa.Table.from_pylist([{"index": index, "id": id, "version": version, "body": None}], WRITTEN))

    def ensure_index(self, mapping: IndexMapping) -> None:
        """Create the index if it is not there. Called on every start; must not disturb what serves."""

    def is_seeded(self, index: str) -> bool:
        """Whether the index has been filled completely once, in the shape that `ensure_index` was told."""
        return False

    def mark_seeded(self, index: str) -> None:
        """All documents are durable: let searches see the new index instead of the old one, at once."""

    def reindex(self, mapping: IndexMapping) -> None:
        """Prepare an empty index beside the one that serves, and count as not seeded until `mark_seeded`."""

    def filling(self, index: str) -> Sink:
        """A sink for the generation that is being filled, and no other: what a backfill writes to.

        Plain `write` goes to the generation that serves and, while one is being filled, to that too: what a change
        writes. Where nothing is being filled, the generation that serves is meant. The default is for sinks without
        generations: the sink itself.
        """
        return self

    def count(self, index: str) -> int | None:
        """How many documents the index has now; of a `filling` sink, the generation that it fills. None: not known.

        Compared with what was written before a generation serves; what was written before counts, whether searches
        see it yet or not.
        """
        return None


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What one batch was."""

    changes: int
    documents: Mapping[str, int] = field(default_factory=dict[str, int])
    """By index."""
    flush_seconds: float = 0.0


class Observer(Protocol):
    """Hears what an engine does. Called where the work is done, from two threads: cheap and quick, and never raises."""

    def on_indexes_ensured(self, count: int) -> None:
        """Every index exists."""

    def on_backfill_started(self, indexes: Sequence[str]) -> None:
        """These are not seeded, and will be."""

    def on_index_seeded(self, index: str) -> None:
        """It is complete, and searches see it."""

    def on_backfill_completed(self) -> None:
        """All are seeded, or it was skipped."""

    def on_live_started(self) -> None:
        """From here on changes are followed."""

    def on_changes_captured(self, count: int) -> None:
        """They wait in the queue."""

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        """A batch is durable and confirmed."""

    def on_slot_lag(self, lag: int) -> None:
        """From the supervisor's timer, in bytes."""

    def on_document_quarantined(self, rejection: Rejection) -> None:
        """It was refused and set aside; its batch is about to be confirmed."""

    def on_error(self, message: str) -> None:
        """The run ends with this; once."""


class NoopObserver(Observer):
    """Hears nothing."""


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


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """How an index is in the sink."""

    generation: str | None = None
    """What serves searches; None if nothing does."""
    filling: str | None = None
    """What is being filled beside it, or for the first time."""
    documents: int = 0
    """In what serves."""


@runtime_checkable
class ReadableSink(Protocol):
    """Reads what serves searches. An index that does not exist has no documents."""

    def facts(self, index: str) -> IndexFacts:
        """How the index is now."""
        ...

    def fetch(self, index: str, ids: Sequence[str]) -> Mapping[str, Any]:
        """The documents with these ids, as parsed JSON, also if searches do not see them yet; absent if not there."""
        ...

    def scan(self, index: str, chunk: int = SCAN_CHUNK) -> Iterator[list[str]]:
        """The ids of all documents, in any order; those that come or go meanwhile may be among them or not."""
        ...

    def sample(self, index: str, count: int) -> list[str]:
        """Ids of some documents, by chance."""
        ...


def readable(sink: Sink, name: str) -> ReadableSink:
    """The sink as one that can be read; an error that names it if it cannot."""
    if isinstance(sink, ReadableSink):
        return sink
    raise ConfigError(
        f"sink {name!r} cannot be read: what it was given is not there any more, or not for others",
        hint="Documents can be looked at in opensearch, and in sinks of your own that have what ReadableSink has.",
    )
