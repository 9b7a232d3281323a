"""Trials by seed: random writers, pipelines and kills; a few in each run, many in `make soak`."""

from __future__ import annotations

import os

import pytest

from tests.support.trial import TrialSettings, run_trial, run_trials
from tests.support.workload import Ddl

SOAK_TRIALS = int(os.environ.get("PENSTOCK_SOAK_TRIALS", "60"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "1000"))


@pytest.mark.timeout(1200)
@pytest.mark.trap(3, 4, 19, 20, 28)
@pytest.mark.parametrize(
    "settings",
    [TrialSettings(2, kills=4, pipelines=2), TrialSettings(50, kills=2, master="local[2]")],
    ids=["two pipelines", "spark"],
)
def test_whoever_is_killed_nothing_is_lost_or_doubled(settings, make_server, tmp_path):
    report = run_trial(settings, tmp_path, server=make_server())
    assert report.changes > 0
    assert report.starts > settings.pipelines
    # A part that is not found is not killed, and the rest would hold all the same. Later ones may just be starting.
    assert report.kills[settings.plan_kills()[0].victim.value] > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_whoever_is_killed_nothing_is_lost_or_doubled_for_many_seeds(tmp_path, record_property):
    """Every fifth trial runs on Spark, every third has two pipelines, every other one changes columns."""
    trials = [
        TrialSettings(
            seed,
            pipelines=2 if seed % 3 == 0 else 1,
            master="local[2]" if seed % 5 == 0 else None,
            ddl=Ddl.ANY if seed % 2 else Ddl.NONE,
        )
        for seed in range(SOAK_SEED, SOAK_SEED + SOAK_TRIALS)
    ]
    run_trials(trials, tmp_path, record_property)
