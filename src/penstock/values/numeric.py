"""`numeric`: a 128-bit decimal where one holds every value of the column, else what `NumericPolicy` says.

Arrow's cast from text to decimal **wraps around silently**: 39 digits become some other number, and so does a short
number whose digits overflow when they are brought to the column's scale. So a column is cast only after a proof, by
the lengths of its cells, that nothing can overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.schema import PostgresType, numeric_precision_scale
from penstock.values.cells import cast_matching, layout, to_numpy
from penstock.values.codec import Codec, Decoded, register
from penstock.values.floats import FloatCodec
from penstock.values.settings import NumericPolicy, OutOfRange, TypeSettings
from penstock.values.text import TextCodec

MAX_DIGITS = 38
UNCONSTRAINED_SCALE = 18
"""Digits after the point that unconstrained numerics get under `NumericPolicy.DECIMAL`: 20 remain before it."""

_LAST_DIGIT, _POINT, _MINUS = ord("9"), ord("."), ord("-")


@dataclass(frozen=True, slots=True)
class DecimalCodec:
    """Exact decimals; NaN, infinities and whatever would have to be rounded are rejected."""

    precision: int
    scale: int

    @property
    def arrow_type(self) -> pa.DataType:
        return pa.decimal128(self.precision, self.scale)

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        if self._cannot_overflow(text):
            try:
                return Decoded(pc.cast(text, self.arrow_type), None)
            except pa.ArrowInvalid:
                pass
        return self._decode_carefully(text)

    def _cannot_overflow(self, text: pa.LargeStringArray) -> bool:
        offsets, data = layout(text)
        if not len(data):
            return True
        if data.max() > _LAST_DIGIT:  # NaN, Infinity, or an exponent, which may overflow by itself
            return False
        longest = int(np.diff(offsets).max())
        if longest + self.scale <= MAX_DIGITS:
            return True
        # Exact, for wide columns: one point in each cell, and few enough digits before it.
        points = np.flatnonzero(data == _POINT)
        starts, ends = offsets[:-1], offsets[1:]
        if text.null_count:
            valid = to_numpy(text.is_valid())
            starts, ends = starts[valid], ends[valid]
        if len(points) != len(starts) or (points < starts).any() or (points >= ends).any():
            return False
        starts = starts + (data[starts] == _MINUS)
        whole_digits, digits = points - starts, ends - starts - 1
        return bool(whole_digits.max() <= self.precision - self.scale and digits.max() <= MAX_DIGITS)

    def _decode_carefully(self, text: pa.LargeStringArray) -> Decoded:
        room = self.precision - self.scale
        whole = f"[0-9]{{1,{room}}}" if room else "0"
        fraction = f"[0-9]{{1,{self.scale}}}" if self.scale else "0"
        pattern = rf"\A[+-]?0*(?:{whole}\.?|(?:{whole})?\.{fraction})\z"
        return cast_matching(self._without_padding(text), self.arrow_type, pattern)

    def _without_padding(self, text: pa.LargeStringArray) -> pa.LargeStringArray:
        """Zeros beyond the scale mean nothing, but would overflow on the way."""
        return pc.replace_substring_regex(text, rf"\A([+-]?[0-9]*\.[0-9]{{{max(self.scale, 1)}}})0+\z", r"\1")


def numeric_codec(type_: PostgresType, modifier: int, settings: TypeSettings) -> Codec:
    """Decimal if 38 digits hold every value of the column; otherwise as configured."""
    constraint = numeric_precision_scale(modifier)
    if constraint is not None:
        precision, scale = constraint
        # Parquet, Delta and Spark want 0 <= scale <= precision: numeric(3,5) is held by (5,5), numeric(3,-2) by (5,0).
        precision, scale = max(precision - min(scale, 0), scale), max(scale, 0)
        if precision <= MAX_DIGITS:
            return _exact(DecimalCodec(precision, scale), settings)
    match settings.numeric:
        case NumericPolicy.STRING:
            return TextCodec(pa.string())
        case NumericPolicy.DOUBLE:
            return FloatCodec(pa.float64())
        case NumericPolicy.DECIMAL:
            scale = UNCONSTRAINED_SCALE if constraint is None else min(max(constraint[1], 0), MAX_DIGITS)
            return _exact(DecimalCodec(MAX_DIGITS, scale), settings)


def _exact(codec: DecimalCodec, settings: TypeSettings) -> Codec:
    return TextCodec(pa.string()) if settings.out_of_range is OutOfRange.TEXT else codec


# Rejecting is decided here and not by `rejects`: a numeric that became text or double holds all it is given.
register("numeric", factory=numeric_codec)
