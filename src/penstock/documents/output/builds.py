"""Which indexes serve, and which are being built: what the store knows, for all threads of an output.

Whoever finds that an index cannot be brought up to date says so (`want`), and goes on when that is stored. Somebody
else (`penstock.documents.output.backfill`) then builds it, into a fresh generation.
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
from penstock.documents.output.tasks import Outcome
from penstock.state import IndexBuild, IndexStatus, PipelineStore, WorkKind

logger = logging.getLogger(__name__)


class Builds:
    """The builds of all indexes. May be used from any thread."""

    def __init__(self, store: PipelineStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._builds: dict[str, IndexBuild] = {}
        self.held = False
        """Nothing is begun: something that builds need is not there yet."""

    def load(self) -> None:
        """Read what the store has."""
        with self._changed:
            self._builds = dict(self._store.get_index_builds())
            self._changed.notify_all()

    def all(self) -> dict[str, IndexBuild]:
        """Every build that is known."""
        with self._changed:
            return dict(self._builds)

    def of(self, index: str) -> IndexBuild | None:
        """The last build of an index."""
        with self._changed:
            return self._builds.get(index)

    def is_current(self, build: IndexBuild) -> bool:
        """Whether nobody has asked for another one since."""
        current = self.of(build.index)
        return current is not None and current.build == build.build

    @property
    def unfinished(self) -> list[IndexBuild]:
        """Those that are still to be done, by name."""
        with self._changed:
            return [each for _, each in sorted(self._builds.items()) if each.status is not IndexStatus.SEEDED]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nothing is begun meanwhile."""
        held, self.held = self.held, True
        try:
            yield
        finally:
            self.held = held

    def wait(self, timeout: float) -> bool:
        """Wait until something is to be built; False when nothing was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.held and bool(self.unfinished), timeout)

    def want(self, index: str, fingerprint: str, reason: str) -> IndexBuild:
        """Let an index be built anew, from the beginning; stored when it returns."""
        build = IndexBuild(index, uuid.uuid4().hex, fingerprint, IndexStatus.WANTED, reason)
        logger.info("index is built anew index=%s reason=%s", index, reason)
        self._put(build)
        failpoints.reach("after_build_wanted")
        return build

    def skip(self, index: str, fingerprint: str) -> None:
        """An index counts as built, whatever it has: somebody has said so."""
        self._put(IndexBuild(index, uuid.uuid4().hex, fingerprint, IndexStatus.SEEDED, "not built: skip_backfill"))

    def fill(self, build: IndexBuild, plan: Mapping[str, Any]) -> IndexBuild | None:
        """Its generation is there, and what it consists of is planned; None if another one is wanted by now."""
        return self._advance(replace(build, status=IndexStatus.FILLING, plan=plan))

    def seeded(self, build: IndexBuild) -> IndexBuild | None:
        """It serves."""
        return self._advance(replace(build, status=IndexStatus.SEEDED, plan={}))

    def forget(self, index: str) -> None:
        """The index is not in the configuration any more."""
        with self._changed:
            self._store.delete_index(index)
            self._builds.pop(index, None)

    @property
    def recorded(self) -> frozenset[str]:
        """The indexes whose removals have to be remembered."""
        if failpoints.is_off("recorded_removals"):
            return frozenset()
        with self._changed:
            return frozenset(name for name, each in self._builds.items() if each.status is IndexStatus.FILLING)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Remember what changes have written to indexes that are being built, and which documents went."""
        for index in sorted({each.index for each in outcomes}):
            build = self.of(index)
            if build is None or build.status is not IndexStatus.FILLING:
                continue
            mine = [each for each in outcomes if each.index == index]
            removed = [{"keys": [*each.removed]} for each in mine if each.removed]
            changed = sum(each.documents for each in mine)
            self._store.add_index_work(index, WorkKind.REMOVAL, removed, changed=changed)

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
