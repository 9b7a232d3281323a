"""How long room lasts, from scripted samples."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.headroom import GRACE_SECONDS, LEAST_SECONDS, SHORT_SECONDS, Overrun, Room, RoomWatch, Trend

GB = 1 << 30


def lasting(*samples: tuple[float, int]) -> float | None:
    trend = Trend()
    for at, left in samples:
        trend.add(at, left)
    return trend.seconds_left


@pytest.mark.parametrize(
    ("samples", "seconds"),
    [
        ([(0.0, 100)], None),  # one sample has no rate
        ([(0.0, 100), (LEAST_SECONDS / 2, 50)], None),  # too soon: a batch may free all of it
        ([(0.0, 100), (100.0, 50)], 100.0),
        ([(0.0, 100), (50.0, 20), (100.0, 50)], 100.0),  # steps in between do not matter
        ([(0.0, 100), (100.0, 100)], None),
        ([(0.0, 100), (100.0, 150)], None),
        ([(0.0, 100), (5.0, 0)], 0.0),
        ([(0.0, 100), (5.0, -7)], 0.0),
        ([(0.0, 10_000), (1000.0, 1000), (1100.0, 900)], 900.0),  # only the last minutes count
    ],
)
def test_the_rate_of_the_last_minutes_says_how_long_room_lasts(
    samples: Sequence[tuple[float, int]], seconds: float | None
) -> None:
    assert lasting(*samples) == seconds


def watch() -> tuple[RoomWatch, list[Room]]:
    warned: list[Room] = []
    return RoomWatch(warned.append), warned


def test_the_limit_that_is_reached_first_counts() -> None:
    watched, _ = watch()
    watched.look(0.0, 0, {"small": 2 * GB, "large": 9 * GB})
    room = watched.look(100.0, 0, {"small": 2 * GB, "large": 8 * GB})
    assert (room.limit, room.left, room.seconds_left) == ("large", 8 * GB, 800.0)
    watched, _ = watch()
    assert watched.look(0.0, 0, {"small": 2 * GB, "large": 9 * GB}).limit == "small"


def test_a_warning_comes_once_before_the_room_runs_out_and_again_after_it_was_ample() -> None:
    watched, warned = watch()
    assert not watched.look(0.0, 0, {"limit": 10 * GB}).is_short
    at, left = 0.0, 10 * GB
    for _ in range(20):
        at, left = at + 10.0, left - GB // 10
        watched.look(at, 10 * GB - left, {"limit": left})
    assert [room.is_short for room in warned] == [True]
    assert warned[0].seconds_left is not None
    assert 0.0 < warned[0].seconds_left < SHORT_SECONDS
    assert warned[0].left > 9 * GB
    # A pause does not end it, a long one does.
    assert watched.look(at + 10.0, 2 * GB, {"limit": left}).is_short
    assert not watched.look(at + 1000.0, 2 * GB, {"limit": left}).is_short
    assert watched.look(at + 1100.0, 9 * GB, {"limit": GB // 2}).is_short
    assert len(warned) == 2


def test_the_last_tenth_is_short_however_slowly_it_is_used() -> None:
    watched, warned = watch()
    assert watched.look(0.0, 95, {"limit": 5}).is_short
    assert watched.look(1.0, 100, {"limit": 0}).seconds_left == 0.0
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("used", "lasts"),
    [
        ([101], False),
        ([101, 101], True),
        ([101, 150], True),
        ([300, 250, 200, 150, 120, 100, 90], False),  # it shrinks all the time
        ([300, 200, 250], True),  # it shrank, and grew again
        ([300, 200, 250, 190], True),  # too late
        ([101, 100, 101], False),  # it was met meanwhile
        ([100, 100, 100], False),
    ],
)
def test_a_limit_is_exceeded_for_good_if_it_is_not_about_to_be_met_again(used: Sequence[int], lasts: bool) -> None:
    overrun = Overrun()
    assert any(overrun.lasts(number * GRACE_SECONDS, each, 100) for number, each in enumerate(used)) is lasts
