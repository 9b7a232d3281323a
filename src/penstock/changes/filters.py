"""Row filters: conditions on the columns of one table, which Postgres and Penstock evaluate alike.

The server evaluates a filter when a table is copied or compared, as part of the query; tasks evaluate it on the columns
of changes. So the language (`penstock.changes.conditions`) has only what means the same to both: a column against
constants, in types whose values compare exactly. Text is compared byte by byte, and only for equality, because order
depends on a collation.

A large value may be missing from an update because it did not change. The server stores a value apart from its row only
if it has more than 20 bytes, so such a value differs from every constant that is not longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.changes.conditions import (
    LANGUAGE,
    Both,
    Comparison,
    Condition,
    Constant,
    Either,
    IsNull,
    Not,
    columns_of,
    comparisons_of,
)
from penstock.errors import ConfigError, ValuesNotSent
from penstock.schema import (
    Column,
    ReplicaIdentity,
    TableSchema,
    TypeKind,
    numeric_precision_scale,
    quote_identifier,
    quote_literal,
    resolve_domain,
)

ALWAYS_SENT_BYTES = 20
"""A value of at most this many bytes is in its row (TOAST_POINTER_SIZE), so every update sends it."""
_ALWAYS_SENT_DIGITS = 30
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Cells:
    """A column of rows that are filtered."""

    values: pa.Array
    texts: pa.Array | None = None
    """The texts of cells that the type cannot hold; NULL elsewhere."""
    unsent: NDArray[np.bool_] | None = None
    """Cells whose value is missing because it did not change."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How values of a type are compared."""

    read: Callable[[Constant], pa.Scalar]
    """Raises `ValueError` for a constant that the type does not have."""
    cast: str
    """The type to which the server casts the constant."""
    ordered: bool = True
    as_text: bool = False
    """The server compares the column as text, byte by byte."""


def _read_bool(constant: Constant) -> pa.Scalar:
    if not isinstance(constant, bool):
        raise ValueError("true or false")
    return pa.scalar(constant)


def _read_integer(constant: Constant) -> pa.Scalar:
    if isinstance(constant, bool) or not isinstance(constant, int) or not -(2**63) <= constant < 2**63:
        raise ValueError("a whole number of at most 64 bits")
    return pa.scalar(constant, pa.int64())


def _read_decimal(constant: Constant) -> pa.Scalar:
    if isinstance(constant, bool | str) or len(str(constant)) > 16:
        raise ValueError("a number of at most 15 digits")
    return pa.scalar(Decimal(constant))


def _read_text(constant: Constant) -> pa.Scalar:
    if not isinstance(constant, str) or "\0" in constant:
        raise ValueError("a text in single quotes")
    return pa.scalar(constant)


def _read_uuid(constant: Constant) -> pa.Scalar:
    try:
        return pa.scalar(str(UUID(str(constant))))
    except ValueError:
        raise ValueError("a uuid in single quotes") from None


def _read_date(constant: Constant) -> pa.Scalar:
    try:
        return pa.scalar(date.fromisoformat(str(constant)))
    except ValueError:
        raise ValueError("a date like '2026-01-31'") from None


def _read_moment(constant: Constant, *, zoned: bool) -> pa.Scalar:
    try:
        moment = datetime.fromisoformat(str(constant))
    except ValueError:
        moment = None
    if moment is None or (moment.tzinfo is not None) != zoned:
        raise ValueError(f"a time like '2026-01-31 12:00:00{'+00:00' if zoned else ''}'")
    if zoned:
        return pa.scalar(moment.astimezone(UTC), pa.timestamp("us", "UTC"))
    return pa.scalar(moment, pa.timestamp("us"))


def _read_timestamp(constant: Constant) -> pa.Scalar:
    return _read_moment(constant, zoned=False)


def _read_timestamptz(constant: Constant) -> pa.Scalar:
    return _read_moment(constant, zoned=True)


