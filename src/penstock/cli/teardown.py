"""`penstock teardown`: remove what a pipeline has created; data at the destination stays."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.display import echo
from penstock.cli.options import DEFAULT_PATH, ConfigPath, configured
from penstock.operations.teardown import planned_teardown


def teardown(
    config_path: ConfigPath = DEFAULT_PATH,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="Remove only this output, which may no longer be in the config.",
            metavar="NAME",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a pipeline's slot, DDL trigger, publication, spool and state.

    Lists what it will remove and asks first. The pipeline must be stopped. The publication is removed only if
    manage_publication is true. Tables at the destination and search indexes stay. With --output, the other outputs are
    left alone, and the slot no longer waits for the removed one.
    """
    with configured(config_path) as config, planned_teardown(config, output) as planned:
        if not planned.steps:
            what = f"output {output}" if output is not None else f"pipeline {config.pipeline.id}"
            echo(f"nothing to remove for {what}")
            return
        echo("this will be removed:")
        for step in planned.steps:
            echo(f"  {step.what}")
        echo("data at the destination stays" + (", and so do indexes" if config.documents is not None else ""))
        if not yes:
            typer.confirm("continue?", abort=True)
        for step in planned.run():
            echo(f"removed {step.what}")
