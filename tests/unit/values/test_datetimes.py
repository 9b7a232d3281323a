"""Timestamps, dates and times."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.values import OutOfRange, TypeSettings, codec_for
from tests.unit.values.columns import builtin, decode, fits, values


def postgres_text(moment: dt.datetime | dt.time) -> str:
    """ISO as the server writes it: no trailing zeros in the fraction."""
    text = moment.isoformat(*([" "] if isinstance(moment, dt.datetime) else []))
    return text.rstrip("0") if moment.microsecond else text


@given(st.lists(st.datetimes(), max_size=20))
def test_timestamps_are_exact_to_the_microsecond(moments: list[dt.datetime]) -> None:
    assert values("timestamp", [postgres_text(moment) for moment in moments]) == moments


@given(st.lists(st.datetimes(), max_size=20))
def test_timestamps_with_a_zone_are_utc(moments: list[dt.datetime]) -> None:
    decoded = decode("timestamptz", [postgres_text(moment) + "+00" for moment in moments])
    assert decoded.array.type == pa.timestamp("us", "UTC")
    assert decoded.array.cast(pa.timestamp("us")).to_pylist() == moments


@given(st.lists(st.dates(), max_size=20))
def test_dates_are_exact(days: list[dt.date]) -> None:
    assert values("date", [day.isoformat() for day in days]) == days


@given(st.lists(st.times(), max_size=20))
def test_times_are_exact(times: list[dt.time]) -> None:
    assert values("time", [postgres_text(time) for time in times]) == times


@pytest.mark.parametrize(
    ("cell", "utc"),
    [
        ("2026-11-15 09:25:00.5+05:30", "2026-11-15 03:55:00.5"),
        ("2026-11-15 09:25:00-03", "2026-11-15 12:25:00"),
        ("1890-01-01 00:00:00+00:19:32", "1889-12-31 23:40:28"),
        ("1890-01-01 00:00:00-00:19:32", "1890-01-01 00:19:32"),
    ],
)
def test_any_offset_is_read(cell: str, utc: str) -> None:
    decoded = decode("timestamptz", [None, cell, "1970-01-01 00:00:00+00"])
    assert decoded.array.cast(pa.timestamp("us")).to_pylist()[1] == dt.datetime.fromisoformat(utc)
    assert decoded.rejected is None


@pytest.mark.trap(31)
def test_moments_that_lakes_cannot_hold_are_rejected() -> None:
    beyond = ["infinity", "-infinity", "0044-03-15 00:00:00 BC", "10000-01-01 00:00:00", "294276-12-31 23:59:59.999999"]
    ends = ["0001-01-01 00:00:00", "9999-12-31 23:59:59.999999"]
    assert fits("timestamp", [*beyond, None, *ends]) == [0, 0, 0, 0, 0, 1, 1, 1]
    with_zone = ["infinity", "-infinity", "0044-03-15 00:00:00+00 BC", "10000-01-01 00:00:00+00"]
    assert fits("timestamptz", [*with_zone, *(end + "+00" for end in ends)]) == [0, 0, 0, 0, 1, 1]
    days = ["infinity", "-infinity", "0044-03-15 BC", "10000-01-01", "5874897-12-31", "0001-01-01", "9999-12-31"]
    assert fits("date", days) == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.trap(31)
def test_the_end_of_the_day_is_not_a_time() -> None:
    assert fits("time", ["00:00:00", "24:00:00", None, "23:59:59.999999"]) == [1, 0, 1, 1]


def test_a_column_of_nothing_but_infinity_is_rejected_as_a_whole() -> None:
    assert not any(fits("date", ["infinity"] * 1000))


def test_days_that_no_calendar_has_are_rejected() -> None:
    cells = ["2023-02-29", "2024-02-29", "1900-02-29", "2000-02-29", "2024-04-31", "2024-13-01", "0000-01-01"]
    assert fits("date", cells) == [0, 1, 0, 1, 0, 0, 0]
    assert fits("timestamp", [cell + " 00:00:00" for cell in cells]) == [0, 1, 0, 1, 0, 0, 0]
    assert fits("timestamp", ["0000-12-31 00:00:00"]) == [False]


def test_an_offset_that_moves_a_value_over_the_end_rejects_it() -> None:
    assert fits("timestamptz", ["9999-12-31 23:00:00-05", "0001-01-01 00:00:00+01"]) == [0, 0]


def test_the_careful_way_agrees_with_the_calendar() -> None:
    years = [*range(401), *range(1896, 2105), 9999]
    cells = [f"{year:04}-{month:02}-{day:02}" for year in years for month in range(14) for day in range(33)]
    assert fits("date", [*cells, "infinity"]) == [*map(_is_date, cells), False]


def _is_date(cell: str) -> bool:
    try:
        return bool(dt.date.fromisoformat(cell))
    except ValueError:
        return False


def test_text_policy_makes_these_columns_text() -> None:
    settings = TypeSettings(out_of_range=OutOfRange.TEXT)
    for name in ("date", "time", "timestamp", "timestamptz"):
        assert codec_for(builtin(name), -1, settings).arrow_type == pa.string()
    assert values("date", ["infinity", None], out_of_range=OutOfRange.TEXT) == ["infinity", None]
