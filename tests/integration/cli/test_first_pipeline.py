"""docs/guides/first-pipeline.md, followed to the letter on a real server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.program import PATIENCE, penstock
from tests.support.delta_jars import find_delta_jars

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs/guides/first-pipeline.md").read_text()
WITHOUT_SPARK = '\n[spark]\nmaster = "none"\n'


def samples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def shape(text: str) -> list[str]:
    """Lines without what differs from one machine to another: addresses, paths, numbers, widths."""
    lines = [re.sub(r"\S*[/:.]\S*[/:]\S*|\d+", "#", line) for line in text.splitlines()]
    return [" ".join(line.split()) for line in lines]


@pytest.fixture
def shop(database: Any, tmp_path: Path) -> Path:
    database.execute("create schema sales")
    for table in ("orders", "items"):
        database.execute(f"create table sales.{table} (id bigint primary key, total numeric(10,2))")
        database.execute(f"insert into sales.{table} select i, i from generate_series(1, 1000) i")
    (config,) = samples("toml")
    (tmp_path / "penstock.toml").write_text(config + WITHOUT_SPARK)
    return tmp_path


def test_the_commands_of_the_guide_work_and_print_what_it_shows(database: Any, shop: Path) -> None:
    environment = {**os.environ, "SHOP_URL": database.dsn, "COLUMNS": "160"}

    def run(command: str) -> subprocess.CompletedProcess[str]:
        words = shlex.split(command, comments=True)
        assert words[0] == "penstock"
        return penstock(*words[1:], environment=environment, folder=shop)

    plan, commands = "", []
    for sample in samples("console"):
        if sample.startswith("$ penstock run --plan\n"):
            plan = sample.partition("\n")[2]
        commands += [line[2:] for line in sample.splitlines() if line.startswith("$ penstock")]
    names = [" ".join(command.split()[:2]) for command in commands]
    assert names == [f"penstock {name}" for name in ("check", "run", "run", "status", "verify", "resync")]

    check, planned, started, status, verify, resync = commands
    assert run(check).returncode == 0
    shown = run(planned)
    assert shown.returncode == 0
    assert shape(shown.stdout) == shape(plan)
    assert run(f"{started} --once").returncode == 0
    database.execute("delete from sales.orders where id <= 10")
    assert run(f"{started} --once").returncode == 0
    assert "sales.orders" in run(status).stdout
    compared = run(verify)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "sales.orders  990 rows, equal" in compared.stdout
    assert run(resync).returncode == 0

    polars_sample, spark_sample = samples("python")
    assert run_python(f"{polars_sample}\nprint(len(orders), len(table))", shop).split() == ["990", "990"]
    if jars := find_delta_jars():
        sample = with_jars(spark_sample, jars)
        counted = run_python(f"{sample}\nprint(spark.read.format('delta').load('lake/sales/orders').count())", shop)
        assert counted.split()[-1] == "990"


def with_jars(sample: str, jars: list[Path]) -> str:
    """The sample with the jars that are here, which must be those of the package that it names."""
    package = re.search(r'"spark.jars.packages", "(.*?)"', sample)
    assert package is not None
    assert (jars[0].parent / package[1].replace(":", "_")).exists(), "the guide names another version"
    return sample.replace(package[0], f'"spark.jars", "{",".join(map(str, jars))}"')


def run_python(program: str, folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
