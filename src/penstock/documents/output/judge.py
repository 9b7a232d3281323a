"""Refused documents: stop, or set aside; and those that were set aside and are taken after all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from penstock.documents.base import FailurePolicies, Observer, Rejection
from penstock.documents.output.writer import Outcome
from penstock.documents.quarantine import QuarantineStore
from penstock.lsn import Lsn

logger = logging.getLogger(__name__)


class Judge:
    """Decides about all refusals before anything is done about one. May be used from any thread."""

    def __init__(self, policies: FailurePolicies, quarantine: QuarantineStore | None, observer: Observer) -> None:
        self._policies = policies
        self._quarantine = quarantine
        self._observer = observer
        self._lock = threading.Lock()
        self._aside: dict[str, frozenset[str]] = {}

    def load(self) -> None:
        """Look which documents are set aside."""
        found: dict[str, set[str]] = {}
        for each in self._quarantine.entries() if self._quarantine is not None else ():
            found.setdefault(each.index, set()).add(each.id)
        with self._lock:
            self._aside = {index: frozenset(ids) for index, ids in found.items()}

    @property
    def aside(self) -> Mapping[str, frozenset[str]]:
        """By index: the documents that are set aside. Whoever writes one of them says so."""
        with self._lock:
            return dict(self._aside)

    def decide(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Set documents aside, or raise `DocumentsRejected`."""
        self._policies.stop_for(rejections)
        self.set_aside(rejections, position)

    def set_aside(self, rejections: Sequence[Rejection], position: Lsn | None) -> None:
        """Put documents into quarantine, whatever the policy says."""
        if not rejections:
            return
        if self._quarantine is not None:
            self._quarantine.add(rejections, position)
        with self._lock:
            for each in rejections:
                self._aside[each.index] = self._aside.get(each.index, frozenset()) | {each.id}
        for each in rejections:
            logger.warning("document set aside index=%s reason=%s", each.index, each.reason)
            self._observer.on_document_quarantined(each)

    def take_back(self, outcomes: Iterable[Outcome]) -> None:
        """Documents that were set aside, and are in the index now."""
        for each in outcomes:
            if each.taken and self._quarantine is not None:
                self._quarantine.drop(each.index, each.taken)
                with self._lock:
                    self._aside[each.index] = self._aside.get(each.index, frozenset()).difference(each.taken)
                logger.info("documents that were set aside are taken index=%s count=%d", each.index, len(each.taken))

    def wanted(self, index: str) -> list[str]:
        """The documents that somebody asked to try again."""
        return [] if self._quarantine is None else self._quarantine.wanted(index)
