"""docs/reference/config.md has every key, and no others; the example is understood."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from penstock.config import load_config
from penstock.config.loading import _keys
from penstock.config.models import ConfigFile

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/config.md").read_text()


def keys(model: type[BaseModel], before: str = "") -> set[str]:
    found: set[str] = set()
    for key, inner in _keys(model).items():
        found |= {f"{before}{key}"} if inner is None else keys(inner, f"{before}{key}.")
    return found


def test_the_page_has_every_key_and_no_others():
    documented: set[str] = set()
    for section, text in re.findall(r"^## \[+([a-z]+)\]+\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL):
        documented |= {f"{section}.{key}" for key in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)}
    assert documented - {"spark.spark.*"} == keys(ConfigFile) - {"tables"}


def test_the_defaults_on_the_page_are_those_of_the_models():
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `([^`]*)` \|", PAGE, re.MULTILINE))
    assert rows["max_table_sync_workers"] == str(ConfigFile.model_fields["copy_"].default.max_table_sync_workers)
    assert rows["master"] == f'"{ConfigFile.model_fields["spark"].default.master}"'


def test_the_examples_are_understood(tmp_path):
    example = ROOT / "examples/penstock.toml"
    config = load_config(example, {"SHOP_URL": "postgresql://reader@db/shop"})
    config.create_destination()
    assert config.pipeline.spool.path == ROOT / "examples/penstock-data/spool"
    smallest = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert smallest is not None
    (tmp_path / "penstock.toml").write_text(smallest[1])
    assert load_config(tmp_path / "penstock.toml", {"SHOP_URL": "host=db"}).pipeline.id == "shop"
