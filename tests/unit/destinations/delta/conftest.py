"""A lake and a source for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.testing.destinations import ScriptedSource


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def source(tmp_path: Path) -> ScriptedSource:
    return ScriptedSource(tmp_path / "segments")
