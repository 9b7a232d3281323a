"""The Postgres destination: the driver plans and records, tasks move rows, and each table commits with its position."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.naming import FOLDERS
from penstock.destinations.postgres.apply import SLICE_ROWS, Work, apply_work
from penstock.destinations.postgres.control import Control, Known
from penstock.destinations.postgres.copying import (
    CopyTarget,
    add_indexes,
    add_key,
    begin_generation,
    drop_generations,
    finish_copy,
    require_begun,
    write_range,
)
from penstock.destinations.postgres.layout import Mode, Target
from penstock.destinations.postgres.reader import PinnedTarget, pin_target
from penstock.destinations.postgres.server import Server, Session, close_idle, settings_of
from penstock.destinations.refusals import (
    fenced_copy,
    foreign_table,
    gone_back,
    rejected,
    unexpected,
    unusable,
)
from penstock.destinations.table_layout import table_capabilities
from penstock.destinations.table_parts import (
    TableWork,
    deal_out,
    describe_shares,
    is_of_this_server,
    plan_table,
    require_writable,
)
from penstock.errors import DestinationUnavailable, PenstockError, TableBusy
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)

_SHARED_ROWS = 4 * SLICE_ROWS
"""The most changes of a table in a batch that other tables share; only a large transaction has more."""
_SWAPS = 20
"""How often a complete copy waits for a lock on the table that it replaces."""
_NAME_BYTES = 63


class PostgresDestination:
    """`type = "postgres"`: tables of another database, or of another schema.

    | option | |
    |---|---|
    | `url` | `postgresql://user:password@host:5432/database` |
    | `schema` | the schema of a table: `{schema}` (default) stands for that of the source |
    | `mode` | `mirror` (default): the rows of the source; `history`: every change; `soft_delete`: deleted rows stay |
    | `transactional` | `table` (default): each table commits by itself; `batch`: all tables of a batch at once |
    | `control_schema` | the schema for what Penstock records (`penstock`) |
    | `indexes` | `true`: copies get the indexes of the source, none of them unique (`false`) |
    | `lock_timeout` | seconds to wait for locks of other sessions (30) |
    | `commit_interval` | seconds between two batches (0.5) |
    """

    name = "postgres"

    def __init__(
        self,
        url: str,
        *,
        schema: str = "{schema}",
        mode: str = "mirror",
        transactional: str = "table",
        control_schema: str = "penstock",
        indexes: bool = False,
        lock_timeout: float = 30.0,
        commit_interval: float = 0.5,
    ) -> None:
        known = [each.value for each in Mode]
        if mode not in known:
            raise unusable(f"unknown mode {mode!r}", hint=f"Use {', '.join(known[:-1])} or {known[-1]}.")
        if transactional not in ("table", "batch"):
            raise unusable(f"unknown transactional {transactional!r}", hint="Use table or batch.")
        if not isinstance(indexes, bool) or (indexes and mode == "history"):
            raise unusable("indexes must be true or false, and false with the mode history")
        for name, value in (("lock_timeout", lock_timeout), ("commit_interval", commit_interval)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise unusable(f"{name} must be a number of seconds above zero")
        if not schema or not control_schema or len(control_schema.encode()) > _NAME_BYTES:
            raise unusable("schema and control_schema must be names of schemas", hint="The default is {schema}.")
        if "%" in control_schema:
            raise unusable("control_schema cannot contain %", hint="The default is penstock.")
        self.commit_interval = float(commit_interval)
        """Seconds between two batches, unless more than one batch of changes is waiting."""
        self._mode = Mode(mode)
        self._together = transactional == "batch"
        self._schema = schema
        self._control_schema = control_schema
        self._indexes = indexes
        self._server = Server(settings_of(url), float(lock_timeout))
        self._context: DestinationContext | None = None
        self._reached: dict[int, Lsn] = {}
        """How far this process has seen each table."""

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`."""
        return table_capabilities(self._mode)

    def probe(self) -> None:
        """See `ProbedDestination`: create what the first copy would create, and roll it back."""
        with self._server.session() as session:
            self._control("probe").create(session)
            session.run("create temporary table penstock_probe (id int8) on commit drop")
            query = (
                "select 1 from pg_catalog.pg_namespace where nspname = %s and not has_schema_privilege(oid, 'create')"
            )
            if session.rows(query, [self._schema]):
                raise unusable(
                    f"the role may not create tables in the schema {self._schema} of {self._server.location}",
                    hint=f"Run: grant create, usage on schema {self._schema} to the role in url.",
                )

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        with self._server.transaction() as session:
            self._control(context.pipeline_id).create(session)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        context = self._started
        control = self._control(context.pipeline_id)
        place = context.take_folder(schema)
        self._reached.pop(schema.table_id, None)
        with self._server.transaction(str(schema)) as session:
            control.require_other(session, schema, context.store.ancestry.current.database)
            known = control.load(session)
            target = self._target(schema, place, known)
            control.begin(session, schema, place, target, attempt, context.epoch)
        drop_generations(self._server, control, schema.table_id, but=attempt)

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        context = self._started
        control = self._control(context.pipeline_id)
        with self._server.transaction(str(schema)) as session:
            known = require_begun(control.load(session, [schema.table_id]).get(schema.table_id), schema, rows.attempt)
            if known.is_copied:
                if known.position != rows.position:
                    raise fenced_copy(str(schema), rows.attempt)
                return
            layout = begin_generation(session, control, schema, rows.attempt, self._mode)
        generation = control.generation(schema.table_id, rows.attempt)
        target = CopyTarget(
            self._server, control, schema, rows.attempt, rows.position, rows.arrow_schema, generation, layout
        )
        counts = context.tasks.run(rows.ranges, partial(write_range, rows.reader, target), description=f"copy {schema}")
        with self._server.transaction(str(schema)) as session:
            add_key(session, generation, layout)
        indexes = context.indexes_of(schema) if self._indexes else ()
        if indexes:
            with self._server.transaction(str(schema)) as session:
                add_indexes(session, known.readable, generation, indexes)
        self._finish(control, target)
        logger.info("table copied table=%s rows=%d", schema, sum(counts))

    def _finish(self, control: Control, target: CopyTarget) -> None:
        """Put a complete copy in its place; a reader that holds a lock must not cost a new copy."""
        schema = target.schema
        for turn in range(_SWAPS):
            try:
                with self._server.transaction(str(schema)) as session:
                    known = control.lock(session, schema.table_id, str(schema), target.attempt, self._started.epoch)
                    if not known.is_copied:
                        known = require_begun(known, schema, target.attempt)
                        finish_copy(session, control, known, target, self._started.lineage, self._started.epoch)
                return
            except (TableBusy, DestinationUnavailable):
                # Also a deadlock with readers, and a server that restarts.
                if turn == _SWAPS - 1:
                    raise
                logger.info("copy is complete and waits to take the place of the table table=%s", schema)
                time.sleep(1.0)

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        context = self._started
        control = self._control(context.pipeline_id)
        errors: dict[int, PenstockError] = {}
        works: list[TableWork] = []
        if not batch.tables:
            return completed()
        with self._server.session() as session:
            known = control.load(session, [changes.table_id for changes in batch.tables])
            for changes in batch.tables:
                try:
                    if changes.table_id not in known:
                        self._refuse_foreign(control, session, changes)
                    work = self._plan(batch, changes, known.get(changes.table_id))
                except Exception as error:
                    errors[changes.table_id] = unexpected(changes.table, error)
                    continue
                if work is not None:
                    works.append(work)
        items = [
            Work(
                *(self._server, control, context.epoch, context.lineage, context.records_ddl, group, self._together),
                source=context.source_rows,
            )
            for group in deal_out(works, 1 if self._together else context.tasks.parallel)
        ]
        is_long = batch.alone and batch.row_count > _SHARED_ROWS
        outcomes: list[list[PenstockError | None]] = []
        if items:
            with context.tasks.copying() if is_long else nullcontext():
                outcomes = context.tasks.run(items, apply_work, description=describe_shares(batch, works))
        for item, results in zip(items, outcomes, strict=True):
            for table, error in zip(item.tables, results, strict=True):
                if error is not None:
                    errors[table.table_id] = error
                else:
                    self._reached[table.table_id] = table.end
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        context = self._started
        with self._server.session() as session:
            known = self._control(context.pipeline_id).load(session, [table_id]).get(table_id)
        if known is None or not known.is_copied or known.position is None:
            return None
        return known.position if context.knows(known.lineage, known.position) else None

    def folder_of(self, table_id: int) -> str | None:
        """See `FolderDestination`; the folder stands for the name of the table."""
        context = self._started
        with self._server.session() as session:
            known = self._control(context.pipeline_id).load(session, [table_id]).get(table_id)
        if known is None or known.readable is None or not is_of_this_server(known, self._started):
            return None
        return known.place

    def name_table(self, table_id: int, name: str) -> None:
        """See `FolderDestination`."""
        control = self._control(self._started.pipeline_id)
        with self._server.transaction() as session:
            session.run(
                f"update {control.tables} set source = %s where pipeline = %s and table_id = %s and source <> %s",
                [name, control.pipeline, table_id, name],
            )

    def locations(self, pipeline_id: str) -> Mapping[int, str]:
        """See `FolderDestination`."""
        control = self._control(pipeline_id)
        with self._server.session() as session:
            known = control.load(session) if control.exists(session) else {}
        return {
            table_id: f"{self._server.location} {each.readable}"
            for table_id, each in known.items()
            if each.readable is not None
        }

    def drop_table(self, table_id: int) -> bool:
        """See `DroppingDestination`."""
        control = self._control(self._started.pipeline_id)
        with self._server.transaction() as session:
            known = control.load(session, [table_id]).get(table_id)
            if known is None or not is_of_this_server(known, self._started):
                return False
            for target in {known.target, known.former} - {None}:
                assert target is not None
                with self._server.translated(session.connection, known.source):
                    session.run(f"drop table if exists {target.sql}")
                control.release(session, target)
            control.forget(session, table_id)
        drop_generations(self._server, control, table_id)
        logger.info("the data of a dropped table was deleted table=%s", known.source)
        return True

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`: a snapshot stays readable during writes."""
        return True

    def pin(self, schema: TableSchema) -> PinnedTarget | None:
        """See `ReadableDestination`."""
        control = self._control("")
        with self._server.session() as session:
            found = control.find(session, schema.table_id) if control.exists(session) else []
        found.sort(key=lambda known: known.source != str(schema))
        for known in found:
            if known.readable is not None and known.layout is not None:
                return pin_target(self._server, known.readable, known.layout)
        return None

    def shutdown(self) -> None:
        """See `Destination`."""
        close_idle(self._server)

    def _plan(self, batch: EventBatch, changes: TableChanges, known: Known | None) -> TableWork | None:
        """Return a table's part of the work; raise also if the destination lost what it had committed."""
        context = self._started
        _, position = require_writable(changes, known, context, self._mode)
        if (reached := self._reached.get(changes.table_id)) is not None and not reaches(position, reached):
            raise gone_back(changes.table)
        self._reached[changes.table_id] = position
        return plan_table(batch, changes, known, context, self._mode, shared_rows=_SHARED_ROWS)

    def _refuse_foreign(self, control: Control, session: Session, changes: TableChanges) -> None:
        for step in changes.steps:
            schema = step.new if isinstance(step, SchemaChange) else step.schema if isinstance(step, Rows) else None
            owner = None if schema is None else control.owner(session, self._named(schema))
            if owner is not None and owner != control.pipeline:
                raise foreign_table(changes.table, owner, control.pipeline)

    def _target(self, schema: TableSchema, place: str, known: Mapping[int, Known]) -> Target:
        """Return the table that a copy goes to. A place that is not that of its name belongs to a renamed table."""
        named = self._named(schema)
        if place == FOLDERS.table(schema):
            return named
        for each in known.values():
            if each.place == place and each.target is not None:
                return each.target
        suffix = f"_{schema.table_id}"
        return Target(
            named.namespace, named.name.encode()[: _NAME_BYTES - len(suffix)].decode("utf-8", "ignore") + suffix
        )

    def _named(self, schema: TableSchema) -> Target:
        namespace = self._schema.replace("{schema}", schema.namespace)
        if len(namespace.encode()) > _NAME_BYTES or namespace == self._control_schema:
            raise rejected(
                str(schema),
                f"{namespace!r} cannot be its schema at the destination",
                hint="Choose another schema: its name has at most 63 bytes, and control_schema is Penstock's own.",
            )
        return Target(namespace, schema.name)

    def _control(self, pipeline_id: str) -> Control:
        return Control(self._control_schema, pipeline_id)

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context
