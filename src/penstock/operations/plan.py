"""What a start would create, and which tables it would copy; and whether the server is ready. Changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from penstock.changes.segment import inexact_keys
from penstock.changes.transform import Transforms
from penstock.config import Config, IndexChoice, OutputChoice
from penstock.destinations.base import Capabilities, FolderDestination
from penstock.destinations.folders import RenameTable
from penstock.destinations.naming import FOLDERS
from penstock.documents.catalog import SourceCatalog, load_catalog
from penstock.documents.mapping import build_fingerprint
from penstock.errors import ConfigError, for_table, with_hint
from penstock.operations.readiness import check_pipeline, described_policies
from penstock.operations.stores import existing_store, running
from penstock.schema import TableSchema
from penstock.source import Role, connect
from penstock.source.catalog import load_tables, load_types, schema_from_catalog
from penstock.source.faults import translated
from penstock.source.membership import load_membership
from penstock.source.patterns import TableName
from penstock.source.publications import (
    find_tables,
    identity_problems,
    inspect_publication,
    published_tables,
)
from penstock.source.shapes import remembering
from penstock.source.slots import inspect_slot
from penstock.source.unidentified import find_unidentified
from penstock.state import CommandKind, Errored, IndexBuild, IndexStatus, Ready, Store, StoredPhase, SyncDone
from penstock.stream import load_left_out
from penstock.tables import OnLostSlot
from penstock.values import TypeSettings
from penstock.workers import Recopy, SchemaChanges

_REJECTED = "NO REPLICA IDENTITY: the server rejects updates and deletes on it"
_OIDS = """
    select n.nspname || '.' || c.relname, c.oid::int8
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    where n.nspname || '.' || c.relname = any(%s::text[]) and c.relkind in ('r', 'p')
"""
POLLED = "not needed: changes are polled"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a start would do; as JSON it has the same names."""

    pipeline: str
    running: str | None
    source: str
    publication: str
    publication_plan: str
    slot: str
    slot_plan: str
    ddl_trigger: str
    ddl_trigger_plan: str | None
    """None if it neither exists nor is wanted."""
    state: str
    state_plan: str
    spool: str
    spool_plan: str
    destinations: Mapping[str, str]
    """Types by output."""
    tables: Mapping[str, Mapping[str, str]]
    """What would happen to each table, by output."""
    schema_changes: Mapping[str, str]
    """How tables follow changes of their schemas: those with a policy of their own by name, the others under `""`."""
    sink: str | None = None
    """Where documents go; None if there are none."""
    indexes: Mapping[str, str] = field(default_factory=dict[str, str])
    """What would happen to each index."""
    problems: tuple[str, ...] = ()
    """Why the start would fail or be refused, each with its remedy."""


def make_plan(config: Config) -> Plan:
    """Compare the config with the server and the stored state, and try everything that a start needs."""
    for output in config.outputs:
        config.create_destination(output)
    if config.documents is not None:
        config.documents.create_sink()
    settings = config.pipeline
    with ExitStack() as stack:
        stores = {each.name: stack.enter_context(existing_store(config, each)) for each in config.every_output}
        connection = stack.enter_context(connect(settings.source, Role.CATALOG))
        phases = {name: {} if store is None else store.get_table_replication_states() for name, store in stores.items()}
        first = stores[config.every_output[0].name]
        builds = {} if config.documents is None else _builds(stores[config.documents.name])
        driver = None if first is None else running(first)
        known = [phase for each in phases.values() for phase in each.values()]
        polled = config.documents is not None and config.documents.polling is not None
        slot, from_start = (POLLED, False) if polled else _slot(connection, config, known, has_built=bool(builds))
        tables = {} if polled else _tables(connection, config)
        oids = _table_oids(connection, tables)
        left_out = {} if polled else load_left_out(connection, settings)
        rejected = find_unidentified(connection, [oids[name] for name in oids.keys() - left_out.keys()])
        refused = {error.table: _REJECTED for error in rejected.values()}
        refused |= {name: f"REFUSED: {error}" for name, error in identity_problems(connection, tables).items()}
        schemas = _schemas(connection, oids.values())
        regenerated = _regenerated(connection, config)
        indexes = config.documents.indexes if config.documents is not None else ()
        catalog = load_catalog(connection, {name for each in indexes for name in each.specification.tables()})
        return Plan(
            pipeline=settings.id,
            running=None if driver is None else str(driver),
            source=settings.source.location,
            publication=settings.publication,
            publication_plan=POLLED if polled else _publication(connection, config),
            slot=settings.slot,
            slot_plan=slot,
            ddl_trigger=settings.trigger.name,
            ddl_trigger_plan=_trigger(connection, config),
            state=config.state_location,
            state_plan="would be created" if first is None else "exists",
            spool=str(settings.spool.path),
            spool_plan="exists" if settings.spool.path.is_dir() else "would be created",
            destinations={output.name: output.destination_type for output in config.outputs},
            tables={
                name: {
                    output.name: f"WOULD BE LEFT OUT: {with_hint(left_out[name]).removeprefix(f'{name} is left out: ')}"
                    if name in left_out and not _is_empty(schemas.get(name))
                    else _fate_of_table(
                        config, output, stores[output.name], name, table_id, schemas.get(name), from_start, regenerated
                    )
                    + (f"; {refused[name]}" if name in refused else "")
                    for output in config.outputs
                }
                for name, table_id in tables.items()
            },
            schema_changes=described_policies(config),
            sink=None if config.documents is None else config.documents.sink_type,
            indexes={each.name: _fate_of_index(each, builds.get(each.name), catalog, from_start) for each in indexes},
            problems=tuple(
                f"{each.what}. {each.remedy}" for each in (() if polled else check_pipeline(config).critical)
            ),
        )


