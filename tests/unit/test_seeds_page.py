"""docs/reference/seeds.md names tests that exist, for every promise."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "seeds.md").read_text()
ROWS = re.findall(r"^\| (?!Promise|---)(.+?) \| (.+?) \|$", PAGE, re.MULTILINE)


@cache
def names_in(file: str) -> frozenset[str]:
    """The test functions and classes at the top of a module."""
    body = ast.parse((ROOT / file).read_text()).body
    return frozenset(each.name for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef))


def test_the_page_has_its_promises() -> None:
    assert len(ROWS) > 30


@pytest.mark.parametrize(("promise", "shown_by"), ROWS)
def test_a_promise_names_a_test_that_exists(promise: str, shown_by: str) -> None:
    found = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", shown_by)
    assert found is not None, promise
    assert found[2] in names_in(found[1]), promise
