"""How a person wants types and awkward values handled; `config/` fills these from `[types]` and `[tables.*.types]`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import ConfigError


class OutOfRange(StrEnum):
    """What becomes of a value that its column's type cannot hold (`infinity`, BC, `24:00:00`, numeric NaN …)."""

    KEEP = "keep"
    """The cell is NULL and its exact text is kept beside it: nothing is lost, nothing changes silently."""
    ERROR = "error"
    """The table stops with `ValueOutOfRange`."""
    NULL = "null"
    """The cell is NULL, the text is gone."""
    CLAMP = "clamp"
    """The nearest value that the type can hold; what has no nearest value (NaN, odd arrays) is kept as under KEEP."""
    TEXT = "text"
    """Columns of types that have such values are text from the start."""


class NumericPolicy(StrEnum):
    """What `numeric` becomes when no 128-bit decimal holds all its values: unconstrained, or over 38 digits."""

    STRING = "string"
    DECIMAL = "decimal"
    """`decimal128(38, s)`; s is the column's scale (at most 38), 18 if it has none. What does not fit exactly is
    out of range; nothing is rounded."""
    DOUBLE = "double"
    """Rounded to the nearest double."""


class UnknownTypes(StrEnum):
    """What the types of extensions that Penstock does not know become."""

    TEXT = "text"
    BYTES = "bytes"
    """The UTF-8 bytes of the text."""


class CompositePolicy(StrEnum):
    """What composite types become."""

    TEXT = "text"
    STRUCT = "struct"
    """Reserved: refused until structs can be decoded."""


@dataclass(frozen=True, slots=True)
class TypeSettings:
    """The choices that decide a column's Arrow type and what happens to values outside it."""

    out_of_range: OutOfRange = OutOfRange.KEEP
    numeric: NumericPolicy = NumericPolicy.STRING
    unknown_types: UnknownTypes = UnknownTypes.TEXT
    composites: CompositePolicy = CompositePolicy.TEXT

    def __post_init__(self) -> None:
        if self.composites is CompositePolicy.STRUCT:
            raise ConfigError(
                'composites = "struct" is not supported yet', hint='Use composites = "text"; the text loses nothing.'
            )
