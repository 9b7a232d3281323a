"""`penstock resync`, `rollback`, `pause` and `resume`: commands to a pipeline that runs elsewhere, or later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.display import echo
from penstock.cli.options import DEFAULT_PATH, AsJson, ConfigPath, OutputName, TableNames, configured
from penstock.config import Config
from penstock.errors import PenstockError
from penstock.operations.commands import WAIT_SECONDS, Sent, send_command
from penstock.operations.stores import require_shared_state
from penstock.state import CommandKind, CommandStatus

Wait = Annotated[
    float,
    typer.Option("--wait", min=0, help="How long to wait for a running pipeline to answer.", metavar="SECONDS"),
]


def resync(
    tables: TableNames,
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Copy tables again from the start.

    For a table that lost its position, or whose data at the destination was changed by another program. Other tables
    are not affected. Patterns like 'sales.*' select several tables.

    Examples:

        penstock resync public.orders
        penstock resync 'sales.*' --wait 60
    """
    _send(config_path, CommandKind.RESYNC, "{} will be copied again", output, wait, as_json, tables)


def rollback(
    tables: TableNames,
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Resume stopped tables from where they stopped, once the cause is fixed.

    No change is lost or applied twice. Refused for a table that has not stopped, or that lost its position: use resync
    for that one.

    Examples:

        penstock rollback public.orders
    """
    _send(config_path, CommandKind.ROLLBACK, "{} will resume", output, wait, as_json, tables)


def pause(
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Stop writing changes to the destination until `penstock resume`.

    A pause outlasts restarts; if the pipeline is stopped, it starts paused. Changes are still captured up to the
    spool's limit; beyond it, the server keeps them.
    """
    _send(config_path, CommandKind.PAUSE, "paused; run `penstock resume` to continue", output, wait, as_json)


def resume(
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Continue writing changes after `penstock pause`."""
    _send(config_path, CommandKind.RESUME, "resumed", output, wait, as_json)


def _send(
    path: Path,
    kind: CommandKind,
    done: str,
    output: str | None,
    wait: float,
    as_json: bool,
    tables: list[str] | None = None,
) -> None:
    with configured(path) as config:
        require_shared_state(config)
        for sent in send_command(config, kind, output=output, tables=tables or (), wait=wait):
            if as_json:
                print_json(config, sent, {"tables": list(sent.command.tables)})
            else:
                prefix = f"{sent.output}: " if len(config.every_output) > 1 else ""
                print_answer(config, sent, done.format(", ".join(sent.command.tables)), prefix)


def print_json(config: Config, sent: Sent, target: dict[str, Any]) -> None:
    """One line for each output; a refused command exits with 1."""
    command = sent.command
    facts = {
        "pipeline": config.pipeline.id,
        "output": sent.output,
        "running": sent.is_running,
        "command": command.number,
        "kind": command.kind.value,
        **target,
        "status": command.status.value,
        "reason": command.reason,
    }
    echo(json.dumps(facts, ensure_ascii=False))
    if command.status is CommandStatus.REFUSED:
        raise typer.Exit(1)


def print_answer(config: Config, sent: Sent, done: str, prefix: str = "") -> None:
    """Say what became of a command; raises if it was refused."""
    command, what = sent.command, sent.command.kind.value.replace("_", " ")
    if not sent.is_running:
        echo(
            f"{prefix}pipeline {config.pipeline.id} is not running: {what} is queued (command {command.number}) until "
            "its next start"
        )
    elif command.status is CommandStatus.REFUSED:
        raise PenstockError(f"{what} was refused: {command.reason}")
    elif command.status is CommandStatus.DONE:
        echo(f"{prefix}{done}")
    else:
        echo(
            f"{prefix}no answer yet: command {command.number} is {command.status.value}, and runs after the current "
            "batch"
        )
