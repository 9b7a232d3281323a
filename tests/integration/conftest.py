"""Capture processes that skip the imports."""

from __future__ import annotations

import pytest

from penstock.capture import process
from tests.program import start_capture


@pytest.fixture(autouse=True)
def quick_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork capture processes from an interpreter that has imported them."""
    monkeypatch.setattr(process, "start_child", start_capture)
