"""Progress of a pipeline on stderr: bars in a terminal, lines elsewhere, or log records.

A terminal shows a bar for each copy and a status line for each output; everything else scrolls above them. Elsewhere
both are printed as lines, every few seconds. With `--log-format json` they are log records with fields of their own,
regardless of the log level.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from penstock.config.units import format_bytes, format_seconds
from penstock.copy.progress import CopyProgress
from penstock.observe import one_line, printable
from penstock.observe.logs import ROOT_LOGGER
from penstock.operations.progress import Interval, Notice, OutputLook, copy_facts, describe_copy
from penstock.operations.running import Running

MOST_BARS = 8
"""Further copies are only counted."""
_WIDE = 100
_NAME_WIDTH = 40
_BAR_WIDTH = 24
_PIPE_WIDTH = 160
_UNLIMITED = 10_000
_FILL = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)

_REPORTED = frozenset({"stopped", "waiting"})
"""Events that both log lines and notices report."""

logger = logging.getLogger("penstock.run")


class Display(Protocol):
    """Where progress is shown."""

    def say(self, text: str) -> None:
        """Show a sentence."""
        ...

    def tell(self, notice: Notice) -> None:
        """Show an event."""
        ...

    def show(self, looks: Sequence[OutputLook]) -> None:
        """Show the status of all outputs; called about twice a second."""
        ...


@contextmanager
def opened_display(*, quiet: bool, as_json: bool, seconds: float) -> Iterator[Display]:
    """The display that fits; `seconds` is the interval of status lines and records, 0 for none."""
    if quiet:
        yield Silence()
        return
    with _without_repeats(), _chosen_display(as_json=as_json, seconds=seconds) as display:
        yield display


@contextmanager
def _chosen_display(*, as_json: bool, seconds: float) -> Iterator[Display]:
    if as_json:
        logger.setLevel(logging.INFO)
        try:
            yield Records(seconds)
        finally:
            logger.setLevel(logging.NOTSET)
    elif is_terminal():
        with _above_bars(), Bars() as display:
            yield display
    else:
        yield Lines(write_line, seconds)


@contextmanager
def _without_repeats() -> Iterator[None]:
    """Suppress log lines of workers about events that the display reports."""

    def is_new(record: logging.LogRecord) -> bool:
        return getattr(record, "reported_as", None) not in _REPORTED

    handlers = list(logging.getLogger(ROOT_LOGGER).handlers)
    for handler in handlers:
        handler.addFilter(is_new)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_new)


def show_running(running: Running, display: Display) -> None:
    """Show new events and the status of a running pipeline."""
    notices, looks = running.look()
    for notice in notices:
        display.tell(notice)
    display.show(looks)


def is_terminal() -> bool:
    """True if stderr is a terminal that can show bars."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class SafeConsole(Console):
    """Shows control characters in names and messages as escapes; styles work as usual."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `Console`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line, with control characters as escapes."""
    typer.echo(printable(text), err=err)


def stderr_console(*, soft_wrap: bool = False) -> Console:
    """A console on stderr."""
    return SafeConsole(stderr=True, highlight=False, soft_wrap=soft_wrap)


def wide_console() -> Console:
    """A console on stdout; where that is not a terminal, tables are not squeezed."""
    console = SafeConsole(highlight=False)
    if console.is_terminal or console.width >= _PIPE_WIDTH:
        return console
    return SafeConsole(width=_PIPE_WIDTH, highlight=False)


def make_table(*titles: str, right: Sequence[str] = (), unbroken: Sequence[str] = ()) -> Table:
    """A table without lines; columns in `right` are aligned to the right, those in `unbroken` are not wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        justify = "right" if title in right else "left"
        table.add_column(title, overflow="fold", justify=justify, no_wrap=title in unbroken)
    return table


def print_unwrapped(console: Console, table: Table) -> None:
    """Print a table whose last column has paths. The terminal wraps long lines, so that a path can be copied."""
    widest = Measurement.get(console, console.options.update(max_width=_UNLIMITED), table).maximum
    wide = SafeConsole(width=max(widest, console.width), highlight=False)
    with wide.capture() as captured:
        wide.print(table)
    # Without the spaces that fill a line, which would wrap, too.
    sys.stdout.write(_FILL.sub(r"\1", captured.get()))
    sys.stdout.flush()


def write_line(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


class LastingStream:
    """A stream to which writing never fails: when its terminal hangs up or its reader ends, it writes to nowhere.

    Otherwise a closed terminal would end the run, with an error that says nothing about the run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        # Of the descriptor: what is left in the buffer would fail again at the end of the process.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


