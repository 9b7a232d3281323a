"""`penstock index rebuild`: ask a running pipeline to build an index anew."""

from __future__ import annotations

import json

import typer

from penstock.cli.commands import WAIT_SECONDS, Wait, await_answer, report_answer
from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured, existing_store, require_shared_state, running
from penstock.cli.indexes import IndexName
from penstock.cli.options import AsJson
from penstock.errors import PenstockError
from penstock.state import CommandKind, CommandStatus


def rebuild(
    name: IndexName,
    config_path: ConfigPath = DEFAULT_PATH,
    wait: Wait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Build an index anew from the database, beside the one that serves.

    Searches see the old one until the new one is complete, then the new one, at once; changes go to both meanwhile.
    The pipeline that runs does it; one that does not run begins with it at its next start.

    Examples:

        penstock index rebuild customers
        penstock index rebuild customers --wait 60 && penstock index list
    """
    with configured(config_path) as config:
        require_shared_state(config)
        index = config.indexes.index(name)
        with existing_store(config, config.indexes) as store:
            if store is None:
                raise PenstockError(
                    f"pipeline {config.pipeline.id} has not run yet: its indexes are built when it starts",
                    hint="Start it with `penstock run`.",
                )
            driver = running(store)
            command = store.add_command(CommandKind.REBUILD_INDEX, options={"indexes": [index.name]})
            if driver is not None:
                command = await_answer(store, command, wait)
        if as_json:
            facts = {
                "pipeline": config.pipeline.id,
                "output": config.indexes.name,
                "running": driver is not None,
                "command": command.number,
                "kind": command.kind.value,
                "index": index.name,
                "status": command.status.value,
                "reason": command.reason,
            }
            typer.echo(json.dumps(facts, ensure_ascii=False))
            if command.status is CommandStatus.REFUSED:
                raise typer.Exit(1)
        elif driver is None:
            typer.echo(
                f"pipeline {config.pipeline.id} does not run: the rebuild of {name} is noted "
                f"(command {command.number}), and begins at its next start"
            )
        else:
            report_answer(command, f"{name} is being built anew; `penstock index list` shows when it serves")
