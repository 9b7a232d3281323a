"""Running a pipeline in this process, from its config: start it, watch it, and stop it cleanly.

    with started(config) as running:
        while not running.is_ready():
            running.look()
            ...

Everything that knows how a config becomes a `Coordinator` is in this module.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.capture import CaptureStatus
from penstock.changes.segment_files import Origin
from penstock.config import Config, DocumentsChoice
from penstock.config.units import count_of
from penstock.coordinator import Coordinator
from penstock.documents import Sink
from penstock.documents.output import DocumentsOutput, DocumentsSettings, RunningDocuments
from penstock.documents.relation_map import open_relation_map
from penstock.errors import PenstockError, Retry, with_hint
from penstock.headroom import Headroom
from penstock.lsn import Lsn, reaches
from penstock.observe import scrub
from penstock.observe.traces import Traces, require_traces, tracing
from penstock.operations.lag import Behind, LagWatch
from penstock.operations.progress import CaptureLook, Notice, OutputLook, Progress, StatusFile
from penstock.operations.readiness import require_ready
from penstock.operations.signals import Ending
from penstock.operations.stores import require_stopped
from penstock.output import Output, RunningOutput
from penstock.registry import requires_extra
from penstock.source.lineage import current_position
from penstock.state import Errored, Ready, Store
from penstock.state.quarantine import Quarantine
from penstock.tables import TablesOutput
from penstock.workers.process_tasks import ProcessTasks

_REACHED_BY = 64
"""More than most clusters have cores. They share one task per core."""
_EVENTS = 500
POLL_SECONDS = 0.5
"""How often the state of a running pipeline is checked."""

Say = Callable[[str], None]


def say_nothing(text: str) -> None:
    """For callers that show no progress."""


class Running:
    """A pipeline that runs in this process."""

    def __init__(
        self,
        config: Config,
        coordinator: Coordinator,
        tasks: Any,
        spark: Any,
        lag: LagWatch,
        traces: Traces | None = None,
    ) -> None:
        self.config = config
        self._traces = traces
        self.tasks = tasks
        self._spark = spark
        self._coordinator = coordinator
        self._lag = lag
        self._watches = {output: self._watch(output) for output in coordinator}
        self._status_file = StatusFile(config.pipeline.spool.path)
        self.last: tuple[float, tuple[OutputLook, ...]] = (time.time(), ())
        """When `look` last ran, as Unix time, and what it saw."""
        self.events: deque[tuple[float, Notice]] = deque(maxlen=_EVENTS)
        """The last events, with their times."""

    def _watch(self, output: RunningOutput) -> Progress:
        if self._traces is not None:
            self._traces.follow(output.output, output.tally.batches)
        return Progress(
            output,
            lambda status: self._lag.behind(status.applied, status.last_commit_time),
            prefix=self.named(output, ""),
            lost_since=lambda: self._lag.lost_since,
            headroom=lambda: self._coordinator.headroom,
            acknowledged=lambda status: self._lag.behind(status.acknowledged, status.last_commit_time),
            capture=self._look_at_capture,
        )

    @property
    def session(self) -> Any:
        """The Spark session; None without Spark."""
        return None if self._spark is None else self._spark.session

    @property
    def outputs(self) -> list[RunningOutput]:
        """All outputs, in the order of the config."""
        return list(self._coordinator)

    @property
    def stores(self) -> dict[str, Store]:
        """The open stores, by output."""
        return {output.output: output.store for output in self._coordinator}

    @property
    def capture(self) -> CaptureStatus | None:
        """The last report of capture."""
        return self._coordinator.capture

    @property
    def received(self) -> Behind | None:
        """How far capture is behind the server; None if that is unknown."""
        captured = None if self.capture is None else self.capture.captured
        return None if captured is None else self._lag.behind(captured, 0)

    def _look_at_capture(self) -> CaptureLook | None:
        capture = self.capture
        if capture is None:
            return None
        lag = self.received if self._lag.lost_since is None else None
        if lag is None:
            return CaptureLook(capture.reading.value)
        return CaptureLook(capture.reading.value, lag.bytes, round(lag.seconds, 1))

    @property
    def headroom(self) -> Headroom:
        """What the spool and the server's WAL have left."""
        return self._coordinator.headroom

    @property
    def source_age(self) -> float:
        """Seconds since the source last answered."""
        return self._lag.age

    def wait(self, timeout: float | None) -> bool:
        """Wait until all outputs have ended, and raise the error of one that failed; False if they have not in time."""
        return self._coordinator.wait(timeout)

    def check(self, output: str | None = None) -> None:
        """Raise the error of an output that has failed, also while others keep running; of this one, if it is named."""
        if output is None:
            self._coordinator.check()
        elif (error := self._coordinator.errors.get(output)) is not None:
            raise error

    def look(self) -> tuple[list[Notice], list[OutputLook]]:
        """Return new events and the status of each output, and write the status file. Called about twice a second."""
        notices: list[Notice] = []
        looks: list[OutputLook] = []
        # An output that could not start is another object when it has started.
        self._watches = {each: self._watches.get(each) or self._watch(each) for each in self._coordinator}
        for watch in self._watches.values():
            new, look = watch.look()
            notices += new
            looks += [look] if look is not None else []
        self._status_file.write(looks)
        now = time.time()
        self.last = (now, tuple(looks))
        self.events.extend((now if each.at is None else each.at, each) for each in notices)
        return notices, looks

    def is_ready(self) -> bool:
        """True if nothing is being copied or filled, no retry is scheduled, and no command is waiting.

        An output that has failed is not waited for.
        """
        return all(is_ready(output) for output in self._coordinator if output.error is None)

    def has_reached(self, target: Lsn) -> bool:
        """True if everything that was committed before `target` is durable at every output that has not failed."""
        return all(has_reached(output, target) for output in self._coordinator if output.error is None)

    def current_position(self) -> Lsn:
        """The server's position."""
        return current_position(self.config.pipeline.source)

    @property
    def errored(self) -> dict[str, Errored]:
        """The tables that stopped, by name."""
        return {
            self.named(output, name): phase
            for output in self._coordinator
            for name, phase in output.phases.items()
            if isinstance(phase, Errored)
        }

    @property
    def stopped_indexes(self) -> dict[str, PenstockError]:
        """The indexes that no longer fit the database, and why."""
        documents = [output for output in self._coordinator if isinstance(output, RunningDocuments)]
        return {name: error for output in documents for name, error in output.stopped.items()}

    def named(self, output: RunningOutput, text: str) -> str:
        """A text about an output, with its name in front if there are several."""
        return f"{output.output}: {text}" if len(self._coordinator) > 1 else text


