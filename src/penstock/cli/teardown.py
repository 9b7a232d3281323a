"""`penstock teardown`: remove what a pipeline has made, on the source and here; the destination's data stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from psycopg import sql

from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured, existing_store, running
from penstock.config import Config, OutputChoice
from penstock.documents.polling import open_positions
from penstock.documents.quarantine import open_quarantine
from penstock.documents.relation_map import open_relation_map
from penstock.errors import ConfigError, LeaseHeld
from penstock.source import Role, connect
from penstock.source.faults import translated
from penstock.source.publications import inspect_publication
from penstock.source.slots import drop_slot, inspect_slot
from penstock.spool import Readers
from penstock.spool.folder import SpoolFolder
from penstock.state import Store


@dataclass(frozen=True, slots=True)
class _Step:
    """Something to remove."""

    what: str
    remove: Callable[[], object]


def teardown(
    config_path: ConfigPath = DEFAULT_PATH,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="Only this one of several destinations, also one that is not in the config any more.",
            metavar="NAME",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a pipeline: its slot, its DDL trigger, its publication, its spool and its state.

    Shows what it will remove, and asks. The publication goes only if manage_publication is true; what is at the
    destination, and indexes in a sink, stay. The pipeline must not run. With --output the others keep theirs, and the
    slot waits no longer for the one that is removed.
    """
    with configured(config_path) as config, ExitStack() as stack:
        readers = Readers(SpoolFolder(config.pipeline.spool.path)) if config.pipeline.spool.path.is_dir() else None
        registered = list(readers.positions()) if readers is not None else []
        names = list(dict.fromkeys([*(each.name for each in config.every_output), *registered]))
        if output is not None and output not in names:
            raise ConfigError(f"there is no output called {output!r}", hint=f"There are: {', '.join(names)}.")
        stores = {name: stack.enter_context(existing_store(config, _choice(config, name))) for name in names}
        _refuse_running(config, stores.values())
        if output is None:
            connection = stack.enter_context(connect(config.pipeline.source, Role.CATALOG))
            steps = _plan(config, stores, connection)
        else:
            steps = _plan_output(config, output, stores[output], readers)
        if not steps:
            what = f"output {output}" if output is not None else f"pipeline {config.pipeline.id}"
            typer.echo(f"{what} has left nothing to remove")
            return
        typer.echo("this will be removed:")
        for step in steps:
            typer.echo(f"  {step.what}")
        typer.echo("what is at the destination stays" + (", and so do indexes" if config.documents is not None else ""))
        if not yes:
            typer.confirm("go on?", abort=True)
        for store in stores.values():
            if store is not None:
                store.acquire_lease()
        for step in steps:
            step.remove()
            typer.echo(f"removed {step.what}")


def _choice(config: Config, name: str) -> OutputChoice:
    return OutputChoice(replace(config.pipeline, output=name), destination_type="")


def _plan(config: Config, stores: Mapping[str, Store | None], connection: psycopg.Connection[Any]) -> list[_Step]:
    """In this order: as long as there is a state, a teardown that was cut short can be run again."""
    settings = config.pipeline
    where = settings.source.location
    steps: list[_Step] = []
    if inspect_slot(connection, settings.slot) is not None:
        steps.append(_Step(f"slot {settings.slot} on {where}", lambda: drop_slot(connection, settings.slot)))
    if settings.trigger.exists(connection):
        what = f"ddl trigger {settings.trigger.name} and its functions on {where}"
        steps.append(_Step(what, lambda: settings.trigger.drop(connection)))
    if settings.manage_publication and inspect_publication(connection, settings.publication) is not None:
        what = f"publication {settings.publication} on {where}"
        steps.append(_Step(what, lambda: _drop_publication(connection, settings.publication)))
    # While the spool is there, its readers name outputs whose state is to be removed.
    for name, store in stores.items():
        steps += _plan_state(config, name, store)
    if settings.spool.path.is_dir():
        steps.append(_Step(f"spool {settings.spool.path}", lambda: _remove_spool(settings.spool.path)))
    return steps


def _plan_output(config: Config, name: str, store: Store | None, readers: Readers | None) -> list[_Step]:
    """The state first: an output that is registered without a state has no tables, and is made known again."""
    steps = _plan_state(config, name, store)
    if readers is not None and readers.position(name) is not None:
        steps.append(_Step(f"what the slot keeps for {name}", lambda: readers.unregister(name)))
    return steps


def _plan_state(config: Config, name: str, store: Store | None) -> list[_Step]:
    if store is None or not _has_state(store):
        return []
    owner = _choice(config, name).settings.output_id
    steps: list[_Step] = []
    if store.get_index_builds():
        what = f"what documents of {owner} were made of, and those that were refused, in {config.state_location}"
        polled = config.documents is not None and config.documents.polling is not None
        steps.append(_Step(what, lambda: _forget_documents(config.state_url, owner, polled=polled)))
    return [*steps, _Step(f"state of pipeline {owner} in {config.state_location}", store.delete_pipeline_state)]


def _forget_documents(state_url: str, owner: str, *, polled: bool) -> None:
    if polled:
        with closing(open_positions(state_url, owner)) as positions:
            positions.forget()
    with closing(open_relation_map(state_url, owner)) as relations:
        relations.prepare([])
    with closing(open_quarantine(state_url, owner)) as quarantine:
        for index in quarantine.counts():
            quarantine.drop(index)


def _has_state(store: Store) -> bool:
    return bool(
        store.get_table_replication_states()
        or store.get_stored_progress()
        or store.get_commands()
        or store.get_index_builds()
    )


def _refuse_running(config: Config, stores: Iterable[Store | None]) -> None:
    for driver in (running(store) for store in stores if store is not None):
        if driver is not None:
            raise LeaseHeld(f"pipeline {config.pipeline.id} runs: it is driven by {driver}", hint="Stop it first.")


def _drop_publication(connection: psycopg.Connection[Any], name: str) -> None:
    with translated(connection, f"drop publication {name!r}"):
        connection.execute(sql.SQL("drop publication if exists {}").format(sql.Identifier(name)))


def _remove_spool(path: Path) -> None:
    """Only what a spool consists of: somebody may keep other things in the folder."""
    folder = SpoolFolder(path)
    changes = (folder.log, folder.segments, folder.schemas, folder.open)
    for each in (*changes, folder.readers, folder.holds, folder.comparisons):
        shutil.rmtree(each, ignore_errors=True)
    for file in (folder.lineage, folder.lock, folder.status, folder.released):
        file.unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
