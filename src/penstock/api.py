"""The public API: `import penstock` offers the names of this module.

Docstrings are the contract. Every example runs as a test, in a folder with a `penstock.toml` whose pipeline copies the
table `public.orders`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.comparison.compare import CompareSettings
from penstock.comparison.verification import WAIT_SECONDS, VerifySettings
from penstock.config import Config, load_config, make_config
from penstock.config.problems import REFERENCE
from penstock.config.template import usable_id
from penstock.errors import ConfigError, PenstockError, Retry, for_table
from penstock.operations.plan import Plan, make_plan
from penstock.operations.readiness import check_pipeline
from penstock.operations.reading import choose_output, read_rows
from penstock.operations.running import POLL_SECONDS, Running, started
from penstock.operations.signals import Ending
from penstock.operations.status import pipeline_status
from penstock.operations.status_model import PipelineStatus
from penstock.operations.stores import existing_store
from penstock.operations.verify import VerifyReport, VerifyRequest, verify_pipeline, verify_running
from penstock.server.serving import Serving, require_server, serving
from penstock.source import SourceSettings
from penstock.source.preflight import Report as CheckReport

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "CheckReport",
    "Pipeline",
    "PipelineStatus",
    "Plan",
    "VerifyReport",
    "check",
    "open",
    "plan",
    "read_table",
    "status",
    "verify",
]

logger = logging.getLogger(__name__)

DEFAULT_PATH = "penstock.toml"


class Pipeline:
    """A pipeline: one stream and its outputs, in threads of this process; capture is a child process.

    A `with` block starts it, and at its end finishes the current batches, records progress and releases everything.
    The next start resumes from there. Use `penstock.open` for a pipeline that has a config file.

    Arguments:
        source: URL of the database, or a mapping with the keys of `[source]`.
        destination: mapping with the keys of `[destination]`, or several of them.
        tables: a name or pattern of the tables to copy and follow, or several; all tables by default.
        id: name of the pipeline, and of its slot and publication; by default the name of the database.
        folder: relative paths are relative to it, and it holds the spool and the state.
        sections: the other sections of a config file: `pipeline`, `state`, `copy`, `spark`, `types`, `index`, `sink`,
            `server`, `telemetry`.

    Raises:
        ConfigError: the arguments are not valid; the message names every key that is wrong.

    Example:
        import os
        import penstock

        pipeline = penstock.Pipeline(
            source=os.environ["SOURCE_URL"],
            destination={"type": "parquet", "path": "other_lake"},
            tables=["public.orders"],
            id="other",
            spark={"master": "none"},
        )
        with pipeline:
            pipeline.wait_until_ready()
            print(pipeline.status())
    """

    def __init__(
        self,
        source: str | Mapping[str, Any],
        destination: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        tables: str | Sequence[str] | None = None,
        *,
        id: str | None = None,  # noqa: A002 (the key has this name in the config file)
        folder: str | Path = ".",
        **sections: Any,
    ) -> None:
        keys: dict[str, Any] = {"url": source} if isinstance(source, str) else _section("source", source, "a URL, or ")
        values: dict[str, Any] = {**sections, "source": keys}
        values["pipeline"] = {"id": id or _default_id(keys), **_section("pipeline", sections.get("pipeline", {}))}
        if tables is not None:
            keys["tables"] = [tables] if isinstance(tables, str) else tables
        if isinstance(destination, Sequence) and not isinstance(destination, str):
            values["destination"] = [_section("destination", each) for each in destination]
        elif destination is not None:
            values["destination"] = _section("destination", destination)
        self._set(make_config(values, folder))

    @classmethod
    def _of(cls, config: Config) -> Pipeline:
        pipeline = cls.__new__(cls)
        pipeline._set(config)
        return pipeline

    def _set(self, config: Config) -> None:
        self._config = config
        self._running: Running | None = None
        self._server: Serving | None = None
        self._stack = ExitStack()

    def __repr__(self) -> str:
        return f"<Pipeline {self.id}, {'running' if self._running else 'not running'}>"

    def __enter__(self) -> Pipeline:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The name of the pipeline."""
        return self._config.pipeline.id

    @property
    def address(self) -> str | None:
        """The URL of the server of a running pipeline; None without `server={…}`, and until it listens."""
        return None if self._server is None else self._server.address

    def start(self) -> None:
        """Start; returns when changes flow, while tables are still being copied.

        Raises:
            LeaseHeld: another process runs the pipeline.
            PenstockError: whatever else prevents the start; nothing is left running.
        """
        self._start(Ending())

    def close(self) -> None:
        """Finish the current batches, record progress, and release everything. Can be called twice."""
        try:
            with self._config.discreet():
                self._stack.close()
        finally:
            self._running = self._server = None

    def run(self) -> None:
        """Start, and run until SIGINT (Ctrl-C), SIGTERM or an error; then close. Call it from the main thread.

        Raises:
            PenstockError: what ended the pipeline.
        """
        if threading.current_thread() is not threading.main_thread():
            raise PenstockError(
                "run() stops at signals, which only the main thread receives",
                hint="In another thread, use the pipeline in a `with` block, and wait().",
            )
        with Ending() as ending:
            try:
                self._start(ending)
                while not ending.stop.wait(POLL_SECONDS) and not self.wait(0):
                    pass
            finally:
                self.close()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the pipeline ends; returns False if it still runs after `timeout` seconds.

        Raises:
            PenstockError: what ended the pipeline.
        """
        with self._config.discreet():
            return self._require_running().wait(timeout)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until all tables are copied and all indexes are complete.

        Raises:
            PenstockError: a table stopped and needs a fix, or an output failed.
            TimeoutError: it takes longer than `timeout` seconds.
        """
        running = self._require_running()
        self._wait_for(running.is_ready, timeout, "ready")
        stopped = {name: each for name, each in running.errored.items() if each.retry_policy.retry is Retry.OPERATOR}
        for name, phase in stopped.items():
            with self._config.discreet():
                raise PenstockError(f"{name} stopped: {phase.reason}", hint=for_table(phase.solution or "", name))
        for name, error in running.stopped_indexes.items():
            raise PenstockError(f"index {name} stopped: {error.message}", hint=error.hint)

    def wait_until_caught_up(self, timeout: float | None = None) -> None:
        """Wait until everything that is committed at the source now is durable at every output.

        Raises:
            PenstockError: a table stopped and needs a fix, or an output failed.
            TimeoutError: it takes longer than `timeout` seconds.
        """
        running = self._require_running()
        started = time.monotonic()
        self.wait_until_ready(timeout)
        target = running.current_position()
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - started))
        self._wait_for(lambda: running.has_reached(target), left, "caught up")

    def status(self) -> PipelineStatus:
        """The status of the pipeline, whether it runs or not; see `penstock.status`."""
        return status(self)

    def _start(self, ending: Ending) -> None:
        if self._running is not None:
            raise PenstockError(f"pipeline {self.id} has already been started")
        if self._config.documents is not None and self._config.documents.polling is not None:
            raise ConfigError("a pipeline with [polling] cannot be started from Python", hint="Use `penstock run`.")
        with self._config.discreet(), ExitStack() as stack:
            require_server(self._config)
            self._running = stack.enter_context(started(self._config, ending))
            stack.enter_context(_watched(self._running))
            self._server = stack.enter_context(serving(self._config, self._running))
            self._stack = stack.pop_all()

    def _require_running(self) -> Running:
        if self._running is None:
            raise PenstockError(f"pipeline {self.id} is not running", hint="Use it in a `with` block, or call start().")
        return self._running

    def _wait_for(self, done: Callable[[], bool], timeout: float | None, what: str) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        running = self._require_running()
        while not done():
            left = POLL_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"pipeline {self.id} was not {what} within {timeout:g} s")
            if self.wait(min(left, POLL_SECONDS)):
                raise PenstockError(f"pipeline {self.id} ended before it was {what}")
            self._check(running)
        self._check(running)

    def _check(self, running: Running) -> None:
        """Raise the error of an output that has failed."""
        with self._config.discreet():
            running.check()


