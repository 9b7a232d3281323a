"""Commands to a running pipeline, passed through the state store: pause, resume, resync, rollback, rebuild."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from penstock.config import Config, DocumentsChoice, OutputChoice
from penstock.errors import PenstockError, SlotLost, SlotMissing, SourceError
from penstock.operations.stores import choose_tables, chosen_outputs, every_chosen_output, existing_store, running
from penstock.source import Role, connect
from penstock.source.slots import inspect_slot, require_usable
from penstock.state import Command, CommandKind, Store
from penstock.stream import OnLostSlot

WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Sent:
    """A command to one output, as it stands after waiting for the answer."""

    output: str
    command: Command
    is_running: bool
    """False: the command waits in the store until the pipeline starts."""


def send_command(
    config: Config,
    kind: CommandKind,
    *,
    output: str | None = None,
    tables: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    wait: float = WAIT_SECONDS,
    stores: Mapping[str, Store] | None = None,
    requested_by: str | None = None,
) -> Iterator[Sent]:
    """Send a command to an output, or to all: a command about tables to those of tables only.

    `stores` are those of outputs that run in this process, by name. `requested_by` is who asks, if not this user.
    """
    chosen: Sequence[OutputChoice | DocumentsChoice]
    chosen = chosen_outputs(config, output) if tables else every_chosen_output(config, output)
    for each in chosen:
        opened = (stores or {}).get(each.name)
        with existing_store(config, each) if opened is None else nullcontext(opened) as store:
            if store is None:
                raise PenstockError(
                    f"pipeline {config.pipeline.id} has not run yet: there is nothing to {kind.value.split('_')[0]}",
                    hint="Start it with `penstock run`.",
                )
            driver = running(store)
            if driver is None and kind is CommandKind.RESYNC:
                _require_slot(config, store)
            chosen_tables = choose_tables(config, store, tables)
            command = store.add_command(kind, chosen_tables, options=dict(options or {}), requested_by=requested_by)
            if driver is not None:
                command = _await_answer(store, command, wait)
        yield Sent(each.name, command, driver is not None)


def _require_slot(config: Config, store: Store) -> None:
    """Raise if the next start, which would carry out the command, is refused because the slot is lost."""
    settings = config.pipeline
    if settings.on_lost_slot is OnLostSlot.RECREATE or not store.needs_every_change:
        return
    try:
        with connect(settings.source, Role.CATALOG) as connection:
            require_usable(inspect_slot(connection, settings.slot), settings.slot, database=connection.info.dbname)
    except (SlotMissing, SlotLost):
        raise
    except SourceError:
        return  # whether the slot is lost shows at the start


def _await_answer(store: Store, command: Command, seconds: float) -> Command:
    """The command as it stands when it is answered, or when the time is over."""
    deadline = time.monotonic() + seconds
    while not command.answered and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        command = store.get_command(command.number) or command
    return command
