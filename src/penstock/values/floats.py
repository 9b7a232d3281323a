"""`float4` and `float8`: Postgres writes the shortest text that reads back exactly, Arrow reads it exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.values.cells import cast_matching, fixed_values, matches, reject
from penstock.values.codec import Decoded, register

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
        """Arrow reads numbers that are too large as infinity; only what is called so is infinite."""
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
