"""A pipeline in a process of its own, so that it can be killed: `python -m penstock.testing.drive_pipeline FILE`.

The file holds `DriveSettings` as JSON; `penstock.testing.pipeline_process` writes it. Ten times a second a line of JSON
on standard output says where the pipeline is. SIGTERM ends it in good order.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock.copy import CopySettings
from penstock.destinations.registry import create_destination
from penstock.errors import DestinationUnavailable
from penstock.pipeline import Pipeline, PipelineSettings
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings
from penstock.state import open_store
from penstock.testing.destinations.script import LocalTasks
from penstock.testing.faults import FaultyDestination
from penstock.workers import BatchSettings, ErrorHold

_TELL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """What a driven pipeline does; everything here survives JSON."""

    dsn: str
    folder: str
    """Of its spool and state, and of its lake if `destination` does not say otherwise."""
    slot: str
    id: str = "e2e"
    """Also the publication's name."""
    tables: tuple[str, ...] = ("public.*",)
    destination: str = "parquet"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the destination; `path` is `lake` in the folder unless it is here."""
    master: str | None = None
    """Of Spark; None: tasks run in the process."""
    spark: Mapping[str, str] = field(default_factory=dict[str, str])
    copy_bytes_per_second: int | None = None
    """For each range that is read; None: as fast as it goes."""
    interval: float = 0.1
    max_rows: int = 2_000
    error_hold: float = 3600.0
    """Seconds."""
    reject: str | None = None
    """A table that the destination refuses."""
    times: int | None = None
    """How often; None is always."""

    @property
    def lake(self) -> Path:
        """Where the destination writes."""
        return Path(str(self.options.get("path", Path(self.folder) / "lake")))

    @property
    def state_url(self) -> str:
        return f"sqlite:///{Path(self.folder) / 'state.db'}"

    def write(self, path: Path) -> None:
        """For the process to read."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> DriveSettings:
        """What `write` wrote."""
        record = json.loads(path.read_text())
        return cls(**record | {"tables": tuple(record["tables"])})


def main(path: Path) -> None:
    """Run until SIGTERM, or until the pipeline ends by itself, which raises what ended it."""
    settings = DriveSettings.read(path)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    stop = threading.Event()
    with _started_tasks(settings) as (tasks, session):
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        with make_pipeline(settings, tasks, session) as pipeline:
            while not stop.wait(_TELL_SECONDS) and not pipeline.wait(0):
                _tell(pipeline, session)


def make_pipeline(settings: DriveSettings, tasks: Any, session: Any) -> Pipeline:
    """The pipeline that the settings describe, not started yet."""
    folder = Path(settings.folder)
    options = {"path": str(settings.lake), **settings.options}
    destination = FaultyDestination(create_destination(settings.destination, options))
    if settings.reject is not None:
        error = DestinationUnavailable("by order", table=settings.reject)
        destination.reject(settings.reject, error, times=settings.times)
    return Pipeline(
        PipelineSettings(
            id=settings.id,
            source=SourceSettings(settings.dsn),
            publication=settings.id,
            slot=settings.slot,
            spool=SpoolSettings(folder / "spool", min_free_bytes=0),
            tables=settings.tables,
            batches=BatchSettings(interval=settings.interval, max_rows=settings.max_rows),
            error_hold=ErrorHold(time=timedelta(seconds=settings.error_hold)),
            copy=CopySettings(max_bytes_per_second=settings.copy_bytes_per_second),
        ),
        open_store(settings.state_url, settings.id),
        destination,
        tasks,
        session,
    )


@contextmanager
def _started_tasks(settings: DriveSettings) -> Iterator[tuple[Any, Any]]:
    if settings.master is None:
        yield LocalTasks(), None
        return
    # Imported here: a pipeline without Spark starts without it.
    from penstock.spark.session import SparkSettings, build_session, stop_session
    from penstock.spark.tasks import SparkTasks

    session = build_session(SparkSettings(master=settings.master, options=settings.spark))
    try:
        yield SparkTasks(session), session
    finally:
        stop_session(session)


def _tell(pipeline: Pipeline, session: Any) -> None:
    status = pipeline.status
    line = {
        "applied": None if status is None else str(status.applied),
        "batches": 0 if status is None else status.batches,
        "phases": {name: phase.name for name, phase in pipeline.phases.items()},
    }
    if session is not None:
        line["executors"] = session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
