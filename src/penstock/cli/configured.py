"""What the commands with a config file share: the option, and the state of a pipeline that may never have run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from psycopg.rows import tuple_row

from penstock.config import Config, DocumentsChoice, OutputChoice, load_config
from penstock.errors import ConfigError, ServerUnavailable, SourceError
from penstock.source import Role, SourceSettings, connect
from penstock.source.faults import translated
from penstock.state import LeaseInfo, Store
from penstock.state.postgres import DEFAULT_SCHEMA

ConfigPath = Annotated[
    Path,
    # Whether it can be read is told by whoever reads it.
    typer.Option("--config", "-c", envvar="PENSTOCK_CONFIG", help="The config file.", metavar="FILE", readable=False),
]
DEFAULT_PATH = Path("penstock.toml")
OutputName = Annotated[
    str | None,
    typer.Option("--output", help="One of several destinations, by its name; all if none is named.", metavar="NAME"),
]
TableNames = Annotated[list[str], typer.Argument(help="Tables, like public.orders.", metavar="TABLE")]


@contextmanager
def configured(path: Path) -> Iterator[Config]:
    """The config; errors inside do not show what it took from the environment."""
    config = load_config(path)
    with config.discreet():
        try:
            yield config
        except ServerUnavailable as error:
            error.hint = ServerUnavailable.hint_for_one_try
            raise


@contextmanager
def existing_store(config: Config, output: OutputChoice | DocumentsChoice | None = None) -> Iterator[Store | None]:
    """The store of an output (of the first, if none is named), if there is one: looking must not create it."""
    if not _is_there(config):
        yield None
        return
    with config.open_store(output) as store:
        yield store


def chosen_outputs(config: Config, name: str | None) -> Sequence[OutputChoice]:
    """The output of tables that a person named, or all of them."""
    if config.documents is not None and (name == config.documents.name or not config.outputs):
        raise ConfigError(
            "search indexes have no tables of their own",
            hint="`penstock index` has commands for them: list, rebuild, diff and others.",
        )
    return config.outputs if name is None else (config.output(name),)


def every_chosen_output(config: Config, name: str | None) -> Sequence[OutputChoice | DocumentsChoice]:
    """The output that a person named, of tables or of documents, or all of them."""
    if config.documents is not None and name == config.documents.name:
        return (config.documents,)
    return config.every_output if name is None else (config.output(name),)


def require_shared_state(config: Config) -> None:
    """Other processes cannot see a state in memory."""
    if config.state_url == "memory:":
        raise ConfigError(
            "the state of this pipeline is in the memory of the process that runs it",
            hint="Set state.url to a file or a database to use this command.",
        )


def running(store: Store) -> LeaseInfo | None:
    """Who drives the pipeline; None if nobody does."""
    lease = store.get_lease()
    return None if lease is None or lease.gone else lease


def table_names(config: Config, store: Store) -> dict[int, str]:
    """The names of the tables that have a state: from stored schemas, else from the source, if that answers."""
    names = {version.table_id: str(version.schema) for version in store.get_table_schemas()}
    unnamed = [table_id for table_id in store.get_table_replication_states() if table_id not in names]
    if unnamed:
        try:
            names |= _ask_names(config.pipeline.source, unnamed)
        except SourceError:
            names |= {table_id: f"oid {table_id}" for table_id in unnamed}
    return names


def _ask_names(source: SourceSettings, table_ids: list[int]) -> dict[int, str]:
    query = (
        "select c.oid::int8, n.nspname || '.' || c.relname from pg_catalog.pg_class c"
        " join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.oid = any(%s::oid[])"
    )
    with connect(source, Role.CATALOG) as connection, translated(connection, "ask for the names of tables"):
        found = dict(_rows(connection, query, [table_ids]))
    return {table_id: found.get(table_id, f"oid {table_id}") for table_id in table_ids}


def _is_there(config: Config) -> bool:
    if config.state_file is not None:
        return config.state_file.exists()
    if config.state_url == "memory:":
        return False
    state = SourceSettings(config.state_url)
    with connect(state, Role.STATE) as connection, translated(connection, "look for the state"):
        return bool(_rows(connection, "select 1 where to_regnamespace(%s) is not null", [DEFAULT_SCHEMA]))


def _rows(connection: Any, query: str, parameters: list[Any]) -> list[Any]:
    with connection.cursor(row_factory=tuple_row) as cursor:
        return cursor.execute(query.encode(), parameters).fetchall()
