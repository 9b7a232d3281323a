"""docs/reference/config.md has every key, and no others; the example is understood."""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.config import load_config
from penstock.config.models import ConfigFile, TableSection
from penstock.config.problems import _keys

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/config.md").read_text()


def keys(model: type[BaseModel], before: str = "") -> set[str]:
    found: set[str] = set()
    for key, inner in _keys(model).items():
        found |= {f"{before}{key}"} if inner is None else keys(inner, f"{before}{key}.")
    return found


def test_the_page_has_every_key_and_no_others():
    documented: set[str] = set()
    for section, text in sections().items():
        documented |= {f"{section}.{key}" for key in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)}
    # Of single tables, the page names sections.
    expected = {key for key in keys(ConfigFile) if not key.startswith("tables.")}
    assert documented - {"spark.spark.*"} == expected
    of_tables = PAGE.partition('## [tables."schema.name"]')[2]
    assert set(re.findall(r"^\| `([^`]+)` \|", of_tables, re.MULTILINE)) == set(_keys(TableSection))


def sections() -> dict[str, str]:
    return dict(re.findall(r"^## \[+([a-z_]+)\]+\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def documented_defaults(section: str) -> dict[str, Any]:
    """The defaults of a section that are written as one writes them in a file."""
    found: dict[str, Any] = {}
    for key, default in re.findall(r"^\| `([a-z_.]+)` \| `([^`]+)` \|", sections()[section], re.MULTILINE):
        with suppress(tomllib.TOMLDecodeError):
            *before, last = key.split(".")
            inner = found
            for name in before:
                inner = inner.setdefault(name, {})
            inner[last] = tomllib.loads(f"default = {default}")["default"]
    return found


TABLES = {"pipeline": {"id": "a"}, "source": {"url": "x"}, "destination": {"type": "memory"}, "server": {}}
DOCUMENTS = {
    "pipeline": {"id": "a"},
    "source": {"url": "x"},
    "index": {"specification": "x"},
    "sink": {"type": "memory"},
    "polling": {},
}


@pytest.mark.parametrize(
    ("base", "names"),
    [
        (
            TABLES,
            ["pipeline", "source", "state", "copy", "spark", "destination", "types", "schema_changes", "log", "server"],
        ),
        (DOCUMENTS, ["index", "sink", "polling"]),
    ],
    ids=["tables", "documents"],
)
def test_the_defaults_on_the_page_are_those_of_the_models(base: dict[str, Any], names: list[str]) -> None:
    written = {**base, **{name: {**base.get(name, {}), **documented_defaults(name)} for name in names}}
    assert written != base
    assert ConfigFile.model_validate(written) == ConfigFile.model_validate(base)


def test_the_page_gives_defaults_as_one_writes_them() -> None:
    assert len([key for name in sections() if name != "tables" for key in documented_defaults(name)]) >= 20


def test_the_examples_are_understood(tmp_path):
    example = ROOT / "examples/penstock.toml"
    config = load_config(example, {"SHOP_URL": "postgresql://reader@db/shop"})
    config.create_destination()
    assert config.pipeline.spool.path == ROOT / "examples/penstock-data/spool"
    smallest = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert smallest is not None
    (tmp_path / "penstock.toml").write_text(smallest[1])
    assert load_config(tmp_path / "penstock.toml", {"SHOP_URL": "host=db"}).pipeline.id == "shop"
