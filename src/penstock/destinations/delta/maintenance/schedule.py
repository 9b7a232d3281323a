"""Decides when maintenance is due, for all tables of a destination, in a thread that checks periodically.

Each kind of work is one job for all tables, in the pool of copies, so that changes never wait for it. If a table's work
fails, the failure is logged and counted, and the work is retried at the next turn. It stops neither other tables nor
the stream, whose correctness does not depend on maintenance.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.destinations.base import Tasks
from penstock.destinations.delta.log import DeltaLog
from penstock.destinations.delta.maintenance.cleanup import (
    Vacuum,
    Vacuumed,
    clean_log,
    commits_since_checkpoint,
    vacuum,
    write_checkpoint,
)
from penstock.destinations.delta.maintenance.compaction import (
    CompactionSettings,
    Group,
    Rewritten,
    commit_rewritten,
    plan_compaction,
    rewrite_group,
)
from penstock.destinations.delta.maintenance.pins import WritesInFlight
from penstock.destinations.delta.storage import Storage
from penstock.destinations.refusals import unexpected, unusable
from penstock.errors import DestinationUnavailable, PenstockError, TasksFailed

_LEAST_RETENTION_HOURS = 0.25
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MaintenanceSettings:
    """How often maintenance runs, and how much is kept."""

    interval_seconds: float = 15.0
    """Seconds between two checks of the tables."""
    checkpoint_commits: int = 100
    """Number of commits after which a checkpoint is written."""
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    log_retention_hours: float = 24.0
    """How far back versions can be read, if their files still exist."""
    file_retention_hours: float = 2.0
    """How long files stay that the newest version does not need: the time that a reader of an old version has."""
    orphan_hours: float = 2.0
    """How long files stay that no commit names, counted from the oldest write in progress."""
    clean_up_seconds: float = 600.0
    """Seconds between two clean-ups of log and files."""

    def __post_init__(self) -> None:
        for name in ("log_retention_hours", "file_retention_hours", "orphan_hours"):
            if getattr(self, name) < _LEAST_RETENTION_HOURS:
                raise unusable(
                    f"{name} must be at least {_LEAST_RETENTION_HOURS}",
                    hint="Readers and suspended writers need time to notice that files were deleted.",
                )


@dataclass(slots=True)
class _Counts:
    """The work done since the start."""

    checkpoints: int = 0
    compactions: int = 0
    deleted_files: int = 0
    failures: int = 0


class Maintenance:
    """The schedule of a destination. `tables` returns the locations of the tables that it writes now, by folder."""

    def __init__(
        self,
        tables: Callable[[], Mapping[str, Storage]],
        tasks: Tasks,
        settings: MaintenanceSettings | None = None,
        *,
        writes: WritesInFlight | None = None,
    ) -> None:
        self.settings = settings or MaintenanceSettings()
        self.writes = writes or WritesInFlight()
        self.counts = _Counts()
        self._tables = tables
        self._tasks = tasks
        self._logs: dict[str, DeltaLog] = {}
        self._clean_up_at = time.monotonic() + self.settings.clean_up_seconds
        self._failing: set[str] = set()
        """What failed in this run."""
        self._failed_before: set[str] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop, name="delta-maintenance", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Stop the thread; work in progress is finished, or left for the next start."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def run_once(self, *, clean_up: bool | None = None) -> None:
        """Do the work that is due now; `clean_up` overrides the schedule of clean-ups."""
        self._failed_before, self._failing = self._failing, set()
        tables = dict(self._tables())
        self._logs = {url: log for url, log in self._logs.items() if url in {each.url for each in tables.values()}}
        self.compact(tables)
        self.write_checkpoints(tables)
        if clean_up is None:
            clean_up = time.monotonic() >= self._clean_up_at
        if clean_up:
            self._clean_up_at = time.monotonic() + self.settings.clean_up_seconds
            self.clean_up(tables)

    def compact(self, tables: Mapping[str, Storage]) -> None:
        """Rewrite files of all tables in one job, then replace them table by table."""
        with self.writes.writing():
            groups: list[tuple[str, Group]] = []
            for table, storage in self._until_stopped(tables):
                groups += [(table, group) for group in self._guarded(table, self._plan, storage) or ()]
            results = self._run(groups, rewrite_group, "compact")
            for table in dict.fromkeys(table for table, _ in groups):
                rewritten: list[Rewritten] = [result for name, result in results if name == table]
                log = self._log(tables[table])
                if rewritten and self._guarded(table, commit_rewritten, log, rewritten) is not None:
                    self.counts.compactions += 1
                    files = sum(len(each.sources) for each in rewritten)
                    logger.info("files were compacted folder=%s files=%d into=%d", table, files, len(rewritten))

    def write_checkpoints(self, tables: Mapping[str, Storage]) -> None:
        """Write a checkpoint for each table that has enough commits since its last one."""
        due = [each for each in self._until_stopped(tables) if self._guarded(each[0], self._due, each[1])]
        written = self._run(due, write_checkpoint, "write checkpoints of")
        self.counts.checkpoints += len(written)

    def clean_up(self, tables: Mapping[str, Storage]) -> None:
        """Delete files past their retention: first of the logs, then data files."""
        settings = self.settings
        older_than = settings.log_retention_hours * 3600
        logs = [(table, _CleanLog(storage, older_than)) for table, storage in tables.items()]
        self._run(logs, _clean_log, "clean up the logs of")
        written_before = self.writes.oldest() - settings.orphan_hours * 3600
        removed_seconds = settings.file_retention_hours * 3600
        items = [(table, Vacuum(storage, removed_seconds, written_before)) for table, storage in tables.items()]
        results: list[tuple[str, Vacuumed]] = self._run(items, vacuum, "vacuum")
        for table, result in results:
            if result.files:
                self.counts.deleted_files += result.files
                logger.info("files were vacuumed folder=%s files=%d bytes=%d", table, result.files, result.bytes)

    def _until_stopped(self, tables: Mapping[str, Storage]) -> Iterator[tuple[str, Storage]]:
        """Yield the tables: a stop waits for the one whose log is being read, not for all of them."""
        return itertools.takewhile(lambda _: not self._stopping.is_set(), tables.items())

    def _plan(self, storage: Storage) -> list[Group]:
        snapshot = self._log(storage).refresh()
        return [] if snapshot is None else plan_compaction(storage, snapshot, self.settings.compaction)

    def _due(self, storage: Storage) -> bool:
        snapshot = self._log(storage).refresh()
        if snapshot is None:
            return False
        return commits_since_checkpoint(storage, snapshot.version) >= self.settings.checkpoint_commits

    def _log(self, storage: Storage) -> DeltaLog:
        """Open a separate log, because the writer's must not wait for maintenance."""
        return self._logs.setdefault(storage.url, DeltaLog(storage))

    def _run(
        self, items: Sequence[tuple[str, _Item]], function: Callable[[_Item], _Result], what: str
    ) -> list[tuple[str, _Result]]:
        """Run one job over all tables; return the results of those that did not fail."""
        if not items or self._stopping.is_set():
            return []
        description = f"{what} {items[0][0]}" + (f" and {len(items) - 1} more" if len(items) > 1 else "")
        try:
            with self._tasks.copying():
                outcomes = self._tasks.run(items, _Returned(function), description=description)
        except TasksFailed as error:
            if len(items) > 1 and self._guarded(description, self._try_tasks) is not None:
                # A table may have killed the worker: the maintenance of the others must not fail with it.
                return [each for item in items for each in self._run([item], function, what)]
            self._failed(description, error)
            return []
        except PenstockError as error:
            self._failed(description, error)
            return []
        for (table, _), outcome in zip(items, outcomes, strict=True):
            if isinstance(outcome, PenstockError):
                self._failed(table, outcome)
        pairs = zip(items, outcomes, strict=True)
        return [(table, outcome) for (table, _), outcome in pairs if not isinstance(outcome, PenstockError)]

    def _try_tasks(self) -> bool:
        """Raise if not even an empty task runs."""
        return bool(self._tasks.run([None], _do_nothing, description="check that tasks run"))

    def _guarded(self, table: str, function: Callable[..., _Result], *arguments: Any) -> _Result | None:
        try:
            return function(*arguments)
        except Exception as error:
            self._failed(table, unexpected(table, error))
            return None

    def _failed(self, table: str, error: PenstockError) -> None:
        """Count a failure, and warn of it if it is new: a destination that is away fails for every table, each time."""
        self.counts.failures += 1
        what = "the destination" if isinstance(error, DestinationUnavailable) else table
        is_known = what in self._failing or what in self._failed_before
        self._failing.add(what)
        text = "maintenance failed and will be retried folder=%s error=%s"
        logger.log(logging.INFO if is_known else logging.WARNING, text, table, error)

    def _loop(self) -> None:
        while not self._stopping.wait(self.settings.interval_seconds):
            try:
                self.run_once()
            except Exception as error:
                self._failed("all", unexpected("all", error))


@dataclass(frozen=True, slots=True)
class _CleanLog:
    storage: Storage
    older_than_seconds: float


def _clean_log(item: _CleanLog) -> int | None:
    return clean_log(item.storage, older_than_seconds=item.older_than_seconds)


def _do_nothing(_: None) -> None:
    """Run as a task to check that tasks run."""


class _Returned:
    """A task that returns its errors, so that one table does not fail the job of all."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, item: tuple[str, Any]) -> Any:
        table, argument = item
        try:
            return self._function(argument)
        except Exception as error:
            return unexpected(table, error)
