"""The state of an output's builds: which indexes serve and which are being built, in the state store.

A thread that finds that an index cannot be brought up to date calls `want`, and continues once that is stored;
`penstock.documents.backfill` then builds the index into a fresh generation.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock import failpoints
from penstock.errors import PenstockError
from penstock.state import IndexBuild, IndexStatus, Store, WorkKind

logger = logging.getLogger(__name__)

_NEXT = "next"
"""In the plan of a build: why another one has to follow."""
EMPTIED = "its root table was truncated"
OUTDATED = "a column that connects its tables has another type"
_UNINTERRUPTED = "uninterrupted"
"""In the plan of a build: changes that make documents stale do not interrupt it."""


class Builds:
    """The builds of all indexes. Any thread may call."""

    def __init__(self, store: Store, *, are_durable: bool = True) -> None:
        self._store = store
        self.are_durable = are_durable
        """False if the store is gone with this process."""
        self._changed = threading.Condition()
        self._builds: dict[str, IndexBuild] = {}
        self.held = False
        """True while no build may start because a prerequisite is missing."""
        self.stopped: Mapping[str, PenstockError] = {}
        """Indexes that no longer fit the source, and why: they are neither followed nor built until they do."""

    def load(self) -> None:
        """Load the builds from the store."""
        with self._changed:
            self._builds = dict(self._store.get_index_builds())
            self._changed.notify_all()

    def all(self) -> dict[str, IndexBuild]:
        """Return the last build of every index."""
        with self._changed:
            return dict(self._builds)

    def of(self, index: str) -> IndexBuild | None:
        """Return the last build of an index."""
        with self._changed:
            return self._builds.get(index)

    def is_current(self, build: IndexBuild) -> bool:
        """Return whether no other build was requested since."""
        current = self.of(build.index)
        return current is not None and current.build == build.build

    @property
    def unfinished(self) -> list[IndexBuild]:
        """The builds that are not finished and can be, by name."""
        with self._changed:
            builds = [each for name, each in sorted(self._builds.items()) if name not in self.stopped]
            return [each for each in builds if each.status is not IndexStatus.SEEDED]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let no build start inside the block."""
        held, self.held = self.held, True
        try:
            yield
        finally:
            self.held = held

    def wait(self, timeout: float) -> bool:
        """Wait until there is something to build; False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.held and bool(self.unfinished), timeout)

    def want(self, index: str, fingerprint: str, reason: str, *, plan: Mapping[str, Any] | None = None) -> IndexBuild:
        """Request a rebuild of an index from the start, instead of the current one; stored when it returns.

        One that has not begun sees everything that is committed now, so a second one is not needed.
        """
        known = self.of(index)
        if known is not None and known.status is IndexStatus.WANTED and known.fingerprint == fingerprint:
            return known
        build = IndexBuild(index, uuid.uuid4().hex, fingerprint, IndexStatus.WANTED, reason, plan or {})
        logger.info("rebuilding index index=%s reason=%s", index, reason)
        self._put(build)
        failpoints.reach("after_build_wanted")
        return build

    def invalidate(self, index: str, fingerprint: str, reason: str) -> None:
        """Report a change after which documents that were built before it may be stale; stored when it returns.

        It interrupts the current build, which would otherwise serve stale documents. Such changes may come more often
        than a build takes. So a build that replaces an interrupted one runs to its end, and another one follows it: its
        documents are of its start or later, and no other generation has later ones.
        """
        with self._changed:
            known = self._builds.get(index)
            if known is None or known.status is not IndexStatus.FILLING or known.fingerprint != fingerprint:
                self.want(index, fingerprint, reason)
            elif _UNINTERRUPTED not in known.plan:
                self.want(index, fingerprint, reason, plan={_UNINTERRUPTED: True})
            elif _NEXT not in known.plan or reason == EMPTIED:
                logger.info("rebuilding index after the current build index=%s reason=%s", index, reason)
                self._put(replace(known, plan={**known.plan, _NEXT: reason}))

    def want_again(self, build: IndexBuild, reason: str) -> None:
        """Request another build because this one cannot be completed, unless another one was requested meanwhile."""
        with self._changed:
            if self.is_current(build):
                kept = {name: each for name, each in build.plan.items() if name == _UNINTERRUPTED}
                self.want(build.index, build.fingerprint, reason, plan=kept)

    def is_emptied(self, build: IndexBuild) -> bool:
        """Return whether the root table was truncated since the build began: all its rows have come with changes."""
        current = self.of(build.index)
        return current is not None and current.build == build.build and current.plan.get(_NEXT) == EMPTIED

    def skip(self, index: str, fingerprint: str, reason: str) -> None:
        """Count an index as built, whatever its content."""
        self._put(IndexBuild(index, uuid.uuid4().hex, fingerprint, IndexStatus.SEEDED, reason))

    def fill(self, build: IndexBuild, plan: Mapping[str, Any]) -> IndexBuild | None:
        """Store the plan of a build whose generation exists; None if another build was requested meanwhile."""
        return self._advance(replace(build, status=IndexStatus.FILLING, plan={**build.plan, **plan}))

    def seeded(self, build: IndexBuild) -> IndexBuild | None:
        """Store that the build is complete and serves, or that the next one is wanted (`invalidate`)."""
        with self._changed:
            if not self.is_current(build):
                return None
            reason = self._builds[build.index].plan.get(_NEXT)
            if reason is not None:
                return self.want(build.index, build.fingerprint, reason, plan={_UNINTERRUPTED: True})
            kept = {"generation": build.plan.get("generation")}
            return self._advance(replace(build, status=IndexStatus.SEEDED, plan=kept))

    def forget(self, index: str) -> None:
        """Forget an index that is no longer in the config file."""
        with self._changed:
            self._store.delete_index(index)
            self._builds.pop(index, None)

    @property
    def recorded(self) -> frozenset[str]:
        """The indexes whose removals have to be recorded."""
        with self._changed:
            return frozenset(name for name, each in self._builds.items() if each.status is IndexStatus.FILLING)

    def record(self, index: str, changed: int, removed: Sequence[Sequence[str]]) -> None:
        """Record how many documents changes wrote to an index that is being built, and the ids of those they removed.

        `removed` has a list for each chunk of documents.
        """
        if index in self.recorded:
            work = [{"ids": [*each]} for each in removed]
            self._store.add_index_work(index, WorkKind.REMOVAL, work, changed=changed)

    def _advance(self, build: IndexBuild) -> IndexBuild | None:
        with self._changed:
            if not self.is_current(build):
                return None
            self._put(build)
            return build

    def _put(self, build: IndexBuild) -> None:
        with self._changed:
            self._store.store_index_build(build)
            self._builds[build.index] = build
            self._changed.notify_all()
