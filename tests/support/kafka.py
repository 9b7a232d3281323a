"""A broker of the tests, and what a consumer of committed records makes of the messages.

`KafkaReader` reads a topic like an application: it follows `r`, `c`, `u`, `d` and `t` and ends with the rows of the
source. On its way it checks that every change comes once and in order.
"""

from __future__ import annotations

import io
import json
import struct
import urllib.request
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
from confluent_kafka import KafkaError, TopicPartition

from penstock.changes.events import Unrepresentable
from penstock.changes.segment import UNREPRESENTABLE, UNREPRESENTABLE_TYPE, segment_layout
from penstock.destinations.base import DestinationContext
from penstock.destinations.kafka import KafkaDestination
from penstock.destinations.kafka.client import Cluster
from penstock.destinations.kafka.control import Control, Known, Recorded
from penstock.destinations.kafka.options import TOPICS
from penstock.destinations.naming import FOLDERS
from penstock.schema import TableSchema
from penstock.schema.table import schema_from_json
from penstock.testing.destinations.script import make_context

PLACEHOLDER = "__debezium_unavailable_value"
_EPOCH = datetime(1970, 1, 1)
Decode = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Event:
    """A message of a topic; `value` is None for a tombstone."""

    partition: int
    key: Any
    value: Any

    @property
    def order(self) -> tuple[int, int]:
        """The order key of the change."""
        lsn, ordinal = json.loads(self.value["source"]["sequence"])
        return int(lsn), int(ordinal)


@dataclass
class Kafka:
    """A broker, with names that no other test has."""

    servers: str
    name: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    decode: Decode = json.loads

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.servers, (), 60.0)

    @property
    def control_topic(self) -> str:
        return f"{self.name}-control"

    def open(self, **options: Any) -> KafkaDestination:
        given: dict[str, Any] = {
            "topic_prefix": self.name,
            "control_topic": self.control_topic,
            "transaction_timeout": 60,
        }
        return KafkaDestination(self.servers, **{**given, **self.options, **options})

    def started(self, context: DestinationContext | None = None, **options: Any) -> KafkaDestination:
        destination = self.open(**options)
        destination.startup(context or make_context())
        return destination

    def recorded(self, pipeline: str = "contract") -> Recorded:
        return Control(self.cluster, self.control_topic, pipeline).load()

    def topic(self, schema: TableSchema) -> str:
        return f"{self.name}.{TOPICS.name(*FOLDERS.table(schema).split('/', 1))}"

    def events(self, topic: str) -> list[Event]:
        """Return the committed messages of a topic."""
        return list(read_topic(self.cluster, topic, self.decode))

    def rows(self, schema: TableSchema) -> list[dict[str, Any]] | None:
        """Return the rows that a consumer ends with."""
        recorded = self.recorded()
        known = recorded.tables.get(schema.table_id)
        if known is None or not self.cluster.partitions(self.topic(schema)):
            return None
        reader = TableReader(known, recorded)
        for event in self.events(self.topic(schema)):
            reader.take(event)
        return reader.rows(schema)


def read_topic(cluster: Cluster, topic: str, decode: Decode = json.loads) -> Iterator[Event]:
    """Yield the committed messages of a topic, up to its end."""
    consumer = cluster.consumer("penstock-tests")
    try:
        partitions = [TopicPartition(topic, number, 0) for number in range(cluster.partitions(topic))]
        ends = {each.partition: cluster.end_of(topic, each.partition) for each in partitions}
        consumer.assign(partitions)
        left = set(ends)
        while left:
            for message in consumer.consume(10_000, timeout=0.02):
                error = message.error()
                if error is None:
                    key, value = message.key(), message.value()
                    number = message.partition() or 0
                    yield Event(number, None if key is None else decode(key), None if value is None else decode(value))
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    if (message.offset() or 0) >= ends[message.partition() or 0]:
                        left.discard(message.partition() or 0)
    finally:
        consumer.close()


