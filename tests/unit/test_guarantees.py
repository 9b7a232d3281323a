"""docs/concepts/guarantees.md names tests that exist, and every fault is in the code that strikes it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.faults import FAULTS, IN_STATE_FILE, IN_STATE_SERVER
from tests.support.trial import TrialSettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "concepts" / "guarantees.md").read_text()


def test_the_tests_that_the_page_names_exist() -> None:
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "src" / "penstock" / "testing").rglob("*.py")]
    existing = {name for path in files for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 30
    assert named - existing == set(), "docs/concepts/guarantees.md names tests that were renamed or removed"


def test_every_row_of_the_page_has_a_proof() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| Fault")]
    assert [row for row in rows if "`test_" not in row.rpartition(" | ")[2]] == []


def test_trials_with_consecutive_seeds_strike_every_fault() -> None:
    trials = [TrialSettings(seed, kills=0, faults=6, master="local[2]") for seed in range(20)]
    struck = {each.fault for trial in trials for each in trial.plan_faults()}
    assert struck == set(FAULTS)
    assert set(FAULTS) >= IN_STATE_FILE | IN_STATE_SERVER
    assert trials[3].plan_faults() == trials[3].plan_faults(), "the seed determines them"
