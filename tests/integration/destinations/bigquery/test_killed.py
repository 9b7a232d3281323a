"""Processes that write into an emulated BigQuery are killed at any append; at the end every change is there once."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.testing.bigquery import EmulatedBigQuery
from penstock.testing.destinations import ScriptedSource, make_context
from penstock.testing.destinations.contract import LINES, ORDERS
from tests.e2e.support import wait_for
from tests.integration.destinations.bigquery.test_contract import BigQueryHarness, HistoryHarness
from tests.integration.destinations.bigquery.test_faults import LINE, change, expect, order
from tests.integration.destinations.bigquery.writer import Job

KILLED_AFTER = (2, 3, 4, 5, 7)
"""The number of appends that BigQuery carries out before the process is killed. The control table counts, too."""
BATCHES = 8


@pytest.mark.trap(28)
@pytest.mark.parametrize("mode", ["mirror", "history"])
def test_killed_processes_lose_and_repeat_nothing(server: EmulatedBigQuery, dataset: str, tmp_path: Path, mode: str):
    kind = HistoryHarness if mode == "history" else BigQueryHarness
    harness = kind(server, dataset, mode=mode, max_staleness="0s")
    source, destination = ScriptedSource(tmp_path / "segments"), harness.open()
    destination.startup(make_context())
    for schema, rows in ((ORDERS, [order(1), order(2)]), (LINES, [LINE] * 2)):
        destination.drop_table_for_copy(schema, "attempt-1")
        destination.write_table_rows(schema, source.copy(schema, rows))
    destination.shutdown()
    batches = tuple(change(source, number) for number in range(BATCHES))
    job = Job(server.project, dataset, server.endpoint, server.storage_endpoint, mode, batches)
    file = tmp_path / "job"
    file.write_bytes(pickle.dumps(job))
    killed = 0
    for count in KILLED_AFTER:
        before = len(server.appended)
        process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("writer.py")), str(file)])
        wait_for(lambda: len(server.appended) >= before + count or process.poll() is not None, "an append")  # noqa: B023
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed == len(KILLED_AFTER)
    job.write()
    expect(harness, BATCHES)
