"""Short ways to name types and decode columns in the tests of values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.schema import PostgresType, TypeKind
from penstock.values import Decoded, TypeSettings, codec_for


def builtin(name: str) -> PostgresType:
    return PostgresType(0, name, delimiter=";" if name == "box" else ",")


def array_of(element: PostgresType | str) -> PostgresType:
    element = builtin(element) if isinstance(element, str) else element
    return PostgresType(0, f"_{element.name}", element.namespace, TypeKind.ARRAY, element=element)


def domain_over(base: PostgresType | str, modifier: int = -1) -> PostgresType:
    base = builtin(base) if isinstance(base, str) else base
    return PostgresType(0, f"{base.name}_domain", "public", TypeKind.DOMAIN, base=base, base_modifier=modifier)


def numeric_modifier(precision: int, scale: int) -> int:
    """`atttypmod` of `numeric(precision, scale)`."""
    return (precision << 16 | scale & 0x7FF) + 4


def text_column(cells: Sequence[str | None]) -> pa.LargeStringArray:
    return pa.array(cells, pa.large_string())


def decode(type_: PostgresType | str, cells: Sequence[str | None], modifier: int = -1, **settings: Any) -> Decoded:
    """Decode, also as a slice from the middle of a longer column with other cells around, and check the promises."""
    type_ = builtin(type_) if isinstance(type_, str) else type_
    codec = codec_for(type_, modifier, TypeSettings(**settings))
    text = text_column(cells)
    decoded = codec.decode(text)
    check_promises(decoded, text, codec.arrow_type)
    inner = codec.decode(text_column(["x", None, *cells, "\\", "{"]).slice(2, len(cells)))
    assert printed(inner.array) == printed(decoded.array)
    assert _positions(inner) == _positions(decoded)
    return decoded


def check_promises(decoded: Decoded, text: pa.LargeStringArray, arrow_type: pa.DataType) -> None:
    decoded.array.validate(full=True)
    assert decoded.array.type == arrow_type
    assert len(decoded.array) == len(text)
    rejected = np.zeros(len(text), np.bool_) if decoded.rejected is None else decoded.rejected
    assert decoded.rejected is None or rejected.any()
    assert rejected.dtype == np.bool_
    missing = decoded.array.is_null().to_numpy(zero_copy_only=False)
    given = text.is_valid().to_numpy(zero_copy_only=False)
    # A cell is NULL exactly if it was NULL or was rejected, and never both.
    assert np.array_equal(missing, ~given | rejected)
    assert not (rejected & ~given).any()


def printed(array: pa.Array) -> str:
    """For comparing: NaN is equal to itself only in print."""
    return array.to_string(window=1000, container_window=1000)


def values(type_: PostgresType | str, cells: Sequence[str | None], modifier: int = -1, **settings: Any) -> list[Any]:
    """What was decoded, of cells that all fit."""
    decoded = decode(type_, cells, modifier, **settings)
    assert decoded.rejected is None
    return decoded.array.to_pylist()


def fits(type_: PostgresType | str, cells: Sequence[str | None], modifier: int = -1, **settings: Any) -> list[bool]:
    """Which cells were not rejected."""
    decoded = decode(type_, cells, modifier, **settings)
    return [True] * len(cells) if decoded.rejected is None else [not flag for flag in decoded.rejected.tolist()]


def _positions(decoded: Decoded) -> list[int]:
    return [] if decoded.rejected is None else np.flatnonzero(decoded.rejected).tolist()
