"""Changes as readable lines: long values are shortened, and in a terminal so is the line.

`penstock.destinations.json_lines` is the lossless form for programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from enum import StrEnum
from typing import Any

from rich.cells import cell_len, set_cell_size

from penstock.changes.events import (
    Begin,
    Commit,
    Delete,
    Event,
    Insert,
    Message,
    Relation,
    Row,
    Truncate,
    Unchanged,
    Unrepresentable,
    Update,
)
from penstock.destinations.json_lines import lossless, short_floats
from penstock.observe import one_line
from penstock.schema import TableSchema

VALUE_CELLS = 48
"""Longer values are shortened."""
WIDEST_TABLE = 32


class Style(StrEnum):
    """ANSI codes."""

    PLAIN = ""
    DIM = "2"
    KEY = "1"
    INSERT = "32"
    UPDATE = "33"
    DELETE = "31"
    TRUNCATE = "35"
    MESSAGE = "36"


Part = tuple[str, Style]


class Lines:
    """One line per event; the column of tables grows with their names."""

    def __init__(self, *, colour: bool = False, width: Callable[[], int] | None = None) -> None:
        """`width` gives the current length of a line; None for lines of any length."""
        self._colour = colour
        self._width = width
        self._table_width = 0

    def format(self, event: Event) -> str | None:
        """The line of an event; None for events that are not shown."""
        match event:
            case Begin() | Commit():
                word = type(event).__name__.lower()
                rest = [(f"transaction {event.xid}, commit at {event.commit_lsn}", Style.DIM)]
                return self._line(event.commit_time, word, Style.DIM, None, rest)
            case Insert():
                rest = _join(_row_parts(event.table, event.row))
                return self._line(event.commit_time, "insert", Style.INSERT, str(event.table), rest)
            case Update():
                rest = _join(_update_parts(event))
                return self._line(event.commit_time, "update", Style.UPDATE, str(event.table), rest)
            case Delete():
                rest = _join(_row_parts(event.table, event.old))
                return self._line(event.commit_time, "delete", Style.DELETE, str(event.table), rest)
            case Truncate():
                options = [("cascade", event.cascade), ("restart identity", event.restart_identity)]
                notes = "".join(f" ({word})" for word, given in options if given)
                rest = [(", ".join(event.tables) + notes, Style.PLAIN)]
                return self._line(event.commit_time, "truncate", Style.TRUNCATE, None, rest)
            case Message():
                content = event.content.decode("utf-8", "backslashreplace")
                rest = _join(
                    iter([("prefix", _quote(event.prefix), Style.KEY), ("content", _quote(content), Style.PLAIN)])
                )
                return self._line(event.commit_time, "message", Style.MESSAGE, None, rest)
            case Relation():
                return None

    def _line(self, moment: datetime, word: str, style: Style, table: str | None, rest: list[Part]) -> str:
        clock = moment.astimezone().strftime("%H:%M:%S.%f")[:-3]
        parts: list[Part] = [(clock, Style.DIM), ("  ", Style.PLAIN), (f"{word:<8}", style), (" ", Style.PLAIN)]
        if table is not None:
            self._table_width = max(self._table_width, min(cell_len(table), WIDEST_TABLE))
            padding = " " * max(0, self._table_width - cell_len(table))
            parts.append((f"{table}{padding}  ", Style.PLAIN))
        parts = [(one_line(text), style) for text, style in (*parts, *rest)]
        if self._width is not None:
            parts = list(_shorten_line(parts, self._width()))
        while parts and not parts[-1][0].strip():
            parts.pop()
        if not self._colour:
            return "".join(text for text, _ in parts).rstrip()
        return "".join(f"\x1b[{style}m{text}\x1b[0m" if style else text for text, style in parts)


def _row_parts(table: TableSchema, row: Row) -> Iterator[tuple[str, str, Style]]:
    """Key columns first, then the others: name, value and style."""
    row = short_floats(table, row)
    key = [column.name for column in table.key if column.name in row]
    for name in (*key, *(name for name in row if name not in key)):
        style = Style.KEY if name in key else Style.DIM if row[name] is Unchanged else Style.PLAIN
        yield name, _show(row[name]), style


def _update_parts(event: Update) -> Iterator[tuple[str, str, Style]]:
    """The key and the changed columns; all columns if the server did not send the whole old row."""
    row = short_floats(event.table, event.row)
    old = short_floats(event.table, event.old or {})
    # Without a key, all columns are needed to identify the row.
    knows_all = len(old) == len(row) and bool(event.table.key)
    shown = False
    for name, value, style in _row_parts(event.table, event.row):
        changed = name in old and row[name] is not Unchanged and old[name] != row[name]
        shown = shown or changed or not knows_all
        if changed:
            yield name, f"{_show(old[name])} → {value}", style
        elif style is Style.KEY or not knows_all:
            yield name, value, style
    if not shown:
        yield "", "(no column changed)", Style.DIM


def _join(parts: Iterator[tuple[str, str, Style]]) -> list[Part]:
    joined: list[Part] = []
    for name, value, style in parts:
        if joined:
            joined.append(("  ", Style.PLAIN))
        if style is Style.PLAIN:
            joined += [(f"{name}=", Style.DIM), (value, style)]
        else:
            joined.append((f"{name}={value}" if name else value, style))
    return joined


def _shorten_line(parts: list[Part], width: int) -> Iterator[Part]:
    left = width
    for text, style in parts:
        if cell_len(text) > left:
            yield (set_cell_size(text, left - 1) + "…" if left > 1 else "…"[:left]), style
            return
        left -= cell_len(text)
        yield text, style


def _show(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return _quote(value)
        case list():
            return _shorten(f"[{', '.join(_show(item) for item in value)}]")
        case datetime():
            return value.isoformat(sep=" ").removesuffix("+00:00") + ("Z" if value.tzinfo else "")
        case Unrepresentable():
            return f"<{_shorten(one_line(value.text))}>"
        case _ if value is Unchanged:
            return "<unchanged>"
        case _:
            return _shorten(str(lossless(value)))


def _quote(text: str) -> str:
    return f"'{_shorten(one_line(text[: VALUE_CELLS * 2]))}'"


def _shorten(text: str) -> str:
    if cell_len(text) <= VALUE_CELLS:
        return text
    return set_cell_size(text, VALUE_CELLS - 1).rstrip() + "…"
