"""Names that a terminal would obey."""

from __future__ import annotations

import io
import json
import logging
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import penstock.cli
from penstock.cli.display import SafeConsole, make_table
from penstock.cli.event_lines import Lines
from penstock.observe import one_line, printable
from penstock.observe.logs import JsonFormatter, TextFormatter

HOSTILE = "a\x1b[2Jb\x9b31mc\x07\r\u202ed\u2028\ud800\x7f"
OBEYED = {"Cc", "Cs", "Zl", "Zp"}


def is_harmless(text: str) -> bool:
    return not any(unicodedata.category(each) in OBEYED or each == "\u202e" for each in text if each not in "\n\t")


@given(st.text())
def test_nothing_that_a_terminal_obeys_is_left_and_json_stays_the_same(text: str) -> None:
    assert is_harmless(printable(text))
    assert json.loads(printable(json.dumps(text, ensure_ascii=False))) == text
    assert not set(one_line(text)) & set("\n\t\r")


def test_text_that_is_harmless_stays_as_it_is() -> None:
    for text in ("Ünïcødé 🚰 👩‍🔬", "two\nlines\tand a tab", "back\\slash %s {x}"):
        assert printable(text) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_consoles_show_escapes(terminal: bool) -> None:
    stream = io.StringIO()
    console = SafeConsole(file=stream, force_terminal=terminal, color_system=None, width=400)
    table = make_table("table")
    table.add_row(Text(HOSTILE))
    grid = Table.grid()
    grid.add_row(Text(HOSTILE))
    for each in (HOSTILE, Text(HOSTILE), table, grid):
        console.print(each)
    assert is_harmless(stream.getvalue())
    assert stream.getvalue().count(r"\u001b[2J") == 4


def test_log_lines_cannot_be_forged() -> None:
    name = f"t{HOSTILE}\n2026-01-01T00:00:00.000Z error penstock all data is lost"
    record = logging.LogRecord("penstock", logging.INFO, "", 0, "table copied table=%s", (name,), None)
    text = TextFormatter().format(record)
    assert is_harmless(text)
    assert len(text.splitlines()) == 1
    line = JsonFormatter().format(record)
    assert is_harmless(line)
    assert json.loads(line)["message"] == f"table copied table={name}"


def test_every_command_prints_by_these_means() -> None:
    for path in Path(penstock.cli.__file__).parent.glob("*.py"):
        if path.name != "display.py":
            text = path.read_text()
            assert "typer.echo(" not in text, path
            assert " Console(" not in text, path


def test_lines_of_events_show_escapes() -> None:
    lines = Lines(colour=False)
    line = lines._line(__import__("datetime").datetime.now(), "insert", "", HOSTILE, [(HOSTILE, "")])  # pyright: ignore
    assert is_harmless(line)
