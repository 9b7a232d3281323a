"""`penstock status` and `penstock tables`: the state of a pipeline, whether it runs or not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.display import echo, make_table, print_unwrapped, wide_console
from penstock.cli.options import DEFAULT_PATH, AsJson, ConfigPath, OutputName, configured
from penstock.config import Config, OutputChoice
from penstock.config.units import count_of, format_bytes, format_moment, format_seconds
from penstock.errors import PenstockError, SlotLost, SlotMissing, for_table, in_command
from penstock.headroom import Room
from penstock.observe import one_line, scrub
from penstock.operations.signals import Ended, Ending
from penstock.operations.status import driver_facts, pipeline_status, table_locations, table_states
from penstock.operations.status_model import (
    IndexState,
    OutputStatus,
    PipelineStatus,
    SlotStatus,
    SupervisorStatus,
    TableState,
    TableStatus,
    status_facts,
)
from penstock.operations.stores import chosen_outputs, existing_store, require_shared_state, running
from penstock.state import IndexStatus, LeaseInfo

STYLES = {"ready": "green", "seeded": "green", "errored": "bold red"}
"""Of phases and of the status of an index; all others are yellow."""
UNHEALTHY = 3
"""The exit status if something needs attention."""
_EVERY_SECONDS = 2.0
_MUCH_WAL = 1 << 30


def status(
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    seconds: Annotated[
        float, typer.Option("--every", min=0.2, help="Refresh interval of --watch.", metavar="SECONDS")
    ] = _EVERY_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Show the state of a pipeline: phases, rows, lag, slot, and what to do about stopped tables.

    Works whether the pipeline runs or not; changes nothing. The exit status is 0 if all is well, and 3 if something
    needs attention: the pipeline does not run, the source is unreachable, the destination cannot be written, the slot
    is lost, or a table has stopped.
    With --watch --json, prints one object per line.

    Examples:

        penstock status
        penstock status --watch
        penstock status --json | jq '.outputs[].lag_seconds'
    """
    with configured(config_path) as config:
        require_shared_state(config)
        if not watch:
            found = pipeline_status(config, output)
            _print(found, as_json=as_json, indent=2)
            if found.problems:
                raise typer.Exit(UNHEALTHY)
            return
        with Ending() as ending, ending.interruptible():
            _watch(config, output, seconds, as_json=as_json)


def tables(config_path: ConfigPath = DEFAULT_PATH, output: OutputName = None, as_json: AsJson = False) -> None:
    """Show the phase, position and location of every table, and what to do about stopped ones.

    Reads the stored state, and the destination for the locations: works whether the pipeline runs or not, and changes
    nothing. `penstock status` also queries the server.

    Examples:

        penstock tables
        penstock tables --json | jq '.tables[] | select(.error)'
    """
    with configured(config_path) as config:
        require_shared_state(config)
        driver: LeaseInfo | None = None
        found: list[tuple[TableState, str | None]] = []
        for each in chosen_outputs(config, output):
            with existing_store(config, each) as store:
                if store is not None:
                    driver = running(store) or driver
                    places = _locations(config, each)
                    found += [(state, places.get(state.id)) for state in table_states(config, each, store)]
        if as_json:
            facts = {
                "pipeline": config.pipeline.id,
                "running": driver_facts(driver),
                "tables": [asdict(state) | {"location": location} for state, location in found],
            }
            echo(json.dumps(facts, indent=2, ensure_ascii=False))
        else:
            _print_tables(config, driver, found)


def _locations(config: Config, output: OutputChoice) -> Mapping[int, str]:
    try:
        return table_locations(config, output)
    except (OSError, PenstockError) as error:
        reason = error.message if isinstance(error, PenstockError) else error.strerror
        echo(
            scrub(f"the locations of the tables cannot be read from the destination: {reason}", config.secrets),
            err=True,
        )
        return {}


