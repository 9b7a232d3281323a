"""Applies a policy to values that their column's type cannot hold; says which settings a key does not allow."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.errors import ValueOutOfRange
from penstock.schema import PostgresType
from penstock.values.cells import matches, to_numpy
from penstock.values.codec import Decoded, codec_for
from penstock.values.datetimes import DAY, FIRST_DAY, LAST_DAY
from penstock.values.settings import NumericPolicy, OutOfRange, TypeSettings


class PolicyResult(NamedTuple):
    """A column after the policy was applied."""

    array: pa.Array
    """Of the codec's type."""
    kept: pa.StringArray | None
    """The text of the cells that `array` cannot hold, NULL elsewhere; None if there are none to keep."""


class _Bounds(NamedTuple):
    """The limits of an Arrow type, and patterns for texts beyond them."""

    low: pa.Scalar
    high: pa.Scalar
    below: str
    above: str


def apply_policy(
    decoded: Decoded, text: pa.LargeStringArray, policy: OutOfRange, *, table: str, column: str
) -> PolicyResult:
    """Apply a policy to the rejected cells of a column; `text` is what was decoded.

    Under TEXT the columns concerned are text already and reject nothing; what another type rejects is kept. CLAMP
    gives infinities and values beyond an end that end; NaN, decimals with too many digits after the point, and
    arrays are not beyond an end, and are kept.
    """
    if decoded.rejected is None:
        return PolicyResult(decoded.array, None)
    match policy:
        case OutOfRange.ERROR:
            raise ValueOutOfRange(
                f"{table}.{column} has {int(decoded.rejected.sum())} value(s) that {decoded.array.type} cannot hold",
                table=table,
                column=column,
            )
        case OutOfRange.NULL:
            return PolicyResult(decoded.array, None)
        case OutOfRange.CLAMP:
            return _clamp(decoded, decoded.rejected, text)
        case OutOfRange.KEEP | OutOfRange.TEXT:
            return PolicyResult(decoded.array, _keep(text, np.flatnonzero(decoded.rejected)))


def settle(array: pa.Array, texts: pa.Array, policy: OutOfRange) -> PolicyResult:
    """Apply NULL or CLAMP to a column whose unrepresentable values were kept: `texts` has them, NULL elsewhere."""
    if policy is OutOfRange.NULL:
        return PolicyResult(array, None)
    rejected = to_numpy(texts.is_valid())
    return _clamp(Decoded(array, rejected), rejected, texts.cast(pa.large_string()))


def merging_setting(type_: PostgresType, modifier: int, settings: TypeSettings) -> str | None:
    """Return the name of a setting that can make different values of a column the same; None if there is none.

    Such a column cannot be part of a key. KEEP, ERROR and TEXT never change a value.
    """
    chosen = codec_for(type_, modifier, settings).arrow_type
    exact = codec_for(type_, modifier, replace(settings, numeric=NumericPolicy.STRING)).arrow_type
    if settings.numeric is NumericPolicy.DOUBLE and exact != chosen:
        return "numeric"
    # A type with values that Arrow cannot hold is text under TEXT.
    exact = codec_for(type_, modifier, replace(settings, out_of_range=OutOfRange.TEXT)).arrow_type
    has_bounds = _bounds(chosen) is not None
    merges = settings.out_of_range is OutOfRange.NULL or (settings.out_of_range is OutOfRange.CLAMP and has_bounds)
    return "out_of_range" if merges and exact != chosen else None


def _keep(text: pa.LargeStringArray, positions: NDArray[np.intp]) -> pa.StringArray | None:
    if not len(positions):
        return None
    index = np.zeros(len(text), np.int64)
    index[positions] = np.arange(len(positions))
    elsewhere = np.ones(len(text), np.bool_)
    elsewhere[positions] = False
    return pc.cast(text.take(pa.array(positions)), pa.string()).take(pa.array(index, mask=elsewhere))


def _clamp(decoded: Decoded, rejected: NDArray[np.bool_], text: pa.LargeStringArray) -> PolicyResult:
    positions = np.flatnonzero(rejected)
    bounds = _bounds(decoded.array.type)
    if bounds is None:
        return PolicyResult(decoded.array, _keep(text, positions))
    cells = text.take(pa.array(positions))
    below, above = matches(cells, bounds.below), matches(cells, bounds.above)
    array = decoded.array
    for beyond, end in ((below, bounds.low), (above, bounds.high)):
        if beyond.any():
            where = np.zeros(len(text), np.bool_)
            where[positions[beyond]] = True
            array = pc.if_else(pa.array(where), end, array)
    return PolicyResult(array, _keep(text, positions[~(below | above)]))


def _bounds(arrow_type: pa.DataType) -> _Bounds | None:
    if pa.types.is_date32(arrow_type) or pa.types.is_timestamp(arrow_type):
        low, high = FIRST_DAY, LAST_DAY
        if pa.types.is_timestamp(arrow_type):
            low, high = FIRST_DAY * DAY, (LAST_DAY + 1) * DAY - 1
        return _Bounds(
            pa.scalar(low, arrow_type),
            pa.scalar(high, arrow_type),
            below=r"\A(?:-infinity|[0-9]{4,}-[0-9: .+-]+ BC)\z",
            above=r"\A(?:infinity|[0-9]{5,}-[0-9: .+-]+)\z",
        )
    if pa.types.is_time64(arrow_type):
        return _Bounds(
            pa.scalar(0, arrow_type), pa.scalar(DAY - 1, arrow_type), below=r"\A\z.", above=r"\A24:00:00(?:\.0+)?\z"
        )
    if pa.types.is_decimal(arrow_type):
        # From its digits: arithmetic, even a minus sign, would round to the 28 digits of Python's default context.
        largest = Decimal((0, (9,) * arrow_type.precision, -arrow_type.scale))
        # Too many digits before the point, the first of them not zero.
        beyond = rf"[1-9][0-9]{{{arrow_type.precision - arrow_type.scale},}}(?:\.[0-9]*)?"
        return _Bounds(
            pa.scalar(largest.copy_negate(), arrow_type),
            pa.scalar(largest, arrow_type),
            below=rf"\A-(?:Infinity|{beyond})\z",
            above=rf"\A(?:Infinity|{beyond})\z",
        )
    return None
