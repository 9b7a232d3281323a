"""The Snowflake destination: the driver plans and changes columns, tasks write, each table commits with its position.

The view of a table follows its generation and its layout after the commit. A process that dies in between leaves the
old view; the next one replaces it before its first batch of that table.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import pyarrow as pa

from penstock.changes.batch import EventBatch, Rows, TableChanges
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.naming import IDENTIFIERS
from penstock.destinations.refusals import fenced_copy, foreign_table, other_writer, rejected, unexpected, unusable
from penstock.destinations.snowflake.connection import Session, connect, is_missing, quote, translated
from penstock.destinations.snowflake.control import Control, Record
from penstock.destinations.snowflake.layout import DELETED_AT, Layout, Mode, follow, plain
from penstock.destinations.snowflake.reader import PinnedSnowflake, pin_generation
from penstock.destinations.snowflake.tasks import (
    SLICE_ROWS,
    CopyTarget,
    Staged,
    TableWork,
    Work,
    stage_range,
    write_work,
)
from penstock.destinations.table_parts import (
    deal_out,
    describe_shares,
    is_of_this_server,
    left_of,
    require_writable,
)
from penstock.errors import NotComparable, PenstockError
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)

_SHARED_ROWS = 4 * SLICE_ROWS
_GENERATION = "__G"


class SnowflakeDestination:
    """`type = "snowflake"`: mirrors or histories of tables in a schema of Snowflake. Experimental.

    | option | |
    |---|---|
    | `database`, `schema` | where the tables go; the schema is created if it does not exist |
    | `account`, `user` | as in `myorg-myaccount` |
    | `password` | of the user; or |
    | `private_key_file`, `private_key_passphrase` | the private key of a key pair, in PEM, and its passphrase if any |
    | `connection_name` | a connection of the connector's own `connections.toml`; options given here go before it |
    | `role`, `warehouse` | default: the user's own |
    | `mode` | `mirror` (default): the rows of the source; `soft_delete`: deleted rows stay; `history`: every change |
    | `commit_interval` | seconds between two batches (5) |
    | `timeout` | seconds until a server that does not respond, or a lock, counts as away (300) |
    | `endpoint` | the URL of an emulator |
    """

    name = "snowflake"

    def __init__(
        self,
        database: str,
        schema: str,
        *,
        account: str | None = None,
        user: str | None = None,
        password: str | None = None,
        private_key_file: str | None = None,
        private_key_passphrase: str | None = None,
        connection_name: str | None = None,
        role: str | None = None,
        warehouse: str | None = None,
        mode: str = "mirror",
        commit_interval: float = 5.0,
        timeout: float = 300.0,
        endpoint: str | None = None,
    ) -> None:
        known = [each.value for each in Mode]
        if mode not in known:
            raise unusable(f"unknown mode {mode!r}", hint=f"Use {', '.join(known[:-1])} or {known[-1]}.")
        for name, value in (("commit_interval", commit_interval), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise unusable(f"{name} must be a number of seconds above zero")
        if not database or not schema:
            raise unusable("database and schema must be names")
        self.commit_interval = float(commit_interval)
        """Seconds between two batches, unless more than one batch of changes is waiting."""
        self._mode = Mode(mode)
        self._connection = connect(
            database.upper() if database.islower() else database,
            schema.upper() if schema.islower() else schema,
            {"account": account, "user": user, "password": password, "role": role, "warehouse": warehouse},
            connection_name=connection_name,
            private_key_file=private_key_file,
            private_key_passphrase=private_key_passphrase,
            endpoint=endpoint,
            timeout=float(timeout),
        )
        self._lock = threading.Lock()
        self._shown: set[int] = set()
        """Tables whose view is what this process wants."""
        self._context: DestinationContext | None = None

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`."""
        return Capabilities(
            records_position=True,
            updates_rows=self._mode is not Mode.HISTORY,
            keeps_old_rows_while_copying=True,
            loses_nothing_by_a_copy=self._mode is Mode.MIRROR,
            keeps_deleted_rows=self._mode is Mode.SOFT_DELETE,
        )

    def probe(self) -> None:
        """See `ProbedDestination`: write, stage, copy and read a row, as a copy would."""
        name = f"PENSTOCK_PROBE_{secrets.token_hex(4)}".upper()
        with translated("the schema"), self._connection.session() as session:
            self._create_schema(session)
            Control(self._connection, "").create(session)
            session.run(f"create table {self._connection.name(name)} (C1 number(38,0))")
            try:
                session.put(f"probe/{name}", "0.parquet", pa.table({"C1": [1]}))
                with session.transaction("penstock_probe"):
                    session.copy(self._connection.name(name), f"probe/{name}", 1)
                session.run(f"create or replace view {self._connection.name(name + 'V')} as select 1 as C1")
                session.run(f"drop view {self._connection.name(name + 'V')}")
                session.remove(f"probe/{name}")
            finally:
                session.run(f"drop table if exists {self._connection.name(name)}")

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        with translated("the schema"), self._connection.session() as session:
            self._create_schema(session)
            self._control.create(session)
            self._control.end_others(session)
            session.remove(self._control.folder)

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        context, table, target = self._started, str(schema), _target(schema)
        with translated(table), self._connection.session() as session:
            before = self._control.load(session, [schema.table_id]).get(schema.table_id)
            if before is not None and before.attempt == attempt:
                return
            self._claim(session, schema, target)
            record = Record(
                *(context.pipeline_id, schema.table_id, target, table, attempt, context.epoch, context.lineage)
            )
            self._control.begin(session, record)
            kept = None if before is None else before.generation
            if before is not None and before.target != target:
                session.run(f"drop view if exists {self._connection.name(before.target)}")
            if self._mode is not Mode.HISTORY:
                self._drop_generations(session, target, schema.table_id, kept)
        with self._lock:
            self._shown.discard(schema.table_id)

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        context, table = self._started, str(schema)
        layout = Layout(self._mode, schema, plain(rows.arrow_schema, schema))
        generation = f"{_target(schema)}{_GENERATION}{schema.table_id}_{context.epoch}_{secrets.token_hex(4)}".upper()
        with translated(table), self._connection.session() as session:
            record = self._control.load(session, [schema.table_id]).get(schema.table_id)
            if record is None or record.attempt != rows.attempt:
                raise fenced_copy(table, rows.attempt)
            if record.is_copied:
                if record.position != rows.position:
                    raise fenced_copy(table, rows.attempt)
                return
            columns = ", ".join(f"{name} {type_}" for name, type_ in layout.columns.items())
            session.run(f"create table {self._connection.name(generation)} ({columns})")
        target = CopyTarget(self._connection, f"{self._control.folder}/copies/{generation}", layout, rows.position)
        try:
            staged = context.tasks.run(
                rows.ranges, partial(stage_range, rows.reader, target), description=f"copy {schema}"
            )
            with translated(table), self._connection.session() as session:
                self._finish_copy(session, record, layout, generation, rows.position, staged)
                session.remove(target.folder)
        except BaseException:
            self._drop_unused(schema.table_id, generation)
            raise
        logger.info("table copied table=%s rows=%d", schema, sum(each.count for each in staged))

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        context, control = self._started, self._control
        errors: dict[int, PenstockError] = {}
        works: list[TableWork] = []
        if not batch.tables:
            return completed()
        with translated("the position"), self._connection.session() as session:
            known = control.load(session, [changes.table_id for changes in batch.tables])
            for changes in batch.tables:
                try:
                    with translated(changes.table):
                        work = self._plan(session, batch, changes, known.get(changes.table_id))
                except Exception as error:
                    errors[changes.table_id] = unexpected(changes.table, error)
                    continue
                if work is not None:
                    works.append(work)
        groups = deal_out(works, context.tasks.parallel)
        items = [Work(self._connection, control, context.epoch, context.lineage, group) for group in groups]
        is_long = batch.alone and batch.row_count > _SHARED_ROWS
        outcomes: list[list[PenstockError | None]] = []
        if items:
            with context.tasks.copying() if is_long else nullcontext():
                outcomes = context.tasks.run(items, write_work, description=describe_shares(batch, works))
        for item, results in zip(items, outcomes, strict=True):
            errors |= {
                table.table_id: error for table, error in zip(item.tables, results, strict=True) if error is not None
            }
        reshaped = [
            each for each in works if each.table_id not in errors and each.layout.view("") != _view_of(each.record)
        ]
        if reshaped:
            with self._lock:
                # If the view cannot be replaced now, the next batch does it.
                self._shown.difference_update(each.table_id for each in reshaped)
            with translated("a view"), self._connection.session() as session:
                for work in reshaped:
                    self._show(session, work.table_id)
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        with translated("the position"), self._connection.session() as session:
            record = self._control.load(session, [table_id]).get(table_id)
        if record is None or not record.is_copied or record.position is None:
            return None
        return record.position if self._started.knows(record.lineage, record.position) else None

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`: the result of a query stays as it is."""
        return True

    def pin(self, schema: TableSchema) -> PinnedSnowflake | None:
        """See `ReadableDestination`."""
        if self._mode is Mode.HISTORY:
            raise NotComparable(f"{schema} has every change in Snowflake, not the rows of the source")
        control = Control(self._connection, "")
        try:
            with self._connection.session() as session:
                found = control.find(session, "TABLE_ID = ?", [schema.table_id])
        except Exception as error:
            if is_missing(error):
                return None
            with translated(str(schema)):
                raise
        found.sort(key=lambda record: record.target != _target(schema))
        for record in found:
            if record.generation is not None and record.layout is not None:
                with translated(str(schema)):
                    return pin_generation(self._connection, record)
        return None

    def drop_table(self, table_id: int) -> bool:
        """See `DroppingDestination`."""
        with translated("a dropped table"), self._connection.session() as session:
            record = self._control.load(session, [table_id]).get(table_id)
            if record is None or not is_of_this_server(record, self._started):
                return False
            session.run(f"drop view if exists {self._connection.name(record.target)}")
            self._drop_generations(session, record.target, table_id, None)
            self._control.forget(session, table_id)
        return True

    def shutdown(self) -> None:
        """See `Destination`."""
        self._connection.close()

    def _plan(
        self, session: Session, batch: EventBatch, changes: TableChanges, known: Record | None
    ) -> TableWork | None:
        """Return a table's part of the work; None if the table has all of it. Raise the error that stops the table."""
        record, position = require_writable(changes, known, self._started, self._mode)
        assert record.layout is not None
        assert record.generation is not None
        with self._lock:
            is_shown = changes.table_id in self._shown
        if not is_shown:
            self._show(session, changes.table_id)
        left = left_of(batch, changes, position, shared_rows=_SHARED_ROWS)
        if left is None:
            return None
        layout = record.layout
        rows = [step for step in left.steps if isinstance(step, Rows)]
        for step in rows:
            if step.schema != layout.schema:
                types = plain(step.segments[-1].arrow_schema(), step.schema)
                keep = self._started.keeps_dropped_columns(step.schema)
                layout = follow(changes.table, layout, step.schema, types, keep_dropped=keep)
        if layout != record.layout:
            added = {name: type_ for name, type_ in layout.columns.items() if name not in record.layout.columns}
            for name, type_ in added.items():
                session.run(
                    f"alter table {self._connection.name(record.generation)} add column if not exists {name} {type_}"
                )
        end = position if reaches(position, batch.end) else batch.end
        return TableWork(record, changes.table, layout, left.steps, end)

    def _finish_copy(
        self,
        session: Session,
        before: Record,
        layout: Layout,
        generation: str,
        position: Lsn,
        staged: Sequence[Staged],
    ) -> None:
        """Copy what is staged into the generation, and record it as the table."""
        context = self._started
        with session.transaction(self._control.transaction) as transaction:
            for each in staged:
                if each.count:
                    session.copy(self._connection.name(generation), each.folder, each.count)
            if self._mode is Mode.SOFT_DELETE and before.generation is not None and before.layout is not None:
                self._keep_deleted(session, before.generation, before.layout, generation, layout)
            is_current = self._control.move(
                session,
                before,
                context.epoch,
                transaction=transaction,
                lineage=context.lineage,
                position=position,
                layout=layout,
                generation=generation,
            )
            if not is_current:
                raise fenced_copy(before.source, before.attempt)
        self._show(session, before.table_id)
        if before.generation is not None and self._mode is not Mode.HISTORY:
            session.run(f"drop table if exists {self._connection.name(before.generation)}")

    def _keep_deleted(self, session: Session, former: str, was: Layout, generation: str, layout: Layout) -> None:
        """Keep rows that are gone at the source: those that were deleted, and those that the new copy lacks."""
        shared = [name for name in layout.columns if name in was.columns and name != DELETED_AT]
        new, old = self._connection.name(generation), self._connection.name(former)
        if was.is_bag != layout.is_bag or was.key != layout.key:
            return
        where = f"O.{DELETED_AT} is not null"
        if layout.key:
            same = " and ".join(f"N.{name} = O.{name}" for name in layout.key)
            where = f"not exists (select 1 from {new} as N where {same})"
        session.run(
            f"insert into {new} ({', '.join([*shared, DELETED_AT])}) "
            f"select {', '.join(f'O.{name}' for name in shared)}, "
            f"coalesce(O.{DELETED_AT}, current_timestamp()) from {old} as O where {where}"
        )

    def _show(self, session: Session, table_id: int) -> None:
        """Let the view show what is recorded of a table."""
        record = self._control.load(session, [table_id]).get(table_id)
        if record is None or record.layout is None or record.generation is None:
            return
        if record.epoch > self._started.epoch:
            raise other_writer(record.source)
        query = record.layout.view(self._connection.name(record.generation))
        session.run(f"create or replace view {self._connection.name(record.target)} copy grants as {query}")
        with self._lock:
            self._shown.add(table_id)

    def _claim(self, session: Session, schema: TableSchema, target: str) -> None:
        """Raise unless the view belongs to this table or to nobody."""
        owners = self._control.find(session, "TARGET = ?", [target])
        if not owners and self._tables(session, target, exactly=True):
            raise rejected(
                str(schema),
                f"{target} exists in the schema, and Penstock did not create it",
                hint="Choose another schema, or drop that table.",
            )
        for owner in owners:
            if owner.pipeline != self._started.pipeline_id:
                raise foreign_table(str(schema), owner.pipeline, self._started.pipeline_id)
            if owner.table_id == schema.table_id:
                continue
            if owner.table_id in self._started.store.get_table_replication_states():
                raise rejected(
                    str(schema),
                    f"{target} is in use by another table of this pipeline",
                    hint="Copy that table again first: it then takes its own name.",
                )
            self._control.forget(session, owner.table_id)

    def _drop_generations(self, session: Session, target: str, table_id: int, kept: str | None) -> None:
        """Drop what earlier copies of a table left behind; never a table of a later lease."""
        prefix = f"{target}{_GENERATION}{table_id}_"
        for name in self._tables(session, prefix):
            epoch = name.removeprefix(prefix).partition("_")[0]
            if name != kept and epoch.isdecimal() and int(epoch) <= self._started.epoch:
                session.run(f"drop table if exists {self._connection.name(name)}")

    def _drop_unused(self, table_id: int, generation: str) -> None:
        """Drop the table of a failed copy, unless its commit took effect although it reported an error."""
        try:
            with self._connection.session() as session:
                record = self._control.load(session, [table_id]).get(table_id)
                if record is None or record.generation != generation:
                    session.run(f"drop table if exists {self._connection.name(generation)}")
        except Exception as error:
            logger.info("table of a failed copy remains table=%s error=%s", generation, type(error).__name__)

    def _tables(self, session: Session, name: str, *, exactly: bool = False) -> list[str]:
        matches = "TABLE_NAME = ?" if exactly else f"left(TABLE_NAME, {len(name)}) = ?"
        found = session.rows(
            f"select TABLE_NAME from {quote(self._connection.database)}.INFORMATION_SCHEMA.TABLES "
            f"where TABLE_SCHEMA = ? and {matches}",
            [self._connection.schema, name],
        )
        return [row[0] for row in found]

    def _create_schema(self, session: Session) -> None:
        database = quote(self._connection.database)
        try:
            found = session.rows(
                f"select 1 from {database}.INFORMATION_SCHEMA.SCHEMATA where SCHEMA_NAME = ?", [self._connection.schema]
            )
        except Exception as error:
            if not is_missing(error):
                raise
            raise unusable(
                f"Snowflake has no database {self._connection.database}, or this role may not use it",
                hint="Create it, grant usage on it to the role, or check database and role.",
            ) from None
        # A role may lack the privilege to create a schema that exists.
        if not found:
            session.run(f"create schema if not exists {self._connection.place}")

    @property
    def _control(self) -> Control:
        return Control(self._connection, self._started.pipeline_id)

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context


def _target(schema: TableSchema) -> str:
    return IDENTIFIERS.table(schema).upper()


def _view_of(record: Record) -> str:
    return "" if record.layout is None else record.layout.view("")
