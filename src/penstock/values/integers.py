"""Whole numbers: `int2`, `int4`, `int8`, and the system's unsigned 32-bit identifiers."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.values.cells import cast_matching, layout, reject, to_numpy
from penstock.values.codec import Decoded, register

_LIMITS = {
    pa.int16(): (Decimal(-(2**15)), Decimal(2**15 - 1)),
    pa.int32(): (Decimal(-(2**31)), Decimal(2**31 - 1)),
    pa.int64(): (Decimal(-(2**63)), Decimal(2**63 - 1)),
}
_WIDE = pa.decimal128(19, 0)
_DIGITS = r"\A-?0*[0-9]{1,19}\z"
_LAST_DIGIT = ord("9")


@dataclass(frozen=True, slots=True)
class IntegerCodec:
    """Decimal digits with an optional minus; what Postgres sends, and nothing else."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        _, data = layout(text)
        # Arrow also reads hexadecimal (0xFFFF as int16 is -1): a letter anywhere takes the careful way.
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
