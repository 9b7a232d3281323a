"""Progress of a running pipeline: the events since the last look, and the status now.

`cli.display` shows it; the status file keeps it for `penstock status`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from penstock.config.units import count_of, format_bytes, format_seconds
from penstock.copy.progress import CopyProgress
from penstock.errors import PenstockError, for_table
from penstock.headroom import Headroom
from penstock.lsn import Lsn
from penstock.operations.lag import Behind
from penstock.source.slots import name_blockers
from penstock.spool.folder import SpoolFolder, read_file, replace_file
from penstock.state import DataSync, Errored, IndexBuild, IndexStatus, Init, Ready, TableReplicationPhase
from penstock.workers import ApplyStatus, CopyStatus, Outage, SnapshotWait

RATE_SECONDS = 5.0
"""The period over which changes per second are averaged."""
WRITE_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """What is watched of a `RunningOutput`."""

    @property
    def output(self) -> str: ...
    @property
    def table_ids(self) -> Mapping[str, int]: ...
    @property
    def phases(self) -> Mapping[str, TableReplicationPhase]: ...
    @property
    def copies(self) -> Mapping[str, CopyStatus]: ...
    @property
    def waits(self) -> Mapping[str, SnapshotWait]: ...
    @property
    def status(self) -> ApplyStatus | None: ...
    @property
    def paused(self) -> bool: ...
    @property
    def error(self) -> BaseException | None: ...


@runtime_checkable
class WatchedIndexes(Protocol):
    """What is also watched of a `DocumentsOutput`."""

    @property
    def indexes(self) -> Mapping[str, IndexBuild]: ...
    @property
    def stopped(self) -> Mapping[str, PenstockError]: ...


@dataclass(frozen=True, slots=True)
class Notice:
    """An event: `text` for people, the rest for machines."""

    event: str
    text: str
    output: str
    table: str
    """Table or index."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    at: float | None = None
    """When it happened, as Unix time; None if that is when it was noticed."""


@dataclass(frozen=True, slots=True)
class CaptureLook:
    """Capture at one moment."""

    state: str
    """streaming, or why it is not."""
    lag_bytes: int | None = None
    lag_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class OutputLook:
    """The status of an output at one moment."""

    output: str
    paused: bool
    phases: Mapping[str, TableReplicationPhase]
    copies: tuple[CopyProgress, ...]
    """Those in progress."""
    changes: int
    """Applied since the process started."""
    changes_per_second: float
    applied: Lsn
    behind: Behind | None
    """None before the server's position is known."""
    indexes: Mapping[str, IndexBuild] = field(default_factory=dict[str, IndexBuild])
    error: str | None = None
    """What stopped the output, while others keep running."""
    outage: Outage | None = None
    """Why nothing can be written, while that is retried."""
    source_lost_since: float | None = None
    """When the source last answered, as Unix time, if it no longer does: the lag is unknown then."""
    headroom: Headroom = field(default_factory=Headroom)
    """Of the stream that all outputs share."""
    acknowledged: Behind | None = None
    """How far the position is behind up to which the server may forget; None if that is unknown."""
    capture: CaptureLook | None = None
    """Of the stream that all outputs share."""

    @property
    def line(self) -> str:
        """The status in one line."""
        lag = "unknown"
        if self.behind is not None:
            lag = f"{format_bytes(self.behind.bytes)}, {format_seconds(self.behind.seconds)}"
        if self.error is not None:
            return f"stopped: {self.error}"
        if self.outage is not None and not self.paused:
            since = datetime.fromtimestamp(self.outage.since, UTC)
            return f"waiting since {since:%H:%M} UTC, lag {lag}: {self.outage.reason}"
        state = "paused" if self.paused else "streaming"
        what = count_indexes(self.indexes) if self.indexes else count_phases(self.phases)
        if self.source_lost_since is not None:
            # It has to fit into a terminal of 80 columns, which shows one line.
            since = datetime.fromtimestamp(self.source_lost_since, UTC)
            return f"{state}: {what}; source unreachable since {since:%Y-%m-%d %H:%M} UTC"
        return f"{state}: {what}; {self.changes_per_second:,.0f} changes/s; lag {lag}"

    @property
    def facts(self) -> dict[str, Any]:
        """The status as plain values."""
        return {
            "output": self.output,
            "paused": self.paused,
            **({} if self.error is None else {"error": self.error}),
            **({} if self.outage is None else {"failing": self.outage.reason}),
            "tables": len(self.phases),
            "ready": sum(isinstance(phase, Ready) for phase in self.phases.values()),
            "errored": sum(isinstance(phase, Errored) for phase in self.phases.values()),
            **({"indexes": len(self.indexes), "seeded": _seeded(self.indexes)} if self.indexes else {}),
            "changes": self.changes,
            "changes_per_second": round(self.changes_per_second, 1),
            "position": str(self.applied),
            "lag_bytes": None if self.lag is None else self.lag.bytes,
            "lag_seconds": None if self.lag is None else round(self.lag.seconds, 1),
            **(
                {}
                if self.source_lost_since is None
                else {"source_unreachable_since": format_time(self.source_lost_since)}
            ),
        }

    @property
    def lag(self) -> Behind | None:
        """The lag; None if it is unknown, also because the source no longer answers."""
        return self.behind if self.source_lost_since is None else None


