"""Everything that is known of a pipeline from outside: its stored state, the server, and the status file of a run.

Reading it changes nothing, and each part may be missing: the pipeline never ran, runs on another machine, or the server
does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from penstock.config import Config, DocumentsChoice, IndexChoice, OutputChoice
from penstock.config.units import format_moment
from penstock.destinations.base import FolderDestination
from penstock.documents.mapping import fingerprint, is_built_from
from penstock.errors import RESYNC, Retry, SourceError, for_table
from penstock.headroom import Room
from penstock.lsn import Lsn, distance, furthest
from penstock.observe import scrub
from penstock.operations.progress import CaptureLook, LastLook, StatusFile, format_time
from penstock.operations.status_model import (
    IndexState,
    LeftOutTable,
    OutputStatus,
    PipelineStatus,
    SlotStatus,
    SourceStatus,
    SupervisorStatus,
    TableError,
    TableState,
    TableStatus,
)
from penstock.operations.stores import every_chosen_output, existing_store, running, table_names
from penstock.operations.supervision import SupervisorFile
from penstock.output import RunningOutput
from penstock.source import Role, connect
from penstock.source.catalog import TableSize, load_sizes
from penstock.source.lineage import Ancestry, flushed_position
from penstock.source.slots import Slot, find_blockers, inspect_slot
from penstock.spool import Readers
from penstock.spool.folder import SpoolFolder
from penstock.state import (
    DataSync,
    Errored,
    FinishedCopy,
    IndexBuild,
    IndexStatus,
    Init,
    LeaseInfo,
    Ready,
    Store,
    StoredPhase,
    SyncDone,
)
from penstock.state.quarantine import Quarantine
from penstock.stream import load_left_out
from penstock.workers import Outage

FRESH_SECONDS = 15.0
"""An older status file is not current."""
LONG_SECONDS = 60.0
"""A transaction that is open for longer is listed."""
_CONNECT_SECONDS = 5.0
_IMPATIENCE = {"lock_timeout": "1s", "statement_timeout": "10s"}


def pipeline_status(
    config: Config, output: str | None = None, running_here: Sequence[RunningOutput] = ()
) -> PipelineStatus:
    """The status now; `running_here` are the outputs that run in this process, whose phases are read directly."""
    opened = {each.output: each for each in running_here}
    known = [_stored(config, each, opened.get(each.name)) for each in every_chosen_output(config, output)]
    table_ids = {state.id for each in known for state in each.tables}
    source, sizes, server = _ask_source(config, sorted(table_ids))
    looks = StatusFile(config.pipeline.spool.path).read()
    driver = next((each.driver for each in known if each.driver is not None), None)
    now = time.time()
    live = [each for each in looks.values() if driver is not None and now - each.at < FRESH_SECONDS]
    lost = next((each.source_lost_since for each in live if each.source_lost_since is not None), None)
    wal = next((Room(**each.wal) for each in live if each.wal is not None), None)
    found = PipelineStatus(
        pipeline=config.pipeline.id,
        running=driver_facts(driver),
        source=replace(
            source,
            unreachable_since=None if lost is None else format_time(lost),
            slot=None if source.slot is None else replace(source.slot, room=wal),
        ),
        outputs=tuple(_output(each, looks.get(each.name), sizes, server, now) for each in known),
        forgotten=_forgotten(config),
        last_run=None if driver is not None else _last_run(looks),
        spool=next((Room(**each.spool) for each in live if each.spool is not None), None),
        supervisor=_supervisor(config),
        capture=next((CaptureLook(**each.capture) for each in live if each.capture is not None), None),
        driver=driver,
    )
    return replace(found, problems=tuple(_problems(found)))


def _last_run(looks: Mapping[str, LastLook]) -> str | None:
    if not looks:
        return None
    last = max(looks.values(), key=lambda each: each.at)
    if last.ended is None:
        return f"ended after {format_moment(last.at)} without giving a reason: it was killed, or the machine stopped"
    return f"ended after {format_moment(last.at)}: {last.ended}"


def _supervisor(config: Config) -> SupervisorStatus | None:
    found = SupervisorFile(config.pipeline.spool.path).read()
    if found is None:
        return None
    ended = found.last_end_at and f"ended at {format_moment(found.last_end_at)}: "
    return SupervisorStatus(
        found.holder.host,
        found.holder.pid,
        found.restarts,
        None if found.last_end is None else scrub(f"{ended}{found.last_end}", config.secrets),
        None if found.next_start is None else format_time(found.next_start),
    )


def _problems(found: PipelineStatus) -> Iterator[str]:
    has_run = any(output.position or output.tables for output in found.outputs)
    if found.running is None:
        yield "the pipeline is not running"
    if found.source.error is not None or found.source.unreachable_since is not None:
        yield "the source is unreachable"
    slot = found.source.slot
    if slot is not None and (slot.lost or slot.wal_status == "unreserved" or (has_run and not slot.exists)):
        yield f"slot {slot.name} is lost or about to be"
    elif slot is not None and slot.room is not None and slot.room.is_short:
        yield f"the server retains much WAL for slot {slot.name}"
    if slot is not None and slot.waits_for_standby:
        yield "the server waits for a standby before it sends changes"
    if found.spool is not None and found.spool.is_short:
        yield "the spool is nearly full"
    for output in found.outputs:
        if output.error is not None:
            yield f"output {output.output} has stopped"
        elif output.failing is not None:
            yield f"output {output.output} cannot write: {output.failing}"
        yield from (f"{table.table} has stopped" for table in output.tables if table.error is not None)


def table_states(
    config: Config, output: OutputChoice, store: Store, opened: RunningOutput | None = None
) -> list[TableState]:
    """All tables of an output, sorted by name; `opened` is the output if it runs in this process."""
    stored = store.get_stored_progress()
    positions: dict[int, Lsn] = {}
    if stored is not None:
        if opened is None:
            store.use_lineage(Ancestry(stored.lineage))
        positions = dict(store.get_table_positions())
    names = table_names(config, store)
    changed = store.get_changed_cells()
    current = {} if opened is None else {name: phase.name for name, phase in opened.phases.items()}
    shapes = store.get_table_shapes()
    found = [
        TableState(
            table=names.get(table_id, f"oid {table_id}"),
            id=table_id,
            output=output.name,
            phase=current.get(names.get(table_id, ""), phase.name),
            position=_text(_position(phase, positions.get(table_id), stored.position if stored else None)),
            error=_error(config, phase, names.get(table_id, f"oid {table_id}"), output.name),
            copied_because=reason_of_copy(config.secrets, store, table_id, phase),
            changed_cells=changed.get(table_id, 0),
            silent_change=None if (shape := shapes.get(table_id)) is None else shape.silent_change,
        )
        for table_id, phase in store.get_table_replication_states().items()
    ]
    return sorted(found, key=lambda state: state.table)


def table_locations(config: Config, output: OutputChoice) -> Mapping[int, str]:
    """The path or URL of each table at the destination, by table id; none if it does not keep tables in folders."""
    destination = config.create_destination(output)
    return destination.locations(output.settings.output_id) if isinstance(destination, FolderDestination) else {}


def driver_facts(driver: LeaseInfo | None) -> dict[str, Any] | None:
    """The process that runs the pipeline as plain values, or None."""
    if driver is None:
        return None
    return {"host": driver.host, "pid": driver.pid, "since": driver.since.isoformat(timespec="seconds")}


def stored_indexes(config: Config, store: Store | None) -> list[IndexState]:
    """All indexes of the config; without a store, none is built."""
    if store is None:
        return [_index_state(each, None, 0, None) for each in config.indexes.indexes]
    builds = store.get_index_builds()
    counts = Quarantine(store.database).counts()
    backfills = {name: _backfill(store, build) for name, build in builds.items()}
    return [
        _index_state(each, builds.get(each.name), counts.get(each.name, 0), backfills.get(each.name))
        for each in config.indexes.indexes
    ]


@dataclass(frozen=True, slots=True)
class _Stored:
    """The stored state of an output."""

    name: str
    driver: LeaseInfo | None = None
    progress: Lsn | None = None
    tables: Sequence[TableState] = ()
    indexes: Sequence[IndexState] = ()
    paused: bool = False
    phases_known: bool = False
    """The phases are those of the running process, not those that it stored."""


def _stored(config: Config, output: OutputChoice | DocumentsChoice, opened: RunningOutput | None) -> _Stored:
    with existing_store(config, output) if opened is None else nullcontext(opened.store) as store:
        if store is None:
            return _Stored(output.name)
        if isinstance(output, DocumentsChoice):
            indexes = stored_indexes(config, store)
            return _Stored(output.name, running(store), _progress(store), indexes=indexes, paused=store.is_paused())
        tables = table_states(config, output, store, opened)
        known = _Stored(output.name, running(store), _progress(store), tables, paused=store.is_paused())
        return replace(known, phases_known=opened is not None)


def _forgotten(config: Config) -> dict[str, str]:
    if not config.pipeline.spool.path.is_dir():
        return {}
    known = {output.name for output in config.every_output}
    readers = Readers(SpoolFolder(config.pipeline.spool.path)).positions()
    return {name: str(position) for name, position in readers.items() if name not in known}


def _progress(store: Store) -> Lsn | None:
    stored = store.get_stored_progress()
    return None if stored is None else stored.position


def _ask_source(config: Config, table_ids: Sequence[int]) -> tuple[SourceStatus, Mapping[int, TableSize], Lsn | None]:
    source = config.pipeline.source
    try:
        quick = replace(source, connect_timeout=_CONNECT_SECONDS)
        with connect(quick, Role.CATALOG, parameters=_IMPATIENCE) as connection:
            server = flushed_position(connection)
            polled = config.documents is not None and config.documents.polling is not None
            found_slot = None if polled else inspect_slot(connection, config.pipeline.slot)
            slot = None if polled else _slot_status(config.pipeline.slot, found_slot, server)
            version = connection.info.parameter_status("server_version") or ""
            open_long = [each for each in find_blockers(connection) if (each.seconds or 0.0) >= LONG_SECONDS]
            left_out = [] if polled else load_left_out(connection, config.pipeline).values()
            sizes = _sizes(connection, table_ids)
        found = SourceStatus(
            source.location,
            version.partition(" ")[0],
            str(server),
            slot,
            tuple(str(each) for each in open_long),
            tuple(LeftOutTable(each.table, each.message, each.hint) for each in left_out),
        )
        return found, sizes, server
    except SourceError as error:
        return SourceStatus(source.location, error=error.message, hint=error.hint), {}, None


def _sizes(connection: psycopg.Connection[Any], table_ids: Sequence[int]) -> Mapping[int, TableSize]:
    try:
        return load_sizes(connection, table_ids)
    except SourceError:
        # Reading the size of a table waits for DDL on it; the status does not.
        return {}


def _slot_status(name: str, slot: Slot | None, server: Lsn) -> SlotStatus:
    if slot is None:
        return SlotStatus(name, exists=False)
    return SlotStatus(
        name,
        exists=True,
        active_pid=slot.active_pid,
        position=None if slot.confirmed_flush_lsn is None else str(slot.confirmed_flush_lsn),
        lag_bytes=_distance(slot.confirmed_flush_lsn, server),
        retained_bytes=_distance(slot.restart_lsn, server),
        wal_status=slot.wal_status,
        safe_bytes=slot.safe_wal_size,
        lost=slot.lost,
        waits_for_standby=slot.waits_for_standby,
    )


def _output(
    stored: _Stored, look: LastLook | None, sizes: Mapping[int, TableSize], server: Lsn | None, now: float
) -> OutputStatus:
    live = look if look is not None and stored.driver is not None and now - look.at < FRESH_SECONDS else None
    lag_bytes, lag_seconds = _lag(stored, look, live, server, now)
    outage = None if live is None or live.outage is None else Outage(**live.outage)
    return OutputStatus(
        output=stored.name,
        paused=stored.paused if live is None else live.paused,
        position=None if stored.progress is None else str(stored.progress),
        lag_bytes=lag_bytes,
        lag_seconds=lag_seconds,
        changes_per_second=None if live is None else live.changes_per_second,
        error=None if live is None else live.error,
        failing=None if outage is None else outage.reason,
        failing_since=None if outage is None else format_time(outage.since),
        hint=None if outage is None else outage.hint,
        acknowledged_lag_bytes=None if live is None or server is None else live.acknowledged_lag_bytes,
        acknowledged_lag_seconds=None if live is None or server is None else live.acknowledged_lag_seconds,
        tables=tuple(
            replace(
                _table(state, live, sizes.get(state.id), stored.phases_known),
                lag_bytes=_table_lag(state, lag_bytes, server),
            )
            for state in stored.tables
        ),
        indexes=tuple(stored.indexes),
    )


def _lag(
    stored: _Stored, look: LastLook | None, live: LastLook | None, server: Lsn | None, now: float
) -> tuple[int | None, float | None]:
    """The lag from the status file, or from the server's position; unknown if the server does not answer.

    A stopped pipeline lags by the age of its last status, plus the lag at that time.
    """
    if server is None:
        return None, None
    if live is not None and live.lag_bytes is not None:
        return live.lag_bytes, live.lag_seconds
    size = _distance(stored.progress, server)
    if size == 0:
        return 0, 0.0
    if size is None or look is None or stored.driver is not None:
        return size, None
    return size, round(max(0.0, now - look.at) + (look.lag_seconds or 0.0), 1)


def _table_lag(state: TableState, of_output: int | None, server: Lsn | None) -> int | None:
    """The lag of a table: that of its output, unless the table has stopped."""
    if state.error is not None:
        return None if state.position is None else _distance(Lsn.parse(state.position), server)
    return of_output if state.position is not None else None


def _table(state: TableState, live: LastLook | None, size: TableSize | None, phase_known: bool) -> TableStatus:
    phase = state.phase
    if live is not None and state.error is None and not phase_known:
        phase = live.phases.get(state.table, phase)
    return TableStatus(
        table=state.table,
        id=state.id,
        output=state.output,
        phase=phase,
        position=state.position,
        error=state.error,
        copied_because=state.copied_because,
        changed_cells=state.changed_cells,
        silent_change=state.silent_change,
        rows=None if size is None else size.rows,
        bytes=None if size is None else size.bytes,
        copy=None if live is None else live.copies.get(state.table),
    )


def _distance(position: Lsn | None, server: Lsn | None) -> int | None:
    if position is None or server is None:
        return None
    return distance(position, server)


def _position(phase: StoredPhase, own: Lsn | None, progress: Lsn | None) -> Lsn | None:
    match phase:
        case Ready() | SyncDone():
            known = [each for each in (own, progress) if each is not None]
            return furthest(*known) if known else None
        case Errored():
            return phase.position
        case _:
            return None


def _error(config: Config, phase: StoredPhase, table: str, output: str) -> TableError | None:
    if not isinstance(phase, Errored):
        return None
    solution = for_table(phase.solution or "", table, output if len(config.outputs) > 1 else None)
    next_retry = phase.retry_policy.next_retry
    return TableError(
        reason=scrub(phase.reason, config.secrets),
        solution=scrub(solution, config.secrets) or None,
        command=_command(phase),
        since=phase.since.isoformat(timespec="seconds"),
        next_retry=next_retry.isoformat(timespec="seconds") if next_retry else None,
        attempts=phase.attempts,
        position_lost=phase.position_lost,
    )


def reason_of_copy(secrets: frozenset[str], store: Store, table_id: int, phase: StoredPhase) -> str | None:
    """Why Penstock copies a table again automatically; None if it does not."""
    if not isinstance(phase, Init | DataSync | FinishedCopy):
        return None
    reset: StoredPhase | None = phase
    if not isinstance(phase, Init):  # of thousands of tables, most are not being copied yet: their phase says it
        phases = [record.phase for record in store.get_table_replication_history(table_id)]
        reset = next((past for past in reversed(phases) if isinstance(past, Init)), None)
    return None if not isinstance(reset, Init) or reset.reason is None else scrub(reset.reason, secrets)


def _command(phase: Errored) -> str | None:
    if phase.position_lost or RESYNC in (phase.solution or ""):
        return "resync"
    return "rollback" if phase.retry_policy.retry is Retry.OPERATOR else None


def _text(position: Lsn | None) -> str | None:
    return None if position is None else str(position)


def _backfill(store: Store, build: IndexBuild) -> dict[str, Any] | None:
    """How far a build is; None if it is not filling, or not in ranges (polling)."""
    ranges = build.plan.get("ranges")
    if build.status is not IndexStatus.FILLING or not ranges:
        return None
    done = store.get_index_ranges(build.index, build.build)
    return {"fraction": len(done) / len(ranges), "documents_written": sum(done.values())}


def _index_state(
    index: IndexChoice, build: IndexBuild | None, quarantined: int, backfill: Mapping[str, Any] | None
) -> IndexState:
    is_current = build is not None and is_built_from(build.fingerprint, index.specification)
    status = "not built" if build is None else build.status.value
    if build is not None and not is_current:
        status = "outdated"
    return IndexState(
        index=index.name,
        table=str(index.specification.table),
        fingerprint=fingerprint(index.specification),
        status=status,
        seeded=build is not None and is_current and build.status is IndexStatus.SEEDED,
        reason="" if build is None else build.reason,
        backfill=backfill,
        quarantined=quarantined,
        failure_policy=index.failure_policy.value,
    )
