"""The interfaces of the document engine: where changes come from, what builds documents, and where they go.

    ChangeCapture ─▶ queue ─▶ resolve ─▶ build ─▶ Sink ─▶ flush ─▶ ack

Others may implement `ChangeCapture`, `DocumentBuilder` and `Observer`; `penstock.documents.engine` drives them.
`penstock.sinks.base` has the contract of sinks.
Methods with a default are optional for classes that derive from the Protocol.

**At least once.** A change is confirmed only when its documents are durable and its links are stored. Changes that were
not confirmed are delivered again after a restart. That is safe: documents are built from the current rows, identified
by their key, and carry a version, so an older body never replaces a newer one.

**Whole transactions.** A position never lies inside a transaction. A large transaction may arrive in several pieces;
the position moves past it when its last piece, and all before, are confirmed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

import pyarrow as pa

from penstock.documents.images import Changes
from penstock.documents.resolve import Question, Resolution, ResolvedKeys
from penstock.errors import DocumentsRejected
from penstock.lsn import Lsn
from penstock.sinks.base import (  # noqa: F401 (programs with sinks of their own import them from here)
    DOCUMENT_SCHEMA,
    SCAN_CHUNK,
    FlushReport,
    IndexFacts,
    IndexMapping,
    ReadableSink,
    Rejection,
    Sink,
    readable,
)
from penstock.source.patterns import TableName

PositionT = TypeVar("PositionT")


class Ack(Protocol):
    """Confirms a piece of changes. Unconfirmed changes are delivered again after a restart."""

    def confirm(self) -> None:
        """Report that all documents of these changes are durable; called at most once, by any thread, in any order.

        The source moves its position past a piece when that piece and all before it are confirmed. The engine confirms
        the last piece of a batch first, so the position moves once per batch.
        """
        ...


class Acks(Generic[PositionT]):
    """The pieces that a capture has delivered and that were not confirmed, in order. Thread-safe.

    Its position moves past a piece once that piece and all before it are confirmed.
    """

    def __init__(self, advance: Callable[[PositionT], None]) -> None:
        """`advance` stores a position; it is called by the thread that confirms, by one at a time."""
        self._advance = advance
        self._pieces: deque[_Piece[PositionT]] = deque()
        self._lock = threading.Lock()

    def expect(self, position: PositionT | None = None) -> Ack:
        """Return the acknowledgement of the next piece; `position` is where it ends, None inside of a transaction."""
        piece = _Piece(self, position)
        with self._lock:
            self._pieces.append(piece)
        return piece

    def forget(self) -> None:
        """Forget all pieces that were not confirmed: they are delivered again, and confirming them does nothing."""
        with self._lock:
            self._pieces.clear()

    def confirm(self, piece: _Piece[PositionT]) -> None:
        """Confirm a piece, and move past it if all before it are confirmed."""
        with self._lock:
            piece.confirmed = True
            position: PositionT | None = None
            while self._pieces and self._pieces[0].confirmed:
                reached = self._pieces.popleft().position
                position = position if reached is None else reached
            if position is not None:
                self._advance(position)


@dataclass(eq=False, slots=True)
class _Piece(Generic[PositionT]):
    acks: Acks[PositionT]
    position: PositionT | None
    confirmed: bool = False

    def confirm(self) -> None:
        self.acks.confirm(self)


@dataclass(frozen=True, slots=True)
class Change:
    """Changes of one or more transactions, or of a part of one, with their acknowledgement."""

    changes: Changes
    ack: Ack
    position: Lsn | None = None
    """Where the changes end in the stream, if there is one; for display."""

    @property
    def count(self) -> int:
        """The number of rows; a truncated table counts as one."""
        return sum(len(rows) for rows in self.changes.rows) + len(self.changes.truncated)


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """A table whose current rows are wanted."""

    table: TableName
    columns: tuple[str, ...]
    """The key columns of the documents of every index that has this table as its root."""


class ChangeCapture(Protocol):
    """A mechanism that delivers changes: logical replication, polling."""

    def prepare(self) -> None:
        """Create what has to exist before any snapshot is read: the publication, then the slot. Safe on every start."""

    def resumes(self) -> bool:
        """Return whether `live` continues where an earlier run left off; False before the first `prepare`.

        If it does not, indexes that are already filled have a gap, so the engine fills them again.
        """
        return True

    def live(self) -> Iterator[Change]:
        """Ensure the set-up (`prepare`), and yield changes as they happen, from where the mechanism left off.

        The mechanism stores its own position, and must not move it past an unconfirmed change. It may deliver changes
        of other tables, too, and does not interpret them. Ends only when the mechanism does.
        """
        ...

    def snapshot(self, tables: Sequence[SnapshotTable]) -> Iterator[Change]:
        """Yield the current rows of tables as inserts (`Changes.is_snapshot`); ends after the last row.

        The engine decides whether and when, index by index. Must be safe to run again from the start, which happens
        after a crash; confirming these changes need not move a position. Mechanisms without snapshots keep the default.
        """
        return iter(())

    def opened(self) -> Receiver | None:
        """Return the mechanism's own queue of live changes, from the last confirmed one on; None if it has none.

        For a mechanism that stores changes before it delivers them: the engine then takes them from there, in its own
        thread, instead of calling `live`.
        """
        return None

    def barrier(self) -> Callable[[], bool]:
        """Return a function that tells whether all changes that are committed by now were confirmed."""
        return lambda: True

    def lag(self) -> int | None:
        """Return how many bytes the durable position is behind the source; None if that has no meaning.

        A supervisor calls it on a timer, in another thread than `live`; use a separate connection.
        """
        return None


@dataclass(frozen=True, slots=True)
class BackfillScope:
    """An index and the table that it is filled from."""

    index: str
    table: SnapshotTable


class TaskBuilder(Protocol):
    """The part of a builder that tasks use: it pickles, and has connections of its own."""

    def pieces(self, keys: ResolvedKeys) -> Iterator[pa.Table | Rejection]:
        """Yield the documents of these keys (`penstock.documents.build.BUILT`) in pieces that fit into memory.

        A document that cannot be built from its rows is yielded as a rejection.
        """
        ...

    def range_pieces(self, index: str, part: Any, *, apart: bool = False) -> Iterator[pa.Table | Rejection]:
        """Yield the documents of a range (`DocumentBuilder.ranges`) in the same way.

        Fails if one of them cannot be built; with `apart`, which is slower, it is yielded as a rejection.
        """
        ...


class DocumentBuilder(Protocol):
    """Finds the documents that changes affect, and builds them."""

    def resolve(self, changes: Changes, scope: frozenset[str] | None = None) -> Resolution:
        """Return the documents that these changes affect, of all indexes or of those in `scope`.

        Complete for rows that were inserted, deleted, changed, or moved to another parent. Waits until the changes are
        visible. Names each document at most once.
        """
        ...

    def build(self, keys: ResolvedKeys) -> pa.Table:
        """Build one row per key (`penstock.documents.build.BUILT`) from the current rows.

        A null body means that the source has no such document.
        """
        ...

    def remember(self, resolution: Resolution) -> None:
        """Store the links of a resolution, after its documents are durable and before its changes are confirmed."""

    def answer(self, question: Question, *, apart: bool = False) -> Generator[ResolvedKeys, None, None]:
        """Yield the documents of a question of a resolution, each once; with `apart`, for another thread."""
        yield from ()

    def every_key(self, index: str) -> Iterator[ResolvedKeys]:
        """Yield the keys of all documents that an index should have now."""
        ...

    def for_tasks(self) -> TaskBuilder | None:
        """Return what builds in tasks; None if only `build` does, in this process."""
        return None

    def ranges(self, index: str) -> list[Any] | None:
        """Divide the rows of an index into ranges that tasks can build, as JSON values.

        None if it has no ranges: it is then filled from a snapshot of the source.
        """
        return None

    def require_unchanged(self, index: str, ranges: Sequence[Any]) -> None:
        """Raise `TableRewritten` if these ranges no longer have all rows of the index."""

    def named(self, index: str, ids: Sequence[str]) -> Iterator[ResolvedKeys]:
        """Yield the keys of the documents with these ids; ids that no document can have are left out."""
        return iter(())

    def backfill_scopes(self) -> Sequence[BackfillScope]:
        """Return every index with the table that it is filled from."""
        return ()

    def index_mappings(self) -> Sequence[IndexMapping]:
        """Return every index as it should be created; needs no database."""
        return ()


class Receiver(Protocol):
    """Hands out captured changes in order, to one thread."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is waiting now."""
        ...

    @property
    def is_finished(self) -> bool:
        """True if nothing is waiting and nothing more will come."""
        ...

    def receive(self, timeout: float | None = None) -> Change | None:
        """Return the next piece; None after the timeout or at the end. Raise what ended capture."""
        ...