class AvroDecoder:
    """Reads messages in Avro by the schemas of the registry, with another implementation than that of Penstock."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._schemas: dict[int, Any] = {}

    def __call__(self, content: bytes) -> Any:
        magic, number = struct.unpack(">bI", content[:5])
        assert magic == 0
        if number not in self._schemas:
            with urllib.request.urlopen(f"{self._registry}/schemas/ids/{number}") as answer:
                self._schemas[number] = fastavro.parse_schema(json.loads(json.loads(answer.read())["schema"]))
        stream = io.BytesIO(content[5:])
        value = fastavro.schemaless_reader(stream, self._schemas[number], None)
        assert not stream.read(), "more bytes than the schema describes"
        return value


class TableReader:
    """The rows of one table; columns are identified by their numbers, as the recorded schemas name them."""

    def __init__(self, known: Known, recorded: Recorded) -> None:
        self._schemas = {
            version: schema_from_json(json.loads(value))
            for (table_id, version), value in recorded.schemas.items()
            if table_id == known.table_id
        }
        self._rows: Counter[str] = Counter()
        self._kept: dict[str, dict[int, Any]] = {}
        self._by_key: dict[str, dict[int, Any]] = {}
        self._last: dict[tuple[int, str], tuple[int, int]] = {}
        self._seen: set[tuple[int, int, str]] = set()
        self._tombstone_due: dict[int, Any] = {}
        self.schema: TableSchema | None = None

    def take(self, event: Event) -> None:
        """Follow an event; fail if it comes twice or out of order."""
        if event.value is None:
            assert repr(self._tombstone_due.pop(event.partition)) == repr(event.key)
            return
        assert event.partition not in self._tombstone_due
        operation, order = event.value["op"], event.order
        snapshot = event.value["source"]["snapshot"] == "true"
        if not snapshot:
            assert (*order, operation) not in self._seen, "a change came twice"
            self._seen.add((*order, operation))
            last = self._last.get((event.partition, "change"), order)
            assert last <= order, "changes out of order"
            self._last[event.partition, "change"] = order
        before, after = event.value["before"], event.value["after"]
        self.schema = schema = self._schema_of(before or after, order)
        if operation == "t":
            self._by_key.clear()
            self._rows.clear()
        elif operation == "d":
            self._remove(schema, event.key, before)
            if event.key is not None:
                self._tombstone_due[event.partition] = event.key
        elif event.key is None:
            if operation == "u":
                self._remove(schema, None, before)
            row = self._numbered(schema, after)
            self._kept[repr(row)] = row
            self._rows[repr(row)] += 1
        else:
            self._write(schema, event.key, after, operation)

    def _write(self, schema: TableSchema, key: Any, after: dict[str, Any], operation: str) -> None:
        number = repr(sorted(key.items()))
        old = self._by_key.get(number, self._moved if operation == "c" else {})
        row = self._numbered(schema, after)
        self._by_key[number] = {
            each: old.get(each, value) if value == PLACEHOLDER else value for each, value in row.items()
        }

    def _remove(self, schema: TableSchema, key: Any, before: dict[str, Any]) -> None:
        if key is not None:
            number = repr(sorted(key.items()))
            assert number in self._by_key or self._restructured, "a row is removed that does not exist"
            self._moved = self._by_key.pop(number, {})
            return
        row = repr(self._numbered(schema, before))
        assert self._rows[row] or self._restructured, "a row is removed that does not exist"
        self._rows[row] -= 1 if self._rows[row] else 0

    _moved: dict[int, Any] = {}  # noqa: RUF012  # the row whose key changes, for values that were omitted

    @property
    def _restructured(self) -> bool:
        """True if DDL may have changed rows without a message; the next copy tells."""
        return len({schema.columns for schema in self._schemas.values()}) > 1

    def _numbered(self, schema: TableSchema, row: dict[str, Any]) -> dict[int, Any]:
        assert set(row) == {column.name for column in schema.columns}
        return {column.attnum: row[column.name] for column in schema.columns}

    def _schema_of(self, row: dict[str, Any] | None, order: tuple[int, int]) -> TableSchema:
        """Return the newest schema at an order key that has the columns of a row."""
        at = f"{order[0]:016X}"
        changed = sorted(
            (each for each in self._schemas if not each.startswith("copy") and each[:16] <= at), reverse=True
        )
        for version in (*changed, *(each for each in reversed(self._schemas) if each.startswith("copy"))):
            schema = self._schemas[version]
            if row is None or set(row) == {column.name for column in schema.columns}:
                return schema
        raise AssertionError(f"no schema has the columns {sorted(row or {})}")

    def rows(self, schema: TableSchema) -> list[dict[str, Any]]:
        """Return the rows in the columns of `schema`, as Python values."""
        assert not self._tombstone_due
        kept = [self._kept[row] for row in self._rows.elements()]
        layout = segment_layout(schema)
        return [
            {each.column.name: to_python(row.get(each.column.attnum), each.codec.arrow_type) for each in layout.columns}
            for row in [*self._by_key.values(), *kept]
        ]


class KafkaReadBack:
    """The tables of a pipeline, as a consumer ends with them (`ReadBack`)."""

    def __init__(self, servers: str, control_topic: str, pipeline: str, decode: Decode = json.loads) -> None:
        self._cluster = Cluster(servers, (), 60.0)
        recorded = Control(self._cluster, control_topic, pipeline).load()
        self._readers: dict[str, TableReader] = {}
        for known in recorded.tables.values():
            if not known.is_copied:
                continue
            reader = self._readers[known.source] = TableReader(known, recorded)
            for event in read_topic(self._cluster, known.topic, decode):
                reader.take(event)
            reader.schema = reader.schema or newest_schema(recorded, known)

    def tables(self) -> list[str]:
        """See `ReadBack`."""
        return sorted(self._readers)

    def schema(self, table: str) -> TableSchema:
        """See `ReadBack`."""
        schema = self._readers[table].schema
        assert schema is not None
        return schema

    def read_table(self, table: str) -> pa.Table:
        """See `ReadBack`."""
        schema = self.schema(table)
        rows = self._readers[table].rows(schema)
        columns = segment_layout(schema).columns
        texts = [
            [(each.field_name, row[each.column.name].text) for each in columns if _is_text(row[each.column.name])]
            or None
            for row in rows
        ]
        arrays = {
            each.field_name: pa.array(
                [None if _is_text(row[each.column.name]) else row[each.column.name] for row in rows],
                each.codec.arrow_type,
            )
            for each in columns
        }
        return pa.table({**arrays, UNREPRESENTABLE: pa.array(texts, UNREPRESENTABLE_TYPE)})


def newest_schema(recorded: Recorded, known: Known) -> TableSchema:
    """Return the columns of a table whose topic has no message."""
    found = {version: value for (table_id, version), value in recorded.schemas.items() if table_id == known.table_id}
    return schema_from_json(json.loads(list(found.values())[-1]))


def _is_text(value: Any) -> bool:
    return isinstance(value, Unrepresentable)


def to_python(value: Any, kind: pa.DataType) -> Any:
    """Return a cell as a Python value; the text of a value that its type cannot hold is `Unrepresentable`."""
    if value is None:
        return None
    if pa.types.is_list(kind):
        return (
            [to_python(each, kind.value_type) for each in value] if isinstance(value, list) else Unrepresentable(value)
        )
    if pa.types.is_date(kind):
        return date(1970, 1, 1) + timedelta(value) if isinstance(value, int) else Unrepresentable(value)
    if pa.types.is_time(kind):
        return (_EPOCH + timedelta(microseconds=value)).time() if isinstance(value, int) else Unrepresentable(value)
    if pa.types.is_timestamp(kind) and kind.tz is None:
        return _EPOCH + timedelta(microseconds=value) if isinstance(value, int) else Unrepresentable(value)
    if pa.types.is_timestamp(kind):
        try:
            return datetime.fromisoformat(value).astimezone(UTC)
        except ValueError:
            return Unrepresentable(value)
    if pa.types.is_decimal(kind):
        number = Decimal(value)
        fits = number.is_finite() and -int(number.as_tuple().exponent) <= kind.scale
        return number if fits else Unrepresentable(value)
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return value if isinstance(value, bytes) else b64decode(value)
    if pa.types.is_integer(kind) and isinstance(value, str):
        return Unrepresentable(value)
    return value
