"""The control topic: what a pipeline has recorded of each table, written in the transactions that write the messages.

A compacted topic of one partition. Its keys are JSON lists:

| key | value |
|---|---|
| `["writer", pipeline]` | the number of the lease whose holder writes |
| `["table", pipeline, table id]` | position, attempt and topic of a table |
| `["topic", topic, pipeline]` | the pipeline writes the topic; the first one owns it |
| `["schema", pipeline, table id, version]` | the columns of a table from a change on, for readers that follow renames |
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.destinations.kafka.client import Cluster, translated
from penstock.destinations.kafka.messages import Messages
from penstock.destinations.refusals import out_of_reach, unusable
from penstock.lsn import Lsn
from penstock.schema import TableSchema
from penstock.schema.table import schema_to_json

FORMAT = 1
SETTINGS: Mapping[str, str] = {
    "cleanup.policy": "compact",
    # Compaction leaves the newest segment alone, so that it has to be small.
    "segment.bytes": str(16 << 20),
    "min.cleanable.dirty.ratio": "0.1",
}
_BYTES = pa.large_binary()


class Layout(StrEnum):
    """What the values of a topic look like."""

    JSON = "json"
    JSON_FLAT = "json-flat"
    AVRO = "avro"
    AVRO_FLAT = "avro-flat"


@dataclass(frozen=True, slots=True)
class Known:
    """What is recorded of a table."""

    pipeline: str
    table_id: int
    source: str = ""
    """Namespace and name."""
    attempt: str = ""
    next_place: str = ""
    next_topic: str = ""
    epoch: int = 0
    place: str = ""
    """The folder that its topic is named after; see `penstock.destinations.folders`."""
    topic: str = ""
    topic_id: str = ""
    copied: str = ""
    """The attempt that was completed."""
    lineage: str = ""
    position: Lsn | None = None
    mode: Layout | None = None

    @property
    def is_copied(self) -> bool:
        """True if the newest attempt is complete."""
        return bool(self.copied) and self.copied == self.attempt

    @property
    def key(self) -> bytes:
        """The key of its record."""
        return _key("table", self.pipeline, self.table_id)

    def value(self) -> bytes:
        """Return the value of its record."""
        position = None if self.position is None else str(self.position)
        return json.dumps({"format": FORMAT, **asdict(self), "position": position}).encode()


@dataclass(slots=True)
class Recorded:
    """The contents of the control topic, as one pipeline needs them."""

    epoch: int = -1
    tables: dict[int, Known] = field(default_factory=dict[int, Known])
    claims: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    """By topic: the pipelines that claim it, the first one first, and the id that the topic had."""
    schemas: dict[tuple[int, str], bytes] = field(default_factory=dict[tuple[int, str], bytes])
    """By table and version."""

    def owner(self, topic: str, topic_id: str) -> str | None:
        """Return the pipeline that owns a topic. Claims of a topic that was deleted are void."""
        claims = self.claims.get(topic, {}).items()
        return next((pipeline for pipeline, claimed in claims if claimed == topic_id), None)


@dataclass(frozen=True, slots=True)
class Control:
    """The records of one pipeline."""

    cluster: Cluster
    topic: str
    pipeline: str

    def create(self, replication: int) -> None:
        """Create the topic unless it exists."""
        found = self.cluster.partitions(self.topic)
        if not found:
            self.cluster.create_topic(self.topic, 1, replication, SETTINGS)
        elif found > 1:
            raise unusable(
                f"the control topic {self.topic} has {found} partitions; it must have one",
                hint="Delete it if nothing else uses it, or set another control_topic.",
            )

    def load(self) -> Recorded:
        """Read the topic to its end.

        A transaction of another pipeline may be open there. What follows it is invisible until it ends.
        """
        recorded = Recorded()
        with translated(self.cluster):
            consumer = self.cluster.consumer(f"penstock-{self.pipeline}")
            try:
                partition = TopicPartition(self.topic, 0, 0)
                end = self.cluster.end_of(self.topic)
                consumer.assign([partition])
                deadline = time.monotonic() + self.cluster.transaction_seconds
                while True:
                    # Cold: a few records for each table of the pipelines.
                    for message in consumer.consume(5000, timeout=0.02):
                        error = message.error()
                        if error is None:
                            self._take(recorded, message.key() or b"", message.value())
                        elif error.code() != KafkaError._PARTITION_EOF:
                            if not error.retriable():
                                raise KafkaException(error)
                        elif (message.offset() or 0) >= end:
                            return recorded
                    if time.monotonic() > deadline:
                        raise out_of_reach(self.cluster.servers, f"a transaction is open in {self.topic}")
            finally:
                consumer.close()

    def records(self, known: Iterable[Known]) -> Messages:
        """Return the records of tables."""
        return _messages([(each.key, each.value()) for each in known])

    def writer(self, epoch: int) -> Messages:
        """Return the record of the lease."""
        return _messages([(_key("writer", self.pipeline), json.dumps({"epoch": epoch}).encode())])

    def claim(self, topic: str, topic_id: str | None) -> Messages:
        """Return the record that claims a topic, or that gives it up."""
        value = None if topic_id is None else json.dumps({"topic_id": topic_id}).encode()
        return _messages([(_key("topic", topic, self.pipeline), value)])

    def schema(self, schema: TableSchema, version: str) -> Messages:
        """Return the record of a table's columns."""
        key = _key("schema", self.pipeline, schema.table_id, version)
        return _messages([(key, json.dumps(schema_to_json(schema)).encode())])

    def _take(self, recorded: Recorded, key: bytes, value: bytes | None) -> None:
        kind, *rest = json.loads(key)
        if kind == "topic":
            topic, pipeline = rest
            claims = recorded.claims.setdefault(topic, {})
            claims.pop(pipeline, None)
            if value is not None:
                claims[pipeline] = json.loads(value)["topic_id"]
        elif rest[0] != self.pipeline:
            return
        elif kind == "writer" and value is not None:
            recorded.epoch = int(json.loads(value)["epoch"])
        elif kind == "table":
            recorded.tables.pop(int(rest[1]), None)
            if value is not None:
                recorded.tables[int(rest[1])] = _known(json.loads(value))
        elif kind == "schema" and value is not None:
            recorded.schemas[int(rest[1]), rest[2]] = value


def _known(record: dict[str, Any]) -> Known:
    if record.pop("format") != FORMAT:
        raise unusable("the control topic was written by a newer Penstock", hint="Install that version again.")
    known = Known(**record)
    position = record["position"]
    return replace(
        known,
        position=None if position is None else Lsn.parse(position),
        mode=None if known.mode is None else Layout(known.mode),
    )


def _messages(pairs: list[tuple[bytes, bytes | None]]) -> Messages:
    return Messages(pa.array([each[0] for each in pairs], _BYTES), pa.array([each[1] for each in pairs], _BYTES))


def _key(*parts: str | int) -> bytes:
    return json.dumps(list(parts), ensure_ascii=False).encode()