def is_ready(output: RunningOutput) -> bool:
    """True if nothing is being copied or filled, no retry is scheduled, and no command is waiting."""
    if isinstance(output, RunningDocuments) and not output.is_complete:
        return False
    return all(command.answered for command in output.store.get_commands()) and all(
        isinstance(phase, Ready) or (isinstance(phase, Errored) and phase.retry_policy.retry is Retry.OPERATOR)
        for phase in output.phases.values()
    )


def has_reached(output: RunningOutput, target: Lsn) -> bool:
    """True if everything that was committed before `target` is durable."""
    status = output.status
    # A table that failed holds back what is acknowledged.
    held = any(isinstance(phase, Errored) for phase in output.phases.values())
    return reaches(status.applied if held else status.acknowledged, target)


@contextmanager
def started(config: Config, ending: Ending | None = None, say: Say = say_nothing) -> Iterator[Running]:
    """Start the pipeline of a config; leaving the block finishes the current batches and stops it.

    `say` receives sentences for people.
    """
    ending = ending or Ending()
    status_file = StatusFile(config.pipeline.spool.path)
    try:
        with _started(config, ending, say) as running:
            yield running
    except PenstockError as error:
        status_file.end(scrub(f"error: {with_hint(error)}", config.secrets))
        raise
    except Exception as error:
        status_file.end(f"unexpected {type(error).__name__}")
        raise
    else:
        status_file.end("a signal stopped it" if ending.stop.is_set() else "it had finished")