def render(found: PipelineStatus, *, urgent_first: bool = False) -> RenderableType:
    """For terminals; `urgent_first` for one that shows only the first lines."""
    parts: list[RenderableType] = [*_head(found), Text()]
    several = len(found.outputs) > 1
    tables = [table for output in found.outputs for table in output.tables]
    problems = [line for table in tables for line in problem_lines(table, several=several)]
    if urgent_first:
        tables.sort(key=lambda table: (table.error is None, table.phase == "ready"))
    listed: list[RenderableType] = [_tables(tables, several=several), Text()] if tables else []
    parts += [*problems, *listed] if urgent_first else [*listed, *problems]
    indexes = [index for output in found.outputs for index in output.indexes]
    if indexes:
        parts += [_indexes(indexes), Text()]
    for index in indexes:
        if reason := index_reason(index):
            parts += [reason, Text()]
        if index.quarantined:
            text = f": {count_of(index.quarantined, 'document')} in quarantine"
            parts += [
                Text.assemble((index.index, "bold"), text),
                Text("  Correct their rows or the mapping, then:"),
                Text(f"  penstock index quarantine retry {in_command(index.index, None)} --all"),
                Text(),
            ]
    return Group(*parts[:-1])


def problem_lines(state: TableState, *, several: bool = False) -> list[Text]:
    """Why a table stopped, is copied again or has outdated rows, with an empty line behind; else nothing.

    With `several` outputs, the lines name that of the table.
    """
    table, error = state.table, state.error
    subject = f"{state.output}: {table}" if several else table
    output = state.output if several else None
    if state.changed_cells:
        cells = f"{state.changed_cells:,} {'value' if state.changed_cells == 1 else 'values'}"
        note = Text.assemble((subject, "bold"), f": out_of_range changed {cells} since the copy of the table")
        return [note, Text(), *problem_lines(replace(state, changed_cells=0), several=several)]
    if state.copied_because is not None:
        reason = state.copied_because.removeprefix(f"{table}: ")
        return [Text.assemble((f"{subject} is copied again", "bold"), f": {reason}"), Text()]
    if error is None and state.silent_change is not None:
        what = f" without changes in the stream: {state.silent_change}"
        return [
            Text.assemble((f"{subject}: rows changed at the source", "bold"), what),
            Text(f"  to add a new copy: penstock resync {in_command(table, output)}"),
            Text(),
        ]
    if error is None:
        return []
    reason = error.reason.removeprefix(f"{table}: ")
    lines = [Text.assemble((f"{subject} stopped", "bold"), f" at {format_moment(error.since)}: {reason}")]
    solution = for_table(error.solution or "", table, output)
    call = f"penstock {error.command} {in_command(table, output)}"
    if solution:
        lines.append(Text(f"  {solution}"))
    if error.command and call not in solution:
        lines.append(Text(f"  then: {call}"))
    elif error.next_retry:
        lines.append(Text(f"  retried automatically at {format_moment(error.next_retry)}"))
    return [*lines, Text()]


def _watch(config: Config, output: str | None, seconds: float, *, as_json: bool) -> None:
    console = wide_console()
    if as_json or not console.is_terminal:
        while True:
            _print(pipeline_status(config, output), as_json=as_json)
            if not as_json:
                echo()
            time.sleep(seconds)
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        try:
            while True:
                live.update(render(pipeline_status(config, output), urgent_first=True), refresh=True)
                time.sleep(seconds)
        except Ended:
            # `Live` restores the terminal.
            return


def _print(found: PipelineStatus, *, as_json: bool, indent: int | None = None) -> None:
    if as_json:
        echo(json.dumps(status_facts(found), indent=indent, ensure_ascii=False))
    else:
        wide_console().print(render(found), soft_wrap=False)


