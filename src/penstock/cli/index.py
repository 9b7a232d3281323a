"""`penstock index`: the commands about search indexes."""

from __future__ import annotations

import typer

from penstock.cli.index_diff import diff
from penstock.cli.index_list import list_indexes
from penstock.cli.index_look import check, mapping, preview, schema
from penstock.cli.index_quarantine import quarantine
from penstock.cli.index_rebuild import rebuild

index = typer.Typer(
    name="index",
    help="Search indexes: check, preview, list, rebuild and compare them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

index.command("check")(check)
index.command("preview")(preview)
index.command("mapping")(mapping)
index.command("schema")(schema)
index.command("list")(list_indexes)
index.command("rebuild")(rebuild)
index.command("diff")(diff)
index.add_typer(quarantine)
