"""`penstock check` as people run it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.program import penstock


def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return penstock("check", *arguments, environment={**os.environ, "PENSTOCK_URL": url, "COLUMNS": "180"})


def test_a_ready_source_ends_with_0(database: Any) -> None:
    database.execute("create table t (id int primary key); create publication pub for table t")
    result = run(database.dsn, "--publication", "pub", "--table", "public.t")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "is ready" in result.stdout
    assert "wal_level is logical" in result.stdout
    assert result.stderr == ""


def test_a_fault_ends_with_1_and_names_its_remedy(database: Any) -> None:
    database.execute("create table t (id int); create publication pub for table t")
    result = run(database.dsn, "--publication", "pub")
    assert result.returncode == 1
    assert "replica_identity" in result.stdout
    assert "is not ready" in result.stdout
    report = json.loads(run(database.dsn, "--publication", "pub", "--json").stdout)
    assert report["ready"] is False
    assert {"id", "severity", "status", "what", "remedy", "subjects"} == set(report["checks"][0])


def test_a_pattern_that_cannot_be_read_is_an_error(database: Any) -> None:
    result = run(database.dsn, "--table", "a.b.c")
    assert result.returncode == 1
    assert "a.b.c" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_a_config_says_what_is_looked_at(database: Any, tmp_path: Path) -> None:
    database.execute("create table t (id int primary key); create table u (id int)")
    config = tmp_path / "shop.toml"
    config.write_text(
        'pipeline.id = "shop"\nsource = {url = "${SOURCE}", tables = ["public.*"], exclude = ["u"]}\n'
        'destination.type = "memory"\n'
    )
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_URL"}
    result = penstock("check", "-c", str(config), "--json", environment={**environment, "SOURCE": database.dsn})
    assert result.returncode == 0, result.stdout + result.stderr
    found = {each["id"]: each for each in json.loads(result.stdout)["checks"]}
    for kind in ("publication", "slot"):
        assert found[kind]["what"] == f"{kind} 'penstock_shop' does not exist; Penstock creates it at the first start"
    # `u`, which is left out, has no replica identity.
    assert found["replica_identity"]["status"] == "passed"
    assert database.dsn not in result.stdout
