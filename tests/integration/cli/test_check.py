"""`penstock check` as people run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", "check", *arguments],
        env={**os.environ, "PENSTOCK_URL": url, "COLUMNS": "180"},
        capture_output=True,
        text=True,
        timeout=60,
    )


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
