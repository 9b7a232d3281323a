"""The BigQuery destination: tasks load and append rows, and the driver commits by a row in the control table.

A mirror has its rows before its position is recorded, and a process may die in between. The next one sends the same
changes again, with sequence numbers that BigQuery has already seen. A bag or a history has a stream of its own. The
next process finalizes it, which also ends every late writer, and learns how many rows it has.

Before a batch, the driver records how far the batch goes (`Record.upto`). After a failover this shows whether BigQuery
may have changes that the new server never had.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
from google.api_core import exceptions
from google.cloud import bigquery

from penstock.changes.batch import EventBatch, Rows, TableChanges
from penstock.changes.segment import UNREPRESENTABLE, field_names
from penstock.changes.steps import Truncation
from penstock.destinations.base import (
    Capabilities,
    CopyRows,
    DestinationContext,
    PinnedTable,
    WriteHandle,
    WriteResult,
    completed,
)
from penstock.destinations.batch_events import leave_out
from penstock.destinations.bigquery.append import create_stream, finalize_stream
from penstock.destinations.bigquery.connection import connect, translated
from penstock.destinations.bigquery.control import Control, Record, find_record
from penstock.destinations.bigquery.layout import Kind, Layout, follow, sql_type
from penstock.destinations.bigquery.reader import pin_generation
from penstock.destinations.bigquery.tasks import CopyTarget, Work, Written, load_range, write_changes
from penstock.destinations.naming import IDENTIFIERS
from penstock.destinations.refusals import (
    fenced_copy,
    foreign_table,
    not_copied,
    other_lineage,
    other_writer,
    rejected,
    unexpected,
    unusable,
)
from penstock.errors import LeaseLost, NotComparable, PenstockError
from penstock.lsn import Lsn
from penstock.observe.batches import spanned
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)

_GENERATION = "__g_"
_START_SECONDS = 30.0
_STALENESS = re.compile(r"(\d+) *(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class _Plan:
    """One table's part of a batch, without the changes that the table already has."""

    record: Record
    """As it is when the batch is written."""
    work: Work | None
    """None if there are no rows to write."""
    is_reshaped: bool
    """The view has to be replaced."""


