"""`import penstock`: what it offers, what it costs, and that its page lists the same names."""

from __future__ import annotations

import inspect
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"source": None}, "source should be a URL, or a mapping with the keys of [source], not NoneType"),
        ({"destination": "parquet"}, "destination should be a mapping with the keys of [destination], not str"),
        ({"destination": ["parquet"]}, "destination should be a mapping with the keys of [destination], not str"),
        ({"pipeline": "shop"}, "pipeline should be a mapping with the keys of [pipeline], not str"),
        ({"spark": "none"}, "spark: should be a section"),
        ({"tables": 5}, "source.tables: should be a list"),
    ],
)
def test_an_argument_of_another_type_is_named(arguments: dict[str, Any], problem: str) -> None:
    given = {"source": "postgresql://me@db.example/shop", "destination": {"type": "parquet", "path": "lake"}}
    with pytest.raises(penstock.ConfigError, match=re.escape(problem)):
        penstock.Pipeline(**{**given, **arguments})


def test_a_single_table_needs_no_list() -> None:
    def plan_of(tables: str | list[str]) -> object:
        return Pipeline("postgresql://me@db.example/shop", {"type": "parquet", "path": "lake"}, tables)._config.pipeline

    assert plan_of("public.orders") == plan_of(["public.orders"])


@pytest.mark.parametrize("sample", [0, -1, 5])
def test_a_sample_is_a_fraction(sample: float) -> None:
    pipeline = Pipeline("postgresql://me@db.example/shop", {"type": "parquet", "path": "lake"})
    with pytest.raises(penstock.ConfigError, match=f"sample is {sample}, but"):
        penstock.verify(pipeline, sample=sample)


def test_an_unreachable_server_is_an_error_that_promises_no_retries() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        pipeline = Pipeline(f"postgresql://me@127.0.0.1:{port}/shop", {"type": "parquet", "path": "lake"})
        with pytest.raises(penstock.SourceError, match="Connection refused") as raised:
            penstock.plan(pipeline)
    assert raised.value.hint == "Check that the server is running and that the host and port are correct."


def test_run_says_that_it_needs_the_main_thread() -> None:
    pipeline = Pipeline("postgresql://me@db.example/shop", {"type": "parquet", "path": "lake"})
    with ThreadPoolExecutor(1) as pool, pytest.raises(penstock.PenstockError, match="only the main thread receives"):
        pool.submit(pipeline.run).result()


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
