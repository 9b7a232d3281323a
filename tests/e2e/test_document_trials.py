"""Trials of documents by seed: DDL, kills, faults and nonsense; a few in each run, many in `make soak`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.testing.opensearch import ExistingOpenSearch
from tests.support.document_trial import DocumentTrialSettings, run_document_trial, run_document_trials

SOAK_TRIALS = int(os.environ.get("PENSTOCK_SOAK_TRIALS", "200"))
SOAK_SEED = int(os.environ.get("PENSTOCK_SOAK_SEED", "1000"))


@pytest.mark.timeout(600)
@pytest.mark.trap(42, 43, 44, 45)
def test_whatever_happens_every_document_equals_the_one_of_the_database(tmp_path: Path) -> None:
    events = ("kill driver", "poison", "rebuild", "alias moved")
    report = run_document_trial(DocumentTrialSettings(5, events), tmp_path)
    assert report.kills["driver"] == 1
    assert report.documents > 0
    assert report.ddl


@pytest.mark.timeout(600)
@pytest.mark.trap(46)
def test_whatever_a_search_server_answers_every_document_equals_the_one_of_the_database(
    opensearch: ExistingOpenSearch, tmp_path: Path
) -> None:
    events = ("nonsense {}", "nonsense short list", "nonsense cut body", "second pipeline")
    report = run_document_trial(DocumentTrialSettings(4, events), tmp_path, opensearch)
    assert report.documents > 0
    # An answer that nobody asked for at that moment does not count.
    assert any(event.startswith("nonsense") for event in report.events)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_whatever_happens_every_document_equals_the_one_of_the_database_for_many_seeds(
    opensearch: ExistingOpenSearch, tmp_path: Path, record_property: Any
) -> None:
    """Every other trial writes to OpenSearch, every fifth has a failover, and every tenth runs on Spark."""
    trials = [DocumentTrialSettings(seed) for seed in range(SOAK_SEED, SOAK_SEED + SOAK_TRIALS)]
    run_document_trials(trials, tmp_path, opensearch, record_property)
