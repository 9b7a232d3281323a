"""Progress, acknowledgement and restart, on plain values."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.lsn import Lsn, earliest, furthest, is_in
from penstock.state.phases import (
    Catchup,
    DataSync,
    Errored,
    FinishedCopy,
    Init,
    Ready,
    RetryPolicy,
    SyncDone,
    SyncWait,
)
from penstock.state.positions import (
    followed_from,
    held_at,
    progress,
    start_position,
    table_start,
)

P = Lsn(100)


def errored(position: int, **changes) -> Errored:
    return Errored("x", None, RetryPolicy(), Ready(), datetime(2026, 1, 1, tzinfo=UTC), Lsn(position), **changes)


@pytest.mark.trap(5)
def test_while_all_tables_copy_progress_is_applys_own_position() -> None:
    assert progress(P, []) == P
    assert progress(P, [(phase, None) for phase in (Init(), DataSync(), FinishedCopy(), SyncWait())]) == P


@pytest.mark.trap(5)
def test_tables_that_are_ahead_do_not_pull_progress_past_apply() -> None:
    assert progress(P, [(Ready(), Lsn(150)), (SyncDone(Lsn(140)), None)]) == P


@pytest.mark.trap(3, 23)
def test_progress_is_the_minimum_over_all_that_hold() -> None:
    tables = [(Ready(), Lsn(90)), (Catchup(Lsn(120)), Lsn(70)), (SyncDone(Lsn(80)), None), (DataSync(), Lsn(1))]
    assert progress(P, tables) == 70
    assert progress(P, [tables[0], *tables[2:]]) == 80
    assert progress(P, [tables[0], tables[3]]) == 90


@pytest.mark.trap(33)
def test_an_errored_table_holds_until_its_position_is_lost() -> None:
    assert progress(P, [(Ready(), P), (errored(30), None)]) == 30
    assert progress(P, [(Ready(), P), (errored(30, position_lost=True), None)]) == P


@pytest.mark.trap(23)
def test_until_apply_has_taken_a_table_over_progress_stays_at_the_hand_over() -> None:
    assert held_at(SyncDone(Lsn(80)), None) == 80
    assert held_at(SyncDone(Lsn(80)), Lsn(60)) == 80
    assert held_at(SyncDone(Lsn(80)), Lsn(95)) == 95


def test_a_followed_table_without_a_position_is_an_error() -> None:
    for phase in (Ready(), Catchup(Lsn(1))):
        with pytest.raises(ValueError):
            held_at(phase, None)


@pytest.mark.trap(2, 23)
def test_apply_takes_the_commit_that_starts_at_the_hand_over() -> None:
    taken_from = followed_from(SyncDone(Lsn(10)), Lsn(5))
    assert is_in(9, taken_from)
    assert not is_in(10, taken_from)
    assert followed_from(SyncDone(Lsn(10)), Lsn(12)) == 12
    assert followed_from(Ready(), Lsn(1)) == 1


@pytest.mark.trap(4)
def test_replication_starts_at_the_further_of_slot_and_store() -> None:
    assert start_position(Lsn(5), None) == 5
    assert start_position(Lsn(5), Lsn(7)) == 7
    assert start_position(Lsn(7), Lsn(5)) == 7
    assert table_start(Lsn(5), None) == 5
    assert table_start(Lsn(5), Lsn(9)) == 9


def test_the_extremes() -> None:
    assert (earliest(Lsn(2), Lsn(1), Lsn(3)), furthest(Lsn(2), Lsn(1), Lsn(3))) == (1, 3)
