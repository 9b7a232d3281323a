"""`penstock resync`, `rollback`, `pause` and `resume`: what people ask of a pipeline that runs elsewhere, or later."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
    every_chosen_output,
    existing_store,
    require_shared_state,
    running,
    table_names,
)
from penstock.cli.options import AsJson
from penstock.config import Config, DocumentsChoice, OutputChoice
from penstock.errors import ConfigError, PenstockError
from penstock.source.patterns import TableName, select_tables
from penstock.state import Command, CommandKind, CommandStatus, Store

_POLL_SECONDS = 0.1

Wait = Annotated[
    float,
    typer.Option("--wait", min=0, help="How long to wait for the answer of a running pipeline.", metavar="SECONDS"),
]
WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked for, and how the answer is shown."""

    kind: CommandKind
    tables: Sequence[str]
    wait: float
    as_json: bool
    done: str
    """For people, when it is done; `{}` stands for the tables."""

    def choose(self, config: Config, output: str | None) -> Sequence[OutputChoice | DocumentsChoice]:
        """Whom it is for: what is about tables is not for documents."""
        return chosen_outputs(config, output) if self.tables else every_chosen_output(config, output)


def resync(
    tables: TableNames,
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Copy tables again, from the beginning.

    For a table that lost its position, or whose data at the destination was changed by somebody else. The other tables
    go on meanwhile. Patterns like 'sales.*' name several.

    Examples:

        penstock resync public.orders
        penstock resync 'sales.*' --wait 60
    """
    _send(config_path, output, _Asked(CommandKind.RESYNC, tables, wait, as_json, "{} will be copied again"))


def rollback(
    tables: TableNames,
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Let tables that stopped go on from where they were, after the cause is gone.

    Nothing is lost or doubled. Refused for a table that did not stop, or whose position is lost: then resync.

    Examples:

        penstock rollback public.orders
    """
    _send(config_path, output, _Asked(CommandKind.ROLLBACK, tables, wait, as_json, "{} will go on"))


def pause(
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Stop writing changes to the destination, until resume or the next start; one that does not run begins paused.

    Changes are still read, up to the spool's limit; then the server keeps them.
    """
    done = "paused; `penstock resume` lets it go on"
    _send(config_path, output, _Asked(CommandKind.PAUSE, (), wait, as_json, done))


def resume(
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Go on after pause."""
    _send(config_path, output, _Asked(CommandKind.RESUME, (), wait, as_json, "resumed"))


def _send(path: Path, output: str | None, asked: _Asked) -> None:
    with configured(path) as config:
        require_shared_state(config)
        for each in asked.choose(config, output):
            with existing_store(config, each) as store:
                _send_to(config, each, store, asked)


def _send_to(config: Config, output: OutputChoice | DocumentsChoice, store: Store | None, asked: _Asked) -> None:
    if store is None:
        raise PenstockError(
            f"pipeline {config.pipeline.id} has not run yet: there is nothing to {asked.kind.value}",
            hint="Start it with `penstock run`.",
        )
    chosen = choose_tables(config, store, asked.tables)
    driver = running(store)
    command = store.add_command(asked.kind, chosen)
    if driver is not None:
        command = await_answer(store, command, asked.wait)
    if asked.as_json:
        _print_json(config, output, command, is_running=driver is not None)
        return
    of_several = f"{output.name}: " if len(config.every_output) > 1 else ""
    if driver is None:
        typer.echo(
            f"{of_several}pipeline {config.pipeline.id} does not run: {asked.kind.value} is noted "
            f"(command {command.number}), and taken at its next start"
        )
        return
    report_answer(command, of_several + asked.done.format(", ".join(chosen)))


def _print_json(config: Config, output: OutputChoice | DocumentsChoice, command: Command, *, is_running: bool) -> None:
    """One line for each output; what was refused fails all the same."""
    facts = {
        "pipeline": config.pipeline.id,
        "output": output.name,
        "running": is_running,
        "command": command.number,
        "kind": command.kind.value,
        "tables": list(command.tables),
        "status": command.status.value,
        "reason": command.reason,
    }
    typer.echo(json.dumps(facts, ensure_ascii=False))
    if command.status is CommandStatus.REFUSED:
        raise typer.Exit(1)


def await_answer(store: Store, command: Command, seconds: float) -> Command:
    """The command as it is when it was answered, or when there was time enough."""
    deadline = time.monotonic() + seconds
    while not command.answered and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        command = store.get_command(command.number) or command
    return command


def report_answer(command: Command, done: str) -> None:
    """Tell a person; raises what was refused."""
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
