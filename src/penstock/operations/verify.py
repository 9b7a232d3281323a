"""Compare the tables of a pipeline with their source, whether the pipeline runs or not."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from penstock.comparison.report import Report
from penstock.comparison.verification import Observer, VerifySettings, require_readable, verify_tables
from penstock.config import Config, OutputChoice
from penstock.errors import NotComparable, PenstockError
from penstock.operations.running import POLL_SECONDS, Running, Say, say_nothing, started, started_tasks
from penstock.operations.signals import Ending
from penstock.operations.stores import choose_tables, chosen_outputs, existing_store, require_shared_state, running
from penstock.spool.folder import SpoolFolder, read_file, replace_file
from penstock.state import Store, this_user

logger = logging.getLogger(__name__)

EQUAL, DIFFERENT, NOT_COMPARED = 0, 1, 2
"""Exit status of `penstock verify`."""
_RESULTS = {EQUAL: "equal", DIFFERENT: "different", NOT_COMPARED: "not compared"}
_ROW_KINDS = ("equal", "missing", "extra", "changed", "unsettled")
_REMEMBERED = 20
_REMEMBERED_TABLES = 100
"""Of each output in each comparison."""
_REMEMBERED_ROWS = 100
_KEY_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a comparison found."""

    outputs: Mapping[str, Report]
    """By output: the position of the comparison, and each table with its counts and differences."""
    unreadable: Mapping[str, str] = field(default_factory=dict[str, str])
    """By output: why none of its tables can be compared."""

    @property
    def equal(self) -> bool:
        """True if every table was compared and every row is equal."""
        return self.exit_code == EQUAL

    @property
    def exit_code(self) -> int:
        """0 if everything is equal, 1 if rows or columns differ, 2 if something could not be compared."""
        found = {report.exit_code for report in self.outputs.values()} | ({NOT_COMPARED} if self.unreadable else set())
        return DIFFERENT if DIFFERENT in found else max(found, default=NOT_COMPARED)

    def to_json(self) -> dict[str, Any]:
        """As plain values, for JSON; the keys are stable."""
        return {
            "result": _RESULTS[self.exit_code],
            "outputs": [{"output": name, **report.to_json()} for name, report in self.outputs.items()],
            "unreadable": dict(self.unreadable),
        }


@dataclass(frozen=True)
class VerifyRequest:
    """What to compare, and how."""

    config: Config
    tables: Sequence[str] = ()
    """Names or patterns; empty for all."""
    output: str | None = None
    options: VerifySettings = field(default_factory=VerifySettings)
    requested_by: str | None = None
    """Who asked, if not this user."""

    @cached_property
    def unreadable(self) -> Mapping[str, str]:
        """The outputs that cannot be compared, with the reason. Raises `NotComparable` if there are no others."""
        found: dict[str, str] = {}
        chosen = chosen_outputs(self.config, self.output)
        for each in chosen:
            try:
                require_readable(self.config.create_destination(each))
            except NotComparable as error:
                if len(chosen) == 1 or len(found) == len(chosen) - 1:
                    raise
                found[each.name] = error.message
        return found

    @property
    def outputs(self) -> Sequence[OutputChoice]:
        """The outputs to compare."""
        return [each for each in chosen_outputs(self.config, self.output) if each.name not in self.unreadable]


def verify_pipeline(
    request: VerifyRequest,
    ending: Ending | None = None,
    say: Say = say_nothing,
    observing: Callable[[], AbstractContextManager[Observer]] = lambda: nullcontext(Observer()),
) -> VerifyReport:
    """Compare source and destination; a pipeline that does not run is started for the comparison.

    `say` receives sentences for people; `observing` opens what watches the comparison of one output.
    """
    config, ending = request.config, ending or Ending()
    require_shared_state(config)
    # Check all outputs first, so that one that cannot be compared is refused before anything starts.
    are_running = [_is_running(request, each) for each in request.outputs]
    if all(are_running):
        return verify_elsewhere(request, ending, say, observing)
    say(f"pipeline {config.pipeline.id} is not running: starting it for the comparison")
    with started(config, ending, say) as pipeline:
        return verify_running(request, pipeline, ending, observing)


def verify_elsewhere(
    request: VerifyRequest,
    ending: Ending,
    say: Say = say_nothing,
    observing: Callable[[], AbstractContextManager[Observer]] = lambda: nullcontext(Observer()),
) -> VerifyReport:
    """Compare the tables of a pipeline that runs in another process."""
    config, found = request.config, dict[str, Report]()
    with started_tasks(config, say) as (tasks, spark):
        with ending.interruptible():
            tasks = _all_cores(tasks, spark, say)
        for each in request.outputs:
            with config.open_store(each) as store, observing() as observer:
                found[each.name] = _compare(request, each, store, tasks, ending, observer)
    return _remembered(request, VerifyReport(found, request.unreadable))


def verify_running(
    request: VerifyRequest,
    pipeline: Running,
    ending: Ending | None = None,
    observing: Callable[[], AbstractContextManager[Observer]] = lambda: nullcontext(Observer()),
) -> VerifyReport:
    """Compare the tables of a pipeline that runs in this process, once they are copied."""
    found: dict[str, Report] = {}
    ending = ending or Ending()
    if _wait_ready(pipeline, ending):
        for each in request.outputs:
            with observing() as observer:
                store, check = pipeline.stores[each.name], partial(pipeline.check, each.name)
                found[each.name] = _compare(request, each, store, pipeline.tasks, ending, observer, check)
    return _remembered(request, VerifyReport(found, request.unreadable))


