"""The program `penstock`: its commands, and how it ends.

Exit status: 0 success, 1 failure (with a message and a hint on stderr, and no traceback for known errors), 2 wrong
usage, 75 a run that failed and can succeed later, 130 interrupted by Ctrl-C. To add a command, write a function and
register it below.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.text import Text

from penstock.cli.check import check
from penstock.cli.commands import pause, resume, resync, rollback
from penstock.cli.demo import demo
from penstock.cli.display import LastingStream, echo, stderr_console
from penstock.cli.index import index
from penstock.cli.init import init
from penstock.cli.monitoring import monitoring
from penstock.cli.quarantine import quarantine
from penstock.cli.report import report
from penstock.cli.run import run
from penstock.cli.schema import schema
from penstock.cli.status import status, tables
from penstock.cli.systemd import systemd
from penstock.cli.tail import tail
from penstock.cli.teardown import teardown
from penstock.cli.verify import verify
from penstock.errors import PenstockError
from penstock.observe import LogFormat, configure_logging, redact
from penstock.operations.signals import EXIT_STATUSES

app = typer.Typer(
    name="penstock",
    help="""Replicate Postgres into lakehouse tables and search documents.

Exit status: 0 success, 1 failure (with a message and a hint on stderr), 2 wrong usage, 75 a run that failed and can
succeed later, 130 interrupted by Ctrl-C.
Commands with --json print machine-readable results to stdout.

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

_START, _RUN, _LOOK = "Get started", "Pipelines", "Source databases"

app.command("demo", rich_help_panel=_START)(demo)
app.command("init", rich_help_panel=_START)(init)
app.add_typer(schema, rich_help_panel=_START)
app.command("run", rich_help_panel=_RUN)(run)
app.command("systemd", rich_help_panel=_RUN)(systemd)
app.add_typer(monitoring, rich_help_panel=_RUN)
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
    # Imported modules live until the end. Without this, garbage collection takes a fifth of a short command's time.
    gc.freeze()
    sys.stderr = LastingStream(sys.stderr)
    try:
        app(prog_name="penstock")
    except SystemExit as ended:
        if ended.code in EXIT_STATUSES:
            sys.exit(_interrupted(ended.code))
        if _is_cancelled_prompt(ended):
            # "Aborted." has been printed.
            sys.exit(_interrupted(128 + signal.SIGINT, said=True))
        raise
    except KeyboardInterrupt:
        sys.exit(_interrupted(128 + signal.SIGINT))
    except PenstockError as error:
        report_error(error)
        sys.exit(error.facts.get("exit_status", 1))
    except OSError as error:
        logger.debug("system call failed", exc_info=True)
        report_error(_from_system(error))
        sys.exit(1)


def _interrupted(status: int, *, said: bool = False) -> int:
    """Report an interruption and return the exit status; another Ctrl-C ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not said:
        stderr_console().print("interrupted")
    return status


def _is_cancelled_prompt(ended: SystemExit) -> bool:
    """True for Ctrl-C at a prompt, which typer turns into `Abort` and status 1."""
    abort = ended.__context__
    return abort is not None and isinstance(abort.__context__, KeyboardInterrupt)


def _from_system(error: OSError) -> PenstockError:
    """An error of the operating system that no other code has translated."""
    where = f" {str(error.filename)!r}" if error.filename is not None else ""
    return PenstockError(
        f"system error{where}: {error.strerror or type(error).__name__}",
        hint="Check the path, its owner and permissions, and the free disk space; --log-level debug shows details.",
    )


def report_error(error: PenstockError) -> None:
    """Print the error and its hint to stderr."""
    console = stderr_console(soft_wrap=True)
    console.print(Text.assemble(("error: ", "bold red"), redact(error.message)))
    if error.hint:
        console.print(Text.assemble(("hint: ", "bold"), redact(error.hint)))


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            echo(f"penstock {version('penstock')}")
        except PackageNotFoundError:
            echo("penstock (not installed)")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(envvar="PENSTOCK_LOG_LEVEL", help="Log level: debug, info, warning or error.", metavar="LEVEL"),
    ] = "warning",
    log_format: Annotated[
        LogFormat, typer.Option(envvar="PENSTOCK_LOG_FORMAT", help="Format of log lines on stderr.")
    ] = LogFormat.TEXT,
) -> None:
    """Set up what all commands share."""
    if log_level.lower() not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(f"{log_level!r} is not one of debug, info, warning, error", param_hint="--log-level")
    configure_logging(log_level, log_format)


if __name__ == "__main__":
    main()
