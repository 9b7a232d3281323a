"""The path of a row: docs/concepts/a-change.md names modules that exist, and not too many."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts" / "a-change.md").read_text()
MOST_MODULES = 25
LISTS = {
    "One changed row": MOST_MODULES,
    "One copied row": MOST_MODULES,
    "One changed child row, in a search document": 15,
}
"""The lists, and how many modules each may have."""


def modules_of(heading: str) -> list[str]:
    """The modules of the numbered list under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)


@pytest.mark.parametrize("heading", LISTS)
def test_the_path_of_a_row_is_short(heading: str) -> None:
    modules = modules_of(heading)
    assert 10 < len(modules) <= LISTS[heading]
    assert len(set(modules)) == len(modules)


def test_the_modules_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert named >= {module for heading in LISTS for module in modules_of(heading)}
    missing = sorted(module for module in named if not (ROOT / "src" / "penstock" / module).exists())
    assert missing == [], "docs/concepts/a-change.md names modules that have moved: update its lists"
