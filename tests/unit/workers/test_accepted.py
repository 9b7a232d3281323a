"""A destination that accepts first and is durable later: each change is sent once, and nothing is forgotten early."""

from __future__ import annotations

import pytest

from penstock.changes.batch import EventBatch
from penstock.destinations.base import TableResult, WriteHandle, WriteResult, completed
from penstock.errors import DestinationUnavailable, TableRejected
from penstock.state import Errored
from penstock.workers import Board
from tests.unit.workers.test_apply import LATE, START, TABLE, Recording, make_worker, publish, spool, store

__all__ = ["spool", "store"]

ACCEPTED = TableResult(durable=False)


class Lazy(Recording):
    """Answers as it is told; without a word, everything is only accepted."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: WriteResult | Exception | None = None

    def write_events(self, batch: EventBatch) -> WriteHandle:
        if isinstance(self.answer, Exception):
            error, self.answer = self.answer, None
            raise error
        super().write_events(batch)
        answer, self.answer = self.answer, None
        return completed(answer or WriteResult({table.table_id: ACCEPTED for table in batch.tables}))


@pytest.fixture
def destination():
    return Lazy()


@pytest.fixture
def board(store):
    return Board(store, START, {TABLE: START, LATE: START}.get)


@pytest.fixture
def worker(tmp_path, spool, store, board, destination):
    return make_worker(tmp_path, store, board, destination)


def progress(store) -> int | None:
    return store.get_replication_progress()


@pytest.mark.trap(4, 7)
def test_what_was_accepted_is_not_sent_again_and_not_acknowledged(store, spool, board, worker, destination):
    publish(spool, 100, 108)
    for _ in range(3):
        worker.run()
    assert destination.rows == {TABLE: [100, 108], LATE: [100, 108]}
    assert board.positions() == {TABLE: START, LATE: START}
    assert progress(store) is None
    publish(spool, 116)
    worker.run()
    assert destination.rows == {TABLE: [100, 108, 116], LATE: [100, 108, 116]}
    # One of them is durable by the answer to a batch without any table.
    destination.answer = WriteResult({TABLE: TableResult(), LATE: ACCEPTED})
    worker.run()
    assert destination.batches[-1][2] == []
    assert board.positions() == {TABLE: 124, LATE: START}
    assert progress(store) == START
    destination.answer = WriteResult({LATE: TableResult()})
    worker.run()
    assert board.positions() == {TABLE: 124, LATE: 124}
    assert progress(store) == 124
    # Nothing is outstanding, so nothing is sent.
    count = len(destination.batches)
    worker.run()
    assert len(destination.batches) == count


def test_a_table_that_the_answer_does_not_name_stays_accepted(spool, board, worker, destination):
    publish(spool, 100)
    worker.run()
    destination.answer = WriteResult()
    worker.run()
    assert destination.batches[-1][2] == []
    assert board.positions() == {TABLE: START, LATE: START}


def test_a_batch_that_fails_brings_back_what_was_accepted(spool, board, worker, destination):
    publish(spool, 100)
    worker.run()
    publish(spool, 108)
    destination.answer = DestinationUnavailable("out of reach")
    worker.run()
    destination.answer = WriteResult()
    worker.run()
    assert destination.rows == {TABLE: [100, 100, 108], LATE: [100, 100, 108]}
    assert board.positions() == {TABLE: 116, LATE: 116}


@pytest.mark.trap(33)
def test_a_table_that_fails_later_stops_at_what_is_durable(spool, board, worker, destination):
    publish(spool, 100)
    worker.run()
    publish(spool, 108)
    destination.answer = WriteResult.failures({TABLE: TableRejected("no")})
    worker.run()
    phase = board.phase(TABLE)
    assert isinstance(phase, Errored)
    assert phase.position == START
    assert board.positions() == {LATE: 116}
    assert board.acknowledged == START
