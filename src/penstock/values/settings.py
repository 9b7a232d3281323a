"""Settings for types and unrepresentable values; `config/` fills them from `[types]`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.errors import ConfigError


class OutOfRange(StrEnum):
    """What to do with a value that its column's type cannot hold (`infinity`, BC, `24:00:00`, numeric NaN …)."""

    KEEP = "keep"
    """The cell is NULL and its exact text is kept in another column: nothing is lost or changed silently."""
    ERROR = "error"
    """The table stops with `ValueOutOfRange`."""
    NULL = "null"
    """The cell is NULL; its text is lost."""
    CLAMP = "clamp"
    """The nearest value that the type can hold; a value without one (NaN, odd arrays) is kept as under KEEP."""
    TEXT = "text"
    """Columns of types with such values are text."""


class NumericPolicy(StrEnum):
    """The type of `numeric` columns that no 128-bit decimal can hold: unconstrained, or over 38 digits."""

    STRING = "string"
    DECIMAL = "decimal"
    """`decimal128(38, s)`; s is the column's scale (at most 38), 18 if it has none. What does not fit exactly is
    out of range; nothing is rounded."""
    DOUBLE = "double"
    """Rounded to the nearest double."""


class UnknownTypes(StrEnum):
    """The type of columns whose Postgres type Penstock does not know."""

    TEXT = "text"
    BYTES = "bytes"
    """The UTF-8 bytes of the text."""


class CompositePolicy(StrEnum):
    """The type of composite columns."""

    TEXT = "text"
    STRUCT = "struct"
    """Reserved: refused, because structs cannot be decoded yet."""


@dataclass(frozen=True, slots=True)
class TypeSettings:
    """The choices that decide a column's Arrow type and what happens to values outside it."""

    out_of_range: OutOfRange = OutOfRange.KEEP
    numeric: NumericPolicy = NumericPolicy.STRING
    unknown_types: UnknownTypes = UnknownTypes.TEXT
    composites: CompositePolicy = CompositePolicy.TEXT
    as_text: bool = False
    """Every column is text, as Postgres writes it, whatever the other settings say."""
    overrides: tuple[TypeOverride, ...] = ()
    """Tables and columns with settings of their own."""

    def of(self, table: str, column: str) -> TypeSettings:
        """Return the settings of a column, without overrides: its own, else its table's, else these."""
        if not self.overrides:
            return self
        chosen = self
        for override in self.overrides:
            if override.table == table and override.column in (None, column):
                chosen = override.settings
                if override.column is not None:
                    break
        return replace(chosen, overrides=())

    @property
    def can_refuse(self) -> bool:
        """True if the policy of some column is `ERROR`."""
        return any(each.out_of_range is OutOfRange.ERROR for each in self._every())

    @property
    def can_change(self) -> bool:
        """True if the policy of some column is `NULL` or `CLAMP`."""
        return any(each.out_of_range in (OutOfRange.NULL, OutOfRange.CLAMP) for each in self._every())

    @property
    def can_merge(self) -> bool:
        """True if a setting of some column can make different values the same; see `merging_setting`."""
        merging = (OutOfRange.NULL, OutOfRange.CLAMP)
        return any(each.out_of_range in merging or each.numeric is NumericPolicy.DOUBLE for each in self._every())

    def keeping(self) -> TypeSettings:
        """Return these settings with `KEEP` instead of `NULL` and `CLAMP`: values are changed when they are read."""
        changing = (OutOfRange.NULL, OutOfRange.CLAMP)
        policy = OutOfRange.KEEP if self.out_of_range in changing else self.out_of_range
        overrides = tuple(replace(each, settings=each.settings.keeping()) for each in self.overrides)
        return replace(self, out_of_range=policy, overrides=overrides)

    def _every(self) -> Iterator[TypeSettings]:
        yield self
        yield from (override.settings for override in self.overrides)

    def __post_init__(self) -> None:
        if self.composites is CompositePolicy.STRUCT:
            raise ConfigError(
                'composites = "struct" is not supported yet',
                hint='Use composites = "text", which keeps every value exactly.',
            )


@dataclass(frozen=True, slots=True)
class TypeOverride:
    """The settings of one table, or of one of its columns."""

    table: str
    """Namespace and name, with a dot between them."""
    column: str | None
    """None for all columns that have no override of their own."""
    settings: TypeSettings