class Progress:
    """Watches one output."""

    def __init__(
        self,
        pipeline: Watched,
        behind: Callable[[ApplyStatus], Behind | None],
        *,
        prefix: str = "",
        lost_since: Callable[[], float | None] = lambda: None,
        headroom: Callable[[], Headroom] = Headroom,
        acknowledged: Callable[[ApplyStatus], Behind | None] = lambda status: None,
        capture: Callable[[], CaptureLook | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefix` is put before notices, to name one of several outputs; `lost_since` is when the source went away."""
        self._pipeline = pipeline
        self._behind = behind
        self._prefix = prefix
        self._lost_since = lost_since
        self._headroom = headroom
        self._acknowledged = acknowledged
        self._capture = capture
        self._clock = clock
        self._ids: dict[str, int] = {}
        self._phases: dict[str, TableReplicationPhase] = {}
        self._reported: dict[str, CopyStatus] = {}
        self._waiting: dict[str, frozenset[str]] = {}
        self._builds: dict[str, IndexBuild] = {}
        self._samples: deque[tuple[float, int]] = deque()

    def look(self) -> tuple[list[Notice], OutputLook | None]:
        """The new events and the status; None before the start."""
        ids, phases = dict(self._pipeline.table_ids), dict(self._pipeline.phases)
        if ids.keys() != phases.keys():  # a table got another name between the two
            ids, phases = dict(self._pipeline.table_ids), dict(self._pipeline.phases)
        renames = self._new_names(ids)
        copies = dict(self._pipeline.copies)
        stopped: Mapping[str, PenstockError] = {}
        indexes: dict[str, IndexBuild] = {}
        if isinstance(self._pipeline, WatchedIndexes):
            indexes, stopped = dict(self._pipeline.indexes), self._pipeline.stopped
        notices = [
            *renames,
            *self._new_waits(),
            *self._new_copies(copies),
            *self._new_phases(phases),
            *self._new_builds(indexes, stopped),
        ]
        self._phases = phases
        self._builds = indexes
        status = self._pipeline.status
        if status is None:
            return notices, None
        under_way = tuple(
            copy.progress
            for table, copy in copies.items()
            if isinstance(phases.get(table), DataSync) and copy.seconds is None
        )
        lost_since = self._lost_since()
        look = OutputLook(
            output=self._pipeline.output,
            paused=self._pipeline.paused,
            phases=phases,
            copies=under_way,
            changes=status.changes,
            changes_per_second=self._rate(status.changes),
            applied=status.applied,
            behind=self._behind(status),
            indexes=indexes,
            error=_message(self._pipeline.error),
            outage=status.outage,
            source_lost_since=lost_since,
            headroom=self._headroom(),
            acknowledged=None if lost_since is not None else self._acknowledged(status),
            capture=self._capture(),
        )
        return notices, look

    def _rate(self, changes: int) -> float:
        now = self._clock()
        self._samples.append((now, changes))
        while now - self._samples[0][0] >= RATE_SECONDS:
            self._samples.popleft()
        since, count = self._samples[0]
        return (changes - count) / (now - since) if now > since else 0.0

    def _new_names(self, ids: dict[str, int]) -> list[Notice]:
        """Return the renamed tables, and move what was reported of each to its new name, so that it is not repeated."""
        names = {table_id: name for name, table_id in ids.items()}
        renamed = {
            before: names[table_id] for before, table_id in self._ids.items() if names.get(table_id, before) != before
        }
        self._ids = ids
        self._phases = {renamed.get(name, name): phase for name, phase in self._phases.items()}
        self._reported = {renamed.get(name, name): copy for name, copy in self._reported.items()}
        self._waiting = {renamed.get(name, name): blockers for name, blockers in self._waiting.items()}
        return [
            self._notice("renamed", f"{before} was renamed to {name}", name, {"before": before})
            for before, name in sorted(renamed.items())
        ]

    def _new_waits(self) -> list[Notice]:
        waits = dict(self._pipeline.waits)
        seen = {table: frozenset(each.identity for each in wait.blockers) for table, wait in waits.items()}
        notices = [
            self._notice(
                "waiting",
                f"waiting to copy {table} until these transactions end: {name_blockers(wait.blockers)}",
                table,
                {"blockers": [str(blocker) for blocker in wait.blockers], "since": wait.since.isoformat()},
            )
            for table, wait in waits.items()
            if self._waiting.get(table) != seen[table]
        ]
        self._waiting = seen
        return notices

    def _new_copies(self, copies: Mapping[str, CopyStatus]) -> list[Notice]:
        notices: list[Notice] = []
        for table, copy in copies.items():
            reported = self._reported.get(table)
            is_new = reported is None or reported.attempt != copy.attempt
            if copy.seconds is not None and (is_new or reported is None or reported.seconds is None):
                text = f"copied {table}: {describe_whole(copy.progress)}, in {format_seconds(copy.seconds)}"
                facts = {**copy_facts(copy.progress), "seconds": round(copy.seconds, 3)}
                notices.append(self._notice("copied", text, table, facts))
            elif copy.seconds is None and is_new:
                text = f"copying {table}: {describe_plan(copy.progress)}{_resumed(copy.progress)}"
                notices.append(self._notice("copying", text, table, copy_facts(copy.progress)))
        self._reported = dict(copies)
        return notices

    def _new_phases(self, phases: Mapping[str, TableReplicationPhase]) -> list[Notice]:
        notices = [
            replace(
                self._notice(
                    *("stopped", _stopped(table, phase), table),
                    {"reason": phase.reason, "solution": _remedy(table, phase)},
                ),
                at=self._stopped_at(table, phase),
            )
            for table, phase in phases.items()
            if isinstance(phase, Errored) and self._phases.get(table) != phase
        ]
        for table in self._phases.keys() - phases.keys():
            text = f"{table} is no longer in the publication; its data stays at the destination"
            notices.append(self._notice("left", text, table, {}))
        return notices

    def _stopped_at(self, table: str, phase: Errored) -> float | None:
        """Return when a table stopped, perhaps before this process started; None for a stop that follows another."""
        known = self._phases.get(table)
        is_again = isinstance(known, Errored) or (known is not None and phase.attempts > 0)
        return None if is_again else phase.since.timestamp()

    def _new_builds(self, indexes: Mapping[str, IndexBuild], stopped: Mapping[str, PenstockError]) -> list[Notice]:
        notices: list[Notice] = []
        for name, build in indexes.items():
            before = self._builds.get(name)
            facts = {"build": build.build, "reason": build.reason}
            if name in stopped:
                error = stopped[name]
                if before is None or before.build != build.build:
                    facts = {"reason": error.message, "solution": error.hint}
                    notices.append(self._notice("stopped", f"index {name} stopped: {error.message}", name, facts))
            elif build.status is not IndexStatus.SEEDED and (before is None or before.build != build.build):
                notices.append(self._notice("filling", f"filling index {name}: {build.reason}", name, facts))
            elif build.status is IndexStatus.SEEDED and before is not None and _state(before) != _state(build):
                notices.append(self._notice("seeded", f"index {name} is complete and in use", name, facts))
        return notices

    def _notice(self, event: str, text: str, table: str, facts: Mapping[str, Any]) -> Notice:
        return Notice(event, f"{self._prefix}{text}", self._pipeline.output, table, facts)


class Interval:
    """A timer that repeats."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last = clock()

    def is_over(self) -> bool:
        """True once per interval; never if the interval is 0."""
        now = self._clock()
        if not self._seconds or now - self._last < self._seconds:
            return False
        self._last = now
        return True


@dataclass(frozen=True, slots=True)
class LastLook:
    """The status of an output, as its process last wrote it."""

    at: float
    """Unix time."""
    paused: bool
    changes: int
    changes_per_second: float
    position: str
    lag_bytes: int | None
    lag_seconds: float | None
    phases: Mapping[str, str] = field(default_factory=dict[str, str])
    """By table; includes phases that are not stored."""
    copies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """By table: the copies in progress."""
    error: str | None = None
    """What stopped the output, while others keep running."""
    outage: Mapping[str, Any] | None = None
    """Why nothing can be written: the fields of `Outage`."""
    source_lost_since: float | None = None
    """Unix time, if the source no longer answers."""
    ended: str | None = None
    """Why the run ended; None while it runs, and if it was killed."""
    spool: Mapping[str, Any] | None = None
    """What is left of its room: the fields of `Room`."""
    wal: Mapping[str, Any] | None = None
    """The same, of WAL that the server retains for the slot."""
    acknowledged_lag_bytes: int | None = None
    acknowledged_lag_seconds: float | None = None
    capture: Mapping[str, Any] | None = None
    """The fields of `CaptureLook`."""


class StatusFile:
    """A small file in the spool, replaced every second: copies, rates and lag, which only the running process knows.

    After the process has ended, it holds the last status.
    """

    def __init__(self, spool: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = SpoolFolder(spool).status
        self._clock = clock
        self._interval = Interval(WRITE_SECONDS)
        self._is_new = True

    def write(self, looks: Sequence[OutputLook]) -> None:
        """Replace the file, at most once a second. A full disk is not an error here."""
        if not looks or not (self._is_new or self._interval.is_over()):
            return
        self._is_new = False
        try:
            replace_file(self._path, {look.output: asdict(self._last(look)) for look in looks})
        except OSError as error:
            logger.debug("status file not written error=%s", error)

    def end(self, reason: str) -> None:
        """Add why the run ended. Does nothing if there is no status yet."""
        try:
            if looks := self.read():
                ended = {output: asdict(replace(look, ended=reason)) for output, look in looks.items()}
                replace_file(self._path, ended)
        except OSError as error:
            logger.debug("status file not written error=%s", error)

    def read(self) -> dict[str, LastLook]:
        """The last status by output; empty if there is no valid file."""
        try:
            return {output: LastLook(**values) for output, values in (read_file(self._path) or {}).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.debug("status file not read error=%s", error)
            return {}

    def _last(self, look: OutputLook) -> LastLook:
        return LastLook(
            at=self._clock(),
            paused=look.paused,
            changes=look.changes,
            changes_per_second=round(look.changes_per_second, 1),
            position=str(look.applied),
            lag_bytes=None if look.lag is None else look.lag.bytes,
            lag_seconds=None if look.lag is None else round(look.lag.seconds, 1),
            error=look.error,
            outage=None if look.outage is None else asdict(look.outage),
            source_lost_since=look.source_lost_since,
            phases={table: phase.name for table, phase in look.phases.items()},
            copies={copy.table: copy_facts(copy) for copy in look.copies},
            spool=None if look.headroom.spool is None else asdict(look.headroom.spool),
            wal=None if look.headroom.wal is None else asdict(look.headroom.wal),
            acknowledged_lag_bytes=None if look.acknowledged is None else look.acknowledged.bytes,
            acknowledged_lag_seconds=None if look.acknowledged is None else round(look.acknowledged.seconds, 1),
            capture=None if look.capture is None else asdict(look.capture),
        )


def _remedy(table: str, phase: Errored) -> str | None:
    return None if phase.solution is None else for_table(phase.solution, table)


def _stopped(table: str, phase: Errored) -> str:
    remedy = _remedy(table, phase) or ""
    return f"stopped {table}: {phase.reason.removeprefix(f'{table}: ')}{'. ' if remedy else ''}{remedy}"


def format_time(seconds: float) -> str:
    """A Unix time, for machines; for people: `format_moment`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def describe_plan(progress: CopyProgress) -> str:
    """The size of a copy."""
    rows = "" if progress.estimated_rows is None else f", about {count_of(progress.estimated_rows, 'row')}"
    return f"{format_bytes(progress.bytes)}{rows}"


def describe_copy(progress: CopyProgress) -> str:
    """The progress of a copy."""
    left = progress.seconds_left
    return (
        f"{progress.ranges_done} of {count_of(progress.ranges, 'range')}, {count_of(progress.rows_done, 'row')}, "
        f"{format_bytes(progress.bytes_done)} of {format_bytes(progress.bytes)} "
        f"({progress.fraction:.0%}{_resumed(progress)})"
        + ("" if left is None else f", about {format_seconds(left)} left")
    )


def _resumed(progress: CopyProgress) -> str:
    return f", resumed at {progress.fraction_resumed:.0%}" if progress.bytes_resumed else ""


def describe_whole(progress: CopyProgress) -> str:
    """A finished copy. Rows that are read through a data frame are not counted."""
    if progress.ranges_done < progress.ranges:
        return describe_plan(progress)
    return f"{count_of(progress.rows_done, 'row')}, {format_bytes(progress.bytes)}"


def copy_facts(progress: CopyProgress) -> dict[str, Any]:
    """The progress of a copy as plain values."""
    left = progress.seconds_left
    return {
        "ranges": progress.ranges,
        "ranges_done": progress.ranges_done,
        "rows_done": progress.rows_done,
        "estimated_rows": progress.estimated_rows,
        "bytes": progress.bytes,
        "bytes_done": progress.bytes_done,
        "fraction": round(progress.fraction, 3),
        **({"fraction_resumed": round(progress.fraction_resumed, 3)} if progress.bytes_resumed else {}),
        "seconds_left": None if left is None else round(left, 1),
    }


def count_phases(phases: Mapping[str, TableReplicationPhase]) -> str:
    """`4 of 5 tables ready, 1 copying`."""
    kinds = Counter(_kind(phase) for phase in phases.values())
    ready = kinds.pop("ready", 0)
    others = "".join(f", {count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{ready} of {count_of(len(phases), 'table')} ready{others}"


def count_indexes(indexes: Mapping[str, IndexBuild]) -> str:
    """`1 of 2 indexes complete, 1 filling`."""
    filling = sum(build.status is IndexStatus.FILLING for build in indexes.values())
    noun = "index" if len(indexes) == 1 else "indexes"
    return f"{_seeded(indexes)} of {len(indexes)} {noun} complete{f', {filling} filling' if filling else ''}"


def _message(error: BaseException | None) -> str | None:
    """Of an unknown error only the class: libraries quote values in their messages."""
    return error.message if isinstance(error, PenstockError) else None if error is None else type(error).__name__


def _state(build: IndexBuild) -> tuple[str, IndexStatus]:
    return build.build, build.status


def _seeded(indexes: Mapping[str, IndexBuild]) -> int:
    return sum(build.status is IndexStatus.SEEDED for build in indexes.values())


def _kind(phase: TableReplicationPhase) -> str:
    match phase:
        case Init():
            return "waiting"
        case DataSync():
            return "copying"
        case Ready():
            return "ready"
        case Errored():
            return "errored"
        case _:
            return "catching up"
