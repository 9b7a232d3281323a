"""How the program starts and ends, without a server."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.options import configured
from penstock.errors import ServerUnavailable
from tests.program import Command, penstock

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


def test_a_hint_for_the_case_is_not_replaced_by_a_general_one(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('pipeline.id = "a"\nsource.url = "postgresql://h/d"\ndestination = {type = "memory"}\n')
    with pytest.raises(ServerUnavailable) as raised, configured(config):
        raise ServerUnavailable("too many connections", hint="Raise max_connections.")
    assert raised.value.hint == "Raise max_connections."


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


@pytest.mark.parametrize("module", ["penstock.cli.main", "psycopg", "penstock.operations.status"])
def test_ctrl_c_during_the_imports_is_one_line(module: str) -> None:
    code = f"""
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["penstock", "status"]
from penstock.__main__ import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("arguments", [("check",), ("init", "--yes"), ("run", "--plan")])
def test_ctrl_c_is_one_line_and_status_130(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"postgresql://me:{SECRET}@127.0.0.1:{silent.getsockname()[1]}/d"
        if arguments[0] != "init":
            (tmp_path / "penstock.toml").write_text(
                'pipeline.id = "p"\nsource.url = "${PENSTOCK_URL}"\ndestination.type = "memory"\n'
            )
        with (tmp_path / "out").open("w+b") as output, (tmp_path / "err").open("w+b") as errors:
            environment = {**os.environ, "PENSTOCK_URL": url}
            command = Command(*arguments, environment=environment, folder=tmp_path, output=output, errors=errors)
            try:
                # The command has connected, and waits for an answer.
                connection, _ = silent.accept()
                with connection:
                    assert connection.recv(1)
                    command.send_signal(signal.SIGINT)
                    assert command.wait(60) == 130
            finally:
                command.kill()
    assert (tmp_path / "err").read_text() == "interrupted\n"
