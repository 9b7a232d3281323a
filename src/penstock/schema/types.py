"""Postgres types as the catalog knows them: base types, enums, domains, arrays, composites and ranges."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PG_CATALOG = "pg_catalog"


class TypeKind(StrEnum):
    """The kind of a type (`pg_type.typtype`, and arrays as a kind of their own)."""

    BASE = "base"
    ENUM = "enum"
    DOMAIN = "domain"
    ARRAY = "array"
    COMPOSITE = "composite"
    RANGE = "range"
    MULTIRANGE = "multirange"
    PSEUDO = "pseudo"


@dataclass(frozen=True, slots=True)
class PostgresType:
    """One type; `name` is `pg_type.typname` (`int4`, not `integer`)."""

    oid: int
    name: str
    namespace: str = PG_CATALOG
    kind: TypeKind = TypeKind.BASE
    element: PostgresType | None = None
    """Of an array: the type of its elements."""
    base: PostgresType | None = None
    """Of a domain: the type under it, which may be a domain again."""
    base_modifier: int = -1
    """Of a domain: the type modifier that it fixes."""
    delimiter: str = ","
    """The separator of elements in the text of an array *of* this type."""

    def __str__(self) -> str:
        return self.name if self.namespace == PG_CATALOG else f"{self.namespace}.{self.name}"

    @property
    def is_builtin(self) -> bool:
        return self.namespace == PG_CATALOG


def resolve_domain(type_: PostgresType, modifier: int) -> tuple[PostgresType, int]:
    """The base type of a domain, with the modifier that applies to it."""
    while type_.kind is TypeKind.DOMAIN and type_.base is not None:
        modifier = type_.base_modifier
        type_ = type_.base
    return type_, modifier


def numeric_precision_scale(modifier: int) -> tuple[int, int] | None:
    """Precision and scale of `numeric(p, s)`; None when unconstrained. The scale may be negative (15 and newer)."""
    if modifier < 4:
        return None
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
    return precision, scale - 0x800 if scale & 0x400 else scale


_TEXTS = frozenset({"text", "varchar"})
_TIMES = frozenset({"time", "timetz", "timestamp", "timestamptz"})
_UNLIMITED, _FINEST = -1, 6


def keeps_values(before: tuple[PostgresType, int], after: tuple[PostgresType, int]) -> bool:
    """True if values do not change when a column gets another type or modifier.

    The server does not report what it rewrites: numbers that lose digits, times that are rounded, text that is padded.
    """
    (old, old_modifier), (new, modifier) = resolve_domain(*before), resolve_domain(*after)
    wider = modifier == _UNLIMITED or (old_modifier != _UNLIMITED and modifier >= old_modifier)
    if not (old.is_builtin and new.is_builtin):
        return (old.oid, old_modifier) == (new.oid, modifier)
    match old.name, new.name:
        case one, other if one in _TEXTS and other in _TEXTS:
            return wider
        case one, other if one == other and one in _TIMES:
            return wider or modifier == _FINEST
        case "varbit", "varbit":
            return wider
        case "numeric", "numeric":
            limits, limit = numeric_precision_scale(old_modifier), numeric_precision_scale(modifier)
            return limit is None or (limits is not None and limits[1] == limit[1] and limits[0] <= limit[0])
        case "interval", "interval":
            return modifier in (_UNLIMITED, old_modifier)
        case _:
            return (old.oid, old_modifier) == (new.oid, modifier)