class BigQueryDestination:
    """`type = "bigquery"`: mirrors or histories of tables in a dataset of BigQuery. Experimental.

    | option | |
    |---|---|
    | `project`, `dataset` | where the tables go; the dataset is created if it does not exist |
    | `location` | of the dataset and its jobs, such as `EU`; default: BigQuery's own |
    | `credentials_file` | the JSON key of a service account; without it, the machine's default credentials |
    | `mode` | `mirror` (default): the rows of the source; `history`: one row for each change |
    | `max_staleness` | how old the rows of a mirror may be in a query, such as `15m` (default) or `0s` |
    | `endpoint`, `storage_endpoint` | URL and host:port of an emulator, which gets no credentials |
    """

    name = "bigquery"

    def __init__(
        self,
        project: str,
        dataset: str,
        *,
        location: str | None = None,
        credentials_file: str | None = None,
        mode: str = "mirror",
        max_staleness: str = "15m",
        endpoint: str | None = None,
        storage_endpoint: str | None = None,
    ) -> None:
        if mode not in ("mirror", "history"):
            raise unusable(f"unknown mode {mode!r}", hint="Use mirror or history.")
        self._connection = connect(project, dataset, location, credentials_file, endpoint, storage_endpoint)
        self._is_history = mode == "history"
        self._staleness = _interval(max_staleness)
        self.capabilities = Capabilities(
            records_position=True,
            updates_rows=not self._is_history,
            keeps_old_rows_while_copying=True,
            loses_nothing_by_a_copy=not self._is_history,
        )
        self._lock = threading.Lock()
        self._records: dict[int, Record] = {}
        self._opened: set[int] = set()
        """Tables whose stream and view are this process's."""
        self._context: DestinationContext | None = None
        self._control: Control | None = None

    def probe(self) -> None:
        """See `ProbedDestination`."""
        name = f"penstock_probe_{secrets.token_hex(4)}"
        with translated("the dataset"):
            self._create_dataset()
            client, table = self._connection.client, self._connection.reference(name)
            client.create_table(bigquery.Table(table, schema=[bigquery.SchemaField("c1", "INT64")]))
            try:
                list(self._connection.run(f"select c1 from {self._connection.quoted(name)}"))
            finally:
                client.delete_table(table, not_found_ok=True)

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        self._control = Control(self._connection, context.pipeline_id, context.epoch)
        with translated("the dataset"):
            self._create_dataset()
            self._records = self._control.open()

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        context, table, target = self._started, str(schema), IDENTIFIERS.table(schema)
        with self._lock:
            before = self._records.get(schema.table_id)
        if before is not None and before.attempt == attempt:
            return
        with translated(table):
            self._claim(schema, target)
            known = before if before is not None and before.target == target else None
            record = Record(schema.table_id, target, table, attempt, context.lineage)
            if known is not None:
                record = replace(record, generation=known.generation, layout=known.layout)
            self._commit([record])
            if not self._controlled.is_newest(schema.table_id):
                raise other_writer(table)
            if before is not None and known is None and not self._is_history:
                self._remove(before)  # the table has another name now

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        context, table = self._started, str(schema)
        record = self._records.get(schema.table_id)
        if record is None or record.attempt != rows.attempt:
            raise fenced_copy(table, rows.attempt)
        if record.position == rows.position:
            return
        kind = Kind.HISTORY if self._is_history else Kind.MIRROR if schema.key else Kind.BAG
        layout = Layout(kind, schema, _plain(rows.arrow_schema))
        layout.require_storable()
        with translated(table):
            generation = self._create_generation(record.target, layout)
            target = CopyTarget(self._connection, generation, layout, rows.position)
            try:
                loaded = context.tasks.run(
                    rows.ranges, partial(load_range, rows.reader, target), description=f"copy {schema}"
                )
            except BaseException:
                self._connection.client.delete_table(self._connection.reference(generation), not_found_ok=True)
                raise
            if self._records.get(schema.table_id) != record:
                raise fenced_copy(table, rows.attempt)
            total = sum(loaded)
            copied = replace(
                record, lineage=context.lineage, generation=generation, position=rows.position, upto=rows.position,
                layout=layout, total=total,
            )  # fmt: skip
            self._commit([copied])
            if not self._controlled.is_newest(schema.table_id):
                raise other_writer(table)
            self._show(copied)
        logger.info("table copied table=%s rows=%d", schema, total)

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        errors: dict[int, PenstockError] = {}
        plans: dict[int, _Plan] = {}
        for changes in batch.tables:
            try:
                with translated(changes.table):
                    plan = self._plan(batch, changes)
            except Exception as error:
                errors[changes.table_id] = unexpected(changes.table, error)
                continue
            if plan is not None:
                plans[changes.table_id] = plan
        # Before the first row: a later process must know how far this batch went.
        self._commit([plan.record for plan in plans.values() if plan.work is not None], intent=batch.end)
        work = [plan.work for plan in plans.values() if plan.work is not None]
        written: list[Written | PenstockError] = []
        if work:
            written = self._started.tasks.run(
                work, write_changes, description=f"append {len(work)} tables to {batch.end}"
            )
        results = {item.table_id: result for item, result in zip(work, written, strict=True)}
        with spanned("commit"):
            errors |= self._finish(batch, plans, results)
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        with self._lock:
            record = self._records.get(table_id)
        return None if record is None or not self._is_known(record) else record.position

    @property
    def keeps_versions(self) -> bool:
        """See `ReadableDestination`: the rows are copied when they are pinned."""
        return True

    def pin(self, schema: TableSchema) -> PinnedTable | None:
        """See `ReadableDestination`."""
        if self._is_history:
            raise NotComparable(f"{schema} has every change in BigQuery, not the rows of the source")
        with translated(str(schema)):
            try:
                record = find_record(self._connection, schema.table_id, IDENTIFIERS.table(schema))
            except exceptions.NotFound:
                return None
            return None if record is None else pin_generation(self._connection, record, self._staleness)

    def drop_table(self, table_id: int) -> bool:
        """See `DroppingDestination`."""
        with self._lock:
            record = self._records.get(table_id)
        if record is None:
            return False
        with translated(record.source):
            self._remove(record)
            self._controlled.forget(record)
        with self._lock:
            self._records.pop(table_id, None)
            self._opened.discard(table_id)
        return True

    def shutdown(self) -> None:
        """See `Destination`."""
        self._opened.clear()

    def _plan(self, batch: EventBatch, changes: TableChanges) -> _Plan | None:
        record = self._open(changes)
        layout = record.layout
        assert layout is not None
        assert record.generation is not None
        changes = leave_out(changes, record.position, batch.begin)
        if not changes.steps:
            return None
        steps = [step for step in changes.steps if isinstance(step, Rows | Truncation)]
        rows = [step for step in steps if isinstance(step, Rows)]
        is_reshaped = bool(rows) and rows[-1].schema != layout.schema
        if is_reshaped:
            last = rows[-1].segments[-1].arrow_schema()
            types = pa.schema([last.field(name) for name in field_names(rows[-1].schema)])
            keep = self._started.keeps_dropped_columns(rows[-1].schema)
            layout = follow(changes.table, layout, rows[-1].schema, _plain(types), keep_dropped=keep)
        places = [number for number, step in enumerate(steps) if isinstance(step, Truncation)]
        is_new = bool(places) and layout.kind is not Kind.HISTORY
        record = replace(record, layout=layout, lineage=self._started.lineage)
        if is_new:
            # Rows before a truncate do not matter, and an empty generation takes the place of the one that has them.
            steps = steps[places[-1] + 1 :]
            generation = self._create_generation(record.target, layout)
            stream = create_stream(self._connection, generation) if layout.kind is Kind.BAG else None
            record = replace(record, generation=generation, stream=stream, stream_rows=0, ahead=0, total=0)
        elif is_reshaped:
            self._add_columns(record)
        assert record.generation is not None
        if not steps:
            return _Plan(record, None, is_reshaped or is_new)
        work = Work(
            table_id=changes.table_id,
            table=changes.table,
            connection=self._connection,
            generation=record.generation,
            layout=layout,
            steps=tuple(steps),
            is_new=is_new,
            is_reshaped=is_reshaped,
            is_fresh=self._staleness is None,
            source=self._started.source_rows,
            stream=record.stream,
            offset=record.stream_rows,
            ahead=record.ahead,
        )
        return _Plan(record, work, is_reshaped or is_new)

    def _open(self, changes: TableChanges) -> Record:
        """Return the record of a table that this process writes."""
        with self._lock:
            record = self._records.get(changes.table_id)
            is_open = changes.table_id in self._opened
        if record is None or record.position is None or record.generation is None or record.layout is None:
            raise not_copied(changes.table)
        if not self._is_known(record):
            raise other_lineage(changes.table, record.lineage, self._started.lineage)
        if is_open:
            return record
        if record.layout.kind is not Kind.MIRROR:
            ahead = self._count_ahead(record)
            stream = create_stream(self._connection, record.generation)
            record = replace(record, stream=stream, stream_rows=0, ahead=ahead)
            self._commit([record])
        self._show(record)
        with self._lock:
            self._opened.add(changes.table_id)
        return record

    def _count_ahead(self, record: Record) -> int:
        """Return how many rows after the position are there; from now on, nobody else can append more."""
        if record.stream is None:
            return 0
        try:
            return record.ahead + finalize_stream(self._connection, record.stream) - record.stream_rows
        except exceptions.NotFound:
            # A stream that was not used for long expires, and nobody can append to it either.
            assert record.generation is not None
            rows = self._connection.run(f"select count(*) as n from {self._connection.quoted(record.generation)}")
            return int(next(iter(rows))["n"]) - record.total

    def _finish(
        self, batch: EventBatch, plans: dict[int, _Plan], results: dict[int, Written | PenstockError]
    ) -> dict[int, PenstockError]:
        """Record the positions of tables that were written; return the errors of the others."""
        errors: dict[int, PenstockError] = {}
        done: list[Record] = []
        for table_id, plan in plans.items():
            result = results.get(table_id, Written(0, 0))
            if isinstance(result, PenstockError):
                errors[table_id] = result
                with self._lock:
                    self._opened.discard(table_id)  # how much of it is there has to be found out
                continue
            record = replace(plan.record, position=batch.end, upto=batch.end)
            rows, ahead = record.stream_rows + result.appended, record.ahead - result.left_out
            total = record.total + result.appended + result.left_out
            done.append(replace(record, stream_rows=rows, ahead=ahead, total=total))
        try:
            self._commit(done)
        except Exception:
            with self._lock:
                self._opened.difference_update(record.table_id for record in done)
            raise
        for record in done:
            if plans[record.table_id].is_reshaped:
                try:
                    self._show(record)
                except LeaseLost as error:
                    errors[record.table_id] = error
                except Exception as error:
                    # The rows are there and recorded; the view follows when the table is opened again.
                    with self._lock:
                        self._opened.discard(record.table_id)
                    logger.warning("view not replaced table=%s error=%s", record.source, type(error).__name__)
        return errors

    def _commit(self, records: Sequence[Record], intent: Lsn | None = None) -> None:
        """Write records; with an `intent`, as they are now except that rows up to there may follow."""
        if intent is not None:
            # A generation that a truncate makes is recorded when it is complete.
            records = [replace(self._records[each.table_id], upto=intent, lineage=each.lineage) for each in records]
        with translated("the position"):
            self._controlled.write(records)
        with self._lock:
            self._records |= {record.table_id: record for record in records}

    def _is_known(self, record: Record) -> bool:
        """Return True if all that BigQuery may have of a table is part of the server's history."""
        positions = [each for each in (record.position, record.upto) if each is not None]
        return bool(positions) and all(self._started.knows(record.lineage, each) for each in positions)

    def _claim(self, schema: TableSchema, target: str) -> None:
        """Raise unless the view belongs to this table or to nobody."""
        owner = self._controlled.owner(target)
        if owner is None:
            if self._find(target) is not None:
                raise rejected(
                    str(schema),
                    f"{target} exists in the dataset, and Penstock did not create it",
                    hint="Choose another dataset, or drop that table.",
                )
            return
        pipeline, table_id = owner
        if pipeline != self._started.pipeline_id:
            raise foreign_table(str(schema), pipeline, self._started.pipeline_id)
        if table_id != schema.table_id:
            if table_id in self._started.store.get_table_replication_states():
                raise rejected(
                    str(schema),
                    f"{target} is in use by another table of this pipeline",
                    hint="Copy that table again first: it then takes its own name.",
                )
            former = self._records.pop(table_id, None)
            if former is not None:
                self._controlled.forget(former)

    def _show(self, record: Record) -> None:
        """Let the view show the generation of a record; drop the earlier generations of a mirror.

        Raise if another process writes the table now: its generation must not disappear.
        """
        assert record.layout is not None
        assert record.generation is not None
        client, reference = self._connection.client, self._connection.reference(record.target)
        query = record.layout.view(self._connection.quoted(record.generation))
        view = self._find(record.target)
        if not self._controlled.is_newest(record.table_id):
            raise other_writer(record.source)
        if view is None:
            view = bigquery.Table(reference)
            view.view_query = query
            client.create_table(view)
        elif view.view_query != query:
            view.view_query = query
            client.update_table(view, ["view_query"])  # refused if the view has changed since it was found
        if not self._is_history:
            self._drop_generations(record.target, keep=record.generation)

    def _drop_generations(self, target: str, keep: str | None = None) -> None:
        """Delete generations; with `keep`, only those that were created before that one."""
        client, kept = self._connection.client, None if keep is None else self._find(keep)
        for each in client.list_tables(f"{self._connection.project}.{self._connection.dataset}"):
            if not each.table_id.startswith(target + _GENERATION) or each.table_id == keep:
                continue
            found = self._find(each.table_id)
            if found is not None and (kept is None or _created(found) <= _created(kept)):
                client.delete_table(each.reference, not_found_ok=True)

    def _remove(self, record: Record) -> None:
        self._connection.client.delete_table(self._connection.reference(record.target), not_found_ok=True)
        self._drop_generations(record.target)

    def _create_generation(self, target: str, layout: Layout) -> str:
        name = f"{target}{_GENERATION}{secrets.token_hex(4)}"
        self._connection.client.create_table(layout.table(self._connection.reference(name), self._staleness))
        return name

    def _add_columns(self, record: Record) -> None:
        assert record.layout is not None
        assert record.generation is not None
        table = self._connection.client.get_table(self._connection.reference(record.generation))
        there = {field.name for field in table.schema}
        added = [field for field in record.layout.physical_schema() if field.name not in there]
        if added:
            clauses = ", ".join(f"add column if not exists {field.name} {sql_type(field.type)}" for field in added)
            self._connection.run(f"alter table {self._connection.quoted(record.generation)} {clauses}")

    def _create_dataset(self) -> None:
        connection = self._connection
        reference = f"{connection.project}.{connection.dataset}"
        try:
            # Sooner than the client would give up: an operator waits.
            connection.client.get_dataset(reference, retry=bigquery.DEFAULT_RETRY.with_timeout(_START_SECONDS))
        except exceptions.NotFound:
            dataset = bigquery.Dataset(reference)
            if connection.location is not None:
                dataset.location = connection.location
            connection.client.create_dataset(dataset, exists_ok=True)

    def _find(self, table: str) -> bigquery.Table | None:
        try:
            return self._connection.client.get_table(self._connection.reference(table))
        except exceptions.NotFound:
            return None

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context

    @property
    def _controlled(self) -> Control:
        if self._control is None:
            raise RuntimeError("startup was not called")
        return self._control


def _created(table: bigquery.Table) -> float:
    """Return when a table was created, in seconds."""
    return 0.0 if table.created is None else table.created.timestamp()


def _plain(types: pa.Schema) -> pa.Schema:
    """Return columns without what segments and copies add to them."""
    return pa.schema([field for field in types if field.name != UNREPRESENTABLE]).remove_metadata()


def _interval(text: str) -> str | None:
    """Return a staleness as BigQuery writes an interval; None for zero."""
    found = _STALENESS.fullmatch(text.strip())
    if found is None:
        raise unusable(f"max_staleness is {text!r}", hint="Write a number and a unit: 0s, 15m, 1h, 1d.")
    seconds = int(found[1]) * _UNITS[found[2]]
    if seconds > 86_400:
        raise unusable("max_staleness is over a day, the most that BigQuery allows")
    days, rest = divmod(seconds, 86_400)
    return f"0-0 {days} {rest // 3600}:{rest // 60 % 60}:{rest % 60}" if seconds else None