def require_comparable(request: VerifyRequest, stores: Mapping[str, Store]) -> None:
    """Raise what can be known before a comparison starts: no such output or table, or nothing that can be read back."""
    require_shared_state(request.config)
    for each in request.outputs:
        choose_tables(request.config, stores[each.name], request.tables)


def verifications(spool: Path) -> list[dict[str, Any]]:
    """Return what the last comparisons on this machine found, oldest first: counts and keys, never other cells."""
    try:
        return list((read_file(SpoolFolder(spool).verified) or {}).get("runs", ()))
    except (OSError, ValueError, AttributeError) as error:
        logger.debug("comparisons not read error=%s", error)
        return []


def remember_failure(request: VerifyRequest, reason: str) -> None:
    """Keep that a comparison failed, and why."""
    _remember(request, {"result": _RESULTS[NOT_COMPARED], "reason": reason, "outputs": {}})


def _remembered(request: VerifyRequest, report: VerifyReport) -> VerifyReport:
    outputs = {
        name: {
            "position": str(each.position),
            "sample": each.sample,
            "tables": dict(Counter(table.result for table in each.tables)),
            "rows": {kind: sum(getattr(table.counts, kind) for table in each.tables) for kind in _ROW_KINDS},
            "different": [table.table for table in each.tables if table.result == "different"][:_REMEMBERED_TABLES],
            "found": _findings(each),
        }
        for name, each in report.outputs.items()
    }
    _remember(
        request,
        {"result": _RESULTS[report.exit_code], "outputs": outputs, "unreadable": dict(report.unreadable)},
    )
    return report


def _findings(report: Report) -> list[dict[str, Any]]:
    """The tables that are not equal, those that differ first, with keys of some rows; never with other cells."""
    unequal = [table for table in report.tables if table.result != "equal"]
    unequal.sort(key=lambda table: table.result != "different")
    found: list[dict[str, Any]] = []
    left = _REMEMBERED_ROWS
    for table in unequal[:_REMEMBERED_TABLES]:
        rows = [
            {
                "kind": each.kind.value,
                "key": {
                    name: None if value is None else str(value)[:_KEY_CHARACTERS] for name, value in each.key.items()
                },
                "columns": list(each.columns),
            }
            for each in table.differences[:left]
        ]
        left -= len(rows)
        found.append({**table.to_json(), **({} if table.reason is not None else {"differences": rows})})
    return found


def _remember(request: VerifyRequest, run: Mapping[str, Any]) -> None:
    """Keep a result for the server of the pipeline (`penstock.server`); a full disk is not an error here."""
    spool, now = request.config.pipeline.spool.path, time.time()
    about = {"id": f"{now * 1000:.0f}", "at": now, "requested_by": request.requested_by or this_user()}
    try:
        runs = [*verifications(spool)[1 - _REMEMBERED :], {**about, **run}]
        replace_file(SpoolFolder(spool).verified, {"runs": runs})
    except OSError as error:
        logger.debug("the result of a comparison was not kept error=%s", error)


def _is_running(request: VerifyRequest, output: OutputChoice) -> bool:
    """True if the pipeline of an output runs. Raises if the output cannot be compared."""
    with existing_store(request.config, output) as store:
        if store is None:
            raise PenstockError(
                f"pipeline {request.config.pipeline.id} has not run yet: there is nothing to compare",
                hint="Start it with `penstock run`.",
            )
        choose_tables(request.config, store, request.tables)
        return running(store) is not None


def _compare(
    request: VerifyRequest,
    output: OutputChoice,
    store: Store,
    tasks: Any,
    ending: Ending,
    observer: Observer,
    check: Callable[[], None] = lambda: None,
) -> Report:
    # Differences are written below the spool: only tasks on this machine see it.
    folder = SpoolFolder(output.settings.spool.path).comparisons
    options = replace(
        request.options, compare=replace(request.options.compare, work_folder=folder, is_shared=not tasks.elsewhere)
    )
    with ending.interruptible(), _closed_on_signal(ending, tasks):
        return verify_tables(
            output.settings,
            store,
            request.config.create_destination(output),
            tasks,
            tables=choose_tables(request.config, store, request.tables),
            options=options,
            observer=observer,
            check=check,
        )


def _all_cores(tasks: Any, spark: Any, say: Say) -> Any:
    """This process only compares, so no core is reserved for changes. Waits until tasks run on Spark, if it is used."""
    if spark is None:
        return tasks
    from penstock.spark.tasks import SparkTasks

    tasks.wait_for_executors(say)
    return SparkTasks(spark, copy_tasks=tasks.cores)


@contextmanager
def _closed_on_signal(ending: Ending, tasks: Any) -> Iterator[None]:
    """Stop running tasks when a signal arrives."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_SECONDS):
            if ending.stop.is_set():
                tasks.close()
                return

    thread = threading.Thread(target=watch, name="close-tasks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait_ready(pipeline: Running, ending: Ending) -> bool:
    """Wait until all tables are copied; False if the pipeline ends first."""
    while not ending.stop.is_set() and not pipeline.wait(0):
        pipeline.check()
        if pipeline.is_ready():
            return True
        ending.stop.wait(POLL_SECONDS)
    return False
