"""`penstock tail`: see the changes of a publication as they are committed."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import FrameType
from typing import Annotated, Any

import typer
from psycopg.rows import tuple_row

from penstock.changes.events import Begin, Commit, Event
from penstock.cli.event_lines import Lines
from penstock.cli.following import Follow, Followed, follow, prepare
from penstock.cli.options import OptionalConfigPath, Publication, Url
from penstock.cli.sources import ChosenSource, chosen_source
from penstock.destinations.json_lines import event_to_json
from penstock.errors import ConfigError
from penstock.lsn import Lsn
from penstock.source import Role, connect
from penstock.source.faults import translated
from penstock.source.publications import create_publication, find_tables, inspect_publication

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        typer.Option(help="Read from this slot and leave it where it is; without it, from now on.", metavar="NAME"),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables",
            "--table",
            help="Only these tables: a name or a pattern, like public.orders or sales.*; may be repeated.",
            metavar="PATTERN",
        ),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Start at this position of the named slot, like 16/B374D848.", metavar="LSN"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many changes.", metavar="N")] = None,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="End after so many seconds.", metavar="SECONDS")
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="A line per change for people, or a JSON object that loses nothing.")
    ] = Format.LINES,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format ndjson.")] = False,
    transactions: Annotated[
        bool, typer.Option("--transactions", help="Show where transactions begin and commit, too.")
    ] = False,
    acknowledge: Annotated[
        bool,
        typer.Option("--acknowledge", help="Move the named slot: what was shown will not come again, for anybody."),
    ] = False,
    create: Annotated[
        bool,
        typer.Option(
            "--create-publication", help="Create the publication if it is missing, for --tables or for all tables."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")] = False,
) -> None:
    """Show every change of a publication as it is committed, in commit order.

    By default it follows from now on, by a temporary slot that ends with it. With --slot it shows what that slot has
    kept; the slot stays where it is unless --acknowledge is given. With a config file it shows the publication of that
    pipeline, by a slot of its own: a pipeline that runs is not disturbed.

    Examples:

        penstock tail --table public.orders
        penstock tail --url postgresql://me@db.example/shop --publication shop --json | jq .row
    """
    notice = _say_nothing if quiet else say
    position = _parse_start(start, slot)
    _check_acknowledge(acknowledge, slot)
    formatted = event_to_json if as_json or form is Format.NDJSON else make_lines().format
    with Ending() as ending, chosen_source(context, url, config_path) as source:
        with ending.interruptible():
            name = _choose_publication(source, publication, create, tables or [], notice)
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
    """Follow and print, until a signal comes or until nobody reads any more: both are good ends."""
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
    """Lines for standard output: coloured and cut in a terminal, whole elsewhere."""
    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Lines(colour=colour, width=(lambda: shutil.get_terminal_size().columns) if terminal else None)


def say(text: str) -> None:
    """A sentence on standard error, which may be closed."""
    try:
        dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        sys.stderr.write(f"\x1b[2m{text}\x1b[0m\n" if dim else f"{text}\n")
        sys.stderr.flush()
    except OSError:
        pass


def quiet_capture() -> None:
    """What happens to capture is told by notices and errors; its log lines would say it twice."""
    if logging.getLogger().getEffectiveLevel() >= logging.WARNING:
        logging.getLogger("penstock.capture").setLevel(logging.CRITICAL)


class Ended(BaseException):
    """A signal came at a moment when nothing is lost by stopping at once."""


class Ending:
    """Turns SIGINT, SIGTERM and SIGHUP into `stop`, and into `Ended` where waiting could take long."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._interruptible = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        for number in _ENDINGS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        return kind is not None and issubclass(kind, Ended | BrokenPipeError)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal inside raises `Ended`; elsewhere things are brought to their end first."""
        self._interruptible = True
        try:
            if self.stop.is_set():
                raise Ended
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.stop.set()
        if self._interruptible:
            raise Ended


class Output:
    """Writes whole lines to a descriptor, each at once. Nothing is buffered: a reader sees a change when it came."""

    def __init__(self, descriptor: int, ending: Ending) -> None:
        self._descriptor = descriptor
        self._ending = ending
        self._poll = select.poll()
        self._poll.register(descriptor, 0)

    def write(self, line: str) -> None:
        """Write a line; raises BrokenPipeError when nobody reads any more, and `Ended`."""
        rest = memoryview(line.encode("utf-8", "backslashreplace") + b"\n")
        while rest:
            # Only waiting may be interrupted: a line that was written is counted. There is room for so much then.
            with self._ending.interruptible():
                select.select([], [self._descriptor], [])
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(self._descriptor, rest[: select.PIPE_BUF]) :]

    def check(self) -> None:
        """Notice, without writing, that nobody reads any more (`penstock tail … | head`)."""
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in self._poll.poll(0)):
            raise BrokenPipeError


def _choose_publication(
    source: ChosenSource,
    name: str | None,
    create: bool,
    tables: list[str],
    notice: Callable[[str], None],
) -> str:
    """The publication to read; made only when asked for."""
    name = name or source.publication
    if name is not None and not create:
        return name
    with connect(source.settings, Role.TAIL) as connection:
        if name is None:
            with translated(connection, "list the publications"), connection.cursor(row_factory=tuple_row) as cursor:
                rows = cursor.execute("select pubname::text from pg_catalog.pg_publication order by 1").fetchall()
            there = ", ".join(row[0] for row in rows)
            raise ConfigError(
                "tail needs a publication: it says which tables the server sends",
                hint=f"Use --publication; this database has {there}."
                if there
                else "This database has none: add --publication penstock --create-publication to make one.",
            )
        if inspect_publication(connection, name) is None:
            patterns = tables or list(source.tables) or ["*"]
            wanted = find_tables(connection, patterns, source.exclude)
            if not wanted:
                raise ConfigError(
                    f"there are no tables for a publication: nothing matches {', '.join(patterns)}",
                    hint="Write schema.table, like public.orders or sales.*",
                )
            create_publication(connection, name, wanted)
            notice(f"created publication {name} for {len(wanted)} tables; it stays: drop publication {name}")
    return name


def _parse_start(start: str | None, slot: str | None) -> Lsn | None:
    if start is None:
        return None
    if slot is None:
        raise ConfigError(
            "--from needs --slot: a temporary slot starts now, and the server has nothing earlier for it",
            hint="Name a slot that exists; it has kept the changes since its own position.",
        )
    try:
        return Lsn.parse(start)
    except ValueError as error:
        raise ConfigError(str(error), hint="`select pg_current_wal_lsn()` shows positions like this.") from None


def _check_acknowledge(acknowledge: bool, slot: str | None) -> None:
    if acknowledge and slot is None:
        raise ConfigError("--acknowledge needs --slot: a temporary slot ends with this command", hint="Leave it out.")


def _say_end(settings: Follow, followed: Followed, notice: Callable[[str], None]) -> None:
    if followed.position is None:
        return
    changes, transactions = followed.change_count, followed.transactions
    text = f"{changes} change{'s' * (changes != 1)} in {transactions} whole transaction{'s' * (transactions != 1)}"
    if settings.slot is None:
        notice(text)
    elif settings.acknowledge:
        notice(f"{text}; slot {settings.slot} now stands at {followed.position}")
    else:
        notice(f"{text}; slot {settings.slot} was not moved (go on with --from {followed.position})")


def _say_nothing(text: str) -> None:
    pass
