"""`penstock run`: copy the tables of a source, then apply every change until it is stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len, set_cell_size

from penstock.cli.display import Display, echo, opened_display, show_running, stderr_console
from penstock.cli.options import DEFAULT_PATH, ConfigPath, Quiet, configured
from penstock.config import Config, LogChoice
from penstock.errors import PenstockError
from penstock.lsn import Lsn
from penstock.observe import LogFormat, configure_logging
from penstock.operations.plan import POLLED, Plan, make_plan
from penstock.operations.polling import run_polling
from penstock.operations.running import POLL_SECONDS, Running, started
from penstock.operations.signals import Ending
from penstock.operations.supervision import Child, Link, Supervisor, child_command, exit_status
from penstock.server.serving import require_server, serving

_STATUS_SECONDS = 10.0


def run(
    context: typer.Context,
    config_path: ConfigPath = DEFAULT_PATH,
    once: Annotated[
        bool, typer.Option("--once", help="Copy, catch up with everything committed by then, and exit.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be created and copied; change nothing.")
    ] = False,
    status_seconds: Annotated[
        float,
        typer.Option(
            "--status-every",
            min=0,
            help="Status interval when stderr is not a terminal; 0 disables it.",
            metavar="SECONDS",
        ),
    ] = _STATUS_SECONDS,
    quiet: Quiet = False,
    supervise: Annotated[
        bool,
        typer.Option("--supervise", help="Run in a child process; start it again after a crash or a passing error."),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --plan: print JSON. For a run, use penstock --log-format json run."),
    ] = False,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
) -> None:
    """Copy the tables of a source to a destination, build its search indexes, then apply every change.

    A new run resumes where the last one stopped. SIGINT and SIGTERM stop it cleanly, with status 0: it finishes the
    current batch. The next run continues an incomplete copy of a large Delta table, and starts other copies again. A
    second run of the same pipeline is refused. Exit status 75 means that a new run can succeed as soon as the cause is
    gone, such as a server that is down; 1 means that something has to be changed first.

    Examples:

        penstock run --plan
        penstock run
        penstock run --supervise
        penstock run --once && echo all tables are copied
        penstock --log-format json run 2> run.jsonl
    """
    if plan and supervise:
        raise typer.BadParameter("cannot be combined with --plan", param_hint="--supervise")
    if as_json and not plan:
        raise typer.BadParameter("needs --plan; for a run, use penstock --log-format json run", param_hint="--json")
    link = Link() if supervised else None
    with _reporting_to(link), configured(config_path) as config:
        log = _configure_log(context, config)
        if plan:
            _show_plan(config, as_json=as_json)
        elif supervise:
            _supervise(config, _child_arguments(log, config_path, status_seconds, once=once, quiet=quiet))
        else:
            with (
                _with_exit_status(config),
                Ending() as ending,
                opened_display(quiet=quiet, as_json=log.format is LogFormat.JSON, seconds=status_seconds) as display,
            ):
                _run(config, ending, display, link, once=once)


def _show_plan(config: Config, *, as_json: bool) -> None:
    found = make_plan(config)
    for line in [json.dumps(asdict(found), indent=2, ensure_ascii=False)] if as_json else plan_lines(found):
        echo(line)
    if found.problems:
        raise typer.Exit(1)


def _supervise(config: Config, arguments: list[str]) -> None:
    command = child_command(arguments)
    with Ending() as ending:
        end = Supervisor(lambda: Child(command), config.pipeline.spool.path, ending).run()
        # A child that was killed has not restored it.
        stderr_console().show_cursor()
        if end.error is not None:
            end.error.facts["exit_status"] = end.status
            raise end.error
        raise typer.Exit(end.status)


def _configure_log(context: typer.Context, config: Config) -> LogChoice:
    """Let log lines look as the config says, unless an option or the environment says otherwise."""
    chosen = config.log
    if context.parent is not None:
        names = {"level": "log_level", "format": "log_format"}
        sources = {key: context.parent.get_parameter_source(name) for key, name in names.items()}
        given = {
            key: context.parent.params[names[key]]
            for key, source in sources.items()
            if source is not None and source.name != "DEFAULT"
        }
        chosen = replace(chosen, **given)
    configure_logging(chosen.level, chosen.format)
    return chosen


def _child_arguments(log: LogChoice, config_path: Path, status_seconds: float, *, once: bool, quiet: bool) -> list[str]:
    before = [f"--log-level={log.level}", f"--log-format={log.format}"]
    after = [f"--config={config_path}", f"--status-every={status_seconds}", *["--once"] * once, *["--quiet"] * quiet]
    return [*before, "run", "--supervised", *after]


@contextmanager
def _with_exit_status(config: Config) -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        error.facts["exit_status"] = exit_status(error, config.pipeline.on_lost_slot)
        raise


@contextmanager
def _reporting_to(link: Link | None) -> Iterator[None]:
    """Leave errors to the supervisor, if there is one, to be shown once."""
    try:
        yield
    except PenstockError as error:
        if link is None:
            raise
        link.failed(error)
        raise typer.Exit(error.facts.get("exit_status", 1)) from None


def _run(config: Config, ending: Ending, display: Display, link: Link | None, *, once: bool) -> None:
    polling = None if config.documents is None else config.documents.polling
    if polling is not None:
        if link is not None:
            link.started()
        run_polling(config, polling, ending, display.say, once=once)
        return
    require_server(config)
    with started(config, ending, display.say) as running, serving(config, running) as server:
        if server is not None:
            server.listening.wait(1)
            display.say(
                f"serving on {server.address}" if server.address else "the server cannot start yet; see the log"
            )
        if link is not None:
            link.started()
        caught_up = _watch(running, ending, display, once=once)
        display.say("caught up, stopping" if caught_up else "stopping after the current batch")
        failed = list(running.errored)
        stopped = running.stopped_indexes
        copied = any(output.phases for output in running.outputs)
    running.check()
    if once and caught_up and config.outputs and not copied:
        raise PenstockError(
            f"no table matches {', '.join(config.pipeline.tables)}, so none was copied",
            hint="`penstock run --plan` shows which tables would be copied.",
        )
    if once and failed:
        raise PenstockError(
            f"{len(failed)} table{'s' * (len(failed) > 1)} stopped: {', '.join(failed)}",
            hint="`penstock tables` shows why, and what to do.",
        )
    for name, error in stopped.items() if once else ():
        raise PenstockError(f"index {name} stopped: {error.message}", hint=error.hint)


def _watch(running: Running, ending: Ending, display: Display, *, once: bool) -> bool:
    """Show progress until all outputs have ended or a signal arrives; with `once`, True when they have caught up.

    It does not wait for an output that has failed: the others continue, and that error is raised at the end.
    """
    target: Lsn | None = None
    while not ending.stop.is_set():
        if running.wait(0):
            return False
        show_running(running, display)
        # Before `paused` is read: a pause that is carried out meanwhile must not pass for having caught up.
        ready = once and running.is_ready()
        if once and any(output.paused for output in running.outputs):
            raise PenstockError(
                "the pipeline is paused, so it cannot catch up",
                hint="Run: penstock resume. Then run it again.",
            )
        if ready:
            target = target or running.current_position()
            if running.has_reached(target):
                show_running(running, display)
                return True
        ending.stop.wait(POLL_SECONDS)
    return False


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan, for people."""
    yield f"pipeline     {plan.pipeline}{'' if plan.running is None else f', already running: {plan.running}'}"
    yield f"source       {plan.source}"
    yield f"publication  {plan.publication}: {plan.publication_plan}"
    yield f"slot         {plan.slot}: {plan.slot_plan}"
    if plan.ddl_trigger_plan is not None:
        yield f"ddl trigger  {plan.ddl_trigger}: {plan.ddl_trigger_plan}"
    yield f"state        {plan.state}: {plan.state_plan}"
    yield f"spool        {plan.spool}: {plan.spool_plan}"
    for name, type_ in plan.destinations.items():
        yield f"destination  {f'{name}: ' if len(plan.destinations) > 1 else ''}{type_}"
    none = "none" if plan.publication_plan == POLLED else "none: no table in the database matches"
    yield f"tables       {len(plan.tables) or none}"
    width = max((cell_len(name) for name in plan.tables), default=0)
    for name, fates in plan.tables.items():
        if not fates:
            yield f"  {name}"
        elif len(set(fates.values())) == 1:
            yield f"  {set_cell_size(name, width)}  {next(iter(fates.values()))}"
        else:
            yield f"  {set_cell_size(name, width)}  {'; '.join(f'{each}: {fate}' for each, fate in fates.items())}"
    if plan.tables:
        yield f"schema changes: tables are {plan.schema_changes['']}"
        for name, policy in plan.schema_changes.items():
            if name:
                yield f"  {set_cell_size(name, max(width, cell_len(name)))}  is {policy}"
    if plan.sink is not None:
        yield f"sink         {plan.sink}"
        yield f"indexes      {len(plan.indexes)}"
        width = max(len(name) for name in plan.indexes)
        for name, fate in plan.indexes.items():
            yield f"  {name:<{width}}  {fate}"
    for problem in plan.problems:
        yield f"WOULD FAIL   {problem}"
    yield "nothing was changed"