def _publication(connection: psycopg.Connection[Any], config: Config) -> str:
    settings = config.pipeline
    publication = inspect_publication(connection, settings.publication)
    if not settings.manage_publication:
        return "exists, and would not be changed" if publication else "is MISSING, and manage_publication is false"
    wanted = {str(table) for table in find_tables(connection, settings.tables, settings.exclude)}
    wanted -= load_left_out(connection, settings).keys()
    if publication is None:
        return f"would be created, for {len(wanted)} table{'s' * (len(wanted) != 1)}"
    if publication.all_tables:
        return "is FOR ALL TABLES, so Penstock cannot choose its tables; set manage_publication = false"
    members = {str(table) for table in published_tables(connection, settings.publication)}
    changes = [
        f"{', '.join(sorted(tables))} would be {what}"
        for tables, what in ((wanted - members, "added"), (members - wanted, "removed"))
        if tables
    ]
    if settings.generated_columns is not None and settings.generated_columns != publication.generated_columns:
        changes.append(
            f"stored generated columns would {'' if settings.generated_columns else 'no longer '}be published"
        )
    return f"exists; {'; '.join(changes) or 'has the right tables'}"


def _regenerated(connection: psycopg.Connection[Any], config: Config) -> Collection[int]:
    """The tables whose stored generated columns the next start would publish."""
    publication = inspect_publication(connection, config.pipeline.publication)
    if publication is None or publication.generated_columns or not config.pipeline.generated_columns:
        return ()
    return load_membership(connection, publication.name).generated


def _trigger(connection: psycopg.Connection[Any], config: Config) -> str | None:
    """What would happen to the trigger; None if it neither exists nor is wanted."""
    exists = config.pipeline.trigger.exists(connection)
    if config.pipeline.ddl_trigger:
        return "exists" if exists else "would be created, with its functions in schema penstock_ddl"
    return "exists, and would be removed" if exists else None


def _slot(
    connection: psycopg.Connection[Any], config: Config, phases: Sequence[StoredPhase], *, has_built: bool
) -> tuple[str, bool]:
    """What would happen to the slot, and whether every table would be copied again for it."""
    slot = inspect_slot(connection, config.pipeline.slot)
    if slot is not None and not slot.lost:
        return f"exists, at {slot.confirmed_flush_lsn}", False
    what = "is lost" if slot is not None else "no longer exists"
    if slot is None and not has_built and not any(isinstance(phase, SyncDone | Ready) for phase in phases):
        return "would be created", False
    if config.pipeline.on_lost_slot is OnLostSlot.ERROR:
        return f'{what}: the start WOULD BE REFUSED (on_lost_slot = "error")', False
    return f"{what}, and would be created again", True


def _tables(connection: psycopg.Connection[Any], config: Config) -> dict[str, int | None]:
    """The tables that the pipeline would have, and the ids of those that are published already."""
    settings = config.pipeline
    published = (
        {str(table): table.oid for table in published_tables(connection, settings.publication)}
        if inspect_publication(connection, settings.publication)
        else {}
    )
    if not settings.manage_publication:
        return dict(published)
    wanted = [str(table) for table in find_tables(connection, settings.tables, settings.exclude)]
    return {name: published.get(name) for name in wanted}


def _table_oids(connection: psycopg.Connection[Any], tables: Iterable[str]) -> dict[str, int]:
    """The oids of tables that exist, by name."""
    with translated(connection, "find the tables"), connection.cursor(row_factory=tuple_row) as cursor:
        return dict(cursor.execute(_OIDS, [list(tables)]).fetchall())


def _schemas(connection: psycopg.Connection[Any], oids: Collection[int]) -> dict[str, TableSchema]:
    catalog = load_tables(connection, oids).values()
    known = load_types(connection, {each.type_oid for table in catalog for each in table.live_attributes})
    return {str(table): schema_from_catalog(table, known) for table in catalog}


