"""`int2` to `int8`, `oid`, `float4`, `float8`, `numeric` and `bool`.

A `numeric` is a 128-bit decimal where one holds every value of the column, else what `NumericPolicy` says. Arrow's cast
from text to decimal **wraps around silently**: 39 digits become some other number, and so does a short number whose
digits overflow when they are brought to the column's scale. So a column is cast only after a proof, by the lengths of
its cells, that nothing can overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.schema import PostgresType, numeric_precision_scale
from penstock.values.cells import cast_matching, fixed_values, large_text, layout, matches, reject, to_numpy
from penstock.values.codec import Codec, Decoded, register
from penstock.values.settings import NumericPolicy, OutOfRange, TypeSettings
from penstock.values.text import TextCodec

MAX_DIGITS = 38
UNCONSTRAINED_SCALE = 18
"""Digits after the point that unconstrained numerics get under `NumericPolicy.DECIMAL`: 20 remain before it."""

_LAST_DIGIT, _POINT, _MINUS = ord("9"), ord("."), ord("-")


@dataclass(frozen=True, slots=True)
class DecimalCodec:
    """Exact decimals; NaN, infinities and values that would be rounded are rejected."""

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
        """Remove zeros beyond the scale, which would overflow during the cast."""
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


# Not registered with `rejects`: a numeric that became text or double holds every value.
register("numeric", factory=numeric_codec)


_LIMITS = {
    pa.int16(): (Decimal(-(2**15)), Decimal(2**15 - 1)),
    pa.int32(): (Decimal(-(2**31)), Decimal(2**31 - 1)),
    pa.int64(): (Decimal(-(2**63)), Decimal(2**63 - 1)),
}
_WIDE = pa.decimal128(19, 0)
_DIGITS = r"\A-?0*[0-9]{1,19}\z"


@dataclass(frozen=True, slots=True)
class IntegerCodec:
    """Decimal digits with an optional minus sign, as Postgres sends them."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        _, data = layout(text)
        # Arrow also parses hexadecimal (0xFFFF as int16 is -1): any letter takes the careful path.
        if not len(data) or data.max() <= _LAST_DIGIT:
            try:
                return Decoded(pc.cast(text, self.arrow_type), None)
            except pa.ArrowInvalid:
                pass
        return self._decode_carefully(text)

    def _decode_carefully(self, text: pa.LargeStringArray) -> Decoded:
        wide = cast_matching(text, _WIDE, _DIGITS)
        low, high = (pa.scalar(limit, _WIDE) for limit in _LIMITS[self.arrow_type])
        outside = pc.or_(pc.less(wide.array, low), pc.greater(wide.array, high))
        decoded = reject(wide, to_numpy(pc.fill_null(outside, False)))
        return Decoded(pc.cast(decoded.array, self.arrow_type), decoded.rejected)


register("int2", factory=lambda type_, modifier, settings: IntegerCodec(pa.int16()))
register("int4", factory=lambda type_, modifier, settings: IntegerCodec(pa.int32()))
register("int8", factory=lambda type_, modifier, settings: IntegerCodec(pa.int64()))
register("oid", "xid", "cid", factory=lambda type_, modifier, settings: IntegerCodec(pa.int64()))


_NUMBER = r"\A(?:[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|NaN|-?Infinity)\z"
_NOT_FINITE = r"\A(?:NaN|-?Infinity)\z"


@dataclass(frozen=True, slots=True)
class FloatCodec:
    """Floating point, with NaN, both infinities and negative zero."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        try:
            decoded = Decoded(pc.cast(text, self.arrow_type), None)
        except pa.ArrowInvalid:
            decoded = cast_matching(text, self.arrow_type, _NUMBER)
        return self._reject_overflow(decoded, text)

    def _reject_overflow(self, decoded: Decoded, text: pa.LargeStringArray) -> Decoded:
        """Reject numbers that Arrow reads as infinity because they are too large."""
        kind = np.float32 if self.arrow_type == pa.float32() else np.float64
        finite = np.isfinite(fixed_values(decoded.array, kind))
        if finite.all():
            return decoded
        others = np.flatnonzero(~finite)
        misnamed = np.zeros(len(text), np.bool_)
        misnamed[others] = ~matches(text.take(pa.array(others)), _NOT_FINITE)
        return reject(decoded, misnamed)


register("float4", factory=lambda type_, modifier, settings: FloatCodec(pa.float32()))
register("float8", factory=lambda type_, modifier, settings: FloatCodec(pa.float64()))


@dataclass(frozen=True, slots=True)
class BooleanCodec:
    """`t` and `f`."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        is_true, is_false = pc.equal(text, large_text("t")), pc.equal(text, large_text("f"))
        decoded = Decoded(is_true, None)
        if is_true.true_count + is_false.true_count == len(text) - text.null_count:
            return decoded
        return reject(decoded, to_numpy(pc.fill_null(pc.invert(pc.or_(is_true, is_false)), False)))


register("bool", factory=lambda type_, modifier, settings: BooleanCodec(pa.bool_()))
