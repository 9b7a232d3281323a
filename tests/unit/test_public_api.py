"""`import penstock`: what it offers, what it costs, and that its page lists the same names."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.api import Pipeline

PAGE = (Path(__file__).parents[2] / "docs/reference/api.md").read_text()
CALLABLES = [name for name in penstock.__all__ if inspect.isfunction(getattr(penstock, name))]


def test_importing_it_imports_nothing_heavy() -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import penstock"], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "penstock" in loaded
    assert not {name for name in loaded if re.match(r"(pyarrow|numpy|psycopg|pydantic|pyspark|penstock\.)", name)}


def test_every_name_is_there_and_documented() -> None:
    assert dir(penstock) == sorted(penstock.__all__)
    for name in set(penstock.__all__) - {"__version__"}:
        assert inspect.getdoc(getattr(penstock, name)), name
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", penstock.__version__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = penstock.nothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", [*CALLABLES, "Pipeline"])
def test_docstrings_say_what_goes_in_what_comes_out_and_what_can_fail(name: str) -> None:
    text = inspect.getdoc(getattr(penstock, name)) or ""
    wanted = ["Arguments:", "Raises:", "Example:"] + ["Returns:"] * (name != "Pipeline")
    assert [each for each in wanted if f"\n{each}\n" not in text] == []
    parameters = inspect.signature(getattr(penstock, name)).parameters
    assert [each for each in parameters if f"    {each}: " not in text] == []


def test_the_page_lists_exactly_these_names() -> None:
    section = PAGE.partition("## Names")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `penstock\.(\w+)", section, re.MULTILINE)) == sorted(penstock.__all__)


def test_a_pipeline_without_a_file_has_the_same_checks_as_one_with_a_file() -> None:
    with pytest.raises(penstock.ConfigError) as raised:
        penstock.Pipeline(
            "postgresql://me@db.example/shop", {"type": "parquet", "path": "lake"}, spool={}, types={"numeric": "x"}
        )
    assert "config has 2 errors" in raised.value.message
    assert "spool: there is no such key" in raised.value.message
    with pytest.raises(penstock.ConfigError, match=r"source\.url: is missing"):
        penstock.Pipeline({}, {"type": "parquet", "path": "lake"})


def test_a_pipeline_without_a_file_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(
        """
        [pipeline]
        id = "shop"
        [source]
        url = "postgresql://me@db.example/shop"
        tables = ["public.orders"]
        [spark]
        master = "none"
        [destination]
        type = "parquet"
        path = "lake"
        """
    )
    made = penstock.Pipeline(
        source="postgresql://me@db.example/shop",
        destination={"type": "parquet", "path": "lake"},
        tables=["public.orders"],
        folder=tmp_path,
        spark={"master": "none"},
    )
    loaded = penstock.open(tmp_path / "penstock.toml")
    assert made._config.outputs == loaded._config.outputs
    assert made._config.state_url == loaded._config.state_url
    assert repr(made) == "<Pipeline shop, not running>"


def test_a_pipeline_that_is_not_running_says_so() -> None:
    pipeline = Pipeline("postgresql://me@db.example/shop", {"type": "parquet", "path": "lake"})
    with pytest.raises(penstock.PenstockError, match="pipeline shop is not running"):
        pipeline.wait_until_ready()
    pipeline.close()
