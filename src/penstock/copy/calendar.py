"""The server's text for dates and timestamps that lie outside of what lakes can hold: infinities, BC, years over 9999.

They are few and mostly the same, so texts are made one by one, for distinct values only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

EPOCH_DAYS = 10_957
"""Postgres counts from 2000-01-01."""
_DAY = 86_400_000_000
EPOCH_MICROSECONDS = EPOCH_DAYS * _DAY


def date_texts(days: NDArray[np.int32]) -> list[str]:
    """`days` since 2000."""
    return [
        infinity or f"{day}{era}"
        for infinity, (day, era) in zip(_infinities(days), _days(days.astype(np.int64)), strict=True)
    ]


def timestamp_texts(microseconds: NDArray[np.int64], *, zoned: bool) -> list[str]:
    """`microseconds` since 2000, in UTC."""
    days, rest = np.divmod(microseconds, _DAY)
    zone = "+00" if zoned else ""
    return [
        infinity or f"{day} {_clock(int(time))}{zone}{era}"
        for infinity, (day, era), time in zip(_infinities(microseconds), _days(days), rest, strict=True)
    ]


def _infinities(values: NDArray[Any]) -> list[str]:
    limits = np.iinfo(values.dtype)
    names = {limits.min: "-infinity", limits.max: "infinity"}
    return [names.get(int(value), "") for value in values]


def _days(days: NDArray[np.int64]) -> list[tuple[str, str]]:
    """Year, month and day, and ` BC` where the year is one. Infinities give anything."""
    moments = days.astype("datetime64[D]") + EPOCH_DAYS
    years = moments.astype("datetime64[Y]").astype(np.int64) + 1970
    months = moments.astype("datetime64[M]")
    month_numbers = months.astype(np.int64) % 12 + 1
    numbers = (moments - months.astype("datetime64[D]")).astype(np.int64) + 1
    return [
        (f"{year if year > 0 else 1 - year:04d}-{month:02d}-{day:02d}", "" if year > 0 else " BC")
        for year, month, day in zip(years, month_numbers, numbers, strict=True)
    ]


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{text}.{fraction:06d}".rstrip("0") if fraction else text
