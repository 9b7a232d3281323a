"""The language of row filters: what a condition may say, and the parser that reads it.

    country = 'DE' and (age >= 18 or verified) and deleted_at is null

A condition compares columns with constants; it knows no table yet. `penstock.changes.filters` binds it to one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from penstock.errors import ConfigError

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_\u0080-\U0010ffff][\w$]*)|(?P<quoted>\"(?:[^\"]|\"\")+\")|(?P<text>'(?:[^']|'')*')"
    r"|(?P<number>[+-]?[0-9]+(?:\.[0-9]+)?)|(?P<sign><>|!=|<=|>=|[=<>(),]))"
)
_MOST_NESTED = 100
"""Parentheses and negations of a filter, which may be inside each other."""
_WORDS = frozenset({"and", "or", "not", "in", "is", "null", "true", "false"})
_SIGNS = {"=": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
LANGUAGE = (
    "A filter compares columns with constants (=, <>, <, <=, >, >=, in, is null) and combines conditions with and, or, "
    "not; docs/guides/columns.md has the rules."
)
"""What a filter may say, for hints."""

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


def parse_filter(text: str) -> Condition:
    """Parse a filter; raise `ConfigError` if it says something that the language does not have."""
    return _Parser(text).parse()


def columns_of(condition: Condition) -> Iterator[str]:
    """The columns that a condition names, in order; some more than once."""
    return (each.column for each in _leaves(condition))


def comparisons_of(condition: Condition) -> Iterator[Comparison]:
    """The comparisons in a condition, in order."""
    return (each for each in _leaves(condition) if isinstance(each, Comparison))


def _leaves(condition: Condition) -> Iterator[Comparison | IsNull]:
    match condition:
        case Comparison() | IsNull():
            yield condition
        case Not():
            yield from _leaves(condition.part)
        case Both() | Either():
            for part in condition.parts:
                yield from _leaves(part)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._at = 0
        if sum(word in ("(", "not") for _, word in self._tokens) > _MOST_NESTED:
            raise self._error(f"has more than {_MOST_NESTED} parentheses and negations")

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
        return ConfigError(f"the filter {problem}", hint=LANGUAGE)

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
