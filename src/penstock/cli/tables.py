"""`penstock tables`: where every table of a pipeline stands, whether it runs now or not."""

from __future__ import annotations

import json
from typing import Annotated, Any

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
    table_names,
)
from penstock.config import Config, OutputChoice
from penstock.errors import Retry
from penstock.lsn import Lsn
from penstock.observe import scrub
from penstock.state import Errored, LeaseInfo, Ready, Store, StoredPhase, SyncDone
from penstock.state.positions import furthest

_STYLES = {"ready": "green", "errored": "bold red"}
_PIPE_WIDTH = 160


def tables(
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show the phase and the position of every table, and what to do about those that stopped.

    Reads the stored state, so it works whether the pipeline runs or not, and changes nothing.
    """
    with configured(config_path) as config:
        require_shared_state(config)
        driver: LeaseInfo | None = None
        found: list[dict[str, Any]] = []
        for each in chosen_outputs(config, output):
            with existing_store(config, each) as store:
                if store is not None:
                    driver = running(store) or driver
                    found += _describe(config, each, store)
        if as_json:
            typer.echo(json.dumps(_to_json(config, driver, found), indent=2, ensure_ascii=False))
        else:
            _print(config, driver, found)


def _describe(config: Config, output: OutputChoice, store: Store) -> list[dict[str, Any]]:
    """One record per table, by name."""
    stored = store.get_stored_progress()
    positions: dict[int, Lsn] = {}
    if stored is not None:
        store.use_lineage(stored.lineage)
        positions = dict(store.get_table_positions())
    names = table_names(config, store)
    states = store.get_table_replication_states()
    return sorted(
        (
            {
                "table": names.get(table_id, f"oid {table_id}"),
                "id": table_id,
                "output": output.name,
                "phase": phase.name,
                "position": _text(_position(phase, positions.get(table_id), stored.position if stored else None)),
                "error": _error(config, phase),
            }
            for table_id, phase in states.items()
        ),
        key=lambda each: each["table"],
    )


def _position(phase: StoredPhase, own: Lsn | None, progress: Lsn | None) -> Lsn | None:
    """Up to where the table is durable, as far as it is stored."""
    match phase:
        case Ready() | SyncDone():
            known = [each for each in (own, progress) if each is not None]
            return furthest(*known) if known else None
        case Errored():
            return phase.position
        case _:
            return None


def _error(config: Config, phase: StoredPhase) -> dict[str, Any] | None:
    if not isinstance(phase, Errored):
        return None
    policy = phase.retry_policy
    return {
        "reason": scrub(phase.reason, config.secrets),
        "solution": None if phase.solution is None else scrub(phase.solution, config.secrets),
        "command": _command(phase),
        "since": phase.since.isoformat(timespec="seconds"),
        "next_retry": policy.next_retry.isoformat(timespec="seconds") if policy.next_retry else None,
        "attempts": phase.attempts,
        "position_lost": phase.position_lost,
    }


def _command(phase: Errored) -> str | None:
    """What a person runs when the cause is gone."""
    if phase.position_lost:
        return "resync"
    return "rollback" if phase.retry_policy.retry is Retry.OPERATOR else None


def _to_json(config: Config, driver: LeaseInfo | None, found: list[dict[str, Any]]) -> dict[str, Any]:
    runs = None
    if driver is not None:
        runs = {"host": driver.host, "pid": driver.pid, "since": driver.since.isoformat(timespec="seconds")}
    return {"pipeline": config.pipeline.id, "running": runs, "tables": found}


def _print(config: Config, driver: LeaseInfo | None, found: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal and console.width < _PIPE_WIDTH:
        console = Console(width=_PIPE_WIDTH, highlight=False)
    if found:
        table = Table(box=None, pad_edge=False, header_style="bold")
        several = len(config.outputs) > 1
        for title in ("table", *(["output"] * several), "phase", "position"):
            table.add_column(title, overflow="fold")
        for each in found:
            phase = Text(each["phase"], style=_STYLES.get(each["phase"], "yellow"))
            output = [Text(each["output"])] * several
            table.add_row(Text(each["table"]), *output, phase, Text(each["position"] or ""))
        console.print(table)
        console.print()
    for each in found:
        for line in _error_lines(each):
            console.print(line, soft_wrap=True)
    console.print(_summary(config, driver, found), soft_wrap=True)


def _error_lines(each: dict[str, Any]) -> list[Text]:
    error = each["error"]
    if error is None:
        return []
    lines = [Text.assemble((f"{each['table']} stopped", "bold"), f" at {error['since']}: {error['reason']}")]
    if error["solution"]:
        lines.append(Text(f"  {error['solution']}"))
    if error["command"]:
        lines.append(Text(f"  then: penstock {error['command']} {each['table']}"))
    elif error["next_retry"]:
        lines.append(Text(f"  it is tried again by itself at {error['next_retry']}"))
    return [*lines, Text()]


def _summary(config: Config, driver: LeaseInfo | None, found: list[dict[str, Any]]) -> Text:
    name = f"pipeline {config.pipeline.id}"
    if not found and driver is None:
        return Text(f"{name} has not run yet")
    ready = sum(each["phase"] == "ready" for each in found)
    count = f"{ready} of {len(found)} tables ready"
    if driver is None:
        return Text(f"{name} does not run; {count}", style="yellow")
    return Text(f"{name} is driven by {driver}; {count}")


def _text(position: Lsn | None) -> str | None:
    return None if position is None else str(position)
