"""`penstock verify`: whether the tables at a destination equal their source, row by row, while both live."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.commands import choose_tables
from penstock.cli.configured import (
    DEFAULT_PATH,
    ConfigPath,
    OutputName,
    chosen_outputs,
    configured,
    existing_store,
    require_shared_state,
    running,
)
from penstock.cli.display import Display, Lines, Silence, write_line
from penstock.cli.options import AsJson
from penstock.cli.outputs import POLL_SECONDS, is_settled, started_outputs, started_tasks
from penstock.cli.tail import Ending
from penstock.cli.verify_display import opened_watching, print_report
from penstock.comparison.compare import CompareSettings
from penstock.comparison.report import Report
from penstock.comparison.verification import WAIT_SECONDS, VerifySettings, require_readable, verify_tables
from penstock.config import Config, OutputChoice
from penstock.errors import PenstockError
from penstock.spool.folder import SpoolFolder
from penstock.state import PipelineStore
from penstock.tables import Coordinator

DIFFERENT, NOT_COMPARED = 1, 2
"""Exit status; 0 if all is equal."""


def parse_part(text: str) -> float:
    """`1%` or `0.01`."""
    try:
        fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise typer.BadParameter(f"{text!r} is no part of a whole, like 1% or 0.01")
    return fraction


def verify(
    tables: Annotated[
        list[str] | None, typer.Argument(help="Tables or patterns; all if none is named.", metavar="TABLE")
    ] = None,
    config_path: ConfigPath = DEFAULT_PATH,
    output: OutputName = None,
    as_json: AsJson = False,
    sample: Annotated[
        float,
        typer.Option(parser=parse_part, help="Look at a part of the rows only, like 1%.", metavar="PART"),
    ] = "100%",  # pyright: ignore[reportArgumentType] (parsed like what a person writes)
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Show what differs, not only where: the data of both sides.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, help="How long to wait for transactions that are open.", metavar="SECONDS"),
    ] = WAIT_SECONDS,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")] = False,
) -> None:
    """Compare every row of the tables at a destination with the source.

    Exactly, at one position, while writers and the pipeline go on: changes wait for a second or two, until both sides
    are there. The source is read in another way than by a copy. A pipeline that does not run is started for as long as
    it takes. Ends with 0 if all is equal, 1 if rows differ, 2 if something could not be compared.
    """
    options = VerifySettings(CompareSettings(sample=sample, show_values=show_values), wait)
    compared: list[Compared] = []
    with configured(config_path) as config, _not_compared():
        require_shared_state(config)
        with Ending() as ending:
            _compare_all(_Request(config, tables or (), output, options, quiet=quiet or as_json), ending, compared)
            if as_json:
                typer.echo(json.dumps(_to_json(compared), ensure_ascii=False))
            else:
                for each in compared:
                    print_report(each.report, each.output.name if len(compared) > 1 else None)
            raise typer.Exit(_exit_status(compared))
    # Ended by a signal: nothing is known.
    raise typer.Exit(NOT_COMPARED)


@dataclass(frozen=True, slots=True)
class Compared:
    """One output, and what was found."""

    output: OutputChoice
    report: Report


@dataclass(frozen=True, slots=True)
class _Request:
    """What a person asked for."""

    config: Config
    tables: Sequence[str]
    output: str | None
    options: VerifySettings
    quiet: bool

    @property
    def outputs(self) -> Sequence[OutputChoice]:
        return chosen_outputs(self.config, self.output)

    def chosen(self, output: OutputChoice) -> list[str]:
        """The names of the tables that are meant; none for all."""
        with self.config.open_store(output) as store:
            return choose_tables(self.config, store, self.tables)


@contextmanager
def _not_compared() -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        error.facts["exit_status"] = NOT_COMPARED
        raise


def _compare_all(request: _Request, ending: Ending, compared: list[Compared]) -> None:
    config = request.config
    for each in request.outputs:
        require_readable(config.create_destination(each))
    display: Display = Silence() if request.quiet else Lines(write_line, 0)
    stores = [_look(request, each) for each in request.outputs]
    if all(stores):
        with started_tasks(config, ending, display) as (tasks, session):
            for each in request.outputs:
                with config.open_store(each) as store:
                    compared.append(_compare(request, each, store, _all_cores(tasks, session), ending))
        return
    display.say(f"pipeline {config.pipeline.id} does not run: it is started, and runs until all is compared")
    with started_outputs(config, ending, display) as started:
        if not _wait_settled(started.outputs, ending):
            return
        stores_by_name = {pipeline.output: pipeline.store for pipeline in started.outputs}
        for each in request.outputs:
            compared.append(_compare(request, each, stores_by_name[each.name], started.tasks, ending))


def _look(request: _Request, output: OutputChoice) -> bool:
    """Whether the pipeline of an output runs; refuses what cannot be compared before anything is started."""
    with existing_store(request.config, output) as store:
        if store is None:
            raise PenstockError(
                f"pipeline {request.config.pipeline.id} has not run yet: there is nothing to compare",
                hint="Start it with `penstock run`.",
            )
        is_running = running(store) is not None
    request.chosen(output)
    return is_running


def _compare(request: _Request, output: OutputChoice, store: PipelineStore, tasks: Any, ending: Ending) -> Compared:
    options = VerifySettings(_with_folder(request.options.compare, output), request.options.wait)
    with (
        opened_watching(quiet=request.quiet) as watching,
        ending.interruptible(),
        _given_up(ending, tasks),
    ):
        report = verify_tables(
            output.settings,
            store,
            request.config.create_destination(output),
            tasks,
            tables=request.chosen(output),
            options=options,
            observer=watching,
        )
    return Compared(output, report)


def _with_folder(settings: CompareSettings, output: OutputChoice) -> CompareSettings:
    """What differs is written below the spool, which all tasks see."""
    folder = SpoolFolder(output.settings.spool.path)
    return CompareSettings(settings.sample, settings.show_values, settings.shown, folder.comparisons)


def _all_cores(tasks: Any, session: Any) -> Any:
    """Nothing else runs in this process, so no core is left for changes."""
    if session is None:
        return tasks
    from penstock.spark.tasks import SparkTasks

    return SparkTasks(session, copy_tasks=tasks.cores)


@contextmanager
def _given_up(ending: Ending, tasks: Any) -> Iterator[None]:
    """After a signal, tasks that run are ended, too."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if ending.stop.is_set():
                tasks.close()
                return

    thread = threading.Thread(target=watch, name="give-up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait_settled(outputs: Coordinator, ending: Ending) -> bool:
    """Until nothing is copied any more; False if that will not be."""
    while not ending.stop.is_set() and not outputs.wait(0):
        if all(is_settled(pipeline) for pipeline in outputs):
            return True
        ending.stop.wait(POLL_SECONDS)
    return False


def _exit_status(compared: Sequence[Compared]) -> int:
    found = {each.report.exit_code for each in compared}
    return DIFFERENT if DIFFERENT in found else max(found, default=NOT_COMPARED)


def _to_json(compared: Sequence[Compared]) -> dict[str, Any]:
    return {
        "result": {0: "equal", DIFFERENT: "different", NOT_COMPARED: "not compared"}[_exit_status(compared)],
        "outputs": [{"output": each.output.name, **each.report.to_json()} for each in compared],
    }
