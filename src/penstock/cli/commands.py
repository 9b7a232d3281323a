"""`penstock resync`, `rollback`, `pause` and `resume`: what people ask of a pipeline that runs elsewhere, or later."""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.configured import (
    DEFAULT_PATH,
    ConfigPath,
    OutputName,
    TableNames,
    chosen_outputs,
    configured,
    existing_store,
    require_shared_state,
    running,
    table_names,
)
from penstock.config import Config, OutputChoice
from penstock.errors import ConfigError, PenstockError
from penstock.source.patterns import TableName, select_tables
from penstock.state import Command, CommandKind, CommandStatus, Store

_POLL_SECONDS = 0.1

Wait = Annotated[
    float,
    typer.Option("--wait", min=0, help="How long to wait for the answer of a running pipeline.", metavar="SECONDS"),
]
_WAIT_SECONDS = 10.0


def resync(
    tables: TableNames, config_path: ConfigPath = DEFAULT_PATH, output: OutputName = None, wait: Wait = _WAIT_SECONDS
) -> None:
    """Copy tables again, from the beginning.

    For a table that lost its position, or whose data at the destination was changed by somebody else. The other tables
    go on meanwhile. Patterns like 'sales.*' name several.
    """
    _send(config_path, output, CommandKind.RESYNC, tables, wait, done="{} will be copied again")


def rollback(
    tables: TableNames, config_path: ConfigPath = DEFAULT_PATH, output: OutputName = None, wait: Wait = _WAIT_SECONDS
) -> None:
    """Let tables that stopped go on from where they were, after the cause is gone.

    Nothing is lost or doubled. Refused for a table that did not stop, or whose position is lost: then resync.
    """
    _send(config_path, output, CommandKind.ROLLBACK, tables, wait, done="{} will go on")


def pause(config_path: ConfigPath = DEFAULT_PATH, output: OutputName = None, wait: Wait = _WAIT_SECONDS) -> None:
    """Stop writing changes to the destination, until resume or the next start.

    Changes are still read, up to the spool's limit; then the server keeps them.
    """
    _send(config_path, output, CommandKind.PAUSE, (), wait, done="paused; `penstock resume` lets it go on")


def resume(config_path: ConfigPath = DEFAULT_PATH, output: OutputName = None, wait: Wait = _WAIT_SECONDS) -> None:
    """Go on after pause."""
    _send(config_path, output, CommandKind.RESUME, (), wait, done="resumed")


def _send(path: Path, output: str | None, kind: CommandKind, tables: Sequence[str], wait: float, *, done: str) -> None:
    with configured(path) as config:
        require_shared_state(config)
        for each in chosen_outputs(config, output):
            with existing_store(config, each) as store:
                _send_to(config, each, store, kind, tables, wait, done)


def _send_to(
    config: Config,
    output: OutputChoice,
    store: Store | None,
    kind: CommandKind,
    tables: Sequence[str],
    wait: float,
    done: str,
) -> None:
    if store is None:
        raise PenstockError(
            f"pipeline {config.pipeline.id} has not run yet: there is nothing to {kind.value}",
            hint="Start it with `penstock run`.",
        )
    chosen = choose_tables(config, store, tables)
    driver = running(store)
    command = store.add_command(kind, chosen)
    of_several = f"{output.name}: " if len(config.outputs) > 1 else ""
    if driver is None:
        typer.echo(
            f"{of_several}pipeline {config.pipeline.id} does not run: {kind.value} is noted "
            f"(command {command.number}), and taken at its next start"
        )
        return
    _report(_await(store, command, wait), of_several + done.format(", ".join(chosen)))


def _await(store: Store, command: Command, seconds: float) -> Command:
    deadline = time.monotonic() + seconds
    while not command.answered and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        command = store.get_command(command.number) or command
    return command


def _report(command: Command, done: str) -> None:
    if command.status is CommandStatus.REFUSED:
        raise PenstockError(f"{command.kind.value} was refused: {command.reason}")
    if command.status is CommandStatus.DONE:
        typer.echo(done)
    else:
        typer.echo(
            f"no answer yet: command {command.number} is {command.status.value}, and taken after the batch at hand"
        )


def choose_tables(config: Config, store: Store, wanted: Sequence[str]) -> list[str]:
    """The tables that are meant, by the names that the pipeline knows; `orders` alone is `public.orders`."""
    names = sorted(table_names(config, store).values())
    known = {TableName(*name.split(".", 1)): name for name in names if "." in name}
    chosen: dict[str, None] = {}
    for each in wanted:
        # A name as `penstock tables` shows it, whatever letters it has, before a pattern.
        found = [each] if each in names else [known[table] for table in select_tables(known, [each])]
        if not found:
            near = difflib.get_close_matches(each, names, n=1)
            raise ConfigError(
                f"pipeline {config.pipeline.id} has no table {each!r}"
                + (f"; did you mean {near[0]!r}?" if near else ""),
                hint="`penstock tables` lists them.",
            )
        chosen |= dict.fromkeys(found)
    return list(chosen)
