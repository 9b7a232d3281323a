"""Rejected documents: which one, why, since when, and how often. Never the body, only a hash of it.

A quarantined document is not in the index as it should be; the body that was there before may still be. It leaves the
quarantine in three ways. Its rows change and the sink takes the new body. A user asks for a retry: the output finds the
document in `wanted`, rebuilds it, and drops the entry if the sink takes it; if the sink rejects it again, the entry
stays with one more attempt and is no longer wanted. Or a user drops it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from penstock.lsn import Lsn
from penstock.state.opening import open_store
from penstock.state.phases import storable_text
from penstock.state.records import Database, QuarantineRecord, Transaction


class Rejected(Protocol):
    """A document that a sink has rejected."""

    @property
    def index(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def body_hash(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A document in the quarantine."""

    index: str
    id: str
    reason: str
    position: Lsn | None
    """The position of the stream; None if the index was being built."""
    body_hash: str
    """Tells whether the same body was rejected again."""
    first_at: datetime
    last_at: datetime
    attempts: int
    wanted: bool
    """A user asked for a retry that has not happened yet."""


def open_quarantine(state_url: str, owner: str) -> Quarantine:
    """Open the quarantine in the state of this URL; `owner` is the output's id."""
    return Quarantine(open_store(state_url, owner).database)


class Quarantine:
    """The rejected documents of one output. The output and commands use it at the same time; every call is durable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, rejections: Sequence[Rejected], position: Lsn | None) -> None:
        """Quarantine documents. One that is already quarantined gets one more attempt and is no longer wanted."""
        # A document may be rejected twice in a batch: by a range and by a change.
        last = {(each.index, each.id): each for each in rejections}

        def work(transaction: Transaction) -> None:
            now = transaction.now()
            known = {(each.index_name, each.id): each for each in _rows(transaction, {index for index, _ in last})}
            transaction.put(
                [
                    QuarantineRecord(
                        index_name=each.index,
                        id=each.id,
                        reason=storable_text(each.reason),
                        position=position,
                        body_hash=each.body_hash,
                        first_at=known[key].first_at if key in known else now,
                        last_at=now,
                        attempts=known[key].attempts + 1 if key in known else 1,
                        wanted=0,
                    )
                    for key, each in last.items()
                ]
            )

        if last:
            self._database.run(work)

    def entries(self, index: str | None = None, *, limit: int | None = None) -> list[Quarantined]:
        """Return the quarantined documents of one index or of all, the last rejected first."""
        found = self._read(index)
        found.sort(key=lambda each: each.last_at, reverse=True)
        return [
            Quarantined(
                index=each.index_name,
                id=each.id,
                reason=each.reason,
                position=each.position,
                body_hash=each.body_hash,
                first_at=each.first_at,
                last_at=each.last_at,
                attempts=each.attempts,
                wanted=bool(each.wanted),
            )
            for each in found[:limit]
        ]

    def counts(self) -> dict[str, int]:
        """Return how many documents of each index are quarantined; indexes with none are left out."""
        return dict(Counter(each.index_name for each in self._read()))

    def retry(self, index: str, ids: Sequence[str] | None = None) -> list[str]:
        """Ask for a retry of these documents, or of all of an index; returns the ids that are quarantined."""

        def work(transaction: Transaction) -> list[str]:
            chosen = _chosen(transaction, index, ids)
            transaction.put([replace(each, wanted=1) for each in chosen])
            return [each.id for each in chosen]

        return self._database.run(work)

    def wanted(self, index: str) -> list[str]:
        """Return the documents for which a user asked for a retry."""

        def work(transaction: Transaction) -> list[str]:
            return [each.id for each in transaction.rows(QuarantineRecord, index_name=index, wanted=1)]

        return self._database.run(work, writing=False)

    def drop(self, index: str, ids: Sequence[str] | None = None) -> int:
        """Forget these documents, or all of an index; returns how many there were."""

        def work(transaction: Transaction) -> int:
            if ids is None:
                return transaction.delete(QuarantineRecord, index_name=index)
            return sum(transaction.delete(QuarantineRecord, index_name=index, id=id_) for id_ in set(ids))

        return self._database.run(work)

    def close(self) -> None:
        """Close connections and files; may be called twice."""
        self._database.close()

    def _read(self, index: str | None = None) -> list[QuarantineRecord]:
        names = None if index is None else {index}
        return self._database.run(lambda transaction: _rows(transaction, names), writing=False)


def _rows(transaction: Transaction, indexes: set[str] | None) -> list[QuarantineRecord]:
    if indexes is None:
        return transaction.rows(QuarantineRecord)
    return [each for index in sorted(indexes) for each in transaction.rows(QuarantineRecord, index_name=index)]


def _chosen(transaction: Transaction, index: str, ids: Sequence[str] | None) -> list[QuarantineRecord]:
    found = transaction.rows(QuarantineRecord, index_name=index)
    wanted = None if ids is None else set(ids)
    return [each for each in found if wanted is None or each.id in wanted]
