"""The spark destination under random writes and kills: what upserts wrote equals the source."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.delta_jars import find_delta_jars, find_postgres_driver
from tests.support.planned_tables import Size
from tests.support.trial import TrialSettings, run_trial, run_trials

SOAK_KILLS = int(os.environ.get("PENSTOCK_SOAK_KILLS", "30"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "1000"))
KILLS = 3
SIZE = Size(tables=3, columns=6, sessions=2, initial_rows=40)
SMALL = Size(tables=2, columns=4, sessions=1, initial_rows=20)
"""Every MERGE of a table takes seconds, however few rows it has."""
INTO = {
    "delta": {"format": "delta", "mode": "upsert"},
    "postgres": {"format": "jdbc", "mode": "upsert", "table": "{schema}.{table}"},
}
NEEDS_JARS = pytest.mark.skipif(
    not find_delta_jars() or not find_postgres_driver(), reason="needs jars for Spark: make jars"
)


def trial(into: str, seed: int, size: Size = SIZE) -> TrialSettings:
    return TrialSettings(seed, kills=KILLS, master="local[2]", size=size, destination="spark", options=INTO[into])


@NEEDS_JARS
@pytest.mark.timeout(2400)
@pytest.mark.trap(19, 25, 27, 28, 29, 32)
@pytest.mark.parametrize("into", INTO)
def test_kills_leave_the_target_equal_to_the_source(into: str, make_server: Callable[..., Any], tmp_path: Path) -> None:
    report = run_trial(trial(into, 7, SMALL), tmp_path, server=make_server())
    assert report.rows > 0
    assert report.starts > 1


@NEEDS_JARS
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("into", INTO)
def test_many_kills_leave_the_target_equal_to_the_source(
    into: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    trials = [trial(into, seed) for seed in range(SOAK_SEED, SOAK_SEED + -(-SOAK_KILLS // KILLS))]
    run_trials(trials, tmp_path, record_property)
