"""The rules of coordination: which phase follows which, by the functions that everything else calls."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest

from penstock.errors import IllegalTransition, Retry
from penstock.lsn import Lsn
from penstock.state import phases, positions, transitions
from penstock.state.phases import (
    Catchup,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Ready,
    Resumption,
    RetryPolicy,
    SyncDone,
    SyncWait,
    TableReplicationPhase,
    phase_from_json,
    phase_to_json,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
LSNS = (Lsn(10), Lsn(20))
RESUMPTION = Resumption("first", Lsn(10))


def errored(previous=None, **changes) -> Errored:
    previous = previous or Ready()
    followed = isinstance(previous, SyncDone | Ready)
    values = {"position": Lsn(20)} if followed else {}
    return Errored("a bad row", "mend it", RetryPolicy(), previous, NOW, **(values | changes))


WORLD: list[TableReplicationPhase] = [
    *(Init(), DataSync(), FinishedCopy(), SyncWait(), Ready()),
    *(Catchup(lsn) for lsn in LSNS),
    *(SyncDone(lsn) for lsn in LSNS),
    *(errored(previous) for previous in (Init(), DataSync(), FinishedCopy(), SyncDone(Lsn(20)), Ready())),
    *(DataSync(RESUMPTION), errored(DataSync(RESUMPTION))),
    *(errored(previous, position_lost=True) for previous in (SyncDone(Lsn(20)), Ready())),
]


def reachable(current: TableReplicationPhase) -> set[TableReplicationPhase]:
    """All that the named functions make of a phase, over a small world of positions."""
    lsn = LSNS
    calls = [
        lambda: transitions.resync(),
        lambda: transitions.start_copy(current),
        lambda: transitions.start_copy(current, RESUMPTION),
        *([lambda: given_up] if (given_up := transitions.give_up_resuming(current)) is not None else []),
        lambda: transitions.finish_copy(current),
        lambda: transitions.wait_for_apply(current),
        *(
            lambda s=s, p=p, a=a: transitions.hand_over(current, snapshot=s, applied=p, acknowledged=a)
            for s, p, a in product(lsn, repeat=3)
        ),
        *(lambda d=d: transitions.finish_catchup(current, d) for d in lsn),
        *(lambda d=d: transitions.become_ready(current, d) for d in lsn),
        *(
            lambda r=r: transitions.fail(
                current,
                reason="a bad row",
                solution="mend it",
                retry_policy=RetryPolicy(),
                at=NOW,
                position=Lsn(20),
                resumes=r,
            )
            for r in (False, True)
        ),
        lambda: transitions.lose_position(current),
        lambda: transitions.roll_back(current),
    ]
    found: set[TableReplicationPhase] = set()
    for call in calls:
        try:
            found.add(call())
        except IllegalTransition:
            continue
    return {replace(each, attempts=0, solution="mend it") if isinstance(each, Errored) else each for each in found}


def test_the_functions_and_the_relation_allow_the_same_steps() -> None:
    for current, new in product(WORLD, WORLD):
        allowed = new in reachable(current) or new == current
        assert allowed == transitions.is_legal(current, new), f"{current} -> {new}"


def test_a_new_table_starts_at_init_and_nowhere_else() -> None:
    assert transitions.discover(None) == Init()
    assert transitions.discover(Ready()) == Ready()
    assert [phase for phase in WORLD if transitions.is_legal(None, phase)] == [Init()]


@pytest.mark.trap(23)
def test_the_hand_over_is_above_snapshot_apply_and_everything_acknowledged() -> None:
    for snapshot, applied, acknowledged in product(range(1, 4), repeat=3):
        target = transitions.hand_over(
            SyncWait(), snapshot=Lsn(snapshot), applied=Lsn(applied), acknowledged=Lsn(acknowledged)
        )
        assert target == Catchup(Lsn(max(snapshot, applied, acknowledged)))


@pytest.mark.trap(23)
def test_a_worker_is_done_exactly_at_the_boundary_that_apply_named() -> None:
    with pytest.raises(IllegalTransition, match="durable only up to 0/9"):
        transitions.finish_catchup(Catchup(Lsn(10)), Lsn(9))
    assert transitions.finish_catchup(Catchup(Lsn(10)), Lsn(10)) == SyncDone(Lsn(10))
    assert transitions.finish_catchup(Catchup(Lsn(10)), Lsn(99)) == SyncDone(Lsn(10))


def test_a_quiet_table_is_ready_when_apply_reaches_the_hand_over() -> None:
    assert not transitions.may_be_ready(SyncDone(Lsn(10)), Lsn(9))
    assert transitions.become_ready(SyncDone(Lsn(10)), Lsn(10)) == Ready()
    with pytest.raises(IllegalTransition):
        transitions.become_ready(SyncDone(Lsn(10)), Lsn(9))


@pytest.mark.trap(33)
def test_rollback_is_never_to_errored_and_never_to_ready() -> None:
    for phase in WORLD:
        if isinstance(phase, Errored) and not phase.position_lost:
            back = transitions.roll_back(phase)
            resumed = None if phase.resumption is None else DataSync(phase.resumption)
            assert back == (resumed or (Init() if phase.position is None else SyncDone(phase.position)))
        else:
            with pytest.raises(IllegalTransition):
                transitions.roll_back(phase)


@pytest.mark.trap(33)
def test_after_its_position_is_lost_a_table_can_only_be_copied_again() -> None:
    lost = transitions.lose_position(errored())
    assert not lost.holds
    assert lost.solution is not None
    assert "penstock resync" in lost.solution
    assert "mend it" not in lost.solution
    with pytest.raises(IllegalTransition) as refused:
        transitions.roll_back(lost)
    assert "resync" in refused.value.hint
    others = [phase for phase in WORLD if not isinstance(phase, Errored)]
    assert [phase for phase in others if transitions.is_legal(lost, phase)] == [Init()]
    assert not transitions.is_legal(lost, errored())
    failed_again = transitions.fail(lost, reason="x", solution=None, retry_policy=RetryPolicy(), at=NOW)
    assert failed_again.position_lost
    assert failed_again.solution == lost.solution
    assert failed_again.retry_policy.retry is Retry.OPERATOR


def test_a_position_is_not_lost_without_having_been_held() -> None:
    assert not transitions.is_legal(Ready(), errored(position_lost=True))
    with pytest.raises(IllegalTransition):
        transitions.lose_position(errored(DataSync()))


@pytest.mark.trap(11, 33)
def test_a_table_that_fails_at_every_retry_does_not_start_its_hold_anew() -> None:
    first = errored()
    again = transitions.fail(
        transitions.roll_back(first),
        reason="again",
        solution=None,
        retry_policy=RetryPolicy(),
        at=NOW + timedelta(hours=1),
        position=Lsn(20),
        after=first,
    )
    assert (again.since, again.attempts) == (NOW, 1)
    moved = transitions.fail(
        transitions.roll_back(first),
        reason="elsewhere",
        solution=None,
        retry_policy=RetryPolicy(),
        at=NOW + timedelta(hours=1),
        position=Lsn(21),
        after=first,
    )
    assert (moved.since, moved.attempts) == (NOW + timedelta(hours=1), 0)


def test_a_followed_table_fails_with_its_position_and_a_copying_one_without() -> None:
    def fail(phase, position=None):
        return transitions.fail(phase, reason="x", solution=None, retry_policy=RetryPolicy(), at=NOW, position=position)

    with pytest.raises(IllegalTransition, match="needs a position"):
        fail(Ready())
    assert fail(SyncDone(Lsn(10)), Lsn(5)).position == 10
    assert fail(Catchup(Lsn(10)), Lsn(5)) == fail(FinishedCopy())
    assert fail(SyncWait()).previous == FinishedCopy()


@pytest.mark.parametrize("phase", WORLD, ids=str)
def test_a_crash_before_the_hand_over_means_a_new_copy(phase: TableReplicationPhase) -> None:
    after = transitions.after_crash(phase, Lsn(11))
    keeps = isinstance(phase, SyncDone | Ready | Errored)
    assert after == (transitions.give_up_resuming(phase) or phase if keeps else Init())
    assert transitions.is_legal(phases.stored_form(phase), after)


@pytest.mark.parametrize("start", [Lsn(9), Lsn(10)])
def test_a_copy_is_resumed_if_its_changes_come_again(start: Lsn) -> None:
    for phase in (DataSync(RESUMPTION), errored(DataSync(RESUMPTION))):
        assert transitions.after_crash(phase, start) == phase
        assert positions.held_at(phase, None) == RESUMPTION.since
        given_up = transitions.give_up_resuming(phase)
        assert given_up is not None
        assert positions.held_at(given_up, None) is None
        assert transitions.give_up_resuming(given_up) is None


def test_a_failed_copy_is_resumed_only_if_its_error_allows_it() -> None:
    def failed(resumes: bool) -> Errored:
        return transitions.fail(
            DataSync(RESUMPTION), reason="", solution=None, retry_policy=RetryPolicy(), at=NOW, resumes=resumes
        )

    assert transitions.roll_back(failed(resumes=True)) == DataSync(RESUMPTION)
    assert transitions.roll_back(failed(resumes=False)) == Init()


@pytest.mark.parametrize("phase", [phase for phase in WORLD if phases.is_persisted(phase)], ids=str)
def test_phases_survive_storage(phase: phases.StoredPhase) -> None:
    assert phase_from_json(phase.name, phase_to_json(phase)) == phase


def test_what_lives_in_memory_is_not_stored() -> None:
    for phase in (SyncWait(), Catchup(Lsn(1))):
        with pytest.raises(IllegalTransition, match="never stored"):
            transitions.check_stored(FinishedCopy(), phase)
    assert transitions.check_stored(FinishedCopy(), SyncDone(Lsn(3))) == SyncDone(Lsn(3))
    with pytest.raises(IllegalTransition):
        transitions.check_stored(DataSync(), SyncDone(Lsn(3)))


def test_a_retry_is_due_at_its_time_and_never_over_a_gap() -> None:
    timed = replace(errored(), retry_policy=RetryPolicy(Retry.TIMED, NOW))
    assert transitions.retry_is_due(timed, NOW)
    assert not transitions.retry_is_due(timed, NOW - timedelta(seconds=1))
    assert not transitions.retry_is_due(transitions.lose_position(timed), NOW)
    assert not transitions.retry_is_due(errored(), NOW)


def test_a_clock_that_is_set_back_does_not_put_off_a_retry() -> None:
    timed = replace(errored(), retry_policy=RetryPolicy(Retry.TIMED, NOW))
    assert not transitions.retry_is_due(timed, NOW - timedelta(seconds=transitions.LONGEST_RETRY_SECONDS))
    assert transitions.retry_is_due(timed, NOW - timedelta(hours=1))


def test_nonsense_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError):
        errored(DataSync(), position=Lsn(1))
    with pytest.raises(ValueError):
        errored(Ready(), position=None)
    with pytest.raises(ValueError):
        errored(errored())
    with pytest.raises(ValueError):
        RetryPolicy(Retry.TIMED)


def test_a_reason_can_hold_what_no_store_takes() -> None:
    phase = replace(errored(), reason="a\x00b\ud800c")
    assert "\x00" not in phase.reason
    assert phase.reason.encode()
