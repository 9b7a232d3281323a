"""Streaming queries by seed, with random writes and kills: the table that they keep equals the source."""

from __future__ import annotations

import os

import pytest

from tests.support.delta_jars import find_delta_jars
from tests.support.spark_trial import run_trial

KILLS = 3
SOAK_KILLS = int(os.environ.get("PENSTOCK_SOAK_KILLS", "30"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "1000"))


@pytest.fixture(autouse=True)
def with_delta():
    if not find_delta_jars():
        pytest.skip("needs Delta's jars for Spark: make jars")


@pytest.mark.timeout(2400)
@pytest.mark.trap(3, 4, 25, 27, 28, 53)
def test_a_query_that_is_killed_loses_and_doubles_nothing(server, tmp_path):
    assert sum(run_trial(server, tmp_path, seed=3, kills=KILLS).values()) > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_query_that_is_killed_loses_and_doubles_nothing_for_many_seeds(server, tmp_path, record_property):
    killed = 0
    for seed in range(SOAK_SEED, SOAK_SEED + -(-SOAK_KILLS // KILLS)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        killed += sum(run_trial(server, folder, seed=seed, kills=KILLS).values())
    record_property("kills", killed)
