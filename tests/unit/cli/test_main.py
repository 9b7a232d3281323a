"""How the program starts and ends, without a server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from tests.program import penstock

SECRET = "s3cret-pa55"


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return penstock(*arguments, environment={**os.environ, "COLUMNS": "200", **environment}, folder=cwd)


def test_version_and_help() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output.startswith("penstock ")
    for arguments in (["--help"], ["check", "-h"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0
        assert "check" in result.output.lower()
    assert "PENSTOCK_URL" in runner.invoke(app, ["check", "--help"], env={"COLUMNS": "200"}).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--url", "postgresql://h/d", "--bogus"],
        ["check", "--url", "postgresql://h/d", "--config", "penstock.toml"],
        ["nonsense"],
        ["--log-level", "loud", "check"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_errors_with_a_name_are_a_message_and_a_hint() -> None:
    result = run("check", PENSTOCK_URL=f"postgresql://me:{SECRET}@@h/d")
    assert result.returncode == 1
    assert result.stderr.startswith("error: the source URL")
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert SECRET not in result.stdout + result.stderr


def test_a_server_that_is_not_there_is_a_finding() -> None:
    result = run("check", "--json", PENSTOCK_URL=f"postgresql://me:{SECRET}@127.0.0.1:1/d")
    assert result.returncode == 1
    assert '"id": "connection"' in result.stdout
    assert '"critical"' in result.stdout
    assert "keeps trying" not in result.stdout
    assert SECRET not in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["check", "tail"])
def test_without_a_database_it_is_told_how_to_name_one(command: str, tmp_path: Path) -> None:
    result = run(command, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("error: no database given")
    assert "penstock init" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "port"),
    [
        ([], {}, 1),
        (["-c", "other.toml"], {}, 2),
        ([], {"PENSTOCK_CONFIG": "other.toml"}, 2),
        (["--url", "postgresql://127.0.0.1:3/d"], {"PENSTOCK_CONFIG": "other.toml"}, 3),
        ([], {"PENSTOCK_CONFIG": "other.toml", "PENSTOCK_URL": "postgresql://127.0.0.1:3/d"}, 3),
        (["-c", "other.toml"], {"PENSTOCK_URL": "postgresql://127.0.0.1:3/d"}, 2),
    ],
)
def test_what_is_typed_comes_before_the_environment_and_that_before_the_file_at_hand(
    arguments: list[str], environment: dict[str, str], port: int, tmp_path: Path
) -> None:
    for name, there in (("penstock.toml", 1), ("other.toml", 2)):
        (tmp_path / name).write_text(
            f'pipeline.id = "p"\nsource.url = "postgresql://127.0.0.1:{there}/d"\ndestination.type = "memory"\n'
        )
    found = json.loads(run("check", "--json", *arguments, cwd=tmp_path, **environment).stdout)
    assert found["source"] == f"127.0.0.1:{port}/d"
