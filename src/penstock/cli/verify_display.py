"""How `penstock verify` shows what it does, on standard error, and what it found, on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.cli.display import write_line
from penstock.cli.formats import count_of, format_seconds
from penstock.comparison.report import Difference, Kind, Report, TableReport
from penstock.comparison.verification import Observer
from penstock.errors import SnapshotBlocked
from penstock.lsn import Lsn
from penstock.source.slots import Blocker, name_blockers


class Watching(Observer):
    """Nothing is shown."""


@contextmanager
def opened_watching(*, quiet: bool) -> Iterator[Watching]:
    """Bars in a terminal, lines elsewhere."""
    if quiet:
        yield Watching()
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
        console = Console(stderr=True, highlight=False)
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            yield _Bars(progress)
    else:
        yield _Lines()


class _Lines(Watching):
    """For files and pipes."""

    def blocked(self, error: SnapshotBlocked) -> None:
        self._say(f"waiting: {error.message}; changes flow meanwhile")

    def going_around(self, error: SnapshotBlocked) -> None:
        self._say("some transaction is open all the time: rows that change meanwhile will not be judged")

    def waiting(self, blockers: list[Blocker]) -> None:
        self._say(f"waiting for open transactions: {name_blockers(blockers)}; changes flow meanwhile")

    def held(self, position: Lsn, *, until_the_end: bool) -> None:
        more = "; changes wait until all is compared, because the destination keeps no versions"
        self._say(f"source and destination are both at {position}{more if until_the_end else ''}")

    def released(self, seconds: float) -> None:
        self._say(f"changes flow again, after {format_seconds(seconds)}")

    def compared(self, report: TableReport) -> None:
        self._say(f"{report.table}: {report.result}, {format_seconds(report.seconds)}")

    def _say(self, text: str) -> None:
        write_line(text)


class _Bars(_Lines):
    """For people."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def comparing(self, table: str, fraction: float) -> None:
        if table not in self._bars:
            self._bars[table] = self._progress.add_task(table, total=1.0)
        self._progress.update(self._bars[table], completed=fraction)

    def compared(self, report: TableReport) -> None:
        bar = self._bars.pop(report.table, None)
        if bar is not None:
            self._progress.remove_task(bar)

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


def print_report(report: Report, output: str | None = None) -> None:
    """The findings, for people; `output` names one of several."""
    if output is not None:
        typer.echo(f"{output}:")
    width = max((len(table.table) for table in report.tables), default=0)
    for table in report.tables:
        typer.echo(f"{table.table:<{width}}  {_describe(table)}")
        for difference in table.differences:
            typer.echo(f"  {_line(difference)}")
        if len(table.differences) < table.counts.different:
            typer.echo(f"  and {count_of(table.counts.different - len(table.differences), 'row')} more")
    typer.echo(_summary(report))


def _describe(table: TableReport) -> str:
    if table.reason is not None:
        return f"not compared: {table.reason}"
    counts = table.counts
    moved = f"; {count_of(counts.unsettled, 'row')} changed meanwhile" if counts.unsettled else ""
    if not counts.different:
        return f"{count_of(counts.equal, 'row')}, equal{moved}"
    found = {"missing": counts.missing, "extra": counts.extra, "changed": counts.changed}
    named = ", ".join(f"{number:,} {what}" for what, number in found.items() if number)
    return f"DIFFERENT: {named}; {counts.equal:,} equal{moved}"


def _line(difference: Difference) -> str:
    key = _pairs(difference.key) or "a row"
    line = f"{difference.kind.value:<8} {key}"
    if difference.kind is Kind.CHANGED:
        line += f": {', '.join(difference.columns)}"
    if difference.source is not None:
        line += f"\n    source:      {_pairs(difference.source)}"
    if difference.destination is not None:
        line += f"\n    destination: {_pairs(difference.destination)}"
    return line


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={'NULL' if value is None else repr(value)}" for name, value in values.items())


def _summary(report: Report) -> str:
    results = [table.result for table in report.tables]
    known = ("equal", "different", "unsettled", "not compared")
    counts = {each: results.count(each) for each in known if each in results}
    found = ", ".join(f"{number:,} {what}" for what, number in counts.items()) or "nothing to compare"
    part = "" if report.sample == 1 else f" in a sample of {report.sample:.4g} of the rows"
    held = format_seconds(report.held_seconds)
    around = "" if report.exact else " or around it, since some transaction was open all the time"
    return f"{found}{part}, at {report.position}{around}; changes waited for {held}"
