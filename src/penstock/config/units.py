"""Sizes, durations and counts as people write and read them: `4GB`, `1h`, `2 tables`. Errors never repeat the input."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Annotated, Any

from pydantic import BeforeValidator

_UNITS = ("B", "kB", "MB", "GB", "TB")
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_SIZES = {"b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_LONGEST_SECONDS = 100 * 365 * 86400


def parse_size(value: Any) -> int:
    """Parse a size: bytes, or a number with a unit. As in Postgres, 1kB is 1024 bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _split(value, {unit: float(bytes_) for unit, bytes_ in _SIZES.items()}, strip_i=True)
    if found is None or not isfinite(found):
        raise ValueError('should be a size like "512MB" or "4GB", or a whole number of bytes')
    return round(found)


def parse_duration(value: Any) -> timedelta:
    """Parse a duration: seconds, or a number with a unit."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    found = value if is_number else _split(value, _SECONDS)
    # Longer waits are more than the system can count.
    if found is None or not 0 <= found <= _LONGEST_SECONDS:
        raise ValueError('should be a duration like "500ms", "30s", "15min", "1h" or "2d", or a number of seconds')
    return timedelta(seconds=found)


def format_bytes(size: float) -> str:
    """`1.5 GB`; 1 kB is 1024 bytes, as in Postgres."""
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def format_seconds(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2 h 05 min`, `3 d 04 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def format_moment(moment: float | str) -> str:
    """`2026-11-17 06:54:03 UTC`, of a Unix time or of a text as `--json` has it."""
    at = datetime.fromisoformat(moment) if isinstance(moment, str) else datetime.fromtimestamp(moment, UTC)
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def count_of(number: int, noun: str) -> str:
    """`1 table`, `2 tables`, `1,200 tables`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _split(value: Any, units: dict[str, float], *, strip_i: bool = False) -> float | None:
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return None
    unit = found[2].lower()
    factor = units.get(unit.replace("ib", "b") if strip_i else unit)
    return None if factor is None else float(found[1]) * factor


Size = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | str)]
Duration = Annotated[timedelta, BeforeValidator(parse_duration, json_schema_input_type=float | str)]
