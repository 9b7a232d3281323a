"""`penstock verify`: compare the tables at a destination with their source, row by row, while both change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.cli.display import echo, is_terminal, stderr_console, write_line
from penstock.cli.options import DEFAULT_PATH, AsJson, ConfigPath, OutputName, Quiet, complete_table, configured
from penstock.comparison.compare import CompareSettings
from penstock.comparison.report import ColumnDifference, ColumnKind, Difference, Kind, Report, TableReport
from penstock.comparison.verification import WAIT_SECONDS, Observer, VerifySettings
from penstock.config.units import count_of, format_seconds
from penstock.errors import PenstockError, SnapshotBlocked
from penstock.lsn import Lsn
from penstock.operations.running import say_nothing
from penstock.operations.signals import Ending
from penstock.operations.verify import NOT_COMPARED, VerifyRequest, verify_pipeline
from penstock.source.slots import Blocker, name_blockers


def parse_part(text: str) -> float:
    """`1%` or `0.01`."""
    try:
        fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise typer.BadParameter(f"{text!r} is not a fraction, like 1% or 0.01")
    return fraction


def verify(
    tables: Annotated[
        list[str] | None,
        typer.Argument(help="Tables or patterns. Default: all tables.", metavar="TABLE", autocompletion=complete_table),
    ] = None,
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    as_json: AsJson = False,
    sample: Annotated[
        float,
        typer.Option(parser=parse_part, help="Compare only this part of the rows, like 1%.", metavar="PART"),
    ] = "100%",  # pyright: ignore[reportArgumentType] (parsed like an argument)
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Print the differing values of both sides, not only the columns.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, help="How long to wait for open transactions to end.", metavar="SECONDS"),
    ] = WAIT_SECONDS,
    quiet: Quiet = False,
) -> None:
    """Compare every row and column of the tables at a destination with the source.

    The comparison is exact, at one position, while writers and the pipeline keep running: changes wait for a second or
    two until both sides are at that position. It reads the source through a different code path than a copy. If the
    pipeline is not running, it is started for the comparison. Exits with 0 if everything is equal, 1 if rows or
    columns differ, 2 if something could not be compared.
    """
    options = VerifySettings(CompareSettings(sample=sample, show_values=show_values), wait)
    quiet = quiet or as_json
    with configured(config_path) as config, not_compared(), Ending() as ending:
        request = VerifyRequest(config, tables or (), output, options)
        say = say_nothing if quiet else write_line
        report = verify_pipeline(request, ending, say, partial(opened_observer, quiet=quiet))
        if not report.outputs and ending.exit_status is not None:
            raise typer.Exit(ending.exit_status)
        if as_json:
            echo(json.dumps(report.to_json(), ensure_ascii=False))
        else:
            for name, each in report.outputs.items():
                print_report(each, name if len(report.outputs) + len(report.unreadable) > 1 else None)
            for name, reason in report.unreadable.items():
                echo(f"{name}: not compared: {reason}")
        raise typer.Exit(report.exit_code)
    # `Ending` suppressed what a signal or a closed pipe raised.
    raise typer.Exit(ending.exit_status or NOT_COMPARED)


@contextmanager
def not_compared() -> Iterator[None]:
    """Errors inside end the program with the status that says so."""
    try:
        yield
    except PenstockError as error:
        error.facts["exit_status"] = NOT_COMPARED
        raise


@contextmanager
def opened_observer(*, quiet: bool) -> Iterator[Observer]:
    """Bars in a terminal, lines elsewhere."""
    if quiet:
        yield Observer()
    elif is_terminal():
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %")
        with Progress(*columns, TimeElapsedColumn(), console=stderr_console(), transient=True) as progress:
            yield _Bars(progress)
    else:
        yield _Lines()


class _Lines(Observer):
    """For files and pipes."""

    def blocked(self, error: SnapshotBlocked) -> None:
        self._say(f"waiting: {error.message}; changes flow meanwhile")

    def going_around(self, error: SnapshotBlocked) -> None:
        self._say("there is always an open transaction, so rows that change during the comparison are not judged")

    def waiting(self, blockers: list[Blocker]) -> None:
        self._say(f"waiting for open transactions: {name_blockers(blockers)}; changes flow meanwhile")

    def held(self, position: Lsn, *, until_the_end: bool) -> None:
        more = "; changes wait until the comparison ends, because the destination keeps no versions"
        self._say(f"source and destination are both at {position}{more if until_the_end else ''}")

    def released(self, seconds: float) -> None:
        self._say(f"changes flow again after {format_seconds(seconds)}")

    def compared(self, report: TableReport) -> None:
        self._say(f"{report.table}: {report.result}, {format_seconds(report.seconds)}")

    def _say(self, text: str) -> None:
        write_line(text)


class _Bars(_Lines):
    """For terminals."""

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
    """Print the findings; `output` names one of several."""
    if output is not None:
        echo(f"{output}:")
    width = max((cell_len(table.table) for table in report.tables), default=0)
    for table in report.tables:
        echo(f"{set_cell_size(table.table, width)}  {_describe(table)}")
        for column in table.columns:
            echo(f"  {_column_line(column)}")
        for difference in table.differences:
            echo(f"  {_line(difference)}")
        if len(table.differences) < table.counts.different:
            echo(f"  and {count_of(table.counts.different - len(table.differences), 'row')} more")
        for what in table.not_compared:
            echo(f"  not compared: {what}")
    echo(_summary(report))


def _describe(table: TableReport) -> str:
    if table.reason is not None:
        return f"not compared: {table.reason}"
    counts = table.counts
    moved = f"; {count_of(counts.unsettled, 'row')} changed meanwhile" if counts.unsettled else ""
    if table.result != "different":
        return f"{count_of(counts.equal, 'row')}, equal{moved}"
    found = {"missing": counts.missing, "extra": counts.extra, "changed": counts.changed}
    names = [f"{number:,} {what}" for what, number in found.items() if number]
    named = ", ".join([*([count_of(len(table.columns), "column")] if table.columns else []), *names])
    return f"DIFFERENT: {named}; {counts.equal:,} equal{moved}"


def _column_line(difference: ColumnDifference) -> str:
    name = difference.column
    match difference.kind:
        case ColumnKind.MISSING:
            return f"column {name} ({difference.source}) is missing at the destination"
        case ColumnKind.EXTRA:
            return f"column {name} ({difference.destination}) exists only at the destination"
        case ColumnKind.RENAMED:
            return f"column {name} is called {difference.destination} at the destination"
        case ColumnKind.TYPE:
            return f"column {name} is {difference.destination} at the destination, and should be {difference.source}"


def _line(difference: Difference) -> str:
    key = _pairs(difference.key) or "one row"
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
    around = "" if report.exact else " or close to it, because there was always an open transaction"
    return f"{found}{part}, at {report.position}{around}; changes waited for {held}"
