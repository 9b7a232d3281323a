"""`penstock run`: copy the tables of a source, then follow every change, until it is told to stop."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured
from penstock.cli.display import Display, opened_display
from penstock.cli.outputs import POLL_SECONDS, LookedAt, is_settled, prefixed, started_outputs
from penstock.cli.plan import make_plan, plan_lines
from penstock.cli.polling_run import run_polling
from penstock.cli.tail import Ending
from penstock.config import Config
from penstock.coordinator import Coordinator, Output
from penstock.errors import PenstockError
from penstock.lsn import Lsn, reaches
from penstock.observe import LogFormat
from penstock.source.wal import current_position
from penstock.state import Errored

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
    as_json: Annotated[
        bool,
        typer.Option("--json", help="With --plan: print JSON. (The lines of a run: penstock --log-format json run.)"),
    ] = False,
) -> None:
    """Copy the tables of a source to a destination, fill its search indexes, then follow every change.

    Goes on where it was when it is started again. SIGINT and SIGTERM end it in good order, with status 0: the batch at
    hand is finished, and a copy that is not whole begins anew next time. A second run of the same pipeline is refused.

    Examples:

        penstock run --plan
        penstock run
        penstock run --once && echo all tables are there
        penstock --log-format json run 2> run.jsonl
    """
    with configured(config_path) as config:
        if plan:
            found = make_plan(config)
            for line in [json.dumps(asdict(found), indent=2, ensure_ascii=False)] if as_json else plan_lines(found):
                typer.echo(line)
            return
        if as_json:
            raise typer.BadParameter("is for --plan; write penstock --log-format json run", param_hint="--json")
        logs_json = context.parent is not None and context.parent.params.get("log_format") is LogFormat.JSON
        with (
            Ending() as ending,
            opened_display(quiet=quiet, as_json=logs_json, seconds=status_seconds) as display,
        ):
            polling = None if config.documents is None else config.documents.polling
            if polling is not None:
                run_polling(config, polling, ending, display, once=once)
            else:
                _run(config, ending, display, once=once)


def _run(config: Config, ending: Ending, display: Display, *, once: bool) -> None:
    with started_outputs(config, ending, display) as running:
        outputs = running.outputs
        with LookedAt(config, outputs, display) as looked_at:
            caught_up = _watch(config, outputs, ending, looked_at, once=once)
        display.say("caught up, stopping" if caught_up else "stopping: the batch at hand is finished first")
        failed = [
            prefixed(outputs, pipeline, name)
            for pipeline in outputs
            for name, phase in pipeline.phases.items()
            if isinstance(phase, Errored)
        ]
        copied = any(pipeline.phases for pipeline in outputs)
    if once and caught_up and config.outputs and not copied:
        raise PenstockError(
            f"no table matches {', '.join(config.pipeline.tables)}, so none was copied",
            hint="`penstock run --plan` shows which tables there would be.",
        )
    if once and failed:
        raise PenstockError(
            f"{len(failed)} table{'s' * (len(failed) > 1)} stopped: {', '.join(failed)}",
            hint="`penstock tables` shows why, and what can be done.",
        )


def _watch(config: Config, outputs: Coordinator, ending: Ending, looked_at: LookedAt, *, once: bool) -> bool:
    """Look until an output ends, or all should; whether they have caught up with where `once` ends."""
    target: Lsn | None = None
    while not ending.stop.is_set():
        if outputs.wait(0):
            return False
        looked_at.look()
        # Before it is asked who is paused: a pause that is carried out meanwhile must not pass for having caught up.
        settled = once and all(is_settled(pipeline) for pipeline in outputs)
        if once and any(pipeline.paused for pipeline in outputs):
            raise PenstockError(
                "paused by a command: it would never catch up",
                hint="Run it again: a pause ends with the process that was paused.",
            )
        if settled:
            target = target or current_position(config.pipeline.source)
            if all(has_reached(pipeline, target) for pipeline in outputs):
                looked_at.look()
                return True
        ending.stop.wait(POLL_SECONDS)
    return False


def has_reached(pipeline: Output, target: Lsn) -> bool:
    """Whether all that was committed before is durable."""
    status = pipeline.status
    if status is None:
        return False
    # A table that failed holds back what is acknowledged.
    held = any(isinstance(phase, Errored) for phase in pipeline.phases.values())
    return reaches(status.applied if held else status.acknowledged, target)
