"""Quantities as people read them."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


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


def count_of(number: int, noun: str) -> str:
    """`1 table`, `2 tables`, `1,200 tables`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
