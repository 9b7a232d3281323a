"""docs/reference/cli.md has every command and option, and no others; every command's help says what it is for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli.main import app

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/cli.md").read_text()
HEAD, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
DEMANDING = {"init", "run", "status", "tables", "resync", "rollback", "report", "check", "tail", "schema config"} | {
    f"index {name}" for name in ("check", "preview", "mapping", "schema", "list", "rebuild", "diff", "quarantine list")
}
"""Commands whose use is not plain from their name: their help has examples."""


def commands(group: Any = None, before: str = "") -> dict[str, Any]:
    group = group or typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= commands(command, f"{before}{name} ") if inner else {f"{before}{name}": command}
    return found


def options(command: Any) -> set[str]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    return {name for parameter in shown for name in parameter.opts if name.startswith("-")} - {"--help", "-h"}


def sections() -> dict[str, str]:
    """Text by command; a section's title may name several."""
    found: dict[str, str] = {}
    for section in SECTIONS:
        title, _, text = section.partition("\n")
        for name in title.split(", "):
            found[name.strip()] = text
    return found


def named(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", text))


def test_the_page_has_every_command_and_no_others() -> None:
    assert set(sections()) == {name.split()[0] for name in commands()}


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_page_has_every_option(name: str) -> None:
    documented = named(sections()[name.split()[0]]) | named(HEAD)
    assert options(commands()[name]) - documented == set()


def test_the_page_has_every_option_of_the_program() -> None:
    assert options(typer.main.get_command(app)) - named(HEAD) == set()


def test_the_page_has_no_option_that_is_not_there() -> None:
    known: dict[str, set[str]] = {}
    for name, command in commands().items():
        known.setdefault(name.split()[0], set()).update(options(command))
    for title, text in sections().items():
        rows = "\n".join(re.findall(r"^\| (`-[^|]*(?:\\\|[^|]*)*)\|", text, re.MULTILINE))
        allowed = known[title]
        assert named(rows) - allowed == set(), title


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_says_what_a_command_is_for(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    assert f"Usage: penstock {name}" in result.output.replace("root", "penstock")
    assert commands()[name].help.strip()
    if name in DEMANDING:
        assert "Examples:" in result.output
        assert f"penstock {name}" in result.output.partition("Examples:")[2]


def test_the_shell_completes_commands() -> None:
    asked = {"_PENSTOCK_COMPLETE": "complete_bash", "COMP_WORDS": "penstock res", "COMP_CWORD": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "penstock"], env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert sorted(result.stdout.split()) == ["resume", "resync"]
