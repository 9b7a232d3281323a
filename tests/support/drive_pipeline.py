"""A pipeline in a process of its own, so that it can be killed: `python -m tests.support.drive_pipeline FILE`.

The file holds `DriveSettings` as JSON; `tests.support.pipeline_process` writes it. Ten times a second a line of JSON
on standard output reports the pipeline's progress. Lines of standard input order faults of the destination (`_obey`).
SIGTERM stops it cleanly.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock import coordinator as coordination
from penstock import failpoints
from penstock.copy import CopySettings
from penstock.copy.plan import RANGE_BYTES
from penstock.destinations.delta import copy as delta_copy
from penstock.destinations.delta import planner
from penstock.destinations.delta import split as delta_split
from penstock.destinations.delta import tasks as delta_tasks
from penstock.destinations.registry import create_destination
from penstock.documents.base import BatchPolicy, FailurePolicies, FailurePolicy, Sink
from penstock.documents.output import DocumentsOutput, DocumentsSettings, RunningDocuments
from penstock.documents.relation_map import open_relation_map
from penstock.errors import DestinationUnavailable, TableBusy
from penstock.output import RunningOutput
from penstock.sinks.registry import create_sink
from penstock.source.connections import SourceSettings
from penstock.specification import parse_specification
from penstock.spool import SpoolSettings
from penstock.state import Store, open_store
from penstock.state.lease import DEFAULT_TTL
from penstock.state.quarantine import open_quarantine
from penstock.stream import OnLostSlot, StreamSettings
from penstock.tables import RunningTables, TablesOutput, TablesSettings
from penstock.testing.destinations.script import LocalTasks
from penstock.testing.faults import FaultyDestination
from penstock.workers import BatchSettings, ErrorHold, table_sync
from tests.support.counting import CountingCoordinator
from tests.support.document_sink import FileSink

_TELL_SECONDS = 0.1
_REFRESH_SECONDS = 0.5
"""How often the publication and the catalog are checked: trials wait for it again and again."""


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """The settings of a driven pipeline; all of them survive JSON."""

    dsn: str
    folder: str
    """The folder of spool and state, and of the lake unless `options` name another path."""
    slot: str
    id: str = "e2e"
    """Also the name of the publication."""
    tables: tuple[str, ...] = ("public.*",)
    unidentified: tuple[str, ...] = ()
    """Tables that are published although they have no replica identity."""
    destination: str = "parquet"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of the destination; `path` defaults to `lake` in the folder."""
    master: str | None = None
    """Spark's master; None runs tasks in this process."""
    spark: Mapping[str, str] = field(default_factory=dict[str, str])
    copy_bytes_per_second: int | None = None
    """The limit for each range that is read; None for no limit."""
    range_bytes: int | None = None
    """The size of ranges, and of files of a copy into Delta; then copies of small tables are resumed, too."""
    resume_max_bytes: int = 4 << 30
    interval: float = 0.1
    max_rows: int = 2_000
    error_hold: float = 3600.0
    """In seconds."""
    reject: str | None = None
    """A table that the destination rejects."""
    times: int | None = None
    """How many times it is rejected; None for always."""
    rewrite_bytes: int | None = None
    """Delta tables that are larger are rewritten by themselves; None for the usual limit."""
    split_rows: int | None = None
    """Parts of a batch with more changes of a Delta table are split over tasks; None for the usual limit."""
    indexes: Mapping[str, str] = field(default_factory=dict[str, str])
    """The specifications of search indexes, by name; with any of them, no tables are replicated."""
    sink: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`type` and options of an OpenSearch sink; empty for a `FileSink` in the folder."""
    documents: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of `DocumentsSettings`; `on_failure` is the policy of all indexes."""
    state: str | None = None
    """The URL of the state; None for a file in the folder."""
    on_lost_slot: str = OnLostSlot.ERROR.value
    lease_seconds: float = DEFAULT_TTL

    @property
    def lake(self) -> Path:
        """Where the destination writes."""
        return Path(str(self.options.get("path", Path(self.folder) / "lake")))

    @property
    def splits(self) -> Path:
        """A file with a line for each part that was split, if `split_rows` is set."""
        return Path(self.folder) / "splits"

    @property
    def sink_file(self) -> Path:
        """Where documents go unless a sink is named."""
        return Path(self.folder) / "documents.db"

    @property
    def state_url(self) -> str:
        return self.state or f"sqlite:///{Path(self.folder) / 'state.db'}"

    def write(self, path: Path) -> None:
        """Write them for the process to read."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> DriveSettings:
        """Read what `write` wrote."""
        record = json.loads(path.read_text())
        return cls(**record | {"tables": tuple(record["tables"])})


def main(path: Path) -> None:
    """Run until SIGTERM, or until the pipeline fails; then raise its error."""
    settings = DriveSettings.read(path)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    stop = threading.Event()
    coordination.REFRESH_SECONDS = _REFRESH_SECONDS
    with _started_tasks(settings) as (tasks, session):
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        output = make_documents(settings, tasks) if settings.indexes else make_pipeline(settings, tasks, session)
        if isinstance(output, TablesOutput) and isinstance(output.destination, FaultyDestination):
            threading.Thread(target=_obey, args=(output.destination,), daemon=True).start()
        with CountingCoordinator([output]) as coordinator:
            (running,) = coordinator
            while not stop.wait(_TELL_SECONDS) and not coordinator.wait(0):
                _tell(running, session, coordinator.looks)


def make_pipeline(settings: DriveSettings, tasks: Any, session: Any) -> TablesOutput:
    """Return the pipeline that the settings describe, not started."""
    folder = Path(settings.folder)
    options = {"path": str(settings.lake), **settings.options}
    if settings.destination == "spark":
        options["checkpoint"] = str(folder / "checkpoint")
    if settings.destination in ("postgres", "clickhouse", "kafka") or options.get("format") == "jdbc":
        del options["path"]
    if settings.rewrite_bytes is not None:
        planner.REWRITE_BYTES = settings.rewrite_bytes
    if settings.split_rows is not None:
        _split_small_parts(settings.split_rows, settings.splits)
    if settings.range_bytes is not None:
        table_sync.SMALL_TABLE_BYTES, delta_copy.FILE_BYTES = -1, settings.range_bytes
    destination = FaultyDestination(create_destination(settings.destination, options))
    if settings.reject is not None:
        error = TableBusy("by order", table=settings.reject)
        destination.reject(settings.reject, error, times=settings.times)
    return TablesOutput(
        TablesSettings(
            id=settings.id,
            source=SourceSettings(settings.dsn),
            publication=settings.id,
            slot=settings.slot,
            spool=SpoolSettings(folder / "spool", min_free_bytes=0),
            tables=settings.tables,
            unidentified=frozenset(settings.unidentified),
            batches=BatchSettings(interval=settings.interval, max_rows=settings.max_rows),
            error_hold=ErrorHold(time=timedelta(seconds=settings.error_hold)),
            copy=CopySettings(
                range_bytes=settings.range_bytes or RANGE_BYTES,
                max_bytes_per_second=settings.copy_bytes_per_second,
                resume_max_bytes=settings.resume_max_bytes,
            ),
            on_lost_slot=OnLostSlot(settings.on_lost_slot),
        ),
        _open_store(settings, settings.id),
        destination,
        tasks,
        lambda: session,
    )


def _split_small_parts(rows: int, log: Path) -> None:
    delta_tasks.SLICE_ROWS, delta_split.GROUP_BYTES, delta_split.PATIENCE = rows, 1, 2
    delta_split.DRIVER_BYTES = 1000
    split = delta_split.split

    def split_and_count(work: delta_tasks.TableWork, tasks: int) -> delta_split.Split | None:
        found = split(work, tasks)
        if found is not None:
            with log.open("a") as file:
                file.write(f"{work.table}\n")
        return found

    delta_split.split = split_and_count


def make_documents(settings: DriveSettings, tasks: Any) -> DocumentsOutput:
    """Return the documents output that the settings describe, not started."""
    folder = Path(settings.folder)
    owner = f"{settings.id}:documents"
    options = dict(settings.documents)
    batch = BatchPolicy(options.pop("max_changes", 200), options.pop("max_delay", 0.02))
    policies = FailurePolicies(FailurePolicy(options.pop("on_failure", FailurePolicy.STOP)))
    return DocumentsOutput(
        StreamSettings(
            id=settings.id,
            source=SourceSettings(settings.dsn),
            publication=settings.id,
            slot=settings.slot,
            spool=SpoolSettings(folder / "spool", min_free_bytes=0),
            tables=settings.tables,
            on_lost_slot=OnLostSlot(settings.on_lost_slot),
        ),
        _open_store(settings, owner),
        [parse_specification(text, name) for name, text in settings.indexes.items()],
        _make_sink(settings),
        tasks,
        relations=lambda: open_relation_map(settings.state_url, owner),
        documents=DocumentsSettings(batch=batch, failure_policies=policies, **options),
        quarantine=open_quarantine(settings.state_url, owner),
    )


def _make_sink(settings: DriveSettings) -> Sink:
    options = dict(settings.sink)
    return create_sink(options.pop("type"), options) if options else FileSink(settings.sink_file)


def _open_store(settings: DriveSettings, owner: str) -> Store:
    store = open_store(settings.state_url, owner)
    acquire = store.acquire_lease
    store.acquire_lease = lambda **options: acquire(ttl=settings.lease_seconds, **options)
    return store


def _obey(destination: FaultyDestination) -> None:
    """Carry out the orders of `PipelineProcess.order` until standard input ends."""
    away = DestinationUnavailable("by order")
    for line in sys.stdin:
        order, argument = json.loads(line)
        match order:
            case "fail_before":
                destination.fail_before("write_events", away, times=argument)
            case "fail_after":
                destination.fail_after("write_events", away, times=argument)
            case "slow":
                destination.slow("write_events", argument)
            case "reject":
                written = [call.tables for call in destination.calls if call.method == "write_events"]
                for table in written[-1] if written else ():
                    destination.reject(table, TableBusy("by order", table=table), times=argument)
            case "arm":
                failpoints.arm(argument)
            case _:
                raise ValueError(f"unknown order {order!r}")


@contextmanager
def _started_tasks(settings: DriveSettings) -> Iterator[tuple[Any, Any]]:
    if settings.master is None:
        yield LocalTasks(parallel=1 if settings.split_rows is None else 3), None
        return
    # Imported here, so that a pipeline without Spark does not load it.
    from penstock.spark.session import SparkSettings, build_session, serving_segments, stop_spark
    from penstock.spark.tasks import SparkTasks

    session = build_session(SparkSettings(master=settings.master, options=settings.spark))
    try:
        with serving_segments(session.sparkContext, Path(settings.folder) / "spool"):
            yield SparkTasks(session), session
    finally:
        stop_spark(session)


def _tell(pipeline: RunningOutput, session: Any, looks: int) -> None:
    phases = {name: phase.name for name, phase in pipeline.phases.items()}
    if isinstance(pipeline, RunningTables):
        phases |= {name: "pending" for name in pipeline.pending if phases.get(name) == "ready"}
    if isinstance(pipeline, RunningDocuments):
        phases = {name: build.status.value for name, build in pipeline.indexes.items()}
        if pipeline.unfinished_work:
            phases = dict.fromkeys(phases, "busy")
    line = {
        "applied": str(pipeline.status.applied),
        "durable": str(pipeline.status.acknowledged),
        "batches": pipeline.status.batches,
        "phases": phases,
        "looks": looks,
    }
    if session is not None:
        # The pipeline notices by itself that its JVM is gone.
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError):
            line["executors"] = session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