_TEXT = _Kind(_read_text, "text", ordered=False, as_text=True)
_KINDS = {
    "bool": _Kind(_read_bool, "bool", ordered=False),
    **dict.fromkeys(("int2", "int4", "int8"), _Kind(_read_integer, "int8")),
    "numeric": _Kind(_read_decimal, "numeric"),
    **dict.fromkeys(("text", "varchar"), _TEXT),
    "uuid": _Kind(_read_uuid, "uuid", ordered=False),
    "date": _Kind(_read_date, "date"),
    "timestamp": _Kind(_read_timestamp, "timestamp"),
    "timestamptz": _Kind(_read_timestamptz, "timestamptz"),
}


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A filter for the columns of one table, by their names in its schema; pickles."""

    condition: Condition
    schema: TableSchema

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that it needs."""
        named = set(columns_of(self.condition))
        return tuple(column for column in self.schema.columns if column.name in named)

    def sql(self) -> str:
        """The filter as an expression for the server."""
        return self._sql(self.condition)

    def keep(self, cells: Mapping[str, Cells], row_count: int) -> NDArray[np.bool_]:
        """Which rows pass, from their cells by column name; what is neither true nor false does not pass."""
        found = self._evaluate(self.condition, cells, row_count)
        return pc.fill_null(found, False).to_numpy(zero_copy_only=False)

    def _sql(self, condition: Condition) -> str:
        match condition:
            case Comparison():
                kind, constant = self._read(condition)
                name = quote_identifier(condition.column)
                if kind.as_text:
                    name = f'{name}::pg_catalog.text collate pg_catalog."C"'
                value = constant.as_py()
                text = str(value).lower() if isinstance(value, bool) else str(value)
                return f"({name} {condition.sign} {quote_literal(text)}::pg_catalog.{kind.cast})"
            case IsNull():
                return f"({quote_identifier(condition.column)} is null)"
            case Not():
                return f"(not {self._sql(condition.part)})"
            case Both():
                return f"({' and '.join(map(self._sql, condition.parts))})"
            case Either():
                return f"({' or '.join(map(self._sql, condition.parts))})"

    def _evaluate(self, condition: Condition, cells: Mapping[str, Cells], row_count: int) -> pa.Array:
        match condition:
            case Comparison():
                return self._compare(condition, cells[condition.column])
            case IsNull():
                found = cells[condition.column]
                is_null = found.values.is_null()
                for known in (
                    None if found.texts is None else found.texts.is_valid(),
                    None if found.unsent is None else pa.array(found.unsent),
                ):
                    is_null = is_null if known is None else pc.and_not(is_null, known)
                return is_null
            case Not():
                return pc.invert(self._evaluate(condition.part, cells, row_count))
            case Both():
                return self._join(pc.and_kleene, condition.parts, cells, row_count)
            case Either():
                return self._join(pc.or_kleene, condition.parts, cells, row_count)

    def _join(
        self,
        operator: Callable[[Any, Any], Any],
        parts: tuple[Condition, ...],
        cells: Mapping[str, Cells],
        row_count: int,
    ) -> pa.Array:
        found = self._evaluate(parts[0], cells, row_count)
        for part in parts[1:]:
            found = operator(found, self._evaluate(part, cells, row_count))
        return found

    def _compare(self, comparison: Comparison, cells: Cells) -> pa.Array:
        kind, constant = self._read(comparison)
        found = _COMPARE[comparison.sign](cells.values, constant)
        if cells.texts is not None:
            # Beyond the ends of the type, so also beyond every constant.
            below = pc.match_substring_regex(cells.texts, r"\A-|BC\z")
            above = pc.invert(below)
            is_true = {"=": None, "<>": cells.texts.is_valid(), "<": below, "<=": below, ">": above, ">=": above}
            answer = is_true[comparison.sign]
            answer = pa.repeat(pa.scalar(False), len(found)) if answer is None else pc.fill_null(answer, False)
            found = pc.if_else(cells.texts.is_valid(), answer, found)
        if cells.unsent is not None and cells.unsent.any():
            if not kind.as_text or _stored_bytes(str(comparison.constant)) > ALWAYS_SENT_BYTES:
                raise ValuesNotSent(
                    f"{self.schema}: an update came without the value of {comparison.column!r}, which the filter needs",
                    table=str(self.schema),
                )
            found = pc.if_else(pa.array(cells.unsent), comparison.sign == "<>", found)
        return found

    def _read(self, comparison: Comparison) -> tuple[_Kind, pa.Scalar]:
        column = next(each for each in self.schema.columns if each.name == comparison.column)
        kind = _kind_of(column)
        assert kind is not None
        return kind, kind.read(comparison.constant)


def bind_filter(condition: Condition, schema: TableSchema) -> RowFilter:
    """Return the filter of a table; raise `ConfigError` if it cannot be evaluated exactly.

    All columns that it names must exist.
    """
    for comparison in comparisons_of(condition):
        column = next(each for each in schema.columns if each.name == comparison.column)
        kind = _kind_of(column)
        if kind is None:
            raise _refused(
                schema,
                f"cannot compare column {column.name!r} of type {column.type}",
                "Filters compare bool, integers, numeric with at most 30 digits, text, varchar, enums, uuid, date, "
                "timestamp and timestamptz; `is null` works for every type.",
            )
        if comparison.sign not in ("=", "<>") and not kind.ordered:
            raise _refused(schema, f"compares {column.name!r} by order, but {column.type} has no order here", LANGUAGE)
        try:
            kind.read(comparison.constant)
        except ValueError as error:
            raise _refused(
                schema, f"compares {column.name!r} with a wrong constant: it needs {error}", LANGUAGE
            ) from None
        is_long = kind.as_text and _stored_bytes(str(comparison.constant)) > ALWAYS_SENT_BYTES
        if is_long and _may_be_missing(column) and schema.replica_identity is not ReplicaIdentity.FULL:
            raise _refused(
                schema,
                f"compares {column.name!r} with a text of more than {ALWAYS_SENT_BYTES} bytes, which the server may "
                "leave out of updates",
                f"Compare with a shorter text, or run: alter table {schema} replica identity full;",
            )
    return RowFilter(condition, schema)


def _kind_of(column: Column) -> _Kind | None:
    type_, modifier = resolve_domain(column.type, column.type_modifier)
    if type_.kind is TypeKind.ENUM:
        return _TEXT
    if type_.kind is not TypeKind.BASE or not type_.is_builtin:
        return None
    if type_.name == "numeric":
        limits = numeric_precision_scale(modifier)
        if limits is None or limits[0] > _ALWAYS_SENT_DIGITS or not 0 <= limits[1] <= limits[0]:
            return None
    return _KINDS.get(type_.name)


def _may_be_missing(column: Column) -> bool:
    return resolve_domain(column.type, -1)[0].kind is not TypeKind.ENUM


def _stored_bytes(text: str) -> int:
    """The most bytes that a text has in any encoding of the server."""
    return sum(1 if character.isascii() else 4 for character in text)


def _refused(schema: TableSchema, problem: str, hint: str) -> ConfigError:
    return ConfigError(f'the filter in [tables."{schema}"] {problem}', hint=hint, table=str(schema))
