"""`penstock teardown`: remove what a pipeline has made, on the source and here; the destination's data stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from psycopg import sql

from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured, existing_store, running
from penstock.config import Config
from penstock.errors import LeaseHeld
from penstock.source import Role, connect
from penstock.source.faults import translated
from penstock.source.publications import inspect_publication
from penstock.source.slots import drop_slot, inspect_slot
from penstock.spool.folder import SpoolFolder
from penstock.state import Store


@dataclass(frozen=True, slots=True)
class _Step:
    """Something to remove."""

    what: str
    remove: Callable[[], object]


def teardown(
    config_path: ConfigPath = DEFAULT_PATH,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a pipeline: its slot, its publication, its spool and its state.

    Shows what it will remove, and asks. The publication goes only if manage_publication is true; what is at the
    destination stays. The pipeline must not run.
    """
    with (
        configured(config_path) as config,
        existing_store(config) as store,
        connect(config.pipeline.source, Role.CATALOG) as connection,
    ):
        _refuse_running(config, store)
        steps = _plan(config, store, connection)
        if not steps:
            typer.echo(f"pipeline {config.pipeline.id} has left nothing to remove")
            return
        typer.echo("this will be removed:")
        for step in steps:
            typer.echo(f"  {step.what}")
        typer.echo("what is at the destination stays")
        if not yes:
            typer.confirm("go on?", abort=True)
        if store is not None:
            store.acquire_lease()
        for step in steps:
            step.remove()
            typer.echo(f"removed {step.what}")


def _plan(config: Config, store: Store | None, connection: psycopg.Connection[Any]) -> list[_Step]:
    """In this order: as long as there is a state, a teardown that was cut short can be run again."""
    settings = config.pipeline
    where = settings.source.location
    steps: list[_Step] = []
    if inspect_slot(connection, settings.slot) is not None:
        steps.append(_Step(f"slot {settings.slot} on {where}", lambda: drop_slot(connection, settings.slot)))
    if settings.manage_publication and inspect_publication(connection, settings.publication) is not None:
        what = f"publication {settings.publication} on {where}"
        steps.append(_Step(what, lambda: _drop_publication(connection, settings.publication)))
    if settings.spool.path.is_dir():
        steps.append(_Step(f"spool {settings.spool.path}", lambda: _remove_spool(settings.spool.path)))
    if store is not None:
        what = f"state of pipeline {settings.id} in {config.state_location}"
        if _has_state(store):
            steps.append(_Step(what, store.delete_pipeline_state))
    return steps


def _has_state(store: Store) -> bool:
    return bool(store.get_table_replication_states() or store.get_stored_progress() or store.get_commands())


def _refuse_running(config: Config, store: Store | None) -> None:
    driver = None if store is None else running(store)
    if driver is not None:
        raise LeaseHeld(f"pipeline {config.pipeline.id} runs: it is driven by {driver}", hint="Stop it first.")


def _drop_publication(connection: psycopg.Connection[Any], name: str) -> None:
    with translated(connection, f"drop publication {name!r}"):
        connection.execute(sql.SQL("drop publication if exists {}").format(sql.Identifier(name)))


def _remove_spool(path: Path) -> None:
    """Only what a spool consists of: somebody may keep other things in the folder."""
    folder = SpoolFolder(path)
    for each in (folder.log, folder.segments, folder.schemas, folder.readers, folder.holds, folder.open):
        shutil.rmtree(each, ignore_errors=True)
    for file in (folder.lineage, folder.lock):
        file.unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
