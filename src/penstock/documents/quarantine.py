"""What happens to documents that a sink rejects: the run stops, or `penstock.state.quarantine` keeps them."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from penstock.documents.base import FailurePolicies, Observer
from penstock.lsn import Lsn
from penstock.observe.tally import Tally
from penstock.sinks.base import Rejection
from penstock.state.quarantine import Quarantine

logger = logging.getLogger(__name__)


class Rejections:
    """Decides what happens to rejected documents: stop, or quarantine them. Any thread may call."""

    def __init__(
        self,
        policies: FailurePolicies,
        quarantine: Quarantine | None,
        observer: Observer,
        tally: Tally | None = None,
    ) -> None:
        self._policies = policies
        self._tally = tally or Tally()
        self._quarantine = quarantine
        self._observer = observer
        self._lock = threading.Lock()
        self._quarantined: dict[str, frozenset[str]] = {}

    def load(self) -> None:
        """Load which documents are quarantined."""
        found: dict[str, set[str]] = {}
        for each in self._quarantine.entries() if self._quarantine is not None else ():
            found.setdefault(each.index, set()).add(each.id)
        with self._lock:
            self._quarantined = {index: frozenset(ids) for index, ids in found.items()}

    @property
    def quarantined(self) -> Mapping[str, frozenset[str]]:
        """The ids of quarantined documents by index. A task that writes one of them reports it."""
        with self._lock:
            return dict(self._quarantined)

    def handle(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Quarantine documents, or raise `DocumentsRejected`; decides about all before it acts on one."""
        self._count(rejections)
        self._policies.raise_fatal(rejections)
        self._keep(rejections, position)

    def quarantine(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Quarantine documents, whatever the policy."""
        self._count(rejections)
        self._keep(rejections, position)

    def _count(self, rejections: Sequence[Rejection]) -> None:
        for index, count in Counter(each.index for each in rejections).items():
            self._tally.count("documents", index, "rejected", by=count)

    def _keep(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        if not rejections:
            return
        if self._quarantine is not None:
            self._quarantine.add(rejections, position)
        with self._lock:
            for each in rejections:
                self._quarantined[each.index] = self._quarantined.get(each.index, frozenset()) | {each.id}
        for each in rejections:
            logger.warning("document quarantined index=%s reason=%s", each.index, each.reason)
            self._observer.on_document_quarantined(each)

    def release(self, index: str, ids: Sequence[str]) -> None:
        """Drop documents from the quarantine: the index has them now."""
        if ids and self._quarantine is not None:
            self._quarantine.drop(index, ids)
            with self._lock:
                self._quarantined[index] = self._quarantined.get(index, frozenset()).difference(ids)
            logger.info("sink accepted quarantined documents index=%s count=%d", index, len(ids))

    def forget(self, index: str, ids: Collection[str]) -> None:
        """Drop ids that no longer belong to a document."""
        if ids and self._quarantine is not None:
            self._quarantine.drop(index, sorted(ids))
            logger.info("quarantined ids no longer belong to a document index=%s count=%d", index, len(ids))

    def wanted(self, index: str) -> list[str]:
        """Return the documents for which a user asked for a retry."""
        return [] if self._quarantine is None else self._quarantine.wanted(index)