Source = str | Path | Pipeline
"""What the functions below take: the path of a config file, or a pipeline."""


def open(config: str | Path = DEFAULT_PATH) -> Pipeline:  # noqa: A001 (penstock.open, like gzip.open)
    """Load a config file; nothing is started.

    Arguments:
        config: path of the file.

    Returns:
        The pipeline, to be started by a `with` block.

    Raises:
        ConfigError: the file cannot be read or is not valid; the message names every key that is wrong.

    Example:
        import penstock

        with penstock.open("penstock.toml") as pipeline:
            pipeline.wait_until_ready()
            print(pipeline.status())
    """
    return Pipeline._of(load_config(config))  # pyright: ignore[reportPrivateUsage] (same module)


def status(config: Source = DEFAULT_PATH, *, output: str | None = None) -> PipelineStatus:
    """Look at a pipeline from outside, whether it runs or not: phases, positions, lag, slot and errors.

    Arguments:
        config: path of a config file, or a pipeline.
        output: name of one output; all by default.

    Returns:
        The status; what `penstock status --json` prints. A server that does not answer is part of it.

    Raises:
        ConfigError: the file is not valid, or there is no such output.
        StateError: the state store cannot be read.

    Example:
        import penstock

        found = penstock.status("penstock.toml")
        for table in found.outputs[0].tables:
            print(table.table, table.phase, table.position)
    """
    found, running = _resolve(config)
    with found.discreet():
        return pipeline_status(found, output, () if running is None else running.outputs)


