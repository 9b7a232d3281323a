"""Fan-out: changes that affect very many documents, built beside the stream so that other changes do not wait.

If a row is part of a million documents, a change of it stores the question of which documents those are, and is
confirmed. A separate thread answers the question and builds the documents, wave by wave. A late answer does no harm: a
change that broke a path up since then is a change of its own, whose documents were built with everything before it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from penstock import failpoints
from penstock.destinations.base import Tasks
from penstock.documents.base import DocumentBuilder
from penstock.documents.builder import is_about_values
from penstock.documents.builds import OUTDATED, Builds
from penstock.documents.resolve import Question, ResolvedKeys
from penstock.documents.writer import DocumentWriter
from penstock.errors import QueryFailed
from penstock.spool import Stopping
from penstock.state import IndexWork, Store, WorkKind

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class FanOuts:
    """The fan-outs that are still to be built. The thread that follows changes calls `add`, another one `round`."""

    store: Store
    builds: Builds
    tasks: Tasks
    writer: DocumentWriter
    documents: Callable[[], DocumentBuilder]
    """Returns the builder as it was last compiled."""
    stop: threading.Event

    def __post_init__(self) -> None:
        self._waiting = threading.Event()
        self._waiting.set()  # an earlier process may have left some
        self._lock = threading.Lock()
        self._queued: list[_Stored] = []

    def add(self, questions: Sequence[Question], fingerprints: dict[str, str]) -> None:
        """Store questions; durable when it returns. A question that is already waiting is not stored twice."""
        for question in questions:
            stored = _Stored(question, fingerprints[question.index])
            with self._lock:  # until it is stored: it may be answered at once, or storing may fail
                if stored in self._queued:
                    continue
                self.store.add_index_work(question.index, WorkKind.FAN_OUT, [stored.details])
                self._queued.append(stored)
            logger.info("fan-out stored index=%s", question.index)
        if questions:
            self._waiting.set()

    @property
    def waiting(self) -> bool:
        """True if questions may be waiting."""
        return self._waiting.is_set()

    def round(self, timeout: float) -> None:
        """Wait for questions, and answer them."""
        if not self._waiting.wait(timeout):
            return
        self._waiting.clear()
        try:
            for mapping in self.documents().index_mappings():
                for work in self.store.get_index_work(mapping.index, WorkKind.FAN_OUT):
                    if self.stop.is_set():
                        return
                    self._answer(work)
        except Stopping:
            return
        except BaseException:
            self._waiting.set()
            raise

    def _until_stopped(self, parts: Iterable[ResolvedKeys]) -> Iterator[ResolvedKeys]:
        for part in parts:
            if self.stop.is_set():
                raise Stopping
            yield part

    def _answer(self, work: IndexWork) -> None:
        documents = self.documents()
        stored = _Stored.read(work)
        with self._lock:
            # From here on the same question must be stored again: its change may be too late for this answer.
            self._queued = [each for each in self._queued if each != stored]
        if stored.fingerprint == fingerprints_of(documents).get(work.index):
            try:
                with self.tasks.copying(), closing(documents.answer(stored.question, apart=True)) as parts:
                    count = self.writer.write_apart(self._until_stopped(parts))
                logger.info("fan-out built index=%s documents=%d", work.index, count)
            except QueryFailed as error:
                if not is_about_values(error):
                    raise
                # Its values are of the type that the column had when they were stored.
                self.builds.invalidate(work.index, stored.fingerprint, OUTDATED)
        failpoints.reach("after_fan_out")
        self.store.delete_index_work(work.index, [work.number])


def fingerprints_of(documents: DocumentBuilder) -> dict[str, str]:
    """Return the fingerprint of every index."""
    return {each.index: each.fingerprint for each in documents.index_mappings()}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A question as it is stored; valid only for the specification with this fingerprint."""

    question: Question
    fingerprint: str

    @classmethod
    def read(cls, work: IndexWork) -> _Stored:
        details: dict[str, Any] = dict(work.details)
        question = Question(work.index, tuple(details["paths"]), tuple(list(each) for each in details["values"]))
        return cls(question, details["fingerprint"])

    @property
    def details(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "paths": list(self.question.paths),
            "values": [list(each) for each in self.question.values],
        }
