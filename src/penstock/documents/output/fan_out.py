"""Changes that concern very many documents: built beside the stream, so that other changes do not wait for them.

A row that a million documents show has changed. The question which documents those are is stored, the change is
confirmed, and a thread of its own asks and builds, a wave after the other. It may be asked late: what has broken a way
up since then was a change of its own, whose documents were built with all that was before it.
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
from penstock.documents.output.indexes import Indexes
from penstock.documents.output.writer import POOL, DocumentWriter
from penstock.documents.quarantine import Rejections
from penstock.documents.resolve import Question, ResolvedKeys
from penstock.source.connections import SourceSettings
from penstock.spool import Stopping
from penstock.state import IndexWork, Store, WorkKind

logger = logging.getLogger(__name__)


class FanOuts:
    """What is still to be built. `add` is called by the thread of the changes, `round` by another one."""

    def __init__(
        self,
        *,
        source: SourceSettings,
        store: Store,
        tasks: Tasks,
        writer: DocumentWriter,
        rejections: Rejections,
        indexes: Callable[[], Indexes],
        stop: threading.Event,
    ) -> None:
        """`writer` is of the thread that calls `round`; `indexes` gives what is compiled now."""
        self._source = source
        self._store = store
        self._tasks = tasks
        self._writer = writer
        self._rejections = rejections
        self._indexes = indexes
        self._stop = stop
        self._waiting = threading.Event()
        self._waiting.set()  # what an earlier process has left
        self._lock = threading.Lock()
        self._queued: list[_Stored] = []

    def add(self, questions: Sequence[Question], indexes: Indexes) -> None:
        """Remember questions; stored when it returns. One that waits already is not asked twice."""
        for question in questions:
            stored = _Stored.of(question, indexes)
            with self._lock:  # until it is known to be stored: it may be answered at once, or not be stored at all
                if stored in self._queued:
                    continue
                self._store.add_index_work(question.index, WorkKind.FAN_OUT, [stored.details])
                self._queued.append(stored)
            logger.info("many documents are built beside the stream index=%s", question.index)
        if questions:
            self._waiting.set()

    @property
    def waiting(self) -> bool:
        """Whether something may be still to be done."""
        return self._waiting.is_set()

    def round(self, timeout: float) -> None:
        """Wait for questions, and answer those that there are."""
        if not self._waiting.wait(timeout):
            return
        self._waiting.clear()
        try:
            for index in self._indexes().specifications:
                for work in self._store.get_index_work(index, WorkKind.FAN_OUT):
                    if self._stop.is_set():
                        return
                    self._answer(work)
        except Stopping:
            return
        except BaseException:
            self._waiting.set()
            raise

    def _until_stopped(self, parts: Iterable[ResolvedKeys]) -> Iterator[ResolvedKeys]:
        for part in parts:
            if self._stop.is_set():
                raise Stopping
            yield part

    def _answer(self, work: IndexWork) -> None:
        indexes = self._indexes()
        stored = _Stored.read(work)
        with self._lock:
            # From here on a change like it is another one: it may come too late for this answer.
            self._queued = [each for each in self._queued if each != stored]
        if stored.fingerprint == indexes.mappings[work.index].fingerprint:
            with (
                self._tasks.copying(),
                POOL.borrow(self._source) as connection,
                closing(indexes.resolver.answer(connection, stored.question)) as parts,
            ):
                written = self._writer.write(self._until_stopped(parts))
            self._rejections.handle(written.rejections, None)
            logger.info("many documents are built index=%s count=%d", work.index, written.documents.total())
        failpoints.reach("after_fan_out")
        self._store.delete_index_work(work.index, [work.number])


@dataclass(frozen=True, slots=True)
class _Stored:
    """A question as the store keeps it: it means something only under the specification that it was asked for."""

    question: Question
    fingerprint: str

    @classmethod
    def of(cls, question: Question, indexes: Indexes) -> _Stored:
        return cls(question, indexes.mappings[question.index].fingerprint)

    @classmethod
    def read(cls, work: IndexWork) -> _Stored:
        details: dict[str, Any] = dict(work.details)
        question = Question(work.index, tuple(details["ways"]), tuple(list(each) for each in details["values"]))
        return cls(question, details["fingerprint"])

    @property
    def details(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "ways": list(self.question.ways),
            "values": [list(each) for each in self.question.values],
        }