class Silence:
    """Shows nothing."""

    def say(self, text: str) -> None:
        pass

    def tell(self, notice: Notice) -> None:
        pass

    def show(self, looks: Sequence[OutputLook]) -> None:
        pass


class Lines:
    """For files and pipes."""

    def __init__(
        self, write: Callable[[str], None], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._interval = Interval(seconds, clock)

    def say(self, text: str) -> None:
        self._write(text)

    def tell(self, notice: Notice) -> None:
        # One line for each event: names of tables are other people's, and must not look like lines of the log.
        self._write(one_line(notice.text))

    def show(self, looks: Sequence[OutputLook]) -> None:
        if self._interval.is_over():
            for look in looks:
                prefix = f"{look.output}: " if len(looks) > 1 else ""
                for copy in look.copies:
                    self._write(one_line(f"{prefix}copying {copy.table}: {describe_copy(copy)}"))
                self._write(f"{prefix}{look.line}")


class Records:
    """For machines: log records whose fields repeat the message."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = Interval(seconds, clock)

    def say(self, text: str) -> None:
        logger.info("%s", text)

    def tell(self, notice: Notice) -> None:
        facts = {"event": notice.event, "output": notice.output, "table": notice.table, **notice.facts}
        _log(notice.text, facts)

    def show(self, looks: Sequence[OutputLook]) -> None:
        if self._interval.is_over():
            for look in looks:
                for copy in look.copies:
                    facts = {"event": "copy", "output": look.output, "table": copy.table, **copy_facts(copy)}
                    _log(f"copying {copy.table}: {describe_copy(copy)}", facts)
                _log(look.line, {"event": "status", **look.facts})


class Bars:
    """For terminals: status at the bottom, events scroll above. Leaves no bar behind."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or stderr_console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False)

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)

    def tell(self, notice: Notice) -> None:
        style = "bold red" if notice.event == "stopped" else "dim"
        self._console.print(Text(one_line(notice.text), style=style), soft_wrap=True)

    def show(self, looks: Sequence[OutputLook]) -> None:
        # Not earlier: it would show an empty line.
        self._live.start()
        self._live.update(render(looks, self._console.width), refresh=True)


def render(looks: Sequence[OutputLook], width: int) -> RenderableType:
    """Bars for copies, and a line for each output."""
    named = [(look.output if len(looks) > 1 else "", copy) for look in looks for copy in look.copies]
    parts: list[RenderableType] = []
    if named:
        parts.append(_bars(named[:MOST_BARS], wide=width >= _WIDE))
    if len(named) > MOST_BARS:
        parts.append(Text(f"… and {len(named) - MOST_BARS} more copies"))
    for look in looks:
        prefix = f"{look.output}: " if len(looks) > 1 else ""
        parts.append(Text(f"{prefix}{look.line}", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _bars(copies: Sequence[tuple[str, CopyProgress]], *, wide: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=_NAME_WIDTH)
    table.add_column(width=_BAR_WIDTH if wide else None)
    for _ in range(5 if wide else 2):
        table.add_column(justify="right", no_wrap=True)
    for output, copy in copies:
        name = Text(f"{output}: {copy.table}" if output else copy.table, style="cyan")
        bar = ProgressBar(total=1.0, completed=copy.fraction, width=_BAR_WIDTH if wide else None)
        left = copy.seconds_left
        # Everything is read, and is being made durable.
        remaining = "finishing" if copy.fraction == 1.0 else "" if left is None else f"{format_seconds(left)} left"
        # A range counts when it is whole: of a small table, which has one, nothing is known before.
        percent, rows = (
            f"{copy.fraction:.0%}" if copy.ranges_done or copy.ranges > 1 else "reading",
            f"{copy.rows_done:,} rows",
        )
        size = f"{format_bytes(copy.bytes_done)} of {format_bytes(copy.bytes)}"
        ranges = f"{copy.ranges_done}/{copy.ranges} ranges"
        more = (percent, ranges, rows, size, remaining) if wide else (percent, remaining)
        table.add_row(name, bar, *(Text(each) for each in more))
    return table


@contextmanager
def _above_bars() -> Iterator[None]:
    """Send log lines through the `sys.stderr` that the bars have replaced, so that they appear above."""
    handlers = [each for each in logging.getLogger(ROOT_LOGGER).handlers if isinstance(each, logging.StreamHandler)]
    streams = [(handler, handler.stream) for handler in handlers if handler.stream is sys.stderr]
    for handler, _ in streams:
        handler.setStream(_CurrentStandardError())
    try:
        yield
    finally:
        for handler, stream in streams:
            handler.setStream(stream)


class _CurrentStandardError:
    """Writes to the current `sys.stderr`."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _log(text: str, facts: dict[str, Any]) -> None:
    logger.info("%s", text, extra={"facts": facts})
