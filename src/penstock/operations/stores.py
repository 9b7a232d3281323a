"""The stored state of a pipeline that may never have run: its stores, who runs it, and the names of its tables."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from psycopg.rows import tuple_row

from penstock.config import Config, DocumentsChoice, OutputChoice
from penstock.errors import ConfigError, LeaseHeld, SourceError
from penstock.source import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.source.patterns import TableName, select_tables
from penstock.state import LeaseInfo, Store
from penstock.state.postgres import DEFAULT_SCHEMA

_CONNECT_SECONDS = 5.0


@contextmanager
def existing_store(config: Config, output: OutputChoice | DocumentsChoice | None = None) -> Iterator[Store | None]:
    """The store of an output (of the first by default), or None if there is none: reading must not create one."""
    if not _exists(config):
        yield None
        return
    with config.open_store(output) as store:
        yield store


def chosen_outputs(config: Config, name: str | None) -> Sequence[OutputChoice]:
    """The tables output with this name, or all of them."""
    if config.documents is not None and (name == config.documents.name or not config.outputs):
        raise ConfigError(
            "this command is for tables, and search indexes have none of their own",
            hint="Use the commands of `penstock index` instead: list, rebuild, diff and others.",
        )
    return config.outputs if name is None else (config.output(name),)


def every_chosen_output(config: Config, name: str | None) -> Sequence[OutputChoice | DocumentsChoice]:
    """The output with this name, of tables or of documents, or all of them."""
    if config.documents is not None and name == config.documents.name:
        return (config.documents,)
    return config.every_output if name is None else (config.output(name),)


def require_shared_state(config: Config) -> None:
    """Refuse a state in memory, which other processes cannot see."""
    if config.state_url == "memory:":
        raise ConfigError(
            "this pipeline keeps its state in memory, where other processes cannot see it",
            hint="Set state.url to a file or a database to use this command.",
        )


def running(store: Store) -> LeaseInfo | None:
    """The process that runs the pipeline, or None."""
    lease = store.get_lease()
    return None if lease is None or lease.gone else lease


def require_stopped(config: Config, store: Store, *, hint: str | None = None) -> None:
    """Raise `LeaseHeld` if a process runs the pipeline."""
    driver = running(store)
    if driver is not None:
        raise LeaseHeld(
            f"pipeline {config.pipeline.id} is already running: {driver}",
            hint=hint,
            host=driver.host,
            pid=driver.pid,
            since=driver.since,
            expires=driver.expires,
        )


def table_names(config: Config, store: Store) -> dict[int, str]:
    """The names of the tables that have a state, as the pipeline last saw them; else from the source if it answers."""
    found = _known_names(config, store)
    return {each: str(found.get(each, f"oid {each}")) for each in store.get_table_replication_states()}


def _known_names(config: Config, store: Store) -> dict[int, TableName]:
    schemas = ((version.table_id, version.schema) for version in store.get_table_schemas())
    # A schema has the name that a table had at its last change.
    known = {table_id: TableName(schema.namespace, schema.name) for table_id, schema in schemas}
    known |= store.get_table_names()
    table_ids = list(store.get_table_replication_states())
    unnamed = [table_id for table_id in table_ids if table_id not in known]
    if unnamed:
        known |= _load_names(config.pipeline.source, unnamed)
    return {table_id: known[table_id] for table_id in table_ids if table_id in known}


def choose_tables(config: Config, store: Store, wanted: Sequence[str]) -> list[str]:
    """The tables that match names or patterns, by the names that the pipeline uses; `orders` is `public.orders`."""
    stored = _known_names(config, store)
    if wanted and (running(store) is None or not set(wanted) <= set(map(str, stored.values()))):
        # Tables may have been renamed since the pipeline last looked.
        stored |= _load_names(config.pipeline.source, list(store.get_table_replication_states()))
    known = sorted(stored.values())
    names = [str(name) for name in known]
    chosen: dict[str, None] = {}
    for each in wanted:
        # An exact name, as `penstock tables` prints it, comes before a pattern.
        found = [each] if each in names else [str(table) for table in select_tables(known, [each])]
        if not found:
            near = difflib.get_close_matches(each, names, n=1)
            raise ConfigError(
                f"pipeline {config.pipeline.id} has no table {each!r}"
                + (f"; did you mean {near[0]!r}?" if near else ""),
                hint="`penstock tables` lists them.",
            )
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _load_names(source: SourceSettings, table_ids: list[int]) -> dict[int, TableName]:
    """The current names of the tables that exist; none if the source does not answer."""
    query = (
        "select c.oid::int8, n.nspname, c.relname from pg_catalog.pg_class c"
        " join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.oid = any(%s::oid[])"
    )
    quick = replace(source, connect_timeout=_CONNECT_SECONDS)
    try:
        with connect(quick, Role.CATALOG) as connection, translated(connection, "read the names of tables"):
            return {oid: TableName(*name) for oid, *name in _rows(connection, query, [table_ids])}
    except SourceError:
        return {}


def _exists(config: Config) -> bool:
    if config.state_file is not None:
        return config.state_file.exists()
    if config.state_url == "memory:":
        return False
    state = SourceSettings(config.state_url)
    with connect(state, Role.STATE) as connection, translated(connection, "find the state"):
        return bool(_rows(connection, "select 1 where to_regnamespace(%s) is not null", [DEFAULT_SCHEMA]))


def _rows(connection: Any, query: str, parameters: list[Any]) -> list[Any]:
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(query.encode(), parameters).fetchall()
