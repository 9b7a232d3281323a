"""The Kafka destination: a transaction for each batch, with the messages of all its tables and their positions.

The driver writes changes: one transaction covers all tables of a batch, so that readers of committed records see each
transaction of the source as a whole. A task writes each copy.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pyarrow as pa
from confluent_kafka import KafkaException

from penstock.changes.batch import EventBatch, Rows, SchemaChange, TableChanges, TableStep
from penstock.changes.segment import segment_layout
from penstock.destinations.base import Capabilities, CopyRows, DestinationContext, WriteHandle, WriteResult, completed
from penstock.destinations.batch_events import read_segment
from penstock.destinations.kafka.client import ANY_PARTITION, Fenced, Writer
from penstock.destinations.kafka.control import Control, Known, Recorded
from penstock.destinations.kafka.copying import Copy, CopyTarget, copy_table
from penstock.destinations.kafka.messages import Encoder
from penstock.destinations.kafka.options import Options
from penstock.destinations.refusals import (
    concerns_all_tables,
    fenced_copy,
    foreign_table,
    other_writer,
    out_of_reach,
    unexpected,
)
from penstock.destinations.table_parts import divide, is_of_this_server, left_of, require_writable
from penstock.errors import LeaseLost, PenstockError
from penstock.lsn import Lsn, reaches
from penstock.schema import TableSchema

logger = logging.getLogger(__name__)

_PIECE_ROWS, _PIECE_BYTES = 50_000, 32 << 20
_SHARED_ROWS = 1_000_000
"""The most changes of a table in a batch that other tables share; only a large transaction has more."""
_LANES = 4
"""Transactional ids for copies and for transactions that take long; a table always has the same one."""
_TAKEOVERS = 5


@dataclass(frozen=True, slots=True)
class _Part:
    """A table's part of a batch."""

    known: Known
    steps: tuple[TableStep, ...]
    position: Lsn


