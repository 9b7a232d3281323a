"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Url = Annotated[
    str | None,
    typer.Option(
        envvar="PENSTOCK_URL",
        help="Where the source is, like postgresql://user@host:5432/database. Other users of the machine can read "
        "command lines: give a password by PENSTOCK_URL, PGPASSWORD or a .pgpass file instead.",
        metavar="URL",
        show_default=False,
    ),
]
OptionalConfigPath = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="PENSTOCK_CONFIG",
        help="Instead of --url: the config file of a pipeline; ./penstock.toml if that is there.",
        metavar="FILE",
        show_default=False,
        readable=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Publication = Annotated[str | None, typer.Option(help="The publication to read.", metavar="NAME")]
Slot = Annotated[str | None, typer.Option(help="The replication slot to read from.", metavar="NAME")]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--table", help="A table or a pattern, like public.orders or sales.*; may be repeated.", metavar="PATTERN"
    ),
]