def _head(found: PipelineStatus) -> Iterator[Text]:
    has_run = any(
        output.tables or output.position or any(index.status != "not built" for index in output.indexes)
        for output in found.outputs
    )
    if found.driver is not None:
        yield Text.assemble(("pipeline  ", "bold"), f"{found.pipeline}, run by {found.driver}")
    else:
        state = "not running" if has_run else "has not run yet"
        yield Text.assemble(("pipeline  ", "bold"), found.pipeline, ", ", (state, "yellow"))
        if found.last_run is not None and (found.supervisor is None or found.supervisor.last_end is None):
            yield Text(f"          the last run {found.last_run}")
            if ": error: " not in found.last_run:
                yield Text("          to resume, run: penstock run")
    if found.supervisor is not None:
        yield from _supervisor(found.supervisor)
    source = found.source
    if source.error is None:
        yield Text.assemble(
            ("source    ", "bold"), f"{source.location}, PostgreSQL {source.version}, at {source.position}"
        )
    else:
        yield Text.assemble(("source    ", "bold"), (source.error, "bold red"))
        yield Text(f"          {source.hint}")
    if source.unreachable_since is not None:
        yield Text.assemble(
            ("source    ", "bold"),
            (f"unreachable since {format_moment(source.unreachable_since)}, retrying", "bold red"),
        )
    if source.slot is not None:
        yield Text.assemble(("slot      ", "bold"), *_slot(source.slot))
        if source.slot.lost or (has_run and not source.slot.exists):
            yield Text(f"          {SlotLost.default_hint if source.slot.lost else SlotMissing.default_hint}")
    if found.capture is not None:
        lag = _lag(found.capture.lag_bytes, found.capture.lag_seconds)
        style = "" if found.capture.state == "streaming" else "yellow"
        yield Text.assemble(("capture   ", "bold"), (found.capture.state, style), f"; lag {lag}")
    if found.spool is not None:
        text = f"{format_bytes(found.spool.used)}, {_lasting(found.spool)}"
        yield Text.assemble(("spool     ", "bold"), (text, "bold red" if found.spool.is_short else ""))
    for blocker in source.long_transactions:
        yield Text.assemble(("waiting   ", "bold"), (f"for an open transaction: {blocker}", "yellow"))
    for table in source.left_out:
        reason = table.reason.replace(" is left out: ", ": ", 1)
        yield Text.assemble(("left out  ", "bold"), (reason, "yellow"), f"\n          {table.solution}")
    for output in found.outputs:
        name = f"{output.output}: " if len(found.outputs) > 1 else ""
        yield Text.assemble(("output    ", "bold"), name, _output(output, is_running=found.driver is not None))
        if output.acknowledged_lag_bytes is not None:
            lag = _lag(output.acknowledged_lag_bytes, output.acknowledged_lag_seconds)
            yield Text(f"          acknowledged: lag {lag}")
        if output.failing is not None and output.failing_since is not None:
            since = format_moment(output.failing_since)
            yield Text(f"          cannot write since {since}, retrying: {output.failing}", style="bold red")
            yield Text(f"          {output.hint}")
    for forgotten, position in found.forgotten.items():
        text = f"{forgotten}: no longer in the config, but holds the slot at {position}"
        remedy = f"          penstock teardown --output {forgotten}"
        yield Text.assemble(("output    ", "bold"), (text, "yellow"), f"\n{remedy}")


def _supervisor(found: SupervisorStatus) -> Iterator[Text]:
    yield Text(f"          supervised by process {found.pid}, {count_of(found.restarts, 'restart')}")
    if found.last_end is not None:
        yield Text(f"          the run before {found.last_end}")
    if found.next_start is not None:
        yield Text(f"          starts again at {format_moment(found.next_start)}", style="yellow")


def _lasting(room: Room) -> str:
    left = f"{format_bytes(room.left)} left"
    if room.left and room.seconds_left is not None:
        left += f", for about {format_seconds(room.seconds_left)}"
    return f"{left} ({room.limit})"


def _slot(slot: SlotStatus) -> Iterator[str | tuple[str, str]]:
    yield f"{slot.name}: "
    if not slot.exists:
        yield ("does not exist", "yellow")
        return
    if slot.lost:
        yield ("lost: its changes can no longer be read", "bold red")
        return
    yield f"read by server process {slot.active_pid}" if slot.active_pid is not None else "not being read"
    yield f", at {slot.position}"
    if slot.retained_bytes is not None:
        yield f", retains {format_bytes(slot.retained_bytes)} of WAL on the server"
        if slot.room is not None and slot.room.is_short:
            yield (f"\n          {_lasting(slot.room)}", "bold red")
        elif slot.safe_bytes is None and slot.retained_bytes >= _MUCH_WAL:
            yield ("\n          only the server's disk is the limit: set max_slot_wal_keep_size", "yellow")
    if slot.wal_status == "unreserved":
        yield (", about to be lost", "bold red")
    if slot.waits_for_standby:
        yield ("\n          the server sends nothing until a standby in synchronized_standby_slots has it", "bold red")
        yield "\n          Start the standby, or remove it from that setting."


