"""Parses YAML into plain values, with the line and column of every key and value.

Plain scalars follow the core schema of YAML 1.2: `yes`, `12:30` and `2026-01-01` are strings, so a value means what it
looks like and reaches Postgres as written. A duplicate key in a mapping is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from penstock.registry import requires_extra

Path = tuple[str | int, ...]
_Node = Any
"""A `yaml.Node`. PyYAML comes with an extra and is imported when the first text is parsed."""

_LONGEST_NUMBER = 100
_NODE_LIMIT = 100_000
_NESTED = "mapping values are not allowed here"
"""What PyYAML says of a colon and a space in the middle of a plain text."""
_NULL = re.compile(r"~|null|Null|NULL|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A line and column; both count from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Misplaced(Exception):
    """An error in the YAML itself."""

    message: str
    position: Position
    path: Path = ()


@dataclass(slots=True)
class Located:
    """Values with the positions of their keys and of themselves."""

    value: Any = None
    keys: dict[Path, Position] = field(default_factory=dict[Path, Position])
    values: dict[Path, Position] = field(default_factory=dict[Path, Position])

    def key_position(self, path: Path) -> Position:
        """Return the position of the key at this path, or of its value if it has no key."""
        return self.keys.get(path) or self.value_position(path)

    def value_position(self, path: Path) -> Position:
        """Return the position of the value, or of the nearest value around it."""
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, Position(1, 1))


def parse_yaml(text: str) -> Located:
    """Parse the only document of a text; raises `Misplaced`."""
    with requires_extra("opensearch", "an index specification"):
        import yaml
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Position(1, 1) if mark is None else Position(mark.line + 1, mark.column + 1)
        # A text that contains ": " reads as another key; expressions and filters in SQL often do.
        quotes = "; put a text that contains ': ' in quotes" if error.problem == _NESTED else ""
        raise Misplaced(f"is not YAML: {error.problem or error.context}{quotes}", place) from None
    except yaml.YAMLError as error:
        raise Misplaced(f"is not YAML: {error}", Position(1, 1)) from None
    located = Located()
    if node is not None:
        located.value = _Reader(located).read(node, ())
    return located


class _Reader:
    def __init__(self, located: Located) -> None:
        self._located = located
        self._open: set[int] = set()
        self._count = 0

    def read(self, node: _Node, path: Path) -> Any:
        place = _position(node)
        self._count += 1
        if id(node) in self._open or self._count > _NODE_LIMIT:
            raise Misplaced("contains itself through aliases", place, path)
        self._open.add(id(node))
        self._located.values[path] = place
        try:
            if node.id == "mapping":
                return self._mapping(node, path)
            if node.id == "sequence":
                return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
            return _scalar(node)
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: _Node, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = _position(key_node)
            if key_node.id != "scalar":
                raise Misplaced("keys must be strings", place, path)
            key = str(key_node.value)
            if key in found:
                raise Misplaced(f"{key!r} appears twice in the same mapping", place, (*path, key))
            self._located.keys[(*path, key)] = place
            found[key] = self.read(value_node, (*path, key))
        return found


def _scalar(node: _Node) -> Any:
    text: str = node.value
    if node.id == "scalar" and node.style is not None:
        return text
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if len(text) <= _LONGEST_NUMBER and _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _position(node: _Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)
