"""Removing what a pipeline has created, on the source and on this machine; data at the destination stays."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg

from penstock.config import Config, OutputChoice
from penstock.documents.relation_map import open_relation_map
from penstock.errors import ConfigError
from penstock.operations.stores import existing_store, require_stopped
from penstock.source import Role, connect
from penstock.source.publications import drop_publication, inspect_publication
from penstock.source.slots import drop_slot, inspect_slot
from penstock.spool import Readers
from penstock.spool.folder import SpoolFolder
from penstock.state import Store


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to remove."""

    what: str
    remove: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Teardown:
    """What there is to remove."""

    steps: list[Step]
    stores: list[Store]

    def run(self) -> Iterator[Step]:
        """Acquire the leases and carry out the steps; yields each one when it is done."""
        for store in self.stores:
            store.acquire_lease()
        for step in self.steps:
            step.remove()
            yield step


@contextmanager
def planned_teardown(config: Config, output: str | None = None) -> Iterator[Teardown]:
    """Find what there is to remove, of the whole pipeline or of one output. Refuses a pipeline that runs."""
    with ExitStack() as stack:
        readers = Readers(SpoolFolder(config.pipeline.spool.path)) if config.pipeline.spool.path.is_dir() else None
        registered = list(readers.positions()) if readers is not None else []
        names = list(dict.fromkeys([*(each.name for each in config.every_output), *registered]))
        if output is not None and output not in names:
            raise ConfigError(f"there is no output {output!r}", hint=f"Known outputs: {', '.join(names)}.")
        stores = {name: stack.enter_context(existing_store(config, _choice(config, name))) for name in names}
        existing = [store for store in stores.values() if store is not None]
        for store in existing:
            require_stopped(config, store, hint="Stop it first.")
        if output is None:
            connection = stack.enter_context(connect(config.pipeline.source, Role.CATALOG))
            steps = _plan(config, stores, connection)
        else:
            steps = _plan_output(config, output, stores[output], readers)
        yield Teardown(steps, existing)


def _choice(config: Config, name: str) -> OutputChoice:
    return OutputChoice(replace(config.pipeline, output=name), destination_type="")


def _plan(config: Config, stores: Mapping[str, Store | None], connection: psycopg.Connection[Any]) -> list[Step]:
    """In this order: while the state exists, an interrupted teardown can be repeated."""
    settings = config.pipeline
    where = settings.source.location
    steps: list[Step] = []
    if inspect_slot(connection, settings.slot) is not None:
        steps.append(Step(f"slot {settings.slot} on {where}", lambda: drop_slot(connection, settings.slot)))
    if settings.trigger.exists(connection):
        what = f"DDL trigger {settings.trigger.name} and its functions on {where}"
        steps.append(Step(what, lambda: settings.trigger.drop(connection)))
    if settings.manage_publication and inspect_publication(connection, settings.publication) is not None:
        what = f"publication {settings.publication} on {where}"
        steps.append(Step(what, lambda: drop_publication(connection, settings.publication)))
    # The spool is removed last: its readers name the outputs whose state has to be removed.
    for name, store in stores.items():
        steps += _plan_state(config, name, store)
    if settings.spool.path.is_dir():
        steps.append(Step(f"spool {settings.spool.path}", lambda: _remove_spool(settings.spool.path)))
    return steps


def _plan_output(config: Config, name: str, store: Store | None, readers: Readers | None) -> list[Step]:
    """The state first: an output that is registered without a state has no tables, and is registered again."""
    steps = _plan_state(config, name, store)
    if readers is not None and readers.position(name) is not None:
        steps.append(
            Step(f"stored position of output {name}, for which the slot retains WAL", lambda: readers.unregister(name))
        )
    return steps


def _plan_state(config: Config, name: str, store: Store | None) -> list[Step]:
    if store is None or not _has_state(store):
        return []
    owner = _choice(config, name).settings.output_id
    steps: list[Step] = []
    if store.get_index_builds():
        what = f"relation map of {owner} in {config.state_location}"
        steps.append(Step(what, lambda: _forget_relations(config.state_url, owner)))
    return [*steps, Step(f"state of pipeline {owner} in {config.state_location}", store.delete_pipeline_state)]


def _forget_relations(state_url: str, owner: str) -> None:
    with closing(open_relation_map(state_url, owner)) as relations:
        relations.prepare([])


def _has_state(store: Store) -> bool:
    return bool(
        store.get_table_replication_states()
        or store.get_stored_progress()
        or store.get_commands()
        or store.get_index_builds()
    )


def _remove_spool(path: Path) -> None:
    """Remove only files of the spool: the folder may contain others."""
    folder = SpoolFolder(path)
    folder.discard()
    shutil.rmtree(folder.comparisons, ignore_errors=True)
    for file in (folder.lock, folder.status, folder.supervisor, folder.verified):
        file.unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()