def _builds(store: Store | None) -> Mapping[str, IndexBuild]:
    return {} if store is None else store.get_index_builds()


def _fate_of_index(index: IndexChoice, build: IndexBuild | None, catalog: SourceCatalog, from_start: bool) -> str:
    table = index.specification.table
    if build is None:
        return f"would be built from {table}"
    if from_start or build.fingerprint != build_fingerprint(index.specification, catalog):
        return f"would be rebuilt from {table} while the current generation keeps serving"
    if build.status is IndexStatus.SEEDED:
        return "is complete, and would be kept up to date"
    return f"is being built from {table}; the build would resume"


def _fate_of_table(
    config: Config,
    output: OutputChoice,
    store: Store | None,
    name: str,
    table_id: int | None,
    schema: TableSchema | None,
    from_start: bool,
    regenerated: Collection[int],
) -> str:
    if schema is None or not schema.columns:
        return "has no columns, and would be skipped until it has one"
    shapes = {} if store is None else store.get_table_shapes()
    transforms = remembering(output.settings.transforms, shapes)
    unusable = _unusable_settings(schema, output.settings.types, transforms)
    if unusable is not None:
        reason = str(unusable).removeprefix(f"{name}: ")
        return f"WOULD STOP: {reason}. {for_table(unusable.hint, name)}".rstrip()
    phase = None if store is None or table_id is None else store.get_table_replication_states().get(table_id)
    rules = transforms.rules.get(name) if table_id is None else transforms.of(table_id, name)
    ending = "" if rules is None else f"; {rules}"
    if from_start or (store is not None and phase is not None and _is_resync_queued(store, name)):
        return f"would be copied again{ending}"
    shape = None if table_id is None else shapes.get(table_id)
    if store is None or table_id is None or shape is None or not isinstance(phase, SyncDone | Ready):
        return f"{_fate(name, phase)}{ending}"
    destination = config.create_destination(output)
    policy = output.settings.policies_with(store).of(table_id, name)
    policy = policy.allowed(destination.capabilities, is_partitioned=shape.is_partitioned)
    now = transforms.in_force(table_id, name)
    if (shape.rules and shape.rules.fingerprint) != (now and now.fingerprint):
        return f"its rules changed: {_fate_of_rows(policy, destination.capabilities)}{ending}"
    if table_id in regenerated:
        return f"its generated columns would be published: {_fate_of_rows(policy, destination.capabilities)}{ending}"
    before, current = store.get_table_names().get(table_id), TableName(schema.namespace, schema.name)
    if before is not None and before != current and isinstance(destination, FolderDestination):
        otherwise = RenameTable.KEEP if policy.keeps_place(destination.capabilities) else RenameTable.FOLLOW
        rule = output.settings.rename_tables.rule(current, FOLDERS.name(*before), otherwise)
        if rule is RenameTable.FOLLOW:
            return f"was {before}, and would be copied again, to the folder of its new name{ending}"
    return f"{_fate(name, phase)}{ending}"


def _unusable_settings(schema: TableSchema, types: TypeSettings, transforms: Transforms) -> ConfigError | None:
    """Why a table would stop because its settings do not fit it: a setting in [types] makes different keys the same,
    or there are rules for columns that do not exist."""
    try:
        transforms.resolve(schema, types)
    except ConfigError as error:
        return error
    return next(inexact_keys(schema, types), None)


def _is_empty(schema: TableSchema | None) -> bool:
    return schema is not None and not schema.columns


def _is_resync_queued(store: Store, name: str) -> bool:
    """True if a new copy was asked for while the pipeline was stopped."""
    queued = [each for each in store.get_commands() if each.kind is CommandKind.RESYNC and not each.answered]
    return any(not each.tables or name in each.tables for each in queued)


def _fate_of_rows(policy: SchemaChanges, capabilities: Capabilities) -> str:
    """What would happen to the rows of a table whose rules have changed."""
    if not capabilities.updates_rows:
        return "existing rows would stay as they are; only later changes would follow the config"
    if policy.recopy is not Recopy.AUTOMATIC:
        return (
            "WOULD STOP until penstock resync, because its policy or the destination does not allow an automatic copy"
        )
    limit = policy.recopy_max_bytes
    return "would be copied again" + ("" if limit is None else f", or stop if it has more than {limit:,} bytes")


def _fate(name: str, phase: StoredPhase | None) -> str:
    match phase:
        case SyncDone() | Ready():
            return "is already copied, and would be kept up to date"
        case Errored():
            return f"is errored: {phase.reason.removeprefix(f'{name}: ')}"
        case _:
            return "would be copied"
