"""Which database a look at a source is about: `--url`, or what a config file says.

The first of these counts: `--url`, `--config`, `PENSTOCK_URL`, `PENSTOCK_CONFIG`, `./penstock.toml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from penstock.cli.configured import DEFAULT_PATH
from penstock.config import load_config
from penstock.errors import ConfigError, ServerUnavailable
from penstock.source import SourceSettings


@dataclass(frozen=True, slots=True)
class ChosenSource:
    """A source, and what a config says of it; without a config the rest is empty."""

    settings: SourceSettings
    publication: str | None = None
    slot: str | None = None
    tables: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    manage_publication: bool = False


@contextmanager
def chosen_source(context: typer.Context, url: str | None, config_path: Path | None) -> Iterator[ChosenSource]:
    """The source that was meant; errors inside promise nothing that a single look does not do."""
    if url is not None and config_path is not None:
        if _is_typed(context, "url") and _is_typed(context, "config_path"):
            raise typer.BadParameter("give --url or --config, not both")
        url, config_path = (None, config_path) if _is_typed(context, "config_path") else (url, None)
    if url is None and config_path is None and DEFAULT_PATH.exists():
        config_path = DEFAULT_PATH
    try:
        if url is not None:
            yield ChosenSource(SourceSettings(url))
        elif config_path is not None:
            config = load_config(config_path)
            with config.discreet():
                settings = config.pipeline
                yield ChosenSource(
                    settings.source,
                    settings.publication,
                    settings.slot,
                    settings.tables,
                    settings.exclude,
                    settings.manage_publication,
                )
        else:
            raise ConfigError(
                "which database? There is neither a --url nor a config file",
                hint="Give --url, set PENSTOCK_URL, or name a config file with -c; `penstock init` writes one.",
            )
    except ServerUnavailable as error:
        error.hint = ServerUnavailable.hint_for_one_try
        raise


def _is_typed(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
