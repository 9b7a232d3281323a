"""Row filters: a small language whose conditions Postgres and Penstock evaluate alike.

    country = 'DE' and (age >= 18 or verified) and deleted_at is null

The server evaluates a filter when a table is copied or compared, as part of the query; tasks evaluate it on the columns
of changes. So the language has only what means the same to both: a column against constants, in types whose values
compare exactly. Text is compared byte by byte, and only for equality, because order depends on a collation.

A large value may be missing from an update because it did not change. The server stores a value apart from its row only
if it has more than 20 bytes, so such a value differs from every constant that is not longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

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
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_\u0080-\U0010ffff][\w$]*)|(?P<quoted>\"(?:[^\"]|\"\")+\")|(?P<text>'(?:[^']|'')*')"
    r"|(?P<number>[+-]?[0-9]+(?:\.[0-9]+)?)|(?P<sign><>|!=|<=|>=|[=<>(),]))"
)
_WORDS = frozenset({"and", "or", "not", "in", "is", "null", "true", "false"})
_SIGNS = {"=": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_LANGUAGE = (
    "A filter compares columns with constants (=, <>, <, <=, >, >=, in, is null) and combines conditions with and, or, "
    "not; docs/guides/columns.md has the rules."
)

Constant = str | bool | int | Decimal


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column against a constant; `sign` is one of = <> < <= > >=."""

    column: str
    sign: str
    constant: Constant


@dataclass(frozen=True, slots=True)
class IsNull:
    column: str


@dataclass(frozen=True, slots=True)
class Not:
    part: Condition


@dataclass(frozen=True, slots=True)
class Both:
    """`and`."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """`or`."""

    parts: tuple[Condition, ...]


Condition = Comparison | IsNull | Not | Both | Either


@dataclass(frozen=True, slots=True)
class Cells:
    """A column of rows that are filtered."""

    values: pa.Array
    texts: pa.Array | None = None
    """The texts of cells that the type cannot hold; NULL elsewhere."""
    unsent: NDArray[np.bool_] | None = None
    """Cells whose value is missing because it did not change."""


def parse_filter(text: str) -> Condition:
    """Parse a filter; raise `ConfigError` if it says something that the language does not have."""
    return _Parser(text).parse()


def columns_of(condition: Condition) -> Iterator[str]:
    """The columns that a condition names, in order; some more than once."""
    match condition:
        case Comparison() | IsNull():
            yield condition.column
        case Not():
            yield from columns_of(condition.part)
        case Both() | Either():
            for part in condition.parts:
                yield from columns_of(part)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._at = 0

    def _split(self) -> Iterator[tuple[str, str]]:
        at = 0
        while self._text[at:].strip():
            found = _TOKEN.match(self._text, at)
            if found is None:
                at = len(self._text) - len(self._text[at:].lstrip())
                raise self._error(f"cannot be read from character {at + 1} on, {self._text[at]!r}")
            kind = found.lastgroup or ""
            word = found[kind]
            if kind == "name":
                # As in SQL: names without quotes are in lower case.
                yield ("word" if word.lower() in _WORDS else "name", word.lower())
            elif kind == "quoted":
                yield "name", word[1:-1].replace('""', '"')
            elif kind == "text":
                yield kind, word[1:-1].replace("''", "'")
            else:
                yield kind, word
            at = found.end()

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"the filter {problem}", hint=_LANGUAGE)

    def parse(self) -> Condition:
        found = self._either()
        if self._at < len(self._tokens):
            raise self._unsupported()
        return found

    def _unsupported(self) -> ConfigError:
        kind, word = self._next()
        if kind == "name":
            return self._error(f"has {word!r}, which filters do not support")
        # A constant is not shown.
        what = repr(word) if kind in ("word", "sign") else "a constant"
        return self._error(f"has {what} where `and`, `or` or its end should be")

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self, kind: str, word: str) -> bool:
        found = self._next() == (kind, word)
        self._at += found
        return found

    def _either(self) -> Condition:
        parts = [self._both()]
        while self._take("word", "or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _both(self) -> Condition:
        parts = [self._single()]
        while self._take("word", "and"):
            parts.append(self._single())
        return parts[0] if len(parts) == 1 else Both(tuple(parts))

    def _single(self) -> Condition:
        if self._take("word", "not"):
            return Not(self._single())
        if self._take("sign", "("):
            found = self._either()
            self._require("sign", ")")
            return found
        kind, column = self._next()
        if kind != "name":
            raise self._error("needs the name of a column at the start of each condition")
        self._at += 1
        return self._about(column)

    def _about(self, column: str) -> Condition:
        if self._take("word", "is"):
            negated = self._take("word", "not")
            self._require("word", "null")
            return Not(IsNull(column)) if negated else IsNull(column)
        negated = self._take("word", "not")
        if self._take("word", "in"):
            found = self._members(column)
            return Not(found) if negated else found
        kind, word = self._next()
        if negated and kind == "name":
            raise self._unsupported()
        if negated or (kind == "sign" and word == "("):
            raise self._error(f"calls a function or an operator that filters do not support, at {column!r}")
        if kind == "sign" and word in _SIGNS:
            self._at += 1
            return Comparison(column, _SIGNS[word], self._constant(column))
        return Comparison(column, "=", True)

    def _members(self, column: str) -> Condition:
        self._require("sign", "(")
        members = [self._constant(column)]
        while self._take("sign", ","):
            members.append(self._constant(column))
        self._require("sign", ")")
        found = tuple(Comparison(column, "=", each) for each in members)
        return found[0] if len(found) == 1 else Either(found)

    def _constant(self, column: str) -> Constant:
        kind, word = self._next()
        self._at += 1
        match kind, word:
            case "text", _:
                return word
            case "number", _:
                return Decimal(word) if "." in word else int(word)
            case "word", ("true" | "false"):
                return word == "true"
            case "word", "null":
                raise self._error(f"compares {column!r} with null, which is never true: write `is null`")
            case _:
                raise self._error(f"compares {column!r} with something else than a constant")

    def _require(self, kind: str, word: str) -> None:
        if not self._take(kind, word):
            raise self._error(f"lacks {word!r} after part {self._at}")


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
    for comparison in _comparisons(condition):
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
            raise _refused(schema, f"compares {column.name!r} by order, but {column.type} has no order here", _LANGUAGE)
        try:
            kind.read(comparison.constant)
        except ValueError as error:
            raise _refused(
                schema, f"compares {column.name!r} with a wrong constant: it needs {error}", _LANGUAGE
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


def _comparisons(condition: Condition) -> Iterator[Comparison]:
    match condition:
        case Comparison():
            yield condition
        case IsNull():
            return
        case Not():
            yield from _comparisons(condition.part)
        case Both() | Either():
            for part in condition.parts:
                yield from _comparisons(part)


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
