"""The repository's own rules: what a newcomer may rely on when opening any file."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "src" / "penstock").rglob("*.py"))
CONSTRAINTS = (ROOT / "requirements" / "constraints.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT / "src"))


def test_modules_say_what_they_are_for() -> None:
    texts = {_name(path): path.read_text() for path in MODULES}
    silent = [name for name, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert silent == [], "modules without a docstring"


# `import penstock` re-exports lazily, which takes a function: tests/unit/test_public_api.py is about it.
def test_packages_only_re_export() -> None:
    packages = [each for each in MODULES if each.name == "__init__.py" and each.parent.name != "penstock"]
    assert packages
    for path in packages:
        for node in ast.parse(path.read_text()).body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            assert is_text or is_name or is_import, f"{_name(path)}, line {node.lineno}: logic"


def test_modules_are_named_by_their_concept() -> None:
    vague = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [_name(path) for path in MODULES if vague & set(path.relative_to(ROOT).with_suffix("").parts)] == []


def test_ci_runs_what_people_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make test")


def test_ci_is_a_machine_with_nothing_cached() -> None:
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command.startswith("env -i ")
    assert "PIP_NO_CACHE_DIR=1" in command
    assert 'HOME="$home"' in command


def test_every_dependency_is_pinned_once_and_without_an_address() -> None:
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    pins = [re.fullmatch(r"([A-Za-z0-9._-]+)==[0-9][A-Za-z0-9.+!]*", line) for line in lines]
    assert all(pins), [line for line, pin in zip(lines, pins, strict=True) if pin is None]
    names = [_canonical(pin[1]) for pin in pins if pin is not None]
    assert len(names) == len(set(names))
    extras = [each for group in PROJECT["optional-dependencies"].values() for each in group]
    wanted = {_canonical(re.split(r"[\[<>=~! ;]", each)[0]) for each in (*PROJECT["dependencies"], *extras)}
    assert wanted - set(names) <= {"penstock"}


def test_make_alone_lists_every_target_that_people_use() -> None:
    listed = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = "setup demo test unit lint fmt bench bench-capture traps audit fuzz soak build clean types imports"
    assert set(wanted.split()) <= listed


def test_the_list_of_traps_is_complete() -> None:
    page = (ROOT / "docs" / "reference" / "traps.md").read_text()
    numbers = [int(number) for number in re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 54


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
