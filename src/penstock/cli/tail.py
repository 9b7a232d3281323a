"""`penstock tail`: show the changes of a publication as they are committed."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from penstock.changes.events import Begin, Commit, Event
from penstock.cli.event_lines import Lines
from penstock.cli.options import OptionalConfigPath, Publication, Quiet, Url, chosen_source
from penstock.destinations.json_lines import event_to_json
from penstock.errors import ConfigError
from penstock.lsn import Lsn
from penstock.observe import printable
from penstock.operations.running import say_nothing
from penstock.operations.signals import Ended, Ending
from penstock.operations.tail import Follow, Followed, choose_publication, follow, prepare


class Format(StrEnum):
    """How changes look."""

    LINES = "lines"
    NDJSON = "ndjson"


def tail(
    context: typer.Context,
    url: Url = None,
    config_path: OptionalConfigPath = None,
    publication: Publication = None,
    slot: Annotated[
        str | None,
        typer.Option(
            help="Read the changes that this slot has kept, without advancing it. Default: a temporary slot that "
            "starts now.",
            metavar="NAME",
        ),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables",
            "--table",
            help="Table or pattern, like public.orders or 'sales.*'. Can be repeated.",
            metavar="PATTERN",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Start at this position of --slot, like 16/B374D848.", metavar="LSN"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many changes.", metavar="N")] = None,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="Stop after this many seconds.", metavar="SECONDS")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="Readable lines, or one lossless JSON object per change.")
    ] = Format.LINES,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format ndjson.")] = False,
    transactions: Annotated[
        bool, typer.Option("--transactions", help="Also show where transactions begin and commit.")
    ] = False,
    acknowledge: Annotated[
        bool,
        typer.Option("--acknowledge", help="Advance --slot past what was shown: no reader will get it again."),
    ] = False,
    create: Annotated[
        bool,
        typer.Option(
            "--create-publication", help="Create the publication if it does not exist, for --tables or all tables."
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Show every change of a publication as it is committed, in commit order.

    By default it uses a temporary slot and starts now. With --slot it shows what that slot has kept; the slot does not
    move unless --acknowledge is given. With a config file it shows the publication of that pipeline through a slot of
    its own: a running pipeline is not affected.

    Examples:

        penstock tail --table public.orders
        penstock tail --url postgresql://me@db.example/shop --publication shop --json | jq .row
    """
    notice = say_nothing if quiet else say
    position = _parse_start(start, slot)
    _check_acknowledge(acknowledge, slot)
    formatted = _json_line if as_json or form is Format.NDJSON else make_lines().format
    with Ending() as ending, chosen_source(context, url, config_path) as source:
        with ending.interruptible():
            known = None if source.config is None else source.config.pipeline
            name = choose_publication(
                source.settings,
                publication or (known and known.publication),
                create_for=(tables or (known.tables if known else ())) if create else None,
                exclude=() if known is None else known.exclude,
                notice=notice,
            )
        settings = Follow(source.settings, name, slot, position, tuple(tables or ()), acknowledge, limit, seconds)
        followed = show(settings, formatted, ending, notice, transactions=transactions)
        _say_end(settings, followed, notice)


def show(
    settings: Follow,
    formatted: Callable[[Event], str | None],
    ending: Ending,
    notice: Callable[[str], None],
    *,
    transactions: bool = False,
) -> Followed:
    """Follow and print until a signal arrives or the reader of the output is gone; neither is an error."""
    quiet_capture()
    output = Output(sys.stdout.fileno(), ending)
    followed = Followed()

    def handle(event: Event) -> None:
        if transactions or not isinstance(event, Begin | Commit):
            line = formatted(event)
            if line is not None:
                output.write(line)

    with contextlib.suppress(Ended, BrokenPipeError):
        with ending.interruptible():
            start = prepare(settings, notice)
        follow(settings, start, handle, stop=ending.stop, notice=notice, idle=output.check, followed=followed)
    return followed


def make_lines() -> Lines:
    """Lines for stdout: coloured and shortened in a terminal, whole elsewhere."""
    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Lines(colour=colour, width=(lambda: shutil.get_terminal_size().columns) if terminal else None)


def say(text: str) -> None:
    """Write a sentence to stderr, which may be closed."""
    try:
        text = printable(text)
        dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n" if dim else f"{text}\n")
        sys.stderr.flush()
    except OSError:
        pass


def quiet_capture() -> None:
    """Suppress the log lines of capture: notices and errors report the same."""
    if logging.getLogger().getEffectiveLevel() >= logging.WARNING:
        logging.getLogger("penstock.capture").setLevel(logging.CRITICAL)


class Output:
    """Writes whole lines to a descriptor, unbuffered: a reader sees a change as soon as it arrives."""

    def __init__(self, descriptor: int, ending: Ending) -> None:
        self._descriptor = descriptor
        self._ending = ending
        self._poll = select.poll()
        self._poll.register(descriptor, 0)

    def write(self, line: str) -> None:
        """Write a line; raises `BrokenPipeError` when the reader is gone, and `Ended`."""
        rest = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
        while rest:
            # Only waiting is interruptible: a written line is counted. After it, PIPE_BUF bytes fit.
            with self._ending.interruptible():
                select.select([], [self._descriptor], [])
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]

    def check(self) -> None:
        """Notice, without writing, that the reader is gone (`penstock tail … | head`)."""
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in self._poll.poll(0)):
            raise BrokenPipeError


def _json_line(event: Event) -> str | None:
    line = event_to_json(event)
    return None if line is None else printable(line)


def _parse_start(start: str | None, slot: str | None) -> Lsn | None:
    if start is None:
        return None
    if slot is None:
        raise ConfigError(
            "--from needs --slot: a temporary slot starts now, and the server has kept nothing earlier for it",
            hint="Name an existing slot; it has kept the changes since its own position.",
        )
    try:
        return Lsn.parse(start)
    except ValueError as error:
        raise ConfigError(str(error), hint="`select pg_current_wal_lsn()` shows positions like this.") from None


def _check_acknowledge(acknowledge: bool, slot: str | None) -> None:
    if acknowledge and slot is None:
        raise ConfigError(
            "--acknowledge needs --slot: a temporary slot ends with this command", hint="Omit --acknowledge."
        )


def _say_end(settings: Follow, followed: Followed, notice: Callable[[str], None]) -> None:
    if followed.position is None:
        return
    changes, transactions = followed.change_count, followed.transactions
    text = f"{changes} change{'s' * (changes != 1)} in {transactions} whole transaction{'s' * (transactions != 1)}"
    if settings.slot is None:
        notice(text)
    elif settings.acknowledge:
        notice(f"{text}; slot {settings.slot} is now at {followed.position}")
    else:
        notice(f"{text}; slot {settings.slot} was not moved (continue with --from {followed.position})")
