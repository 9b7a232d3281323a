"""`timestamptz`, `timestamp`, `date` and `time`: microseconds and days, from years 1 to 9999.

What lakes, Spark and Python cannot hold is rejected: `infinity`, BC, years over 9999, `24:00:00`. Text is ISO, as
Postgres writes it under `datestyle = ISO`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.values.cells import blank, cast_matching, fixed_values, large_text, matches, merge, reject, to_numpy
from penstock.values.codec import Decoded, register

FIRST_DAY, LAST_DAY = -719_162, 2_932_896
"""0001-01-01 and 9999-12-31 in days since 1970."""
DAY = 86_400_000_000
"""Microseconds."""

# Exactly what Arrow reads, with leap years, so that what matches can be cast (the alternative is to search for 30
# February by halving) and whether a cell fits never depends on the others of its column.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # all but 0000
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_FEBRUARY = "02-(?:0[1-9]|1[0-9]|2[0-8])"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-(?:{_LONG_MONTH}|{_SHORT_MONTH}|{_FEBRUARY})|(?:[0-9][0-9]{_FOURTH}|{_FOURTH}00)-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3])(?::[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?)?"
_OFFSET = "(?:Z|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)"

_DATE_PATTERN = rf"\A{_DATE}\z"
_TIME_PATTERN = rf"\A{_TIME}\z"
_TIMESTAMP_PATTERN = rf"\A{_DATE}(?:[ T]{_TIME})?\z"
_TIMESTAMPTZ_PATTERN = rf"\A{_DATE}[ T]{_TIME}{_OFFSET}\z"
_OFFSET_WITH_SECONDS = r"[+-][0-9]{2}:[0-9]{2}:[0-5][0-9]\z"


@dataclass(frozen=True, slots=True)
class DateCodec:
    """Days."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        try:
            decoded = Decoded(pc.cast(text, self.arrow_type), None)
        except pa.ArrowInvalid:
            return cast_matching(text, self.arrow_type, _DATE_PATTERN)
        return _reject_outside(decoded, np.int32, FIRST_DAY, LAST_DAY)


@dataclass(frozen=True, slots=True)
class TimestampCodec:
    """Microseconds, without a zone or in UTC."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        try:
            decoded = Decoded(pc.cast(text, self.arrow_type), None)
        except pa.ArrowInvalid:
            decoded = self._decode_carefully(text)
        # Arrow takes year 0, and an offset may move a value over either end.
        return _reject_outside(decoded, np.int64, FIRST_DAY * DAY, (LAST_DAY + 1) * DAY - 1)

    def _decode_carefully(self, text: pa.LargeStringArray) -> Decoded:
        if self.arrow_type.tz is None:
            return cast_matching(text, self.arrow_type, _TIMESTAMP_PATTERN)
        decoded = cast_matching(text, self.arrow_type, _TIMESTAMPTZ_PATTERN)
        if decoded.rejected is None:
            return decoded
        cells = text.take(pa.array(np.flatnonzero(decoded.rejected)))
        if not matches(cells, _OFFSET_WITH_SECONDS).any():
            return decoded
        return self._decode_offset_seconds(text, pc.match_substring_regex(text, _OFFSET_WITH_SECONDS))

    def _decode_offset_seconds(self, text: pa.LargeStringArray, has_seconds: pa.BooleanArray) -> Decoded:
        """Local mean time has offsets like +00:19:32, which Arrow cannot read; never sent by a session in UTC."""
        shorter = pc.if_else(has_seconds, pc.utf8_slice_codeunits(text, 0, -3), text)
        decoded = cast_matching(shorter, self.arrow_type, _TIMESTAMPTZ_PATTERN)
        affected = np.flatnonzero(to_numpy(pc.fill_null(has_seconds, False)))
        offsets = text.take(pa.array(affected))
        seconds = pc.cast(pc.utf8_slice_codeunits(offsets, -2), pa.int64()).to_numpy()
        west = to_numpy(pc.equal(pc.utf8_slice_codeunits(offsets, -9, -8), large_text("-")))
        values = fixed_values(decoded.array, np.int64).copy()
        values[affected] -= np.where(west, -seconds, seconds) * 1_000_000
        validity = decoded.array.is_valid().buffers()[1]
        array = pa.Array.from_buffers(self.arrow_type, len(text), [validity, pa.py_buffer(values)])
        return Decoded(array, decoded.rejected)


@dataclass(frozen=True, slots=True)
class TimeCodec:
    """Microseconds since midnight; `24:00:00` is not a time of any day."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        # Arrow has no cast to times: read them as timestamps of the first day.
        try:
            return self._cast(text)
        except pa.ArrowInvalid:
            pass
        unwanted = ~matches(text, _TIME_PATTERN)
        decoded = self._cast(blank(text, unwanted))
        return Decoded(decoded.array, merge(unwanted, None))

    def _cast(self, text: pa.LargeStringArray) -> Decoded:
        moments = pc.cast(
            pc.binary_join_element_wise(large_text("1970-01-01 "), text, large_text("")), pa.timestamp("us")
        )
        return Decoded(pc.cast(moments, self.arrow_type), None)


def holds_times(arrow_type: pa.DataType) -> bool:
    """True if values of this type are or contain times of day, for which Delta and Spark 4.0 have no type."""
    return times_as_text(arrow_type) != arrow_type


def times_as_text(arrow_type: pa.DataType) -> pa.DataType:
    """The type of what `print_times` returns: text for times, also in lists and structs; other types unchanged."""
    if pa.types.is_time(arrow_type):
        return pa.string()
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        return pa.list_(times_as_text(arrow_type.value_type)) if holds_times(arrow_type.value_type) else arrow_type
    if pa.types.is_struct(arrow_type):
        return pa.struct([field.with_type(times_as_text(field.type)) for field in arrow_type])
    return arrow_type


def print_times(column: pa.Array) -> pa.Array:
    """Print times as Postgres does, without zeros at the end of a fraction; values without times are unchanged."""
    if not holds_times(column.type):
        return column
    if pa.types.is_time(column.type):
        return pc.utf8_rtrim(pc.utf8_rtrim(column.cast(pa.string()), "0"), ".")
    if pa.types.is_struct(column.type):
        printed = [print_times(child) for child in column.flatten()]
        fields = list(times_as_text(column.type))
        return pa.StructArray.from_arrays(printed, fields=fields, mask=column.is_null())
    printed = print_times(column.flatten())
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    is_null = np.append(column.is_null().to_numpy(zero_copy_only=False), False)
    borders = pa.array(np.append(0, np.cumsum(counts)).astype(np.int32), mask=is_null)
    return pa.ListArray.from_arrays(borders, printed)


def _reject_outside(decoded: Decoded, kind: type[np.int32 | np.int64], low: int, high: int) -> Decoded:
    values = fixed_values(decoded.array, kind)
    if not len(values) or (values.min() >= low and values.max() <= high):
        return decoded
    outside = (values < low) | (values > high)
    return reject(decoded, outside & to_numpy(decoded.array.is_valid()))


register("date", factory=lambda type_, modifier, settings: DateCodec(pa.date32()), rejects=True)
register("timestamp", factory=lambda type_, modifier, settings: TimestampCodec(pa.timestamp("us")), rejects=True)
register(
    "timestamptz", factory=lambda type_, modifier, settings: TimestampCodec(pa.timestamp("us", "UTC")), rejects=True
)
register("time", factory=lambda type_, modifier, settings: TimeCodec(pa.time64("us")), rejects=True)


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
