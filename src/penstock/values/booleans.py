"""`bool`, which Postgres writes as `t` and `f`."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from penstock.values.cells import large_text, reject, to_numpy
from penstock.values.codec import Decoded, register


@dataclass(frozen=True, slots=True)
class BooleanCodec:
    """`t` and `f`, nothing else."""

    arrow_type: pa.DataType

    def decode(self, text: pa.LargeStringArray) -> Decoded:
        is_true, is_false = pc.equal(text, large_text("t")), pc.equal(text, large_text("f"))
        decoded = Decoded(is_true, None)
        if is_true.true_count + is_false.true_count == len(text) - text.null_count:
            return decoded
        return reject(decoded, to_numpy(pc.fill_null(pc.invert(pc.or_(is_true, is_false)), False)))


register("bool", factory=lambda type_, modifier, settings: BooleanCodec(pa.bool_()))
