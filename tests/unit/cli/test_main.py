"""How the program starts and ends, without a server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app

SECRET = "s3cret-pa55"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


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
    [["check"], ["check", "--url", "postgresql://h/d", "--bogus"], ["nonsense"], ["--log-level", "loud", "check"]],
)
def test_wrong_usage_ends_with_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
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
    assert SECRET not in result.stdout + result.stderr
