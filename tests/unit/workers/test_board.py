"""The board: who may move a table, what is true when a worker ends, and where tables start."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from penstock.errors import IllegalTransition, LeaseLost, ServerUnavailable, StateUnusable
from penstock.lsn import Lsn
from penstock.source.lineage import Ancestry, Lineage
from penstock.state import (
    Catchup,
    DataSync,
    FinishedCopy,
    Init,
    MemoryStore,
    Ready,
    SyncDone,
    SyncWait,
)
from penstock.state.transitions import finish_catchup, finish_copy, resync, start_copy
from penstock.workers import ApplyWorker, BatchSettings, Board, ErrorHold, Lifecycle
from penstock.workers.board import Superseded

TABLE, OTHER = 1, 2
S = Lsn(150)


@pytest.fixture
def store():
    made = MemoryStore("test")
    made.acquire_lease()
    made.use_lineage(Ancestry(Lineage(system_identifier="1", timeline=1, database="d", slot="s")))
    yield made
    made.close()


@pytest.fixture
def board(store):
    store.update_table_replication_states({TABLE: Init(), OTHER: Init()})
    return Board(store, Lsn(100), store.get_table_position)


def copy(board: Board, attempt: str = "one") -> None:
    board.claim(TABLE, attempt)
    board.advance(TABLE, attempt, start_copy)
    board.advance(TABLE, attempt, finish_copy)


def hand_over(board: Board, attempt: str = "one") -> Catchup:
    assert board.wait_to_hand_over(TABLE, attempt, S, S, timeout=0) is None
    board.record_progress(Lsn(200), {})
    target = board.wait_to_hand_over(TABLE, attempt, S, S, timeout=0)
    assert target is not None
    return target


@pytest.mark.trap(23)
def test_a_table_is_handed_over_and_holds_progress_until_apply_has_it(board, store):
    copy(board)
    assert hand_over(board) == Catchup(Lsn(200))
    board.move(TABLE, "one", Lsn(180))
    assert board.record_progress(Lsn(300), {}) == 200
    board.advance(TABLE, "one", lambda phase: finish_catchup(phase, Lsn(200)), position=Lsn(200))
    assert board.positions() == {TABLE: 200}
    assert board.record_progress(Lsn(400), {TABLE: Lsn(400)}) == 400
    assert store.get_table_replication_state(TABLE) == Ready()


@pytest.mark.trap(18)
@pytest.mark.parametrize("at", ["copying", "catching up", "waiting", "handed over"])
def test_the_worker_of_a_removed_table_does_not_bring_it_back(board, store, at):
    board.claim(TABLE, "one")
    board.advance(TABLE, "one", start_copy)
    if at != "copying":
        board.advance(TABLE, "one", finish_copy)
    if at == "waiting":
        board.wait_to_hand_over(TABLE, "one", S, S, timeout=0)
    if at == "handed over":
        hand_over(board)
    board.remove(TABLE)
    for attempt in (
        lambda: board.advance(TABLE, "one", finish_copy),
        lambda: board.wait_to_hand_over(TABLE, "one", S, S, timeout=0),
        lambda: board.move(TABLE, "one", S),
        lambda: board.check_claim(TABLE, "one"),
    ):
        with pytest.raises(Superseded):
            attempt()
    board.leave(TABLE, "one")
    assert TABLE not in board.phases()
    assert TABLE not in store.get_table_replication_states()
    assert board.record_progress(Lsn(900), {}) == 900


@pytest.mark.trap(18, 19)
def test_a_table_that_is_to_be_copied_anew_is_not_handed_over_by_the_old_worker(board, store):
    copy(board)
    board.wait_to_hand_over(TABLE, "one", S, S, timeout=0)
    board.set_phase(TABLE, resync())
    with pytest.raises(Superseded):
        board.wait_to_hand_over(TABLE, "one", S, S, timeout=0)
    board.leave(TABLE, "one")
    assert board.phase(TABLE) == store.get_table_replication_state(TABLE) == Init()
    copy(board, "two")
    with pytest.raises(Superseded):
        board.advance(TABLE, "one", finish_copy)
    assert hand_over(board, "two") == Catchup(Lsn(200))


def test_a_worker_that_waits_hears_that_its_table_is_gone(board):
    copy(board)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            board.wait_to_hand_over(TABLE, "one", S, S, timeout=30)
        except Superseded as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not isinstance(board.phase(TABLE), SyncWait):
        pass
    board.remove(TABLE)
    thread.join(10)
    assert len(ended) == 1


@pytest.mark.trap(23)
def test_a_worker_that_ends_without_a_word_holds_back_nothing(board):
    copy(board)
    hand_over(board)
    board.move(TABLE, "one", Lsn(160))
    assert board.record_progress(Lsn(500), {}) == 200
    board.leave(TABLE, "one")
    assert board.phase(TABLE) == FinishedCopy()
    assert board.record_progress(Lsn(600), {}) == 600


@pytest.mark.trap(23)
def test_a_hand_over_whose_answer_was_lost_has_happened(board, store, monkeypatch):
    copy(board)
    hand_over(board)
    update = store.update_table_replication_state

    def lose_answer(table_id, phase):
        update(table_id, phase)
        raise StateUnusable("the answer is lost")

    monkeypatch.setattr(store, "update_table_replication_state", lose_answer)
    with pytest.raises(StateUnusable):
        board.advance(TABLE, "one", lambda phase: finish_catchup(phase, Lsn(200)), position=Lsn(200))
    board.leave(TABLE, "one")
    assert board.phase(TABLE) == SyncDone(Lsn(200))
    assert board.positions() == {TABLE: 200}
    assert board.record_progress(Lsn(500), {}) == 200


def test_only_a_table_that_is_copied_waits_for_apply(board):
    board.claim(TABLE, "one")
    with pytest.raises(IllegalTransition):
        board.wait_to_hand_over(TABLE, "one", S, S, timeout=0)


@pytest.mark.trap(28)
def test_a_table_that_was_handed_over_starts_there_although_nobody_recorded_it(store):
    for phase in (Init(), DataSync(), FinishedCopy(), SyncDone(Lsn(300))):
        store.update_table_replication_state(TABLE, phase)
    store.upsert_replication_progress(Lsn(200))
    assert Board(store, Lsn(200), lambda _: None).positions() == {TABLE: 300}


def test_apply_does_not_finish_its_work_when_the_lease_is_lost(board, store, tmp_path):
    rounds = []
    destination = SimpleNamespace(write_events=lambda batch: pytest.fail("nothing may be written"))

    class Losing(Lifecycle):
        @contextmanager
        def working(self):
            rounds.append(1)
            self.lose(LeaseLost("another process has taken over"))
            yield False

    worker = ApplyWorker(
        name="tables",
        spool=tmp_path,
        board=board,
        store=store,
        destination=destination,
        lifecycle=Losing("tables"),
        settings=BatchSettings(interval=0.01),
        error_hold=ErrorHold(),
        try_tasks=lambda: None,
    )
    worker.run()
    assert len(rounds) == 1


def test_a_worker_that_ends_while_the_store_is_away_leaves_a_table_that_is_copied_again(board, store, monkeypatch):
    copy(board)
    hand_over(board)

    def refuse(table_id):
        raise ServerUnavailable("no answer")

    with monkeypatch.context() as away:
        away.setattr(store, "get_table_replication_state", refuse)
        with pytest.raises(ServerUnavailable):
            board.leave(TABLE, "one")
    # Its thread tries again.
    board.leave(TABLE, "one")
    assert board.phase(TABLE) == FinishedCopy()
    assert TABLE in board.to_copy()
