"""Capture processes that skip the imports, and a small disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.capture import process
from tests.program import start_capture
from tests.support.disks import CannotMount, SmallDisk


@pytest.fixture(autouse=True)
def quick_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork capture processes from an interpreter that has imported them."""
    monkeypatch.setattr(process, "start_child", start_capture)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 24 MB of which all can be taken away and given back."""
    try:
        disk = SmallDisk(tmp_path / "disk")
    except CannotMount as why:
        pytest.skip(str(why))
    with disk:
        yield disk
