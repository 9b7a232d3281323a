"""Whether a pipeline can start: the server, and on this side its state, spool, destinations and sink. All are tried.

`check` and `run --plan` show the findings. The first start refuses what they call critical, before it creates anything.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock.config import Config, DocumentsChoice
from penstock.config.units import format_bytes
from penstock.destinations.base import ProbedDestination
from penstock.durable import probe_folder
from penstock.errors import NotReady, PenstockError, SpoolDiskFull, StateUnavailable
from penstock.operations.indexes import check_sink
from penstock.operations.stores import existing_store
from penstock.source import Role, connect
from penstock.source.preflight import Check, Report, Request, Severity, run_preflight
from penstock.source.preflight.report import failed, passed
from penstock.source.shapes import TableShape, remembering
from penstock.source.slots import inspect_slot
from penstock.tables import OnLostSlot


def check_pipeline(config: Config) -> Report:
    """Check everything that a start needs. Writes to the destinations and the spool are removed again."""
    report = run_preflight(config.pipeline.source, source_request(config))
    return replace(report, checks=(*report.checks, *check_here(config)))


def require_ready(config: Config) -> None:
    """Before the first start, raise `NotReady` if it would fail or harm the source: nothing was created there yet.

    If time heals all that keeps it from starting, such as a destination that is away, raise that error instead: a new
    start can succeed. A pipeline that has a slot or tables resumes: the server retains WAL for it, and a table that
    cannot be followed stops alone.
    """
    settings = config.pipeline
    with connect(settings.source, Role.CATALOG) as connection:
        if inspect_slot(connection, settings.slot) is not None or source_request(config).needs_slot:
            return
    # What needs a person comes first: until that is done, waiting for the rest does not help.
    for finding in sorted(check_pipeline(config).critical, key=lambda each: each.heals):
        kind = type(finding.error) if finding.error is not None and finding.heals else NotReady
        raise kind(f"the start is refused: {finding.what}", hint=finding.remedy)


def source_request(config: Config) -> Request:
    """What to check of the server for the pipeline of a config."""
    settings = config.pipeline
    shapes: dict[int, TableShape] = {}
    has_tables = False
    for output in config.every_output:
        # Without its state, the server can be checked all the same.
        with suppress(PenstockError), existing_store(config, output) as store:
            if store is not None:
                shapes |= store.get_table_shapes()
                has_tables = has_tables or store.needs_every_change
    return Request(
        settings.publication,
        settings.slot,
        settings.tables,
        settings.exclude,
        manage_publication=settings.manage_publication,
        unidentified=settings.unidentified,
        generated_columns=settings.generated_columns,
        ddl_trigger=settings.trigger if settings.ddl_trigger else None,
        failover_slot=settings.failover_slot,
        needs_slot=has_tables,
        recreates_slot=settings.on_lost_slot is OnLostSlot.RECREATE,
        types=settings.types,
        transforms=remembering(settings.transforms, shapes),
        schema_changes=described_policies(config),
    )


def described_policies(config: Config) -> Mapping[str, str]:
    """How tables follow changes of their schemas, for people: by name, and under `""` all others."""
    policies = config.pipeline.policies
    logs = [each.name for each in config.outputs if not config.create_destination(each).capabilities.updates_rows]
    if not logs:
        return policies
    if len(logs) == len(config.outputs):
        return dict.fromkeys(policies, "never copied again automatically: the destination keeps every change")
    return policies | {"": f"{policies['']}; never at {', '.join(logs)}, which keep every change"}


def check_here(config: Config) -> Iterator[Check]:
    """Try the state, the spool, the destinations and the sink of documents from this machine."""
    yield from _check_state(config)
    yield from _check_spool(config)
    for output in config.outputs:
        name = "destination" if len(config.outputs) == 1 else f"destination {output.name}"
        try:
            destination = config.create_destination(output)
            if isinstance(destination, ProbedDestination):
                destination.probe()
                yield passed("destination", f"the {name} can be written")
        except PenstockError as error:
            what = f"{name}: {error.message}"
            yield failed("destination", Severity.CRITICAL, what, error.hint, [output.name], error)
    if config.documents is not None:
        yield from _check_sink(config.documents)


def _check_sink(documents: DocumentsChoice) -> Iterator[Check]:
    try:
        sink = documents.create_sink()
    except PenstockError as error:
        yield failed("sink", Severity.CRITICAL, error.message, error.hint, error=error)
        return
    found = [check for index in documents.indexes for check in check_sink(index, sink)]
    # What concerns the sink itself is the same for every index.
    yield from {each.what: each for each in found}.values()
    if not found:
        yield passed("sink", f"the sink ({documents.sink_type}) accepts the indexes")


def _check_state(config: Config) -> Iterator[Check]:
    try:
        with existing_store(config) as store:
            is_new = store is None
        if is_new and config.state_file is not None:
            probe_folder(config.state_file.parent)
    except PenstockError as error:
        yield failed("state", Severity.CRITICAL, f"state: {error.message}", error.hint, error=error)
    except OSError as error:
        what = f"the state cannot be written to {config.state_location}: {error.strerror}"
        remedy = "Set state.url to a file in a folder that can be written."
        yield failed(
            "state", Severity.CRITICAL, what, remedy, error=StateUnavailable(what) if _is_full(error) else None
        )
    else:
        yield passed("state", f"the state {'can be created' if is_new else 'is readable'} in {config.state_location}")


def _check_spool(config: Config) -> Iterator[Check]:
    spool = config.pipeline.spool
    try:
        probe_folder(spool.path)
        status = os.statvfs(_existing(spool.path))
    except OSError as error:
        what = f"the spool cannot be written to {spool.path}: {error.strerror}"
        remedy = "Set pipeline.spool.path to a folder that can be written."
        yield failed("spool", Severity.CRITICAL, what, remedy, error=SpoolDiskFull(what) if _is_full(error) else None)
        return
    free = status.f_bavail * status.f_frsize
    what = f"the disk of the spool has {format_bytes(free)} free"
    if free < spool.min_free_bytes:
        ending = f", less than pipeline.spool.min_free_bytes ({format_bytes(spool.min_free_bytes)}): capture waits"
        remedy = f"Free space on the disk of {spool.path}, or set pipeline.spool.path to another disk."
        yield failed("spool", Severity.CRITICAL, what + ending, remedy, error=SpoolDiskFull(what))
    elif free < spool.max_bytes:
        ending = f", less than pipeline.spool.max_bytes ({format_bytes(spool.max_bytes)})"
        yield failed(
            "spool", Severity.WARNING, what + ending, "Set pipeline.spool.max_bytes to what the disk can spare."
        )
    else:
        yield passed("spool", what)


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())
