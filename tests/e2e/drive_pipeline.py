"""A pipeline in a process of its own, so that it can be killed: `python -m tests.e2e.drive_pipeline SETTINGS.json`.

Besides what names source, slot and folder the settings may have `reject` (a table that the destination refuses) with
`times`, and `error_hold` (seconds).
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

from penstock.destinations.parquet import ParquetDestination
from penstock.errors import DestinationUnavailable
from penstock.pipeline import Pipeline, PipelineSettings
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings
from penstock.state import open_store
from penstock.testing.destinations.script import LocalTasks
from penstock.testing.faults import FaultyDestination
from penstock.workers import BatchSettings, ErrorHold


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    destination = FaultyDestination(ParquetDestination(folder / "lake"))
    if table := settings.get("reject"):
        destination.reject(table, DestinationUnavailable("by order", table=table), times=settings.get("times"))
    pipeline = Pipeline(
        PipelineSettings(
            id="e2e",
            source=SourceSettings(settings["dsn"]),
            publication="e2e",
            slot=settings["slot"],
            spool=SpoolSettings(folder / "spool", min_free_bytes=0),
            tables=("public.*",),
            batches=BatchSettings(interval=0.1, max_rows=2_000),
            error_hold=ErrorHold(time=timedelta(seconds=settings.get("error_hold", 3600))),
        ),
        open_store(f"sqlite:///{folder / 'state.db'}", "e2e"),
        destination,
        LocalTasks(),
    )
    with pipeline:
        while not stop.wait(0.1):
            status = pipeline.status
            phases = {name: phase.name for name, phase in pipeline.phases.items()}
            applied = None if status is None else str(status.applied)
            sys.stdout.write(json.dumps({"applied": applied, "phases": phases}) + "\n")
            sys.stdout.flush()
            if pipeline.wait(0):
                break


if __name__ == "__main__":
    main()
