"""`penstock report`: one file for support with an incident, without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.display import echo
from penstock.cli.options import DEFAULT_PATH, AsJson, ConfigPath
from penstock.config.units import count_of
from penstock.operations.report import write_report


def report(
    config_path: ConfigPath = DEFAULT_PATH,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="File to write; must not exist.", metavar="FILE.tar.gz", show_default=False),
    ] = None,
    logs: Annotated[
        list[Path] | None,
        typer.Option("--log", help="Log file whose last lines to include. Can be repeated.", metavar="FILE"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Collect config, state, server settings, versions and logs into one file for support, without secrets.

    Changes nothing. Collects as much as it can: for each part that is missing, the file says why.

    Examples:

        penstock report
        penstock report --log /var/log/penstock.log --to incident.tar.gz
    """
    path, files = write_report(config_path, to, logs or ())
    if as_json:
        echo(json.dumps({"path": str(path), "files": files}))
        return
    echo(f"wrote {path} ({count_of(len(files), 'file')}: {', '.join(files)})")
    echo("it contains names of tables, hosts and users, but no passwords or rows; check it before you send it")
