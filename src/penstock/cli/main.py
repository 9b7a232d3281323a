"""The program `penstock`: its commands, and how it ends.

Exit status: 0 done, 1 failed (a message and a hint on standard error, never a traceback for errors with a name),
2 wrong usage. To add a command, write a module with one function and register it below.
"""

from __future__ import annotations

import gc
import logging
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.check import check
from penstock.cli.commands import pause, resume, resync, rollback
from penstock.cli.demo import demo
from penstock.cli.index import index
from penstock.cli.init import init
from penstock.cli.quarantine import quarantine
from penstock.cli.report import report
from penstock.cli.run import run
from penstock.cli.schema import schema
from penstock.cli.status import status, tables
from penstock.cli.tail import tail
from penstock.cli.teardown import teardown
from penstock.cli.verify import verify
from penstock.errors import PenstockError
from penstock.observe import LogFormat, configure_logging, redact

app = typer.Typer(
    name="penstock",
    help="""Postgres into lakehouse tables, databases and search documents: every change, in order, exactly once.

Exit status: 0 done, 1 failed (with a message and a hint on standard error), 2 wrong usage. Commands with --json print
what a script needs on standard output.

Examples:

    penstock init
    penstock run
    penstock status --watch
""",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

logger = logging.getLogger(__name__)

_START, _RUN, _LOOK = "To start", "A pipeline", "To look at a database"

app.command("demo", rich_help_panel=_START)(demo)
app.command("init", rich_help_panel=_START)(init)
app.add_typer(schema, rich_help_panel=_START)
app.command("run", rich_help_panel=_RUN)(run)
app.command("status", rich_help_panel=_RUN)(status)
app.command("tables", rich_help_panel=_RUN)(tables)
app.command("resync", rich_help_panel=_RUN)(resync)
app.command("rollback", rich_help_panel=_RUN)(rollback)
app.command("pause", rich_help_panel=_RUN)(pause)
app.command("resume", rich_help_panel=_RUN)(resume)
app.command("verify", rich_help_panel=_RUN)(verify)
app.command("report", rich_help_panel=_RUN)(report)
app.command("teardown", rich_help_panel=_RUN)(teardown)
index.add_typer(quarantine)
app.add_typer(index, rich_help_panel=_RUN)
app.command("check", rich_help_panel=_LOOK)(check)
app.command("tail", rich_help_panel=_LOOK)(tail)


def main() -> None:
    """Run the program; the entry point."""
    # What was imported stays until the end: to look through it for garbage is a fifth of a short command's time.
    gc.freeze()
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        report_error(error)
        sys.exit(error.facts.get("exit_status", 1))
    except OSError as error:
        logger.debug("the system refused", exc_info=True)
        report_error(_from_system(error))
        sys.exit(1)


def _from_system(error: OSError) -> PenstockError:
    """Files and folders that nobody has looked at more closely: a person can do something about most of them."""
    where = f" {str(error.filename)!r}" if error.filename is not None else ""
    return PenstockError(
        f"the system refused{where}: {error.strerror or type(error).__name__}",
        hint="Check the path, its owner and permissions, and the room on its disk; --log-level debug says more.",
    )


def report_error(error: PenstockError) -> None:
    """Say what went wrong and what can be done, on standard error."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text.assemble(("error: ", "bold red"), redact(error.message)))
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold"), redact(error.hint)))


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"penstock {version('penstock')}")
        except PackageNotFoundError:
            typer.echo("penstock (not installed)")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_level: Annotated[
        str, typer.Option(envvar="PENSTOCK_LOG_LEVEL", help="debug, info, warning or error.", metavar="LEVEL")
    ] = "warning",
    log_format: Annotated[
        LogFormat, typer.Option(envvar="PENSTOCK_LOG_FORMAT", help="How log lines look, on standard error.")
    ] = LogFormat.TEXT,
) -> None:
    """Set up what all commands share."""
    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"{log_level!r} is not one of debug, info, warning, error", param_hint="--log-level")
    configure_logging(log_level, log_format)


if __name__ == "__main__":
    main()