class KafkaDestination:
    """`type = "kafka"`: every change as a message, in transactions that also hold the positions.

    | option | |
    |---|---|
    | `bootstrap_servers` | the brokers, as `host:port,host:port` |
    | `topic_prefix` | topics are called `prefix.schema.table`; default: the name of the pipeline |
    | `topic` | one topic for all tables, instead of one for each |
    | `format` | `json` (default) or `avro`, which needs `schema_registry` |
    | `envelope` | `debezium` (default): `before`, `after`, `source`, `op`; `flat`: the columns of the row |
    | `tombstones` | `true` (default): a message without a value follows each delete |
    | `truncates` | `true` (default): a truncate is a message `t`; `false`: it is left out |
    | `unavailable_value` | stands for a value that the server omitted: `__debezium_unavailable_value` |
    | `partitions` | partitions of topics that Penstock creates (1) |
    | `replication_factor` | replicas of topics that Penstock creates; default: the broker's |
    | `topic_config` | settings of topics that Penstock creates, such as `{ "retention.ms" = "-1" }` |
    | `control_topic` | where positions are recorded (`penstock-control`); pipelines share it |
    | `transaction_timeout` | seconds after which the broker aborts a transaction (900); copies must take less |
    | `schema_registry` | the address of a registry with Confluent's API, for `avro` |
    | `schema_registry_auth_env` | the environment variable that holds its `user:password` |
    | `client` | settings of the client (librdkafka), such as `{ "security.protocol" = "SASL_SSL" }` |
    | `client_env` | secret settings, by environment variable: `{ "sasl.password" = "KAFKA_PASSWORD" }` |
    | `commit_interval` | seconds between two batches (0.2) |
    """

    name = "kafka"

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        topic_prefix: str | None = None,
        topic: str | None = None,
        format: str = "json",  # noqa: A002  # the name of the option
        envelope: str = "debezium",
        tombstones: bool = True,
        truncates: bool = True,
        unavailable_value: str = "__debezium_unavailable_value",
        partitions: int = 1,
        replication_factor: int = -1,
        topic_config: Mapping[str, str] | None = None,
        control_topic: str = "penstock-control",
        transaction_timeout: float = 900.0,
        schema_registry: str | None = None,
        schema_registry_auth_env: str | None = None,
        client: Mapping[str, str] | None = None,
        client_env: Mapping[str, str] | None = None,
        commit_interval: float = 0.2,
    ) -> None:
        self._options = Options(
            bootstrap_servers=bootstrap_servers,
            topic_prefix=topic_prefix,
            topic=topic,
            format=format,
            envelope=envelope,
            tombstones=tombstones,
            truncates=truncates,
            unavailable_value=unavailable_value,
            partitions=partitions,
            replication_factor=replication_factor,
            topic_config=topic_config or {},
            control_topic=control_topic,
            transaction_timeout=transaction_timeout,
            schema_registry=schema_registry,
            schema_registry_auth_env=schema_registry_auth_env,
            client=client or {},
            client_env=client_env or {},
            commit_interval=commit_interval,
        )
        self.commit_interval = self._options.commit_interval
        """Seconds between two batches, unless more than one batch of changes is waiting."""
        self._cluster = self._options.cluster
        self._context: DestinationContext | None = None
        self._known: dict[int, Known] = {}
        self._unsure: dict[int, Writer] = {}
        """Tables in a transaction whose outcome is unknown, and the writer that has to settle it."""
        self._lock = threading.Lock()
        """Held while `_known` changes."""
        self._changes: Writer | None = None
        self._lanes: list[Writer] = []
        self._partitions: dict[str, int] = {}

    @property
    def capabilities(self) -> Capabilities:
        """See `Destination`. It keeps every change; a copy is one transaction, and an event says that it begins."""
        return Capabilities(records_position=True, keeps_old_rows_while_copying=True)

    def probe(self) -> None:
        """See `ProbedDestination`: create the control topic, write a record there, and abort."""
        control = Control(self._cluster, self._options.control_topic, "probe")
        control.create(self._options.replication_factor)
        writer = Writer(self._cluster, f"penstock-probe-{uuid.uuid4()}")
        writer.initialize()
        try:
            with writer.transaction():
                writer.send(control.topic, control.writer(0), 0)
                raise _Probed
        except _Probed:
            pass
        finally:
            writer.discard()
        control.load()
        self._options.check_registry()

    def startup(self, context: DestinationContext) -> None:
        """See `Destination`."""
        self._context = context
        control = self._control(context.pipeline_id)
        control.create(self._options.replication_factor)
        ids = [f"{control.topic}-{context.pipeline_id}-{name}" for name in ("changes", *range(_LANES))]
        self._changes, *self._lanes = (Writer(self._cluster, each) for each in ids)
        for _ in range(_TAKEOVERS):
            recorded = self._take_over(control)
            if recorded is not None:
                break
        else:
            raise other_writer(context.pipeline_id)
        existing = self._cluster.topic_ids({each.topic for each in recorded.tables.values() if each.topic})
        with self._lock:
            self._known = {
                # A topic that was deleted, perhaps created again, has lost its messages.
                table_id: known if existing.get(known.topic) == known.topic_id else _lost(known)
                for table_id, known in recorded.tables.items()
            }

    def drop_table_for_copy(self, schema: TableSchema, attempt: str) -> None:
        """See `Destination`."""
        context, control = self._started, self._control(self._started.pipeline_id)
        self._settle([schema.table_id])
        place = context.take_folder(schema)
        topic = self._options.topic_of(context.pipeline_id, place)
        self._claim(control, schema, topic)
        with self._lock:
            before = self._known.get(schema.table_id)
            if before is not None and before.epoch > context.epoch:
                raise other_writer(str(schema))
            if before is not None and before.attempt == attempt:
                return
            now = before or Known(
                context.pipeline_id, schema.table_id, str(schema), attempt, place, topic, context.epoch
            )
            now = replace(
                now, attempt=attempt, next_place=place, next_topic=topic, source=str(schema), epoch=context.epoch
            )
            others = [each for each in self._known.values() if each.table_id != schema.table_id]
            left = [] if self._options.topic else [_without(each, topic) for each in others]
            records = [now, *(each for each in left if each != self._known[each.table_id])]
        with self._writing(control) as writer:
            self._record(writer, control, records)

    def write_table_rows(self, schema: TableSchema, rows: CopyRows) -> None:
        """See `Destination`."""
        context, control = self._started, self._control(self._started.pipeline_id)
        self._settle([schema.table_id])
        known = self._known.get(schema.table_id)
        if known is None or known.attempt != rows.attempt or not known.next_topic:
            raise fenced_copy(str(schema), rows.attempt)
        if known.is_copied:
            if known.position != rows.position:
                raise fenced_copy(str(schema), rows.attempt)
            return
        topic = known.next_topic
        self._create_topic(topic)
        lane = self._lanes[schema.table_id % _LANES]
        encoder = self._encoder(schema, topic, rows.arrow_schema)
        target = CopyTarget(
            self._cluster,
            control,
            lane.id,
            schema,
            encoder,
            self._partition(topic, schema),
            context.lineage,
            context.epoch,
            self._options.layout,
            self._cluster.topic_ids([topic]).get(topic, ""),
            empties=bool(known.copied) if self._options.topic else self._cluster.holds_records(topic),
        )
        with lane.lock:
            # The task's producer takes the id over. Until the table's record is read again, nothing is certain.
            lane.discard()
            try:
                copied = context.tasks.run([Copy(target, rows)], copy_table, description=f"copy {schema}")
            finally:
                with self._lock:
                    self._unsure[schema.table_id] = lane
        self._settle([schema.table_id])
        logger.info("table copied table=%s rows=%d", schema, sum(copied))

    def write_events(self, batch: EventBatch) -> WriteHandle:
        """See `Destination`."""
        if not batch.tables:
            return completed()
        self._settle([changes.table_id for changes in batch.tables])
        errors: dict[int, PenstockError] = {}
        parts: list[_Part] = []
        for changes in batch.tables:
            try:
                part = self._plan(batch, changes)
            except Exception as error:
                errors[changes.table_id] = unexpected(changes.table, error)
                continue
            if part is not None:
                parts.append(part)
        is_long = batch.alone and batch.row_count > _SHARED_ROWS
        with self._started.tasks.copying() if is_long else nullcontext():
            errors |= self._write_or_divide(batch, parts, is_long=is_long)
        return completed(WriteResult.failures(errors))

    def position(self, table_id: int) -> Lsn | None:
        """See `Destination`."""
        context = self._started
        self._settle([table_id])
        known = self._known.get(table_id)
        if known is None or not known.is_copied or known.position is None:
            return None
        return known.position if context.knows(known.lineage, known.position) else None

    def folder_of(self, table_id: int) -> str | None:
        """See `FolderDestination`; the folder stands for the name of the topic."""
        known = self._known.get(table_id)
        if known is None or not known.place or not is_of_this_server(known, self._started):
            return None
        return known.place

    def name_table(self, table_id: int, name: str) -> None:
        """See `FolderDestination`."""
        control = self._control(self._started.pipeline_id)
        self._settle([table_id])
        known = self._known.get(table_id)
        if known is not None and known.source != name:
            with self._writing(control) as writer:
                self._record(writer, control, [replace(known, source=name)])

    def locations(self, pipeline_id: str) -> Mapping[int, str]:
        """See `FolderDestination`."""
        control = self._control(pipeline_id)
        tables = control.load().tables if self._cluster.partitions(control.topic) else {}
        return {table_id: f"{self._cluster.servers} {known.topic}" for table_id, known in tables.items() if known.topic}

    def shutdown(self) -> None:
        """See `Destination`."""
        for writer in self._writers:
            with writer.lock:
                writer.discard()
        self._context = None

    def _take_over(self, control: Control) -> Recorded | None:
        """Fence off earlier processes and say whose lease it is; None if another one did so meanwhile."""
        with ThreadPoolExecutor(len(self._writers), thread_name_prefix="kafka") as pool:
            list(pool.map(Writer.initialize, self._writers))
        recorded = control.load()
        if recorded.epoch > self._started.epoch:
            raise other_writer(control.pipeline)
        try:
            with self._writers[0].transaction() as writer:
                writer.send(control.topic, control.writer(self._started.epoch), 0)
        except Fenced:
            return None
        return recorded

    def _settle(self, table_ids: Sequence[int]) -> None:
        """Find out what became of transactions with an unknown outcome that had these tables."""
        with self._lock:
            unsure = {table_id: self._unsure[table_id] for table_id in table_ids if table_id in self._unsure}
        if not unsure:
            return
        control = self._control(self._started.pipeline_id)
        for writer in set(unsure.values()):
            with writer.lock:
                self._make_ready(writer, control)
        recorded = self._require_lease(control)
        with self._lock:
            for table_id in unsure:
                found = recorded.tables.get(table_id)
                if found is not None:
                    self._known[table_id] = found
                self._unsure.pop(table_id, None)

    def _make_ready(self, writer: Writer, control: Control) -> None:
        """Give a writer a producer, unless it has one. A process that lost its lease does not keep it."""
        if writer.is_ready:
            return
        writer.initialize()
        try:
            self._require_lease(control)
        except BaseException:
            writer.discard()
            raise

    def _require_lease(self, control: Control) -> Recorded:
        recorded = control.load()
        if recorded.epoch > self._started.epoch:
            raise other_writer(control.pipeline)
        return recorded

    @contextmanager
    def _writing(self, control: Control, writer: Writer | None = None) -> Iterator[Writer]:
        """Lend the writer of changes, or another one, ready for a transaction; a process that was fenced gets none."""
        writer = writer or self._writers[0]
        with writer.lock:
            self._make_ready(writer, control)
            try:
                yield writer
            except Fenced:
                # By the broker, because the transaction took too long, or by another process: the next call finds out.
                raise out_of_reach(self._cluster.servers, "the transaction was aborted") from None

    def _write_or_divide(self, batch: EventBatch, parts: Sequence[_Part], *, is_long: bool) -> dict[int, PenstockError]:
        """Write all tables in one transaction; if one of them cannot be written, each in its own."""
        if not parts:
            return {}
        try:
            self._write(batch, parts, is_long=is_long)
        except PenstockError as error:
            if concerns_all_tables(error) or isinstance(error, LeaseLost):
                raise
            if len(parts) == 1:
                return {parts[0].known.table_id: error}
        else:
            return {}
        self._settle([part.known.table_id for part in parts])
        errors: dict[int, PenstockError] = {}
        for part in parts:
            errors |= self._write_or_divide(batch, [part], is_long=is_long)
        return errors

    def _write(self, batch: EventBatch, parts: Sequence[_Part], *, is_long: bool) -> None:
        control = self._control(self._started.pipeline_id)
        lane = self._lanes[parts[0].known.table_id % _LANES] if is_long else None
        table_ids = [part.known.table_id for part in parts]
        with self._writing(control, lane) as writer:
            now: list[Known] = []
            try:
                with writer.transaction(parts[0].known.source if len(parts) == 1 else None):
                    for part in parts:
                        self._send(writer, control, part)
                        now.append(
                            replace(
                                part.known,
                                position=part.position if reaches(part.position, batch.end) else batch.end,
                                lineage=self._started.lineage,
                                epoch=self._started.epoch,
                            )
                        )
                    writer.send(control.topic, control.records(now), 0)
            except BaseException:
                if not writer.is_ready:
                    with self._lock:
                        self._unsure |= dict.fromkeys(table_ids, writer)
                raise
            with self._lock:
                self._known |= {each.table_id: each for each in now}

    def _send(self, writer: Writer, control: Control, part: _Part) -> None:
        """Send the changes of a table; errors concern this table."""
        topic, schema = part.known.topic, _first_schema(part.steps)
        try:
            for step in divide(part.steps, keeps_all=True, rows=_PIECE_ROWS, size=_PIECE_BYTES):
                if isinstance(step, SchemaChange):
                    schema = step.new
                    writer.send(control.topic, control.schema(step.new, step.version), 0)
                elif isinstance(step, Rows):
                    schema = step.schema
                    partition = self._partition(topic, schema)
                    for segment in step.segments:
                        rows = read_segment(segment)
                        encoder = self._encoder(schema, topic, rows.schema)
                        writer.send(topic, encoder.changes(rows, schema), partition)
                elif self._options.truncates:
                    schema = schema or self._last_schema(part.known)
                    encoder = self._encoder(schema, topic, segment_layout(schema).arrow_schema)
                    messages = encoder.truncate(step, schema)
                    writer.send(topic, messages, max(self._partition(topic, schema), 0))
        except KafkaException:
            raise
        except Exception as error:
            raise unexpected(part.known.source, error) from None

    def _plan(self, batch: EventBatch, changes: TableChanges) -> _Part | None:
        """Return a table's part of the work; None if the topic has all of it. Raise the error that stops the table."""
        known, position = require_writable(
            changes, self._known.get(changes.table_id), self._started, self._options.layout
        )
        left = left_of(batch, changes, position, shared_rows=_SHARED_ROWS)
        return None if left is None else _Part(known, left.steps, position)

    def _claim(self, control: Control, schema: TableSchema, topic: str) -> None:
        """Create a topic unless it exists, and raise `TableOwned` if another pipeline writes it.

        If two pipelines claim it at once, the first record counts.
        """
        self._create_topic(topic)
        topic_id = self._cluster.topic_ids([topic]).get(topic, "")
        owner = control.load().owner(topic, topic_id)
        if owner is None:
            with self._writing(control) as writer, writer.transaction():
                writer.send(control.topic, control.claim(topic, topic_id), 0)
            owner = control.load().owner(topic, topic_id)
            if owner != control.pipeline:
                with self._writing(control) as writer, writer.transaction():
                    writer.send(control.topic, control.claim(topic, None), 0)
        if owner != control.pipeline:
            raise foreign_table(str(schema), owner or "", control.pipeline)

    def _record(self, writer: Writer, control: Control, records: Sequence[Known]) -> None:
        try:
            with writer.transaction():
                writer.send(control.topic, control.records(records), 0)
        except BaseException:
            if not writer.is_ready:
                with self._lock:
                    self._unsure |= {each.table_id: writer for each in records}
            raise
        with self._lock:
            self._known |= {each.table_id: each for each in records}

    def _encoder(self, schema: TableSchema, topic: str, arrow: pa.Schema) -> Encoder:
        context = self._started
        database = context.store.ancestry.current.database
        return self._options.encoder(context.pipeline_id, database, topic, schema, arrow)

    def _last_schema(self, known: Known) -> TableSchema:
        """Return the schema for a truncate that comes without rows."""
        versions = self._started.store.get_table_schemas()
        found = [each.schema for each in versions if each.table_id == known.table_id]
        namespace, _, name = known.source.partition(".")
        return found[-1] if found else TableSchema(known.table_id, namespace, name, ())

    def _create_topic(self, topic: str) -> None:
        if not self._cluster.partitions(topic):
            options = self._options
            self._cluster.create_topic(topic, options.partitions, options.replication_factor, options.topic_config)

    def _partition(self, topic: str, schema: TableSchema) -> int:
        """Return the partition of a table without a key, whose order would be lost in several; others depend on it."""
        if schema.key:
            return ANY_PARTITION
        if topic not in self._partitions:
            self._partitions[topic] = self._cluster.partitions(topic)
        return schema.table_id % max(1, self._partitions[topic])

    def _control(self, pipeline_id: str) -> Control:
        return Control(self._cluster, self._options.control_topic, pipeline_id)

    @property
    def _writers(self) -> list[Writer]:
        return [] if self._changes is None else [self._changes, *self._lanes]

    @property
    def _started(self) -> DestinationContext:
        if self._context is None:
            raise RuntimeError("startup was not called")
        return self._context


class _Probed(Exception):
    """Ends the transaction of a probe."""


def _first_schema(steps: Sequence[TableStep]) -> TableSchema | None:
    for step in steps:
        if isinstance(step, SchemaChange):
            return step.old or step.new
        if isinstance(step, Rows):
            return step.schema
    return None


def _lost(known: Known) -> Known:
    """Return the record of a table whose topic was deleted."""
    return replace(known, place="", topic="", copied="", position=None)


def _without(known: Known, topic: str) -> Known:
    """Return the record of a table that gives a topic to another one."""
    if known.next_topic == topic:
        own = ("", "")
        if known.attempt != known.copied:
            # Its copy goes on, and another one follows to the topic of its new name.
            own = (f"{known.next_place}--oid{known.table_id}", f"{topic}--oid{known.table_id}")
        known = replace(known, next_place=own[0], next_topic=own[1])
    return _lost(known) if known.topic == topic else known
