"""A pipeline whose tasks run on a Spark cluster, in a process of its own: a process has one Spark context.

`python -m tests.e2e.drive_spark_pipeline SETTINGS.json` prints a line of JSON about where it is, ten times a second,
and ends after SIGTERM.
"""

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
from penstock.spark.session import SparkSettings, build_session
from penstock.spark.tasks import SparkTasks
from penstock.spool import SpoolSettings
from penstock.state import open_store
from penstock.workers import BatchSettings


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["folder"])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    session = build_session(SparkSettings(master=settings["master"], options=settings["spark"]))
    tasks = SparkTasks(session)
    pipeline = Pipeline(
        PipelineSettings(
            id="spark",
            source=SourceSettings(settings["dsn"]),
            publication="spark",
            slot=settings["slot"],
            spool=SpoolSettings(folder / "spool", min_free_bytes=0),
            tables=("public.*",),
            batches=BatchSettings(interval=0.2),
        ),
        open_store(f"sqlite:///{folder / 'state.db'}", "spark"),
        ParquetDestination(folder / "lake"),
        tasks,
        session,
    )
    with pipeline:
        while not stop.wait(0.1) and not pipeline.wait(0):
            status = pipeline.status
            executors = session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
            line = {
                "applied": None if status is None else str(status.applied),
                "batches": 0 if status is None else status.batches,
                "phases": {name: phase.name for name, phase in pipeline.phases.items()},
                "executors": executors,
            }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    session.stop()


if __name__ == "__main__":
    main()
