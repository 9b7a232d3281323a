"""Coordinator that a command runs in its own process: started, looked at while they run, and ended in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.cli.configured import running
from penstock.cli.display import Display
from penstock.cli.formats import count_of
from penstock.cli.lag import LagWatch
from penstock.cli.progress import OutputLook, Progress
from penstock.cli.status_file import StatusFile
from penstock.cli.tail import Ending
from penstock.config import Config, DocumentsChoice
from penstock.coordinator import Coordinator, Output
from penstock.documents import Sink
from penstock.documents.output import DocumentsOutput, DocumentsSettings
from penstock.documents.quarantine import open_quarantine
from penstock.documents.relation_map import open_relation_map
from penstock.errors import LeaseHeld, Retry
from penstock.registry import requires_extra
from penstock.source import Role, connect
from penstock.state import Errored, Ready, Store, WorkerType
from penstock.tables import TablesOutput
from penstock.workers.process_tasks import ProcessTasks

POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Running:
    """What runs, and what its tasks run on."""

    outputs: Coordinator
    tasks: Any
    session: Any
    """The Spark session; None without Spark."""


@contextmanager
def started_outputs(config: Config, ending: Ending, display: Display) -> Iterator[Running]:
    """The outputs of a config, with changes flowing; when the block ends, the batches at hand are finished."""
    destinations = {output.name: config.create_destination(output) for output in config.outputs}
    sink = None if config.documents is None else config.documents.create_sink()
    with ExitStack() as stack:
        stores = {output.name: stack.enter_context(config.open_store(output)) for output in config.every_output}
        # Before Spark starts: a person should not wait for a refusal.
        for store in stores.values():
            refuse_second(config, store)
        with ending.interruptible():
            connect(config.pipeline.source, Role.CATALOG).close()
        with started_tasks(config, ending, display) as (tasks, session):
            made: list[Output] = [
                TablesOutput(output.settings, stores[output.name], destinations[output.name], tasks, session)
                for output in config.outputs
            ]
            if config.documents is not None and sink is not None:
                store = stores[config.documents.name]
                made.append(_documents_output(config, config.documents, sink, store, tasks, stack))
            outputs = Coordinator(made)
            try:
                with ending.interruptible():
                    outputs.start()
                display.say(_greeting(config, outputs, [destination.name for destination in destinations.values()]))
                yield Running(outputs, tasks, session)
            finally:
                outputs.stop()
                tasks.close()
                outputs.shutdown()
        for pipeline in outputs:
            position = pipeline.store.get_replication_progress(WorkerType.apply())
            display.say(prefixed(outputs, pipeline, f"stopped at {position or 'the beginning'}"))


def _documents_output(
    config: Config, choice: DocumentsChoice, sink: Sink, store: Store, tasks: Any, stack: ExitStack
) -> DocumentsOutput:
    owner = choice.settings.output_id
    quarantine = open_quarantine(config.state_url, owner)
    stack.callback(quarantine.close)
    return DocumentsOutput(
        choice.settings,
        store,
        choice.specifications,
        sink,
        tasks,
        relations=lambda: open_relation_map(config.state_url, owner),
        documents=DocumentsSettings(
            batch=choice.batch, failure_policies=choice.failure_policies, skip_backfill=choice.skip_backfill
        ),
        output=choice.name,
        quarantine=quarantine,
    )


def _greeting(config: Config, outputs: Coordinator, destinations: Sequence[str]) -> str:
    settings = config.pipeline
    what: list[str] = []
    if destinations:
        tables = max(len(pipeline.phases) for pipeline in outputs)
        what.append(f"{count_of(tables, 'table')}, into {' and '.join(destinations)}")
    if config.documents is not None:
        what.append(f"{_count_indexes(config.documents)}, in {config.documents.sink_type}")
    return (
        f"following publication {settings.publication} on {settings.source.location} by slot {settings.slot}, "
        f"{'; '.join(what)}; Ctrl-C ends it"
    )


def _count_indexes(documents: DocumentsChoice) -> str:
    return "1 index" if len(documents.indexes) == 1 else f"{len(documents.indexes)} indexes"


def prefixed(outputs: Coordinator, pipeline: Output, text: str) -> str:
    """What is said about one of several outputs."""
    return f"{pipeline.output}: {text}" if len(outputs) > 1 else text


def is_settled(pipeline: Output) -> bool:
    """Nothing is copied any more, nothing is tried again by itself, and no command waits that could change that."""
    if isinstance(pipeline, DocumentsOutput) and not pipeline.settled:
        return False
    return all(command.answered for command in pipeline.store.get_commands()) and all(
        isinstance(phase, Ready) or (isinstance(phase, Errored) and phase.retry_policy.retry is Retry.OPERATOR)
        for phase in pipeline.phases.values()
    )


class LookedAt:
    """Shows how the outputs are, each time that `look` is called, and leaves it in a file for other commands."""

    def __init__(self, config: Config, outputs: Coordinator, display: Display) -> None:
        self._display = display
        self._lag = LagWatch(config.pipeline.source)
        self._watches = [
            Progress(
                pipeline,
                lambda status: self._lag.behind(status.applied, status.last_commit_time),
                prefix=prefixed(outputs, pipeline, ""),
            )
            for pipeline in outputs
        ]
        self._status_file = StatusFile(config.pipeline.spool.path)

    def __enter__(self) -> LookedAt:
        self._lag.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lag.__exit__(*exception)

    def look(self) -> None:
        """Called about twice a second."""
        looks: list[OutputLook] = []
        for watch in self._watches:
            notices, look = watch.look()
            for notice in notices:
                self._display.tell(notice)
            looks += [look] if look is not None else []
        self._display.show(looks)
        self._status_file.write(looks)


def refuse_second(config: Config, store: Store) -> None:
    """A pipeline runs once."""
    driver = running(store)
    if driver is not None:
        raise LeaseHeld(
            f"pipeline {config.pipeline.id} runs already: it is driven by {driver}",
            host=driver.host,
            pid=driver.pid,
            since=driver.since,
            expires=driver.expires,
        )


@contextmanager
def started_tasks(config: Config, ending: Ending, display: Display) -> Iterator[tuple[Any, Any]]:
    """Where the data work is done, and the Spark session if there is one."""
    choice = config.spark
    if choice.master is None:
        yield ProcessTasks(copy_tasks=config.copy_tasks), None
        return
    # Imported here: commands without Spark start without it.
    with requires_extra("spark", f'spark.master = "{choice.master}"'):
        from penstock.spark.session import SparkSettings, build_session, stop_session
        from penstock.spark.tasks import SparkTasks

    settings = SparkSettings(
        master=choice.master,
        app_name=f"penstock {config.pipeline.id}",
        memory=choice.memory,
        options=choice.options,
    )
    display.say(f"starting Spark on {choice.master}")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with ending.interruptible():
        session = build_session(settings)
    try:
        # PySpark has put its own in the place of ours: it cancels all jobs on Ctrl-C, also the batch at hand.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield SparkTasks(session, copy_tasks=config.copy_tasks), session
    finally:
        stop_session(session)
