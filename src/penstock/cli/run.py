"""`penstock run`: copy the tables of a source, then follow every change, until it is told to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured, running
from penstock.cli.display import Display, opened_display
from penstock.cli.lag import LagWatch
from penstock.cli.plan import plan_lines
from penstock.cli.progress import OutputLook, Progress
from penstock.cli.status_file import StatusFile
from penstock.cli.tail import Ending
from penstock.config import Config
from penstock.errors import LeaseHeld, PenstockError, Retry
from penstock.lsn import Lsn, reaches
from penstock.observe import LogFormat
from penstock.pipeline import Outputs, Pipeline
from penstock.source import Role, connect
from penstock.source.wal import current_position
from penstock.state import Errored, Ready, Store, WorkerType
from penstock.workers.process_tasks import ProcessTasks

_POLL_SECONDS = 0.5
_STATUS_SECONDS = 10.0


def run(
    context: typer.Context,
    config_path: ConfigPath = DEFAULT_PATH,
    once: Annotated[
        bool, typer.Option("--once", help="Copy, catch up with what is committed by then, and end.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be created and copied, and change nothing.")
    ] = False,
    status_seconds: Annotated[
        float,
        typer.Option(
            "--status-every",
            min=0,
            help="Where standard error is no terminal: lines of status so often; 0 for none.",
            metavar="SECONDS",
        ),
    ] = _STATUS_SECONDS,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")] = False,
) -> None:
    """Copy the tables of a source to a destination, then follow every change.

    Goes on where it was when it is started again. SIGINT and SIGTERM end it in good order, with status 0: the batch at
    hand is finished, and a copy that is not whole begins anew next time. A second run of the same pipeline is refused.
    """
    with configured(config_path) as config:
        if plan:
            for line in plan_lines(config):
                typer.echo(line)
            return
        as_json = context.parent is not None and context.parent.params.get("log_format") is LogFormat.JSON
        with (
            Ending() as ending,
            opened_display(quiet=quiet, as_json=as_json, seconds=status_seconds) as display,
        ):
            _run(config, ending, display, once=once)


def _run(config: Config, ending: Ending, display: Display, *, once: bool) -> None:
    destinations = {output.name: config.create_destination(output) for output in config.outputs}
    with ExitStack() as stack:
        stores = {output.name: stack.enter_context(config.open_store(output)) for output in config.outputs}
        # Before Spark starts: a person should not wait for a refusal.
        for store in stores.values():
            _refuse_second(config, store)
        with ending.interruptible():
            connect(config.pipeline.source, Role.CATALOG).close()
        with _started_tasks(config, ending, display) as (tasks, session):
            outputs = Outputs(
                [
                    Pipeline(output.settings, stores[output.name], destinations[output.name], tasks, session)
                    for output in config.outputs
                ]
            )
            try:
                with ending.interruptible():
                    outputs.start()
                display.say(_greeting(config, outputs, [destination.name for destination in destinations.values()]))
                caught_up = _watch(config, outputs, ending, display, once=once)
                display.say("caught up, stopping" if caught_up else "stopping: the batch at hand is finished first")
                failed = [
                    _prefixed(outputs, pipeline, name)
                    for pipeline in outputs
                    for name, phase in pipeline.phases.items()
                    if isinstance(phase, Errored)
                ]
            finally:
                outputs.stop()
                tasks.close()
                outputs.shutdown()
        for pipeline in outputs:
            position = pipeline.store.get_replication_progress(WorkerType.apply())
            display.say(_prefixed(outputs, pipeline, f"stopped at {position or 'the beginning'}"))
    if once and failed:
        raise PenstockError(
            f"{len(failed)} table{'s' * (len(failed) > 1)} stopped: {', '.join(failed)}",
            hint="`penstock tables` shows why, and what can be done.",
        )


def _greeting(config: Config, outputs: Outputs, into: Sequence[str]) -> str:
    settings = config.pipeline
    tables = max(len(pipeline.phases) for pipeline in outputs)
    return (
        f"following publication {settings.publication} on {settings.source.location} by slot {settings.slot}, "
        f"{tables} table{'s' * (tables != 1)}, into {' and '.join(into)}; Ctrl-C ends it"
    )


def _prefixed(outputs: Outputs, pipeline: Pipeline, text: str) -> str:
    """What is said about one of several outputs."""
    return f"{pipeline.output}: {text}" if len(outputs) > 1 else text


def _watch(config: Config, outputs: Outputs, ending: Ending, display: Display, *, once: bool) -> bool:
    """Look until an output ends, or all should; whether they have caught up with where `once` ends."""
    source = config.pipeline.source
    with LagWatch(source) as lag:
        watches = [_progress(outputs, pipeline, lag) for pipeline in outputs]
        status_file = StatusFile(config.pipeline.spool.path)
        target: Lsn | None = None
        while not ending.stop.is_set():
            if outputs.wait(0):
                return False
            _look(watches, display, status_file)
            if once and all(_is_settled(pipeline) for pipeline in outputs):
                target = target or current_position(source)
                if all(_has_reached(pipeline, target) for pipeline in outputs):
                    _look(watches, display, status_file)
                    return True
            ending.stop.wait(_POLL_SECONDS)
        return False


def _look(watches: Sequence[Progress], display: Display, status_file: StatusFile) -> None:
    looks: list[OutputLook] = []
    for watch in watches:
        notices, look = watch.look()
        for notice in notices:
            display.tell(notice)
        looks += [look] if look is not None else []
    display.show(looks)
    status_file.write(looks)


def _progress(outputs: Outputs, pipeline: Pipeline, lag: LagWatch) -> Progress:
    return Progress(
        pipeline,
        lambda status: lag.behind(status.applied, status.last_commit_time),
        prefix=_prefixed(outputs, pipeline, ""),
    )


def _is_settled(pipeline: Pipeline) -> bool:
    """Nothing is copied any more, nothing is tried again by itself, and no command waits that could change that."""
    return all(command.answered for command in pipeline.store.get_commands()) and all(
        isinstance(phase, Ready) or (isinstance(phase, Errored) and phase.retry_policy.retry is Retry.OPERATOR)
        for phase in pipeline.phases.values()
    )


def _has_reached(pipeline: Pipeline, target: Lsn) -> bool:
    status = pipeline.status
    if status is None:
        return False
    # A table that failed holds back what is acknowledged.
    held = any(isinstance(phase, Errored) for phase in pipeline.phases.values())
    return reaches(status.applied if held else status.acknowledged, target)


def _refuse_second(config: Config, store: Store) -> None:
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
def _started_tasks(config: Config, ending: Ending, display: Display) -> Iterator[tuple[Any, Any]]:
    """Where the data work is done, and the Spark session if there is one."""
    choice = config.spark
    if choice.master is None:
        yield ProcessTasks(copy_tasks=config.copy_tasks), None
        return
    # Imported here: commands without Spark start without it.
    from penstock.spark.session import SparkSettings, build_session
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
        session.stop()