def plan(config: Source = DEFAULT_PATH) -> Plan:
    """Find out what a start would create and copy; changes nothing.

    Arguments:
        config: path of a config file, or a pipeline.

    Returns:
        The plan; what `penstock run --plan --json` prints.

    Raises:
        ConfigError: the file is not valid.
        SourceError: the server does not answer.

    Example:
        import penstock

        for table, what in penstock.plan("penstock.toml").tables.items():
            print(table, what)
    """
    found, _ = _resolve(config)
    with found.discreet():
        return make_plan(found)


def check(config: Source = DEFAULT_PATH) -> CheckReport:
    """Check whether the server is ready for a pipeline; changes nothing.

    Arguments:
        config: path of a config file, or a pipeline.

    Returns:
        The findings, each with a remedy; `ready` is True if none is critical. A server that does not answer is one.

    Raises:
        ConfigError: the file is not valid.

    Example:
        import penstock

        report = penstock.check("penstock.toml")
        for finding in report.failed:
            print(finding.severity, finding.what, finding.remedy)
        assert report.ready
    """
    found, _ = _resolve(config)
    with found.discreet():
        return check_pipeline(found)


def verify(
    config: Source = DEFAULT_PATH,
    tables: str | Sequence[str] = (),
    *,
    output: str | None = None,
    sample: float = 1.0,
    show_values: bool = False,
    wait: float = WAIT_SECONDS,
) -> VerifyReport:
    """Compare the tables at a destination with the source, row by row, at one position, while both change.

    A pipeline that does not run is started for the comparison.

    Arguments:
        config: path of a config file, or a pipeline.
        tables: a name or pattern, or several; all tables by default.
        output: name of one output; all by default.
        sample: fraction of the rows to compare, above 0 and at most 1.
        show_values: put differing values into the report, not only the names of their columns.
        wait: seconds to wait for open transactions to end.

    Returns:
        The report; `equal` is True if every row of every table is equal.

    Raises:
        ConfigError: the file or `sample` is not valid, or there is no such output or table.
        NotComparable: no destination can be read back. `VerifyReport.unreadable` names those of several that cannot.
        PenstockError: the pipeline has not run yet, or cannot be started.

    Example:
        import penstock

        report = penstock.verify("penstock.toml", ["public.orders"])
        assert report.equal, report.to_json()
    """
    found, running = _resolve(config)
    options = VerifySettings(CompareSettings(sample=sample, show_values=show_values), wait)
    request = VerifyRequest(found, [tables] if isinstance(tables, str) else tables, output, options)
    with found.discreet():
        return verify_pipeline(request) if running is None else verify_running(request, running)


def read_table(config: Source, table: str, *, output: str | None = None) -> pa.Table:
    """Read the current rows of a table from its destination, with the names and types of the source.

    Works while the pipeline writes, and sees one version of the table. The whole table is held in memory. Destinations
    that can be read are `delta`, `parquet` and those of your own that implement `ReadableDestination`. `parquet` keeps
    every change; the rows are those that result. A `delta` table in history mode has no current rows: read it with a
    Delta reader. Rows with a value that Arrow cannot represent have its text in an extra column `_unrepresentable`.

    Arguments:
        config: path of a config file, or a pipeline.
        table: name, like `public.orders`.
        output: name of the output, if there are several.

    Returns:
        A `pyarrow.Table`; `docs/reference/types.md` lists the types.

    Raises:
        ConfigError: the file is not valid, or there is no such output or table.
        NotComparable: the destination cannot be read back, or keeps a history.
        PenstockError: the table has not been copied yet.

    Example:
        import penstock

        orders = penstock.read_table("penstock.toml", "public.orders")
        print(orders.num_rows, orders.schema)
    """
    found, running = _resolve(config)
    with found.discreet():
        chosen = choose_output(found, output)
        if running is not None:
            return read_rows(found, chosen, running.stores[chosen.name], table)
        with existing_store(found, chosen) as store:
            if store is None:
                raise PenstockError(f"pipeline {found.pipeline.id} has not run yet", hint="Start it first.")
            return read_rows(found, chosen, store, table)


def _resolve(config: Source) -> tuple[Config, Running | None]:
    if isinstance(config, Pipeline):
        return config._config, config._running  # pyright: ignore[reportPrivateUsage] (same module)
    return load_config(config), None


def _section(name: str, value: Any, also: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{name} should be {also}a mapping with the keys of [{name}], not {type(value).__name__}",
            hint=REFERENCE,
        )
    return {**value}


def _default_id(source: Mapping[str, Any]) -> str:
    try:
        return usable_id(SourceSettings(str(source.get("url", ""))).parameters().get("dbname") or "")
    except PenstockError:
        return usable_id("")


@contextmanager
def _watched(running: Running) -> Iterator[None]:
    """Keep the status file up to date, so that `penstock status` shows how far copies are, and the lag."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(POLL_SECONDS):
            try:
                for notice in running.look()[0]:
                    logger.info("%s", notice.text)
            except Exception:
                logger.warning("the status could not be updated", exc_info=True)
                return

    thread = threading.Thread(target=watch, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
