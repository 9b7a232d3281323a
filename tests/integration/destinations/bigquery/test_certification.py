"""The script that an owner of an account runs works: here against the emulator with the fake."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from penstock.testing.bigquery import EmulatedBigQuery

SCRIPT = Path(__file__).parents[4] / "scripts" / "certify-bigquery.py"


def test_the_certification_runs_from_end_to_end(server: EmulatedBigQuery, capsys: pytest.CaptureFixture[str]) -> None:
    certify = runpy.run_path(str(SCRIPT))["certify"]
    addresses = {"endpoint": server.endpoint, "storage_endpoint": server.storage_endpoint}
    failures = certify({"project": server.project, **addresses}, is_emulated=True)
    printed = capsys.readouterr().out
    assert failures == 0, printed
    assert printed.count("ok ") == len(printed.splitlines()) == 10
