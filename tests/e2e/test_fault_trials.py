"""Faults of every kind, one after the other: each heals, changes flow again, and nothing is lost or doubled.

`docs/concepts/guarantees.md` says what each of them proves. A few seconds of each run here; `make soak` strikes many,
for longer, with many seeds.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.destinations.memory import MemoryDestination
from penstock.lsn import reaches
from penstock.spool import SpoolSettings
from penstock.state import MemoryStore
from penstock.workers.process_tasks import ProcessTasks
from tests.e2e.support import current_position, tables_alone, tables_settings, wait_for
from tests.support.faults import SERVER_SETTINGS
from tests.support.planned_tables import Size
from tests.support.trial import TrialSettings, run_trial, run_trials

SOAK_FAULTS = int(os.environ.get("PENSTOCK_SOAK_FAULTS", "120"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "1000"))
FAULTS_PER_TRIAL = 6
SMALL = Size(tables=3, columns=6, sessions=3, initial_rows=20)
IN_FILE = (
    *("capture stopped", "sessions terminated", "network cut", "spool disk full", "state disk full", "table locked"),
    *("destination loses answers", "destination accepts and the driver dies", "second driver"),
)
IN_SERVER = ("state server killed", "server killed", "slot held", "slot dropped", "slot lost", "taken over")


@pytest.mark.timeout(600)
@pytest.mark.trap(3, 4, 10)
@pytest.mark.parametrize(
    "settings",
    [
        TrialSettings(2, kills=0, size=SMALL, faults=IN_FILE),
        TrialSettings(3, kills=0, size=SMALL, destination="delta", faults=IN_SERVER),
    ],
    ids=["state in a file", "state in a server"],
)
def test_whatever_fails_changes_flow_again_and_nothing_is_lost_or_doubled(settings, make_server, tmp_path):
    report = run_trial(settings, tmp_path, server=make_server(settings=SERVER_SETTINGS))
    assert sorted((report.faults + report.skipped).elements()) == sorted(settings.faults)
    assert {name.partition(" disk")[0] for name in report.skipped} <= {"spool", "state"}, "only disks need root"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_whatever_fails_changes_flow_again_for_many_seeds(tmp_path, record_property):
    """Every fifth trial runs on Spark, every other one writes to Delta, and every other one has its state in a server.
    Each also kills something."""
    trials = [
        TrialSettings(
            seed,
            kills=2,
            master="local[2]" if seed % 5 == 0 else None,
            destination="delta" if seed // 2 % 2 else "parquet",
            faults=FAULTS_PER_TRIAL,
        )
        for seed in range(SOAK_SEED, SOAK_SEED + max(1, SOAK_FAULTS // FAULTS_PER_TRIAL))
    ]
    run_trials(trials, tmp_path, record_property)


@pytest.mark.trap(10)
def test_a_machine_continues_after_another_ran_its_pipeline(database: Any, tmp_path: Path) -> None:
    """Its spool ends before the slot's position, and has nothing that is still needed."""
    database.execute("create table t (id int primary key)")
    settings = tables_settings(database, tmp_path / "a")
    elsewhere = replace(settings, spool=SpoolSettings(tmp_path / "b" / "spool", min_free_bytes=0))
    store, destination = MemoryStore("e2e"), MemoryDestination()
    for number, each in enumerate((settings, elsewhere, settings, elsewhere)):
        with tables_alone(each, store, destination, ProcessTasks()) as running:
            database.execute(f"insert into t values ({number})")
            end = current_position(database)
            wait_for(lambda: reaches(running.status.acknowledged, end), "the changes")  # noqa: B023
            wait_for(lambda: {phase.name for phase in running.phases.values()} == {"ready"}, "the table")
            assert len(running.copies) == (number == 0), "copied once"
        assert sorted(row["id"] for row in destination.rows("public.t")) == list(range(number + 1))
