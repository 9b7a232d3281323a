"""The examples of the public API run as they stand, and so does the one of its page."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock

PAGE = (Path(__file__).parents[3] / "docs/reference/api.md").read_text()
EXAMPLES = ["Pipeline", "check", "open", "plan", "read_table", "status", "verify"]
OF_SPARK = ["register", "snapshot"]
PATIENCE = 120.0


@pytest.fixture
def shop(database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with a config, for a database with a table that is there already."""
    database.execute("create table orders (id int primary key, price numeric(10, 2), at timestamptz, note text)")
    database.execute("insert into orders select i, i / 4.0, now(), 'x' from generate_series(1, 300) i")
    (tmp_path / "penstock.toml").write_text(
        f"""
        [pipeline]
        id = "{database.name[-12:]}"
        batch = {{interval = "100ms"}}
        [source]
        url = "${{SOURCE_URL}}"
        tables = ["public.orders"]
        [spark]
        master = "none"
        [destination]
        type = "parquet"
        path = "lake"
        """
    )
    monkeypatch.setenv("SOURCE_URL", database.dsn)
    monkeypatch.chdir(tmp_path)
    return database


@pytest.fixture
def copied_shop(shop: Any) -> Any:
    with penstock.open() as pipeline:
        pipeline.wait_until_caught_up(PATIENCE)
    return shop


def example(name: str) -> str:
    return textwrap.dedent((inspect.getdoc(getattr(penstock, name)) or "").partition("Example:\n")[2])


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "<example>", "exec"), names)  # noqa: S102 (our own examples)
    return names


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_runs(name: str, copied_shop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code = example(name).replace('id="other"', f'id="o{copied_shop.name[-11:]}"')
    assert f"penstock.{name}(" in code
    run(code)
    if name == "status":
        assert capsys.readouterr().out.startswith("public.orders ready ")


def test_all_names_with_an_example_are_run() -> None:
    assert [name for name in penstock.__all__ if name != "__version__" and example(name)] == sorted(EXAMPLES + OF_SPARK)


@pytest.mark.parametrize("name", OF_SPARK)
def test_examples_on_spark_run(name: str, database: Any, spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    database.execute("create table customers (id int primary key, country text)")
    database.execute("create table orders (id int primary key, customer_id int, status text)")
    database.execute("insert into customers values (1, 'at'); insert into orders values (1, 1, 'new'), (2, 1, 'new')")
    text = example(name).replace("postgresql://…", database.dsn)
    exec(compile(text, f"<example of {name}>", "exec"), {"spark": spark, "url": database.dsn})  # noqa: S102 (our own examples)
    assert re.search(r"\| *(new|at) *\| *2 *\|", capsys.readouterr().out)


def test_the_example_of_the_page_runs(shop: Any) -> None:
    names = run(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0])
    assert names["report"].equal
    assert names["orders"].num_rows == 300


def test_a_table_is_read_with_the_types_of_the_source(shop: Any) -> None:
    pipeline = penstock.open()
    with pipeline:
        pipeline.wait_until_caught_up(PATIENCE)
        shop.execute("update orders set note = 'y' where id = 7")
        shop.execute("delete from orders where id > 10")
        pipeline.wait_until_caught_up(PATIENCE)
        live = penstock.read_table(pipeline, "orders")
    assert live.schema.names == ["id", "price", "at", "note"]
    assert [live.schema.field(name).type for name in ("id", "at")] == [pa.int32(), pa.timestamp("us", "UTC")]
    rows = {row["id"]: row for row in live.to_pylist()}
    assert sorted(rows) == list(range(1, 11))
    assert rows[7]["note"] == "y"
    assert str(rows[7]["price"]) == "1.75"
    # From another process, after the pipeline has ended: the same.
    assert penstock.read_table("penstock.toml", "public.orders").equals(live)
    with pytest.raises(penstock.ConfigError, match="has no table 'nothing'"):
        penstock.read_table("penstock.toml", "nothing")


def test_a_delta_table_is_read_the_same_way(shop: Any) -> None:
    pytest.importorskip("obstore")
    pipeline = penstock.Pipeline(
        os.environ["SOURCE_URL"],
        {"type": "delta", "path": "delta"},
        ["public.orders"],
        id=f"d{shop.name[-11:]}",
        spark={"master": "none"},
        state={"url": "memory:"},
    )
    with pipeline:
        pipeline.wait_until_caught_up(PATIENCE)
        status = pipeline.status()
        rows = penstock.read_table(pipeline, "public.orders")
        assert penstock.verify(pipeline).equal
    assert [(table.table, table.phase) for table in status.outputs[0].tables] == [("public.orders", "ready")]
    assert rows.num_rows == 300
    assert rows.schema.field("at").type == pa.timestamp("us", "UTC")


def test_a_pipeline_runs_once(shop: Any) -> None:
    with penstock.open() as pipeline:
        with pytest.raises(penstock.PenstockError, match="has already been started"):
            pipeline.start()
        with pytest.raises(penstock.LeaseHeld, match="is already running"):
            penstock.open().start()
        pipeline.wait_until_ready(PATIENCE)
        shop.execute("insert into orders values (1000)")
        with pytest.raises(TimeoutError, match="not caught up within 0 s"):
            pipeline._wait_for(lambda: False, 0.0, "caught up")
    pipeline.close()
    with pipeline:
        pipeline.wait_until_caught_up(PATIENCE)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pipeline.run()", 0),
        ("with pipeline:\n    print('started', flush=True)\n    pipeline.wait()", -signal.SIGINT),
    ],
    ids=["run", "wait"],
)
def test_ctrl_c_ends_without_tracebacks_of_threads(shop: Any, tmp_path: Path, code: str, status: int) -> None:
    program = f"import penstock\npipeline = penstock.open()\n{code}\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + PATIENCE
    while [each.phase for output in penstock.status().outputs for each in output.tables] != ["ready"]:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    # As a terminal does: to the whole group, capture included.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, errors
    assert "Exception in thread" not in errors
    assert errors.count("Traceback") == (0 if status == 0 else 1)
