"""Options that several commands take, and the config or source that they select."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.config import Config, load_config
from penstock.errors import ConfigError, PenstockError
from penstock.source import SourceSettings

DEFAULT_PATH = Path("penstock.toml")

ConfigPath = Annotated[
    Path,
    # `load_config` reports a file that cannot be read.
    typer.Option("--config", "-c", envvar="PENSTOCK_CONFIG", help="Config file.", metavar="FILE", readable=False),
]
OptionalConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="PENSTOCK_CONFIG",
        help="Config file of a pipeline, instead of --url. Default: ./penstock.toml if it exists.",
        metavar="FILE",
        show_default=False,
        readable=False,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        envvar="PENSTOCK_URL",
        help="Source database, like postgresql://user@host:5432/database. Pass a password in PENSTOCK_URL, PGPASSWORD "
        "or .pgpass: other users of this machine can read command lines.",
        metavar="URL",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors to stderr.")]
OutputName = Annotated[
    str | None,
    typer.Option("--output", help="Name of one output. Default: all outputs.", metavar="NAME"),
]
Publication = Annotated[str | None, typer.Option(help="Publication to read.", metavar="NAME")]
Slot = Annotated[str | None, typer.Option(help="Replication slot to read from.", metavar="NAME")]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--table", help="Table or pattern, like public.orders or 'sales.*'. Can be repeated.", metavar="PATTERN"
    ),
]


def configured_path(context: typer.Context) -> Path:
    """The config file of a command whose arguments the shell is completing."""
    return Path(context.params.get("config_path") or os.environ.get("PENSTOCK_CONFIG") or DEFAULT_PATH)


def complete_table(context: typer.Context, incomplete: str) -> list[str]:
    """Names of tables for shell completion, as the last run saw them; empty if no config or state can be read."""
    # Imported here: most commands start without it.
    from penstock.operations.stores import existing_store, table_names

    names: set[str] = set()
    try:
        config = load_config(configured_path(context))
        for output in config.outputs:
            with existing_store(config, output) as store:
                names |= set() if store is None else set(table_names(config, store).values())
    except (PenstockError, OSError):
        return []
    return sorted(name for name in names if name.startswith(incomplete))


TableNames = Annotated[
    list[str],
    typer.Argument(help="Tables, like public.orders.", metavar="TABLE", autocompletion=complete_table),
]


@contextmanager
def configured(path: Path) -> Iterator[Config]:
    """The config; errors inside do not show values that it took from the environment."""
    config = load_config(path)
    with config.discreet():
        yield config


@dataclass(frozen=True, slots=True)
class ChosenSource:
    """A source, and the config that it is from, if it is from one."""

    settings: SourceSettings
    config: Config | None = None


@contextmanager
def chosen_source(context: typer.Context, url: str | None, config_path: Path | None) -> Iterator[ChosenSource]:
    """The source from `--url`, `--config`, `PENSTOCK_URL`, `PENSTOCK_CONFIG` or `./penstock.toml`, in this order."""
    if url is not None and config_path is not None:
        if _is_typed(context, "url") and _is_typed(context, "config_path"):
            raise typer.BadParameter("give --url or --config, not both")
        url, config_path = (None, config_path) if _is_typed(context, "config_path") else (url, None)
    if url is None and config_path is None and DEFAULT_PATH.exists():
        config_path = DEFAULT_PATH
    if url is not None:
        yield ChosenSource(SourceSettings(url))
    elif config_path is not None:
        with configured(config_path) as config:
            yield ChosenSource(config.pipeline.source, config)
    else:
        raise ConfigError(
            "no database given: there is neither a --url nor a config file",
            hint="Give --url, set PENSTOCK_URL, or name a config file with -c; `penstock init` writes one.",
        )


def _is_typed(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
