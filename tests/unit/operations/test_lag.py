"""How far a pipeline is behind."""

from __future__ import annotations

from penstock.lsn import Lsn
from penstock.operations.lag import Behind, Lag


def test_nothing_is_known_before_the_first_look():
    assert Lag().behind(10.0, Lsn(5), 0) is None


def test_a_pipeline_that_is_there_has_no_lag():
    lag = Lag()
    lag.add(1.0, Lsn(100))
    lag.add(2.0, Lsn(200))
    assert lag.behind(9.0, Lsn(200), 0) == Behind(0, 0.0)


def test_seconds_count_from_the_first_look_that_is_not_reached():
    lag = Lag()
    for moment in range(10):
        lag.add(float(moment), Lsn(100 * moment))
    assert lag.behind(10.0, Lsn(350), 0) == Behind(550, 6.0)
    # A quiet hour before does not count.
    lag.add(3600.0, Lsn(1000))
    assert lag.behind(3601.0, Lsn(900), 1_000_000) == Behind(100, 1.0)


def test_a_backlog_from_before_goes_by_the_time_of_what_was_applied():
    lag = Lag()
    lag.add(1000.0, Lsn(100))
    assert lag.behind(1002.0, Lsn(50), 400_000_000) == Behind(50, 602.0)


def test_an_output_that_is_ahead_does_not_change_the_lag_of_another():
    lag = Lag()
    for moment in range(10):
        lag.add(float(moment), Lsn(100 * moment))
    assert lag.behind(10.0, Lsn(900), 0) == Behind(0, 0.0)
    assert lag.behind(10.0, Lsn(850), 0) == Behind(50, 1.0)
    assert lag.behind(10.0, Lsn(150), 0) == Behind(750, 8.0)