def _output(output: OutputStatus, *, is_running: bool) -> str:
    parts = [f"at {output.position or 'the beginning'}"]
    if output.error is not None:
        parts.append(f"stopped: {output.error}")
    elif not is_running:
        parts += ["paused"] if output.paused else []
    else:
        parts.append("paused" if output.paused else "waiting" if output.failing is not None else "streaming")
    if output.changes_per_second is not None:
        parts.append(f"{output.changes_per_second:,.0f} changes/s")
    return "; ".join([*parts, f"lag {_lag(output.lag_bytes, output.lag_seconds)}"])


def _lag(size: int | None, seconds: float | None) -> str:
    text = "unknown" if size is None else format_bytes(size)
    return text if seconds is None else f"{text}, {format_seconds(seconds)}"


def _tables(found: list[TableStatus], *, several: bool) -> Table:
    titles = ("table", *["output"] * several, "phase", "rows", "size", "position", "lag")
    table = make_table(*titles, right=("rows", "size", "lag"))
    for each in found:
        table.add_row(
            Text(one_line(each.table)),
            *[Text(each.output)] * several,
            Text(_phase(each), style=STYLES.get(each.phase, "yellow")),
            Text("" if each.rows is None else f"~{each.rows:,}"),
            Text("" if each.bytes is None else format_bytes(each.bytes)),
            Text(each.position or ""),
            Text("" if each.lag_bytes is None else format_bytes(each.lag_bytes)),
        )
    return table


def _indexes(found: list[IndexState]) -> Table:
    table = make_table("index", "table", "status", "quarantined", right=("quarantined",))
    for each in found:
        table.add_row(Text(each.index), Text(one_line(each.table)), index_status(each), Text(f"{each.quarantined:,}"))
    return table


def index_status(index: IndexState) -> Text:
    """The status of an index, and how far its backfill is."""
    progress = ""
    if index.backfill is not None:
        written = f"{index.backfill['documents_written']:,} documents written"
        progress = f" {index.backfill['fraction']:.0%}, {written}"
    return Text(f"{index.status}{progress}", style=STYLES.get(index.status, "yellow"))


def index_reason(index: IndexState) -> Text | None:
    """Why an index waits to be filled; None if it does not."""
    if index.status != IndexStatus.WANTED or not index.reason:
        return None
    return Text.assemble((index.index, "bold"), f" waits to be filled: {index.reason}")


def _phase(table: TableStatus) -> str:
    if table.copy is None:
        return table.phase
    resumed = table.copy.get("fraction_resumed")
    resumed = f" (resumed at {resumed:.0%})" if resumed else ""
    return f"{table.phase} {table.copy['fraction']:.0%}{resumed}, {table.copy['rows_done']:,} rows copied"


def _print_tables(config: Config, driver: LeaseInfo | None, located: Sequence[tuple[TableState, str | None]]) -> None:
    console = wide_console()
    found = [state for state, _ in located]
    if found:
        several, placed = len(config.outputs) > 1, any(location for _, location in located)
        table = make_table("table", *["output"] * several, "phase", "position", *["location"] * placed)
        for each, location in located:
            phase = Text(each.phase, style=STYLES.get(each.phase, "yellow"))
            output = [Text(each.output)] * several
            place = [Text(location or "", overflow="fold")] * placed
            table.add_row(Text(one_line(each.table)), *output, phase, Text(each.position or ""), *place)
        print_unwrapped(console, table)
        console.print()
    for each in found:
        for line in problem_lines(each, several=len(config.outputs) > 1):
            console.print(line, soft_wrap=True)
    console.print(_summary(config, driver, found), soft_wrap=True)


def _summary(config: Config, driver: LeaseInfo | None, found: Sequence[TableState]) -> Text:
    name = f"pipeline {config.pipeline.id}"
    if not found and driver is None:
        return Text(f"{name} has not run yet")
    ready = sum(each.phase == "ready" for each in found)
    count = f"{ready} of {count_of(len(found), 'table')} ready"
    if driver is None:
        return Text(f"{name} is not running; {count}", style="yellow")
    return Text(f"{name} is run by {driver}; {count}")