class Queue(Receiver, Protocol):
    """Passes changes from the thread that captures them to the one that applies them, in order, within a limit."""

    def publish(self, change: Change) -> bool:
        """Wait for room and add a piece; return False if the queue is closed."""
        ...

    def close(self, failure: BaseException | None = None) -> None:
        """Accept no more pieces, and wake up waiting threads. May be called twice; the first failure counts."""
        ...


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Figures of one batch."""

    changes: int
    documents: Mapping[str, int] = field(default_factory=dict[str, int])
    """By index."""
    flush_seconds: float = 0.0


class Observer(Protocol):
    """Receives events of an engine, in its working threads: methods must be quick and never raise."""

    def on_indexes_ensured(self, count: int) -> None:
        """Every index exists."""

    def on_backfill_started(self, indexes: Sequence[str]) -> None:
        """The backfill of these indexes starts."""

    def on_index_seeded(self, index: str) -> None:
        """The index is complete, and searches see it."""

    def on_backfill_completed(self) -> None:
        """All indexes are filled, or the backfill was skipped."""

    def on_live_started(self) -> None:
        """The engine follows changes from here on."""

    def on_changes_captured(self, count: int) -> None:
        """This many changes were received from the source."""

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        """A batch is durable and confirmed."""

    def on_slot_lag(self, lag: int) -> None:
        """The replication lag in bytes, on a timer."""

    def on_document_quarantined(self, rejection: Rejection) -> None:
        """A document was rejected and quarantined; its batch is about to be confirmed."""

    def on_error(self, message: str) -> None:
        """The run ends with this error; called once."""


class NoopObserver(Observer):
    """Ignores all events."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """A batch ends after `max_changes` changes, or `max_delay` after its first change."""

    max_changes: int = 256
    """At least 1. A transaction is never split, so a batch can have more."""
    max_delay: float = 0.05
    """Seconds."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_changes", max(1, self.max_changes))
        object.__setattr__(self, "max_delay", max(0.0, self.max_delay))


class FailurePolicy(StrEnum):
    """What happens when a sink rejects a document."""

    STOP = "stop"
    """The run ends. Nothing of the batch is confirmed, so it is delivered again and nothing is lost."""
    SKIP = "skip"
    """The document is quarantined and the rest continues; a change of its rows or a user retries it."""


@dataclass(frozen=True, slots=True)
class FailurePolicies:
    """The policy of each index."""

    default: FailurePolicy = FailurePolicy.STOP
    indexes: Mapping[str, FailurePolicy] = field(default_factory=dict[str, FailurePolicy])

    def of(self, index: str) -> FailurePolicy:
        """Return the policy of this index, or else the default."""
        return self.indexes.get(index, self.default)

    def raise_fatal(self, rejections: Sequence[Rejection]) -> None:
        """Raise `DocumentsRejected` if an index with the policy `STOP` rejected one of them."""
        fatal = [each for each in rejections if self.of(each.index) is FailurePolicy.STOP]
        if fatal:
            first, count = fatal[0], len(fatal)
            raise DocumentsRejected(
                f"{count} document{'s were' if count > 1 else ' was'} rejected; the first, of index {first.index!r}: "
                f"{first.reason}",
                index=first.index,
                id=first.id,
                count=count,
            )
