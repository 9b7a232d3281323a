"""`penstock tables`: where every table of a pipeline stands, whether it runs now or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.configured import (
    DEFAULT_PATH,
    ConfigPath,
    OutputName,
    chosen_outputs,
    configured,
    existing_store,
    require_shared_state,
    running,
)
from penstock.cli.options import AsJson
from penstock.cli.table_states import TableState, driver_facts, table_states
from penstock.config import Config
from penstock.state import LeaseInfo

PHASE_STYLES = {"ready": "green", "errored": "bold red"}
_PIPE_WIDTH = 160


def tables(config_path: ConfigPath = DEFAULT_PATH, output: OutputName = None, as_json: AsJson = False) -> None:
    """Show the phase and the position of every table, and what to do about those that stopped.

    Reads the stored state, so it works whether the pipeline runs or not, and changes nothing. `penstock status` also
    asks the server.

    Examples:

        penstock tables
        penstock tables --json | jq '.tables[] | select(.error)'
    """
    with configured(config_path) as config:
        require_shared_state(config)
        driver: LeaseInfo | None = None
        found: list[TableState] = []
        for each in chosen_outputs(config, output):
            with existing_store(config, each) as store:
                if store is not None:
                    driver = running(store) or driver
                    found += table_states(config, each, store)
        if as_json:
            facts = {
                "pipeline": config.pipeline.id,
                "running": driver_facts(driver),
                "tables": [asdict(state) for state in found],
            }
            typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        else:
            _print(config, driver, found)


def wide_console() -> Console:
    """Standard output; where it is no terminal, tables are not squeezed."""
    console = Console(highlight=False)
    return (
        console if console.is_terminal or console.width >= _PIPE_WIDTH else Console(width=_PIPE_WIDTH, highlight=False)
    )


def _print(config: Config, driver: LeaseInfo | None, found: Sequence[TableState]) -> None:
    console = wide_console()
    if found:
        table = Table(box=None, pad_edge=False, header_style="bold")
        several = len(config.outputs) > 1
        for title in ("table", *(["output"] * several), "phase", "position"):
            table.add_column(title, overflow="fold")
        for each in found:
            phase = Text(each.phase, style=PHASE_STYLES.get(each.phase, "yellow"))
            output = [Text(each.output)] * several
            table.add_row(Text(each.table), *output, phase, Text(each.position or ""))
        console.print(table)
        console.print()
    for each in found:
        for line in each.error.lines(each.table) if each.error else []:
            console.print(line, soft_wrap=True)
    console.print(_summary(config, driver, found), soft_wrap=True)


def _summary(config: Config, driver: LeaseInfo | None, found: Sequence[TableState]) -> Text:
    name = f"pipeline {config.pipeline.id}"
    if not found and driver is None:
        return Text(f"{name} has not run yet")
    ready = sum(each.phase == "ready" for each in found)
    count = f"{ready} of {len(found)} tables ready"
    if driver is None:
        return Text(f"{name} does not run; {count}", style="yellow")
    return Text(f"{name} is driven by {driver}; {count}")
