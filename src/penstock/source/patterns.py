"""Patterns that select tables: `schema.table`, each part with `*`, `?` and `[…]` as in a shell.

A pattern without a dot refers to the schema `public`; `*` alone matches every table. A part in double quotes is
literal: `"Odd.Schema"."a*b"`. Names are case-sensitive, as in the catalog.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from typing import NamedTuple

from penstock.errors import ConfigError
from penstock.schema import quote_identifier

_PART = re.compile(r'"(?P<literal>(?:[^"]|"")+)"|(?P<glob>[^."]+)')


class TableName(NamedTuple):
    """The name of a table with its schema."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def quoted(self) -> str:
        """The name as a pattern that no other table matches, and as one writes it in SQL."""
        return f"{quote_identifier(self.namespace)}.{quote_identifier(self.name)}"

    @classmethod
    def possible(cls, text: str) -> list[TableName]:
        """Return the names that are printed like this: both parts of a name may contain dots."""
        parts = text.split(".")
        return [cls(".".join(parts[:split]), ".".join(parts[split:])) for split in range(1, len(parts))]


class TablePattern:
    """A compiled pattern."""

    __slots__ = ("_name", "_namespace", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        parts = ["*", "*"] if text.strip() == "*" else _split(text)
        if len(parts) == 1:
            parts = ["public", *parts]
        self._namespace, self._name = (_compile(part) for part in parts)

    def __repr__(self) -> str:
        return f"TablePattern({self.text!r})"

    def matches(self, table: TableName) -> bool:
        return bool(self._namespace.match(table.namespace) and self._name.match(table.name))


def select_tables(tables: Iterable[TableName], patterns: Sequence[str], exclude: Sequence[str] = ()) -> list[TableName]:
    """The tables that match one of `patterns` and none of `exclude`, in the order given."""
    included = [TablePattern(pattern) for pattern in patterns]
    excluded = [TablePattern(pattern) for pattern in exclude]
    return [
        table
        for table in tables
        if any(pattern.matches(table) for pattern in included)
        and not any(pattern.matches(table) for pattern in excluded)
    ]


def refers_to(text: str, table: TableName) -> bool:
    """True if `text` is the name of a table as commands print it, which may contain dots, or a pattern for it."""
    if text == str(table):
        return True
    try:
        return TablePattern(text).matches(table)
    except ConfigError:
        return False


def _split(text: str) -> list[str]:
    parts: list[str] = []
    position, stripped = 0, text.strip()
    while match := _PART.match(stripped, position):
        parts.append(match[0])
        position = match.end()
        if position == len(stripped) and len(parts) <= 2:
            return parts
        if stripped[position : position + 1] != ".":
            break
        position += 1
    raise ConfigError(
        f"invalid table pattern: {text!r}",
        hint='Write schema.table, like public.orders or sales.*; a name with dots needs quotes: sales."a.b"',
    )


def _compile(part: str) -> re.Pattern[str]:
    if part.startswith('"'):
        return re.compile(re.escape(part[1:-1].replace('""', '"')) + r"\Z")
    return re.compile(translate(part))
