"""Remedies, wherever they are written: the commands that they name exist, and none contradicts itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import penstock
from penstock.cli.main import app

SOURCE = Path(penstock.__file__).parent
_NAMES = {"hint", "default_hint", "remedy"}


def texts(node: ast.expr) -> str:
    """The text of an expression; what is filled in stays as its source, like `{RESYNC}`."""
    return re.sub(r"\s+", " ", ast.unparse(node))


@cache
def remedies() -> list[tuple[str, str]]:
    return list(_find_remedies())


def _find_remedies() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(keywords=keywords):
                    for keyword in keywords:
                        if keyword.arg in _NAMES:
                            yield f"{where}:{keyword.value.lineno}", texts(keyword.value)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name in _NAMES:
                    yield f"{where}:{value.lineno}", texts(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if name in _NAMES:
                    yield f"{where}:{value.lineno}", texts(value)
                case _:
                    pass


def known_commands() -> set[str]:
    found: set[str] = set()

    def walk(command: object, name: str) -> None:
        for each, inner in getattr(command, "commands", {}).items():
            found.add(f"{name} {each}".strip())
            walk(inner, f"{name} {each}".strip())

    walk(get_command(app), "")
    return found


def test_there_are_remedies() -> None:
    assert len(remedies()) > 100


def test_every_command_that_a_remedy_names_exists() -> None:
    commands = known_commands()
    for where, text in remedies():
        # In prose, a command follows "run:", a backquote or "then"; elsewhere the word is the name of the program.
        for named in re.findall(r"(?:[Rr]un:? |`|then |: )penstock ([a-z]+(?: [a-z]+)?)", text):
            first, _, rest = named.partition(" ")
            assert first in commands, (where, named)
            if first == "index" and rest:
                assert named in commands, (where, named)


@pytest.mark.parametrize("phrase", [r"\bcopy (the|this) table again", r"needs? a new copy"])
def test_a_remedy_that_says_to_copy_a_table_names_the_command(phrase: str) -> None:
    """Otherwise status would add `penstock rollback`, which contradicts it."""
    for where, text in remedies():
        if re.search(phrase, text, re.IGNORECASE):
            assert "RESYNC" in text or "penstock resync" in text, (where, text)