@contextmanager
def _started(config: Config, ending: Ending, say: Say) -> Iterator[Running]:
    require_traces(config.traces)
    destinations = {output.name: config.create_destination(output) for output in config.outputs}
    sink = None if config.documents is None else config.documents.create_sink()
    with ExitStack() as stack:
        stores = {output.name: stack.enter_context(config.open_store(output)) for output in config.every_output}
        # Before Spark starts, so that a refusal is immediate.
        for store in stores.values():
            require_stopped(config, store)
        with ending.interruptible():
            require_ready(config)
        with (
            started_tasks(config, say) as (tasks, spark),
            ExitStack() as serving,
            tracing(config.traces, config.pipeline.id) as traces,
        ):
            outputs: list[Output] = [
                TablesOutput(
                    *(output.settings, stores[output.name], destinations[output.name], tasks),
                    open_session=lambda: None if spark is None else spark.session,
                )
                for output in config.outputs
            ]
            if config.documents is not None and sink is not None:
                store = stores[config.documents.name]
                outputs.append(_documents_output(config, config.documents, sink, store, tasks))
            coordinator = Coordinator(
                outputs, await_tasks=lambda: None if spark is None else _await_tasks(config, tasks, spark, serving, say)
            )
            try:
                with ending.interruptible():
                    coordinator.start()
                with LagWatch(config.pipeline.source) as lag:
                    running = Running(config, coordinator, tasks, spark, lag, traces)
                    say(_greeting(running, [destination.name for destination in destinations.values()]))
                    yield running
            finally:
                coordinator.stop()
                tasks.close()
                coordinator.shutdown()
        for output in running.outputs:
            position = output.store.get_replication_progress()
            say(running.named(output, f"stopped at {position or 'the beginning'}"))


@contextmanager
def started_tasks(config: Config, say: Say = say_nothing) -> Iterator[tuple[Any, Any]]:
    """What runs the tasks, and the `StartingSpark` if there is one."""
    choice = config.spark
    if not choice.is_used:
        yield ProcessTasks(copy_tasks=config.copy_tasks), None
        return
    # Imported here: commands without Spark start without it.
    named = "Spark" if choice.master is None else f'spark.master = "{choice.master}"'
    with requires_extra("spark", named):
        importlib.import_module("pyspark")  # first, so that an error names this package and not one of its own
        from penstock.spark.session import SparkSettings, StartingSpark
        from penstock.spark.tasks import SparkTasks

    settings = SparkSettings(
        master=choice.master,
        app_name=f"penstock {config.pipeline.id}",
        memory=choice.memory,
        options=choice.options,
    )
    say("starting Spark" if choice.master is None else f"starting Spark on {choice.master}")
    # In a thread, PySpark does not install its handler for Ctrl-C, which would cancel the current batch.
    spark = StartingSpark(settings)
    try:
        yield SparkTasks(spark, copy_tasks=config.copy_tasks), spark
    finally:
        spark.stop()


def _await_tasks(config: Config, tasks: Any, spark: Any, serving: ExitStack, say: Say) -> None:
    """Wait until tasks run. Let those of a cluster read the spool of this machine; raise if they do not reach it."""
    from penstock.spark.session import serving_segments

    tasks.wait_for_executors(say)
    spool, port = config.pipeline.spool.path, config.spark.segment_port
    server = serving.enter_context(serving_segments(spark.sparkContext, spool, port))
    if server is not None:
        what = "check that executors reach the driver"
        tasks.run([server.origin] * _REACHED_BY, Origin.reach, description=what)


def _documents_output(config: Config, choice: DocumentsChoice, sink: Sink, store: Store, tasks: Any) -> DocumentsOutput:
    return DocumentsOutput(
        choice.settings,
        store,
        choice.specifications,
        sink,
        tasks,
        relations=lambda: open_relation_map(config.state_url, choice.settings.output_id),
        documents=DocumentsSettings(
            batch=choice.batch, failure_policies=choice.failure_policies, skip_backfill=choice.skip_backfill
        ),
        output=choice.name,
        quarantine=Quarantine(store.database),
    )


def _greeting(running: Running, destinations: list[str]) -> str:
    settings, documents = running.config.pipeline, running.config.documents
    what: list[str] = []
    if destinations:
        tables = max(len(output.phases) for output in running.outputs)
        what.append(f"{count_of(tables, 'table')}, into {', '.join(destinations)}")
    if documents is not None:
        indexes = "1 index" if len(documents.indexes) == 1 else f"{len(documents.indexes)} indexes"
        what.append(f"{indexes}, into {documents.sink_type}")
    return (
        f"following publication {settings.publication} on {settings.source.location} with slot {settings.slot}, "
        f"{'; '.join(what)}; press Ctrl-C to stop"
    )
