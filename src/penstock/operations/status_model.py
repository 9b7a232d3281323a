"""What is known of a pipeline: the model that the CLI, the page, metrics, reports and Python read.

`penstock.operations.status` fills it. Each part may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.headroom import Room
from penstock.operations.progress import CaptureLook
from penstock.state import LeaseInfo


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """The replication slot."""

    name: str
    exists: bool
    active_pid: int | None = None
    """Process id of the server process that serves its reader."""
    position: str | None = None
    lag_bytes: int | None = None
    retained_bytes: int | None = None
    """WAL that the server retains for it."""
    wal_status: str | None = None
    safe_bytes: int | None = None
    """What the server can still write before it invalidates the slot; None without `max_slot_wal_keep_size`."""
    room: Room | None = None
    """How long the WAL that it may retain lasts; None if the pipeline does not run here."""
    lost: bool = False
    waits_for_standby: bool = False
    """The server sends nothing until a standby in `synchronized_standby_slots` has received it."""


@dataclass(frozen=True, slots=True)
class LeftOutTable:
    """A table that matches and is not published, so that the server does not reject its updates and deletes."""

    table: str
    reason: str
    solution: str


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """The server."""

    location: str
    version: str | None = None
    position: str | None = None
    slot: SlotStatus | None = None
    long_transactions: tuple[str, ...] = ()
    """Open for a minute or more: the slot cannot move past their start, and no copy can start."""
    left_out: tuple[LeftOutTable, ...] = ()
    error: str | None = None
    """Why it does not answer; the rest is unknown then."""
    hint: str | None = None
    unreachable_since: str | None = None
    """When it last answered the process that runs the pipeline, if it no longer does."""


@dataclass(frozen=True, slots=True)
class TableError:
    """Why a table stopped, and what to do."""

    reason: str
    solution: str | None
    command: str | None
    """The command to run when the cause is fixed."""
    since: str
    next_retry: str | None
    attempts: int
    position_lost: bool


@dataclass(frozen=True, slots=True)
class TableState:
    """One table of one output; the JSON has the same names."""

    table: str
    id: int
    output: str
    phase: str
    position: str | None
    """The position up to which the table is durable."""
    error: TableError | None
    copied_because: str | None = None
    """Why Penstock copies it again automatically; None after the copy, and for a copy that was requested."""
    changed_cells: int = 0
    """Cells since its copy that `out_of_range` made NULL or moved to the nearest value."""
    silent_change: str | None = None
    """What changed rows without a change in the stream, since the last copy, if the destination keeps every change."""


@dataclass(frozen=True, slots=True)
class TableStatus(TableState):
    """A table, with its size at the source and the progress of its copy."""

    rows: int | None = None
    """At the source, from its statistics."""
    bytes: int | None = None
    copy: Mapping[str, Any] | None = None
    """The progress of its copy, if there is one."""
    lag_bytes: int | None = None
    """How far the table is behind the server; None if that is unknown, and during its copy."""


@dataclass(frozen=True, slots=True)
class IndexState:
    """One index; the JSON has the same names."""

    index: str
    table: str
    fingerprint: str
    """Of the current specification."""
    status: str
    """not built, wanted, filling or seeded; outdated if the specification has changed since it was built."""
    seeded: bool
    reason: str
    """Why it is being rebuilt, or was."""
    backfill: Mapping[str, Any] | None = None
    """While it is filled: the `fraction` of its table that is done, and `documents_written`."""
    generation: str | None = None
    filling: str | None = None
    documents: int | None = None
    quarantined: int = 0
    failure_policy: str = "stop"


@dataclass(frozen=True, slots=True)
class OutputStatus:
    """One output."""

    output: str
    paused: bool
    position: str | None
    lag_bytes: int | None
    lag_seconds: float | None
    changes_per_second: float | None
    """None if it does not run on this machine."""
    tables: tuple[TableStatus, ...] = ()
    indexes: tuple[IndexState, ...] = ()
    """Of the documents output; the sink is not queried."""
    error: str | None = None
    """What stopped it, while the process still runs."""
    failing: str | None = None
    """Why nothing can be written, while that is retried."""
    failing_since: str | None = None
    hint: str | None = None
    acknowledged_lag_bytes: int | None = None
    """How far the position is behind up to which the server may forget; None if it does not run on this machine."""
    acknowledged_lag_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    """The process that starts the pipeline again whenever it ends (`run --supervise`)."""

    host: str
    pid: int
    restarts: int
    last_end: str | None
    """Why the run before this one ended, and when."""
    next_start: str | None
    """When it starts the pipeline again; None while the pipeline runs."""


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """The status of a pipeline; the JSON has the same names."""

    pipeline: str
    running: Mapping[str, Any] | None
    source: SourceStatus
    outputs: tuple[OutputStatus, ...]
    forgotten: Mapping[str, str] = field(default_factory=dict[str, str])
    """Positions of outputs that are no longer in the config: the slot still waits for them."""
    last_run: str | None = None
    """Why the last run on this machine ended; None while the pipeline runs, and if it never ran here."""
    spool: Room | None = None
    """What is left of the spool's room, and how long it lasts; None if the pipeline does not run here."""
    supervisor: SupervisorStatus | None = None
    """None without one, and if it runs on another machine."""
    capture: CaptureLook | None = None
    """What capture does, and how far it is behind the server; None if the pipeline does not run here."""
    problems: tuple[str, ...] = ()
    """What needs attention; `penstock status` exits with 3 if there is something."""
    driver: LeaseInfo | None = field(repr=False, default=None)


def status_facts(found: PipelineStatus) -> dict[str, Any]:
    """A status as plain values, for JSON; the keys are stable."""
    facts = asdict(found)
    del facts["driver"]
    return facts
