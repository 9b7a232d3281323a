"""A pipeline in a process of its own, so that it can be killed: `python -m tests.e2e.drive_pipeline SETTINGS.json`."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from pathlib import Path

from penstock.destinations.parquet import ParquetDestination
from penstock.pipeline import Pipeline, PipelineSettings
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings
from penstock.state import open_store
from penstock.testing.destinations.script import LocalTasks
from penstock.workers import BatchSettings


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    pipeline = Pipeline(
        PipelineSettings(
            id="e2e",
            source=SourceSettings(settings["dsn"]),
            publication="e2e",
            slot=settings["slot"],
            spool=SpoolSettings(folder / "spool", min_free_bytes=0),
            tables=("public.*",),
            batches=BatchSettings(interval=0.1, max_rows=2_000),
        ),
        open_store(f"sqlite:///{folder / 'state.db'}", "e2e"),
        ParquetDestination(folder / "lake"),
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
