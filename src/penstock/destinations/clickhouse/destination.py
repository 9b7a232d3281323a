"""The ClickHouse destination: the driver plans and records positions, tasks write rows that carry their order keys."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Lock

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges
from penstock.changes.segment import COMMIT_LSN, ORDINAL
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.clickhouse.apply import SLICE_ROWS, Applied, TableWork, Work, apply_work
from penstock.destinations.clickhouse.control import Control, Known
from penstock.destinations.clickhouse.copying import (
    CopyTarget,
    append_copy,
    appends,
    finish_copy,
    require_begun,
    write_range,
)
from penstock.destinations.clickhouse.layout import VERSION, Mode, extend, new_layout
from penstock.destinations.clickhouse.reader import PinnedTable, pin_table
from penstock.destinations.clickhouse.server import literal, server_of
from penstock.destinations.naming import FOLDERS, IDENTIFIERS
from penstock.destinations.refusals import (
    fenced_copy,
    foreign_table,
    other_lineage,
    other_writer,
    rejected,
    unexpected,
    unusable,
)
from penstock.destinations.table_parts import (
    deal_out,
    describe_shares,
    is_of_this_server,
    left_of,
    require_writable,
)
from penstock.errors import PenstockError
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)

_SHARED_ROWS = 8 * SLICE_ROWS
"""The most changes of a table in a batch that other tables share; only a large transaction has more."""


class ClickHouseDestination:
    """`type = "clickhouse"`: a view for each table, over a table that replaces rows by their order keys.

    | option | |
    |---|---|
    | `url` | `https://user:password@host:8443/database` |
    | `database` | the database for all tables; created if it does not exist |
    | `user` | instead of the one in `url` |
    | `password` | instead of the one in `url` |
    | `mode` | `mirror` (default): the rows of the source; `history`: every change |
    | `fsync` | `true` (default): what is acknowledged survives a power failure of the server |
    | `commit_interval` | seconds between two batches (1) |
    """

    name = "clickhouse"

    def __init__(
        self,
        url: str,
        *,
        database: str | None = None,
        user: str | None = None,
        password: str | None = None,
        mode: str = "mirror",
        fsync: bool = True,
        commit_interval: float = 1.0,
    ) -> None:
        known = [each.value for each in Mode]
        if mode not in known:
            raise unusable(f"unknown mode {mode!r}", hint=f"Use {' or '.join(known)}.")
        if isinstance(commit_interval, bool) or not isinstance(commit_interval, int | float) or commit_interval <= 0:
            raise unusable("commit_interval must be a number of seconds above zero")
        self.commit_interval = float(commit_interval)
        """Seconds between two batches, unless more than one batch of changes is waiting."""
        self._mode = Mode(mode)
        self._fsync = fsync
        self._server = server_of(url, database, user, password)
        self._context: DestinationContext | None = None
        self._lock = Lock()
        """Held from reading a record to replacing it."""

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`."""
        mirrors = self._mode is Mode.MIRROR
        return Capabilities(
            records_position=True,
            updates_rows=mirrors,
            keeps_old_rows_while_copying=True,
            fills_added_columns=mirrors,
            accepts_unknown_rows=mirrors,
            loses_nothing_by_a_copy=mirrors,
        )

    def probe(self) -> None:
        """See `ProbedDestination`: create what the first copy would create, and drop a table and a view again."""
        self._control("probe").create(fsync=self._fsync)
        number = uuid.uuid4().hex
        table, view = self._server.name(f"penstock_probe_{number}"), self._server.name(f"penstock_probe_view_{number}")
        self._server.run(f"create table {table} (id Int64) engine = ReplacingMergeTree order by id")
        self._server.run(f"insert into {table} values (1)")
        self._server.run(f"create or replace view {view} as select id from {table} final where id = 1")
        self._server.run(f"drop view {view}")
        self._server.run(f"drop table {table}")

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        self._control(context.pipeline_id).create(fsync=self._fsync)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        context = self._started
        control = self._control(context.pipeline_id)
        place = context.take_folder(schema)
        with self._lock:
            known = control.load()
            view = _view(schema, place, known.values())
            self._claim(control, schema, view)
            before = known.get(schema.table_id)
            if before is not None and before.epoch > context.epoch:
                raise other_writer(str(schema))
            if before is not None and before.attempt == attempt:
                return
            left = [_without(each, view) for each in known.values() if each.table_id != schema.table_id]
            now = before or Known(control.pipeline, schema.table_id, str(schema), attempt, place, view, context.epoch)
            now = replace(
                now, attempt=attempt, next_place=place, next_view=view, source=str(schema), epoch=context.epoch
            )
            control.save([now, *(each for each in left if each != known[each.table_id])])
        control.drop_generations(schema.table_id, but=now.generation)
        if before is not None and before.view and before.layout is not None:
            # In case an attempt that is fenced off has changed the view just now.
            table = self._server.name(before.generation)
            self._server.run(before.layout.view(self._server.name(before.view), table, before.floor))

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        context = self._started
        control = self._control(context.pipeline_id)
        known = require_begun(control.load([schema.table_id]).get(schema.table_id), schema, rows.attempt)
        if known.is_copied:
            if known.position != rows.position:
                raise fenced_copy(str(schema), rows.attempt)
            return
        layout = new_layout(schema, rows.arrow_schema, self._mode)
        if self._mode is Mode.HISTORY and known.layout is not None and known.layout.mode is Mode.HISTORY:
            layout = extend(known.layout, schema, rows.arrow_schema)
        generation = control.generation(schema.table_id, rows.attempt)
        self._server.run(layout.create(self._server.name(generation), fsync=self._fsync), str(schema))
        target = CopyTarget(self._server, schema, rows.attempt, rows.position, rows.arrow_schema, generation, layout)
        counts = context.tasks.run(rows.ranges, partial(write_range, rows.reader, target), description=f"copy {schema}")
        known = require_begun(control.load([schema.table_id]).get(schema.table_id), schema, rows.attempt)
        if appends(known, target):
            append_copy(self._server, known, target)
        with self._lock:
            known = require_begun(control.load([schema.table_id]).get(schema.table_id), schema, rows.attempt)
            finish_copy(control, known, target, context.lineage, context.epoch)
        logger.info("table copied table=%s rows=%d", schema, sum(counts))

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        context = self._started
        control = self._control(context.pipeline_id)
        if not batch.tables:
            return completed()
        errors: dict[int, PenstockError] = {}
        works: list[TableWork] = []
        known = control.load([changes.table_id for changes in batch.tables])
        for changes in batch.tables:
            try:
                work = self._plan(batch, changes, known.get(changes.table_id), control)
            except Exception as error:
                errors[changes.table_id] = unexpected(changes.table, error)
                continue
            if work is not None:
                works.append(work)
        items = [
            Work(self._server, context.records_ddl, group, context.source_rows)
            for group in deal_out(works, context.tasks.parallel)
        ]
        is_long = batch.alone and batch.row_count > _SHARED_ROWS
        outcomes: list[list[Applied | PenstockError]] = []
        if items:
            with context.tasks.copying() if is_long else nullcontext():
                outcomes = context.tasks.run(items, apply_work, description=describe_shares(batch, works))
        applied: dict[int, Applied] = {}
        for item, results in zip(items, outcomes, strict=True):
            for table, result in zip(item.tables, results, strict=True):
                if isinstance(result, PenstockError):
                    errors[table.table_id] = result
                else:
                    applied[table.table_id] = result
        errors |= self._record(control, batch, known, applied)
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        context = self._started
        known = self._control(context.pipeline_id).load([table_id]).get(table_id)
        if known is None or not known.is_copied or known.position is None:
            return None
        return known.position if context.knows(known.lineage, known.position) else None

    def folder_of(self, table_id: int) -> str | None:
        """See `FolderDestination`; the folder stands for the name of the view."""
        known = self._control(self._started.pipeline_id).load([table_id]).get(table_id)
        if known is None or not known.place or not is_of_this_server(known, self._started):
            return None
        return known.place

    def name_table(self, table_id: int, name: str) -> None:
        """See `FolderDestination`."""
        control = self._control(self._started.pipeline_id)
        with self._lock:
            known = control.load([table_id]).get(table_id)
            if known is not None and known.source != name:
                control.save([replace(known, source=name)])

    def locations(self, pipeline_id: str) -> Mapping[int, str]:
        """See `FolderDestination`."""
        control = self._control(pipeline_id)
        known = control.load() if control.exists() else {}
        return {table_id: f"{self._server.location} {each.view}" for table_id, each in known.items() if each.view}

    def drop_table(self, table_id: int) -> bool:
        """See `DroppingDestination`."""
        control = self._control(self._started.pipeline_id)
        known = control.load([table_id]).get(table_id)
        if known is None or not is_of_this_server(known, self._started):
            return False
        if known.view:
            self._server.run(f"drop view if exists {self._server.name(known.view)}")
        control.drop_generations(table_id, but="")
        control.forget(known)
        logger.info("the data of a dropped table was deleted table=%s", known.source)
        return True

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`: rows are read where they are written."""
        return False

    def pin(self, schema: TableSchema) -> PinnedTable | None:
        """See `ReadableDestination`."""
        control = self._control("")
        found = control.find(f"table_id = {schema.table_id}") if control.exists() else []
        found.sort(key=lambda known: known.source != str(schema))
        for known in found:
            if known.view and known.layout is not None:
                return pin_table(self._server, known)
        return None

    def shutdown(self) -> None:
        """See `Destination`."""
        self._context = None

    def _plan(
        self, batch: EventBatch, changes: TableChanges, known: Known | None, control: Control
    ) -> TableWork | None:
        """Return a table's part of the work; None if the table has all of it. Raise the error that stops the table."""
        context = self._started
        if known is None:
            self._refuse_foreign(control, changes)
        known, position = require_writable(changes, known, context, self._mode)
        if known.lineage != context.lineage:
            self._require_nothing_after(known)
        left = left_of(batch, changes, position, shared_rows=_SHARED_ROWS)
        if left is None:
            return None
        change = left.last_schema_change
        assert known.layout is not None
        return TableWork(
            changes.table_id,
            changes.table,
            known.generation,
            self._server.name(known.view),
            known.layout,
            known.floor,
            left.steps,
            token=f"{known.attempt}/{position}/{batch.end}",
            keeps_dropped=change is not None and context.keeps_dropped_columns(change.new),
        )

    def _record(
        self, control: Control, batch: EventBatch, known: Mapping[int, Known], applied: Mapping[int, Applied]
    ) -> dict[int, PenstockError]:
        """Record positions after the data: if this is lost, the changes come again and change nothing."""
        context = self._started
        records: list[Known] = []
        errors: dict[int, PenstockError] = {}
        with self._lock:
            now = control.load(list(applied)) if applied else {}
            for table_id, result in applied.items():
                before, record = known[table_id], now.get(table_id)
                if record is None or record.attempt != before.attempt or record.epoch > context.epoch:
                    errors[table_id] = other_writer(before.source)
                    continue
                position = before.position
                assert position is not None
                records.append(
                    replace(
                        record,
                        position=position if reaches(position, batch.end) else batch.end,
                        lineage=context.lineage,
                        epoch=context.epoch,
                        layout=result.layout,
                        floor=result.floor,
                    )
                )
            if records:
                control.save(records)
        return errors

    def _require_nothing_after(self, known: Known) -> None:
        """Raise if a table has changes of a server that has failed over, which the new one may not have."""
        assert known.position is not None
        assert known.layout is not None
        of_log = known.layout.mode is Mode.HISTORY
        later = f"{COMMIT_LSN} >= {int(known.position)} and {ORDINAL} >= 0" if of_log else f"{VERSION} > "
        later += "" if of_log else f"toUInt128('{int(known.position) << 64}')"
        if self._server.rows(f"select 1 from {self._server.name(known.generation)} where {later} limit 1"):
            raise other_lineage(known.source, known.lineage, self._started.lineage)

    def _claim(self, control: Control, schema: TableSchema, view: str) -> None:
        """Raise `TableOwned` if another pipeline owns a view, `TableRejected` if Penstock did not create it."""
        owners = control.find(f"view = {literal(view)} or next_view = {literal(view)}")
        for owner in owners:
            if owner.pipeline != control.pipeline:
                raise foreign_table(str(schema), owner.pipeline, control.pipeline)
        where = f"database = {literal(self._server.database)} and name = {literal(view)}"
        if not owners and self._server.rows(f"select 1 from system.tables where {where}"):
            raise rejected(
                str(schema),
                f"{view} exists at the destination, and Penstock did not create it",
                hint="Choose another database, or drop that table or view; then run: penstock rollback.",
            )

    def _refuse_foreign(self, control: Control, changes: TableChanges) -> None:
        for step in changes.steps:
            schema = step.new if isinstance(step, SchemaChange) else step.schema if isinstance(step, Rows) else None
            view = "" if schema is None else IDENTIFIERS.table(schema)
            for owner in control.find(f"view = {literal(view)}") if view else ():
                if owner.pipeline != control.pipeline:
                    raise foreign_table(changes.table, owner.pipeline, control.pipeline)

    def _control(self, pipeline_id: str) -> Control:
        return Control(self._server, pipeline_id)

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context


def _view(schema: TableSchema, place: str, known: Iterable[Known]) -> str:
    """Return the view of a copy. A place that is not that of the table's name belongs to a renamed table."""
    if place == FOLDERS.table(schema):
        return IDENTIFIERS.table(schema)
    return next(
        (each.view for each in known if each.place == place and each.view), IDENTIFIERS.name(*place.split("/", 1))
    )


def _without(known: Known, view: str) -> Known:
    """Return the record of a table that gives a view to another one."""
    if known.next_view == view:
        if known.attempt != known.copied:
            # Its copy goes on, and another one follows to the view of its new name.
            own = (f"{known.next_place}--oid{known.table_id}", f"{view}_{known.table_id}")
        else:
            own = ("", "")
        known = replace(known, next_place=own[0], next_view=own[1])
    if known.view == view:
        # Readers see its rows until the other copy is complete.
        known = replace(known, place="", view="", copied="", position=None)
    return known
