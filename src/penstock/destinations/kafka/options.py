"""The options of the Kafka destination, checked before anything is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from penstock.destinations.kafka.avro_format import AvroFormat, key_schema, value_schema
from penstock.destinations.kafka.client import Cluster
from penstock.destinations.kafka.control import Layout
from penstock.destinations.kafka.json_format import JsonEnvelope, JsonFlat, Source
from penstock.destinations.kafka.messages import Encoder, Format
from penstock.destinations.kafka.registry import SchemaRegistry
from penstock.destinations.naming import Naming
from penstock.destinations.refusals import unusable
from penstock.schema import TableSchema

TOPICS = Naming(allowed=r"[A-Za-z0-9_]([A-Za-z0-9_]|-)*", separator=".", mark="--", max_bytes=180)
"""`schema.table`, with a digest if one of them has a letter that topics cannot have, or a dot."""
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_RESERVED = frozenset({"bootstrap.servers", "transactional.id", "transaction.timeout.ms", "isolation.level"})
"""Settings of the client that the guarantees depend on."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `[destination]` says."""

    bootstrap_servers: str
    topic_prefix: str | None
    topic: str | None
    format: str
    envelope: str
    tombstones: bool
    truncates: bool
    unavailable_value: str
    partitions: int
    replication_factor: int
    topic_config: Mapping[str, str]
    control_topic: str
    transaction_timeout: float
    schema_registry: str | None
    schema_registry_auth_env: str | None
    client: Mapping[str, str] = field(repr=False)
    client_env: Mapping[str, str]
    commit_interval: float

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        if not re.fullmatch(r"[^\s,/]+(,[^\s,/]+)*", self.bootstrap_servers):
            raise unusable("bootstrap_servers must be like broker1:9092,broker2:9092")
        for name, value, known in (
            ("format", self.format, ("json", "avro")),
            ("envelope", self.envelope, ("debezium", "flat")),
        ):
            if value not in known:
                raise unusable(f"unknown {name} {value!r}", hint=f"Use {' or '.join(known)}.")
        if (self.format == "avro") != (self.schema_registry is not None):
            raise unusable('format = "avro" and schema_registry need each other')
        if self.topic is not None and self.topic_prefix is not None:
            raise unusable("topic and topic_prefix exclude each other")
        for name, topic in (("topic", self.topic), ("prefix", self.topic_prefix), ("control", self.control_topic)):
            if topic is not None and not _TOPIC.fullmatch(topic):
                raise unusable(f"{name}: {topic!r} cannot be a topic", hint="Use letters, digits, dots, - and _.")
        if self.partitions < 1:
            raise unusable("partitions must be at least 1")
        for name, number in (
            ("transaction_timeout", self.transaction_timeout),
            ("commit_interval", self.commit_interval),
        ):
            if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
                raise unusable(f"{name} must be a number of seconds above zero")
        for name in (*self.client, *self.client_env):
            if name in _RESERVED:
                raise unusable(f"client: {name} cannot be set", hint="Penstock sets it.")

    @property
    def cluster(self) -> Cluster:
        """How to reach the brokers."""
        settings = {name: str(value) for name, value in self.client.items()}
        settings |= {name: _secret(variable, "client_env") for name, variable in self.client_env.items()}
        return Cluster(self.bootstrap_servers, tuple(settings.items()), self.transaction_timeout)

    @property
    def layout(self) -> Layout:
        """What the values of topics look like."""
        return Layout(self.format if self.envelope == "debezium" else f"{self.format}-flat")

    def topic_of(self, pipeline_id: str, place: str) -> str:
        """Return the topic of a table that has a place; see `penstock.destinations.folders`."""
        if self.topic is not None:
            return self.topic
        return f"{self._name(pipeline_id)}.{TOPICS.name(*place.split('/', 1))}"

    def encoder(self, pipeline_id: str, database: str, topic: str, schema: TableSchema, arrow: pa.Schema) -> Encoder:
        """Return what makes messages of the rows of a table, which have the types of `arrow`."""
        source = Source(self.topic or self._name(pipeline_id), database, self.unavailable_value)
        return Encoder(self._format(source, topic, schema, arrow), self.tombstones)

    def check_registry(self) -> None:
        """Raise if the schema registry cannot be used."""
        if self.schema_registry is not None:
            SchemaRegistry(self.schema_registry, self.schema_registry_auth_env).check()

    def _format(self, source: Source, topic: str, schema: TableSchema, arrow: pa.Schema) -> Format:
        if self.schema_registry is not None:
            registry = SchemaRegistry(self.schema_registry, self.schema_registry_auth_env)
            return self._avro(source, topic, schema, arrow, registry)
        return JsonEnvelope(source) if self.envelope == "debezium" else JsonFlat(source)

    def _avro(
        self, source: Source, topic: str, schema: TableSchema, arrow: pa.Schema, registry: SchemaRegistry
    ) -> AvroFormat:
        flat, table = self.envelope == "flat", str(schema)
        # In a topic of several tables, subjects are named after the records, too.
        name = topic if self.topic is None else f"{topic}.{TOPICS.table(schema)}"
        value_id = registry.register(f"{name}-value", value_schema(schema, name, arrow, flat=flat), table)
        key_id = 0
        if schema.key:
            key_id = registry.register(f"{name}-key", key_schema(schema, name, arrow), table)
        return AvroFormat(source, key_id, value_id, flat)

    def _name(self, pipeline_id: str) -> str:
        return self.topic_prefix or re.sub(r"[^A-Za-z0-9._-]", "_", pipeline_id)


def _secret(variable: str, option: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise unusable(
            f"the environment variable {variable} ({option}) is not set",
            hint="Set it for the process that runs the pipeline.",
        )
    return value
