"""`penstock init`: inspect a database, and write the config of a pipeline for it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import psycopg
import typer
from rich.text import Text

from penstock.cli.display import echo, make_table, wide_console
from penstock.cli.options import DEFAULT_PATH, Url
from penstock.config import Config, load_config
from penstock.config.template import (
    Choices,
    PublicUrl,
    password_variable,
    public_url,
    render_config,
    usable_id,
    with_password,
)
from penstock.config.units import count_of, format_bytes
from penstock.errors import AuthenticationFailed, ConfigError, PenstockError
from penstock.operations.readiness import source_request
from penstock.schema import ReplicaIdentity
from penstock.source import Role, SourceSettings, connect
from penstock.source.catalog import TableSize, load_sizes, load_tables
from penstock.source.columns import CatalogTable
from penstock.source.faults import translated
from penstock.source.patterns import TableName, TablePattern, select_tables
from penstock.source.preflight import run_preflight
from penstock.source.publications import find_tables

MOST_TABLES = 40
"""Further tables are only counted."""


class Kind(StrEnum):
    """Destinations that need at most a path."""

    DELTA = "delta"
    PARQUET = "parquet"
    STDOUT = "stdout"


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table that can be replicated."""

    name: TableName
    catalog: CatalogTable
    size: TableSize | None

    @property
    def identity(self) -> str:
        """How the server identifies its rows."""
        identity = self.catalog.row_identity
        match identity.kind:
            case ReplicaIdentity.FULL:
                return "full"
            case ReplicaIdentity.INDEX:
                return "index"
            case ReplicaIdentity.DEFAULT if identity.attnums:
                return "primary key"
            case _:
                return "none"


