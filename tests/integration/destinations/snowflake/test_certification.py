"""The script that an owner of an account runs works: here against the emulator."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from penstock.testing.snowflake import EmulatedSnowflake

SCRIPT = Path(__file__).parents[4] / "scripts" / "certify-snowflake.py"


def test_the_certification_runs_from_end_to_end(server: EmulatedSnowflake, capsys: pytest.CaptureFixture[str]) -> None:
    failures = runpy.run_path(str(SCRIPT))["certify"](server.options(""))
    printed = capsys.readouterr().out
    assert failures == 0, printed
    assert printed.count("ok ") == len(printed.splitlines()) == 13
