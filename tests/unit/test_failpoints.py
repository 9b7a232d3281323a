"""Failpoints: all of them are somewhere, and do nothing unless asked."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import penstock
from penstock import failpoints
from penstock.errors import ConfigError, FailpointReached

SOURCES = Path(penstock.__file__).parent


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm("")


def test_every_point_is_reached_at_exactly_one_place() -> None:
    found = Counter(
        name
        for file in SOURCES.rglob("*.py")
        for name in re.findall(r'failpoints\.reach\(\s*"(\w+)"\s*\)', file.read_text())
    )
    assert set(found) == set(failpoints.POINTS | failpoints.DOCUMENT_POINTS)
    assert set(found.values()) == {1}


def test_nothing_happens_unless_asked() -> None:
    for name in failpoints.POINTS | failpoints.DOCUMENT_POINTS:
        failpoints.reach(name)


def test_an_error_comes_once_at_its_time() -> None:
    failpoints.arm("after_write=error:2")
    failpoints.reach("after_write")
    failpoints.reach("after_ready")
    with pytest.raises(FailpointReached, match="after_write"):
        failpoints.reach("after_write")
    failpoints.reach("after_write")


def test_a_pause_comes_each_time() -> None:
    failpoints.arm("after_write=sleep:0.02, after_ready=error")
    for _ in range(2):
        before = time.monotonic()
        failpoints.reach("after_write")
        assert time.monotonic() - before >= 0.02


@pytest.mark.parametrize(
    "text",
    [
        "nowhere=kill",
        "after_write=explode",
        "after_write",
        "after_write=kill:x",
        "after_write=off",
    ],
)
def test_what_is_not_known_is_refused_and_changes_nothing(text: str) -> None:
    failpoints.arm("after_ready=error")
    with pytest.raises(ConfigError):
        failpoints.arm(text)
    with pytest.raises(FailpointReached):
        failpoints.reach("after_ready")


def test_the_environment_kills() -> None:
    code = "from penstock import failpoints; failpoints.reach('after_slot'); print('alive')"
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"PENSTOCK_FAILPOINTS": "after_slot=kill"}, capture_output=True, timeout=30
    )
    assert (ended.returncode, ended.stdout) == (-9, b"")