def init(
    url: Url = None,
    config_path: Annotated[
        Path, typer.Option("--config", "-c", help="File to write; must not exist.", metavar="FILE")
    ] = DEFAULT_PATH,
    pipeline_id: Annotated[
        str | None, typer.Option("--id", help="Name of the pipeline. Default: name of the database.", metavar="NAME")
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--table", help="Table or pattern to replicate. Can be repeated. Default: all tables.", metavar="PATTERN"
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Pattern of tables to exclude. Can be repeated.", metavar="PATTERN"),
    ] = None,
    destination: Annotated[Kind | None, typer.Option(help="Type of the destination.")] = None,
    path: Annotated[str | None, typer.Option(help="Folder or s3://… URL of the destination.", metavar="PATH")] = None,
    master: Annotated[
        str | None, typer.Option(help='Spark master: local[*], spark://…, or "none" for no Spark.', metavar="MASTER")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use defaults for missing options.")] = False,
) -> None:
    """Write a config file for a database: connect, list its tables, and ask for missing options.

    Changes nothing on the server, and overwrites no file. A password is never written to the file: the config refers
    to an environment variable. Without a terminal, or with --yes, it asks nothing.

    Examples:

        penstock init
        export PENSTOCK_URL=postgresql://me:…@db.example/shop
        penstock init --table 'sales.*' --destination delta --path lake --yes
    """
    if config_path.exists():
        raise ConfigError(
            f"{str(config_path)!r} already exists", hint="Name another file with -c, or move this one away first."
        )
    ask = _Ask(sys.stdin.isatty() and not yes)
    url = url or ask.text("source URL, like postgresql://user@host:5432/database", "--url or PENSTOCK_URL")
    url, connection = _connect(url, ask)
    with connection:
        database = connection.info.dbname
        found = _find(connection)
    location = SourceSettings(url).location
    echo(f"connected to {location}: {count_of(len(found), 'table')}")
    _show(found)
    chosen = _choose_tables(found, tables, exclude or [], ask)
    name = pipeline_id or ask.text("name of the pipeline", "--id", default=usable_id(database))
    variable = password_variable(name)
    public = public_url(url, variable)
    kind = destination or Kind(ask.choice("type of the destination", [each.value for each in Kind], Kind.DELTA.value))
    choices = Choices(
        pipeline_id=name,
        url=public.text,
        password_variable=variable if public.password is not None else None,
        tables=tuple(chosen),
        exclude=tuple(exclude or ()),
        destination=kind,
        path=None if kind is Kind.STDOUT else path or ask.text("path (a folder or s3://…)", "--path", default="lake"),
        master=master or _default_master(),
    )
    config = _write(config_path, choices, public)
    _say_next(config_path, choices, public, config)


class _Ask:
    """Asks in a terminal, and uses defaults elsewhere."""

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive

    def text(self, question: str, option: str, default: str | None = None) -> str:
        if self.interactive:
            return str(typer.prompt(question, default=default)).strip()
        if default is None:
            raise ConfigError(f"missing: {question}", hint=f"Give it with {option}.")
        return default

    def choice(self, question: str, known: Sequence[str], default: str) -> str:
        while True:
            answer = self.text(f"{question} ({', '.join(known)})", "", default=default)
            if answer in known:
                return answer
            echo(f"choose one of {', '.join(known)}")

    def password(self, user: str) -> str:
        return str(typer.prompt(f"password for {user}", hide_input=True))


def _connect(url: str, ask: _Ask) -> tuple[str, psycopg.Connection[Any]]:
    """A connection, and the URL, with the password if one was typed."""
    settings = SourceSettings(url)
    try:
        return url, connect(settings, Role.CHECK)
    except AuthenticationFailed:
        given = settings.parameters()
        if not ask.interactive or "password" in given:
            raise
    password = ask.password(given.get("user") or os.environ.get("PGUSER", "") or "the user")
    typed = with_password(url, password)
    return typed, connect(SourceSettings(typed), Role.CHECK)


def _find(connection: psycopg.Connection[Any]) -> list[FoundTable]:
    names = find_tables(connection, ["*"])
    oids = _oids(connection, names)
    catalogs = load_tables(connection, list(oids.values()))
    sizes = load_sizes(connection, list(catalogs))
    found = [FoundTable(name, catalogs[oid], sizes.get(oid)) for name, oid in oids.items() if oid in catalogs]
    if not found:
        raise ConfigError(
            "this database has no tables to replicate",
            hint="Check the database name, and that the role may read its tables.",
        )
    return found


def _oids(connection: psycopg.Connection[Any], names: Sequence[TableName]) -> dict[TableName, int]:
    query = (
        "select n.nspname, c.relname, c.oid::int8 from pg_catalog.pg_class c"
        " join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.relkind in ('r', 'p')"
    )
    with translated(connection, "list the tables"):
        known = {TableName(namespace, name): oid for namespace, name, oid in connection.execute(query).fetchall()}
    return {name: known[name] for name in names if name in known}


def _show(found: Sequence[FoundTable]) -> None:
    table = make_table("table", "size", "rows", "replica identity", right=("size", "rows"))
    for each in found[:MOST_TABLES]:
        size = each.size
        table.add_row(
            Text(str(each.name)),
            Text("" if size is None else format_bytes(size.bytes)),
            Text("" if size is None or size.rows is None else f"~{size.rows:,}"),
            Text(each.identity, style="bold red" if each.identity == "none" else ""),
        )
    console = wide_console()
    console.print(table)
    if len(found) > MOST_TABLES:
        console.print(f"… and {len(found) - MOST_TABLES} more")
    console.print()


def _choose_tables(
    found: Sequence[FoundTable], given: Sequence[str] | None, exclude: Sequence[str], ask: _Ask
) -> list[str]:
    names = [each.name for each in found]
    while True:
        answer = given or re.split(r"[,\s]+", ask.text("tables (names or patterns)", "--table", default="*.*"))
        patterns = [each for each in answer if each]
        try:
            chosen = select_tables(names, patterns, exclude)
            lost = [each for each in patterns if not any(TablePattern(each).matches(name) for name in names)]
            if not chosen or lost:
                raise ConfigError(
                    f"no table matches {', '.join(lost) or 'these patterns'}", hint="Write schema.table, or sales.*"
                )
        except ConfigError as error:
            if given or not ask.interactive:
                raise
            echo(f"{error.message}; {error.hint}")
            continue
        without = [each for each in found if each.name in chosen and each.identity == "none"]
        if without:
            listed = ", ".join(str(each.name) for each in without[:5]) + (", …" if len(without) > 5 else "")
            echo(
                f"warning: {count_of(len(without), 'table')} without a replica identity, left out because publishing "
                f"would make the server reject updates and deletes on such tables: {listed}"
            )
        return patterns


def _default_master() -> str:
    """Spark, if it is installed and has a Java; otherwise "none"."""
    # Imported here: commands without Spark start without it.
    from penstock.spark.java import require_spark

    try:
        require_spark()
    except PenstockError as error:
        echo(f'{error.message}: the config uses master = "none", which needs no Spark')
        return "none"
    return "local[*]"


def _write(path: Path, choices: Choices, public: PublicUrl) -> Config:
    """Write the file and return what it says; remove it again if it is not valid."""
    try:
        with open(path, "x") as file:
            file.write(render_config(choices))
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}", hint="Name another file with -c.") from None
    variable = {} if choices.password_variable is None else {choices.password_variable: public.password or ""}
    try:
        config = load_config(path, {**os.environ, **variable})
        for output in config.outputs:
            config.create_destination(output)
    except BaseException:
        path.unlink()
        raise
    return config


def _say_next(path: Path, choices: Choices, public: PublicUrl, config: Config) -> None:
    echo(f"wrote {path}")
    critical = run_preflight(config.pipeline.source, source_request(config)).critical
    if critical:
        echo(f"the server is not ready: {critical[0].what}; `penstock check` lists every finding with its remedy")
    option = "" if path == DEFAULT_PATH else f" -c {path}"
    echo("next:")
    if choices.password_variable is not None:
        hint = ""
        if public.password != config.pipeline.source.parameters().get("password"):
            hint = "   # percent-encode special characters, as in a URL"
        echo(f"  export {choices.password_variable}=…{hint}")
    for command, what in (
        ("check", "is the server ready?"),
        ("run --plan", "what would be created and copied"),
        ("run", "copy, then apply every change"),
    ):
        echo(f"  penstock {command + option:<{12 + len(option)}}  # {what}")
