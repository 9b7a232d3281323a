"""The part of a store about search indexes: how they were built, and the work left for them.

A build fills a new generation of an index, range by range; finished ranges survive the process. `WANTED`: the index has
to be built and nothing exists yet. `FILLING`: its generation exists. `SEEDED`: it serves. A new build of the same index
deletes the ranges and removals of the one before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from penstock.state.core import StoreCore
from penstock.state.records import IndexBuildRecord, IndexRangeRecord, IndexWorkRecord, Transaction


class IndexStatus(StrEnum):
    """The status of the last build of an index."""

    WANTED = "wanted"
    FILLING = "filling"
    SEEDED = "seeded"


class WorkKind(StrEnum):
    """The kinds of work left for an index."""

    REMOVAL = "removal"
    """Documents were deleted during the build: they are checked again when its ranges are done."""
    FAN_OUT = "fan_out"
    """A change affects so many documents that it is processed apart from others."""


@dataclass(frozen=True, slots=True)
class IndexBuild:
    """The last build of an index."""

    index: str
    build: str
    """Identifies the build among all builds of the index."""
    fingerprint: str
    """The fingerprint of its specification; empty if its documents can no longer be trusted."""
    status: IndexStatus
    reason: str = ""
    """Why it was rebuilt, for display."""
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values: the ranges and their generation."""
    changed: int = 0
    """Number of documents that changes have written since the build started."""


@dataclass(frozen=True, slots=True)
class IndexWork:
    """Work left for an index."""

    index: str
    number: int
    kind: WorkKind
    details: Mapping[str, Any]


class IndexStore(StoreCore):
    """How search indexes were built, and the work left for them. Reads go to the database, never to a cache."""

    def get_index_builds(self) -> dict[str, IndexBuild]:
        """Return the last build of every known index."""

        def work(transaction: Transaction) -> dict[str, IndexBuild]:
            return {record.index_name: _to_build(record) for record in transaction.rows(IndexBuildRecord)}

        return self.read(work)

    def store_index_build(self, build: IndexBuild) -> None:
        """Store a build. If it differs from the last one, delete the ranges and removals of that one."""

        def work(transaction: Transaction) -> None:
            known = transaction.rows(IndexBuildRecord, index_name=build.index)
            same = bool(known) and known[0].build == build.build
            if not same:
                transaction.delete(IndexRangeRecord, index_name=build.index)
                transaction.delete(IndexWorkRecord, index_name=build.index, work=WorkKind.REMOVAL.value)
            transaction.put(
                [
                    IndexBuildRecord(
                        index_name=build.index,
                        build=build.build,
                        fingerprint=build.fingerprint,
                        status=build.status.value,
                        reason=build.reason,
                        plan=dict(build.plan),
                        changed=known[0].changed if same else build.changed,
                        updated_at=transaction.now(),
                    )
                ]
            )

        self.write(work)

    def delete_index(self, index: str) -> None:
        """Delete everything about an index."""

        def work(transaction: Transaction) -> None:
            for kind in (IndexBuildRecord, IndexRangeRecord, IndexWorkRecord):
                transaction.delete(kind, index_name=index)

        self.write(work)

    def finish_index_ranges(self, index: str, build: str, documents: Mapping[int, int]) -> None:
        """Store that ranges of a build are durable, with their number of documents; ignored for an outdated build."""
        records = [IndexRangeRecord(index, build, part, count) for part, count in documents.items()]

        def work(transaction: Transaction) -> None:
            known = transaction.rows(IndexBuildRecord, index_name=index)
            if known and known[0].build == build:
                transaction.put(records)

        self.write(work)

    def get_index_ranges(self, index: str, build: str) -> dict[int, int]:
        """Return the finished ranges of a build, with their number of documents."""

        def work(transaction: Transaction) -> dict[int, int]:
            found = transaction.rows(IndexRangeRecord, index_name=index, build=build)
            return {record.part: record.documents for record in found}

        return self.read(work)

    def add_index_work(
        self, index: str, kind: WorkKind, details: Sequence[Mapping[str, Any]], *, changed: int = 0
    ) -> None:
        """Store work to be done, in the order given, before the change that it comes from is acknowledged.

        `changed` documents are added to the count of the index's build.
        """
        # Numbered by the clock: finding the last number would read all waiting work.
        first = time.time_ns()
        records = [IndexWorkRecord(index, first + place, kind.value, dict(each)) for place, each in enumerate(details)]

        def work(transaction: Transaction) -> None:
            transaction.put(records)
            if changed:
                _count_changed(transaction, index, changed)

        self.write(work)

    def get_index_work(self, index: str, kind: WorkKind) -> list[IndexWork]:
        """Return the work that is left, oldest first."""

        def work(transaction: Transaction) -> list[IndexWork]:
            found = transaction.rows(IndexWorkRecord, index_name=index, work=kind.value)
            return [IndexWork(record.index_name, record.number, kind, record.details) for record in found]

        return self.read(work)

    def delete_index_work(self, index: str, numbers: Sequence[int]) -> None:
        """Delete work that is done."""

        def work(transaction: Transaction) -> None:
            for number in numbers:
                transaction.delete(IndexWorkRecord, index_name=index, number=number)

        self.write(work)


def _count_changed(transaction: Transaction, index: str, changed: int) -> None:
    known = transaction.rows(IndexBuildRecord, index_name=index)
    transaction.put([replace(record, changed=record.changed + changed) for record in known])


def _to_build(record: IndexBuildRecord) -> IndexBuild:
    return IndexBuild(
        record.index_name,
        record.build,
        record.fingerprint,
        IndexStatus(record.status),
        record.reason,
        record.plan,
        record.changed,
    )
