"""The unit that `penstock systemd` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.operations.supervision import NEEDS_A_PERSON, START_AGAIN


def unit() -> str:
    result = CliRunner().invoke(app, ["systemd"])
    assert result.exit_code == 0
    return result.stdout


def test_the_unit_starts_again_what_time_heals_and_nothing_else() -> None:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string(unit())
    service = parser["Service"]
    assert service["Restart"] == "on-failure"
    prevented = [int(each) for each in service["RestartPreventExitStatus"].split()]
    assert prevented == list(NEEDS_A_PERSON)
    assert START_AGAIN not in prevented
    # It must be able to write to the folders that it is told to use.
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"
    python, *arguments = service["ExecStart"].split()
    assert os.access(python, os.X_OK)
    assert arguments[:3] == ["-m", "penstock", "run"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    (tmp_path / "penstock@.service").write_text(unit())
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "penstock@shop.service")]
    (tmp_path / "penstock@shop.service").symlink_to("penstock@.service")
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, [line for line in result.stderr.splitlines() if "penstock" in line]) == (0, [])
