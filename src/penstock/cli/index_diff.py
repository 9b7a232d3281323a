"""`penstock index diff`: documents in the sink that differ from the database."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.cli.configured import DEFAULT_PATH, ConfigPath, configured
from penstock.cli.display import write_line
from penstock.cli.formats import count_of
from penstock.cli.indexes import IndexNames, LiveDocuments, chosen_indexes, live_documents
from penstock.cli.options import AsJson
from penstock.cli.tail import Ending
from penstock.config import Config, IndexChoice
from penstock.documents.base import ReadableSink, readable
from penstock.documents.diff import DiffObserver, DiffReport, IndexDiff, Kind, Patience
from penstock.errors import PenstockError

DIFFERENT, NOT_COMPARED = 1, 2
"""Exit status; 0 if all is equal."""
_SAMPLE = 1_000
_SHOWN = 10


def diff(
    names: IndexNames = None,
    config_path: ConfigPath = DEFAULT_PATH,
    sample: Annotated[
        int, typer.Option(min=1, help="So many documents of each side, by chance.", metavar="N")
    ] = _SAMPLE,
    full: Annotated[bool, typer.Option("--full", help="All documents of both sides.")] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, help="How long a document that differs may take to follow.", metavar="SECONDS"),
    ] = Patience().seconds,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")] = False,
) -> None:
    """Compare documents in the sink with what the database would make of its rows now.

    Says which are missing, extra or different, and where they differ, but no values. Works while the pipeline runs:
    what does not match is looked at again. Ends with 0 if all is equal, 1 if documents differ, 2 if something could
    not be compared.

    Examples:

        penstock index diff
        penstock index diff customers --full
        penstock index diff --full --json | jq '.indexes[].differences'
    """
    with configured(config_path) as config, Ending() as ending, ending.interruptible(), _not_compared():
        indexes = chosen_indexes(config, names)
        reader = readable(config.indexes.create_sink(), config.indexes.sink_type)
        with _watching(config, indexes, reader, quiet=quiet or as_json) as observer:
            reports = _compare(config, indexes, reader, observer, None if full else sample, wait)
        if as_json:
            typer.echo(json.dumps(_to_json(reports), indent=2, ensure_ascii=False))
        else:
            for report in reports:
                _print(report)
        raise typer.Exit(_exit_status(reports))
    # Ended by a signal: nothing is known.
    raise typer.Exit(NOT_COMPARED)


def _compare(
    config: Config,
    indexes: tuple[IndexChoice, ...],
    reader: ReadableSink,
    observer: DiffObserver,
    sample: int | None,
    wait: float,
) -> list[DiffReport]:
    with live_documents(config, indexes) as live:

        def compare(index: IndexChoice, live: LiveDocuments) -> DiffReport:
            found = IndexDiff(live.documents, live.keys(index), reader, patience=Patience(wait), observer=observer)
            return found.full() if sample is None else found.sample(live.connection, sample)

        return [compare(index, live) for index in indexes]


@contextmanager
def _not_compared() -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        error.facts["exit_status"] = NOT_COMPARED
        raise


def _exit_status(reports: list[DiffReport]) -> int:
    if any(report.differs for report in reports):
        return DIFFERENT
    return 0 if all(report.equal for report in reports) else NOT_COMPARED


def _to_json(reports: list[DiffReport]) -> dict[str, Any]:
    results = {0: "equal", DIFFERENT: "different", NOT_COMPARED: "not compared"}
    return {
        "result": results[_exit_status(reports)],
        "indexes": [
            {
                "index": report.index,
                "compared": report.compared,
                "complete": report.complete,
                **{kind.value: report.count(kind) for kind in Kind},
                "differences": [
                    {"id": each.id, "kind": each.kind.value, "fields": list(each.fields)} for each in report.differences
                ],
            }
            for report in reports
        ],
    }


def _print(report: DiffReport) -> None:
    compared = count_of(report.compared, "document")
    if report.equal:
        typer.echo(f"{report.index}: {compared} compared, all equal")
        return
    counts = ", ".join(f"{report.count(kind):,} {kind.value}" for kind in Kind if report.count(kind))
    typer.echo(f"{report.index}: {compared} compared: {counts}")
    for each in report.differences[:_SHOWN]:
        typer.echo(f"  {each.kind.value:<9}  {each.id}  {', '.join(each.fields)}".rstrip())
    if len(report.differences) > _SHOWN:
        typer.echo(f"  … and {len(report.differences) - _SHOWN:,} more; --json lists all")
    if report.differs:
        typer.echo("a change of one of its rows writes a document again; `penstock index rebuild` writes all of them")


@contextmanager
def _watching(
    config: Config, indexes: tuple[IndexChoice, ...], reader: ReadableSink, *, quiet: bool
) -> Iterator[DiffObserver]:
    """A bar in a terminal, lines elsewhere."""
    if quiet:
        yield _Lines(lambda _: None)
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        console = Console(stderr=True, highlight=False)
        totals = {index.name: reader.facts(index.name).documents for index in indexes}
        with Progress(*columns, console=console, transient=True) as progress:
            yield _Bars(progress, totals)
    else:
        yield _Lines(write_line)


class _Lines(DiffObserver):
    """For files and pipes: only what takes time."""

    def __init__(self, write: Any) -> None:
        self._write = write
        self._told: set[str] = set()

    def on_settling(self, index: str, suspects: int) -> None:
        if index not in self._told:
            self._told.add(index)
            self._write(f"{index}: {count_of(suspects, 'document')} not equal yet, looking again")


class _Bars(DiffObserver):
    """For people."""

    def __init__(self, progress: Progress, totals: dict[str, int]) -> None:
        self._progress = progress
        self._totals = totals
        self._bars: dict[str, TaskID] = {}

    def on_compared(self, index: str, compared: int) -> None:
        if index not in self._bars:
            self._bars[index] = self._progress.add_task(index, total=self._totals.get(index))
        self._progress.update(self._bars[index], completed=compared)

    def on_settling(self, index: str, suspects: int) -> None:
        if index in self._bars:
            self._progress.update(self._bars[index], description=f"{index} ({suspects:,} not equal yet)")
