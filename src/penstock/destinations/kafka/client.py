"""Kafka's clients, and their errors as those of a destination.

Every write is a transaction of a producer with a transactional id of its own. A process that starts initializes all
ids of its pipeline: the broker then aborts what earlier processes left open, and refuses what they still send.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pyarrow as pa
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.cimpl import NewTopic

from penstock.destinations.kafka.messages import Messages
from penstock.destinations.refusals import not_copied, out_of_reach, rejected, unusable
from penstock.errors import PenstockError

logger = logging.getLogger(__name__)
_client_logger = logging.getLogger(f"{__name__}.librdkafka")
# What fails is reported by the request that fails.
_client_logger.setLevel(logging.CRITICAL + 1)

ANY_PARTITION = -1
_ACCESS = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError._AUTHENTICATION,  # the name of a public code
        KafkaError.POLICY_VIOLATION,
    }
)
_FENCED = frozenset({KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED})
_NO_TOPIC = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
    }
)
_PASSING = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._PURGE_QUEUE,
        KafkaError._STATE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    }
)
"""Codes of errors that time or an operator heals, or that a new producer heals."""
_STUCK_SECONDS = 5.0
"""After so long without an acknowledgement, a writer looks whether its topics still exist."""
_GRANTS = (
    "Check bootstrap_servers, client and client_env in [destination]. The user needs create, describe, describe "
    "configs, read and write on the topics, and describe and write on the transactional ids."
)


class Fenced(Exception):
    """Another producer has the same transactional id now, or the transaction took too long."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """How to reach the brokers. Pickles; settings are never printed."""

    servers: str
    settings: tuple[tuple[str, str], ...] = field(repr=False)
    transaction_seconds: float = 900.0
    answer_seconds: float = 30.0
    """How long a request may take in all, with the client's own retries."""

    def producer(self, transactional_id: str, on_failure: Callable[[KafkaError, Message], None]) -> Producer:
        """Return a producer for transactions; it is not initialized."""
        milliseconds = int(self.transaction_seconds * 1000)
        return Producer(
            {
                "linger.ms": 5,
                "batch.size": 1_000_000,
                "batch.num.messages": 100_000,
                "compression.type": "lz4",
                # As the clients in Java do, so that other producers of a topic find the same partitions.
                "partitioner": "murmur2_random",
                "queue.buffering.max.messages": 500_000,
                "queue.buffering.max.kbytes": 512 << 10,
                # The broker decides what is too large.
                "message.max.bytes": 1_000_000_000,
                **self.common(),
                "transactional.id": transactional_id,
                "transaction.timeout.ms": milliseconds,
                "message.timeout.ms": milliseconds,
                "allow.auto.create.topics": "false",
                "delivery.report.only.error": True,
                "on_delivery": on_failure,
            }
        )

    def consumer(self, group: str) -> Consumer:
        """Return a consumer that sees committed records only."""
        return Consumer(
            {
                **self.common(),
                "group.id": group,
                "isolation.level": "read_committed",
                "enable.auto.commit": "false",
                "enable.partition.eof": "true",
                # At the end of a topic, the broker answers at once.
                "fetch.wait.max.ms": 10,
                "auto.offset.reset": "earliest",
            }
        )

    def admin(self) -> AdminClient:
        """Return a client for topics, which this process keeps. A forked process must not use that of its parent."""
        return _admin(self, os.getpid())

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the ids of topics that exist; a topic that is created again has another one."""
        names = list(topics)
        if not names:
            return {}
        found: dict[str, str] = {}
        with translated(self):
            for name, future in self.admin().describe_topics(TopicCollection(names), request_timeout=30).items():
                try:
                    found[name] = str(future.result(self.answer_seconds).topic_id)
                except KafkaException as error:
                    if code_of(error) not in _NO_TOPIC:
                        raise
        return found

    def partitions(self, topic: str) -> int:
        """Return how many partitions a topic has; 0 if it does not exist."""
        with translated(self):
            found = self.admin().list_topics(topic, timeout=self.answer_seconds).topics[topic]
            if found.error is not None:
                if found.error.code() in _NO_TOPIC:
                    return 0
                raise KafkaException(found.error)
            return len(found.partitions)

    def end_of(self, topic: str, partition: int = 0) -> int:
        """Return the offset after the last record of a partition, whether it is committed or not."""
        asked, latest = TopicPartition(topic, partition), OffsetSpec.latest()
        assert latest is not None
        level = IsolationLevel.READ_UNCOMMITTED
        with translated(self):
            answers = self.admin().list_offsets({asked: latest}, isolation_level=level, request_timeout=30)
            return int(answers[asked].result(self.answer_seconds).offset)

    def holds_records(self, topic: str) -> bool:
        """Return True if something was written to a topic, even if it was not committed."""
        return any(self.end_of(topic, partition) for partition in range(self.partitions(topic)))

    def create_topic(self, topic: str, partitions: int, replication: int, config: Mapping[str, str]) -> None:
        """Create a topic unless it exists, and wait until producers can use it."""
        with translated(self):
            new = NewTopic(topic, partitions, replication, config=dict(config))
            try:
                self.admin().create_topics([new], request_timeout=30)[topic].result(self.answer_seconds)
            except KafkaException as error:
                if code_of(error) != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise
        deadline = time.monotonic() + self.answer_seconds
        while not self.partitions(topic):
            if time.monotonic() > deadline:
                raise out_of_reach(self.servers, f"topic {topic} was created and is not there")
            time.sleep(0.05)

    def common(self) -> dict[str, Any]:
        """Return the settings of all clients."""
        return {
            **dict(self.settings),
            "bootstrap.servers": self.servers,
            "client.id": "penstock",
            "logger": _client_logger,
            "error_cb": _ignore,
        }


@lru_cache(maxsize=8)
def _admin(cluster: Cluster, _: int) -> AdminClient:
    return AdminClient(cluster.common())


class Writer:
    """One transactional id. It writes one transaction at a time; callers hold `lock`."""

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self.lock = threading.Lock()
        self.id = transactional_id
        self._cluster = cluster
        self._producer: Producer | None = None
        self._failed: KafkaError | None = None
        self._topics: set[str] = set()

    def initialize(self) -> None:
        """Abort what an earlier producer of this id left open, and refuse what it still sends."""
        self.discard()
        producer = self._cluster.producer(self.id, self._on_failure)
        with translated(self._cluster):
            producer.init_transactions(self._cluster.answer_seconds)
        self._producer = producer

    @property
    def is_ready(self) -> bool:
        """True if a transaction can begin; otherwise the outcome of the last one may be unknown."""
        return self._producer is not None

    def discard(self) -> None:
        """Forget the producer; what it has not committed is aborted by the next one."""
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()

    @contextmanager
    def transaction(self, table: str | None = None) -> Iterator[Writer]:
        """Commit what the block sends, or nothing. After an error of the commit the outcome is unknown.

        `table` is the one that all of it concerns.
        """
        producer = self._producer
        if producer is None:
            raise RuntimeError("the producer was not initialized")
        self._failed = None
        self._topics.clear()
        with translated(self._cluster, table):
            try:
                producer.begin_transaction()
                yield self
                self._commit(producer)
            except KafkaException as error:
                self._abandon(producer, error)
                if code_of(error) in _FENCED:
                    raise Fenced(self.id) from None
                # The reason is that of the first message that failed.
                raise (error if self._failed is None else KafkaException(self._failed)) from None
            except BaseException:
                self._abandon(producer, None)
                raise

    def send(self, topic: str, messages: Messages, partition: int = ANY_PARTITION) -> None:
        """Send messages in order, as part of the transaction."""
        producer = self._producer
        if producer is None:
            raise RuntimeError("the producer was not initialized")
        self._topics.add(topic)
        keys, values = _objects(messages.keys), _objects(messages.values)
        produce = producer.produce
        # The only loop over messages: the client takes them one by one. They are finished bytes.
        for key, value in zip(keys, values, strict=True):
            try:
                produce(topic, value, key, partition)
            except BufferError:
                self._wait_for_room(producer, topic, value, key, partition)
        producer.poll(0)
        if self._failed is not None:
            raise KafkaException(self._failed)

    def _wait_for_room(
        self, producer: Producer, topic: str, value: bytes | None, key: bytes | None, partition: int
    ) -> None:
        """Send a message when the queue of the client has room; a broker that is away keeps it full."""
        deadline = time.monotonic() + self._cluster.answer_seconds
        while True:
            producer.poll(0.05)
            if self._failed is not None:
                raise KafkaException(self._failed)
            if time.monotonic() > deadline:
                raise out_of_reach(self._cluster.servers, "messages are not accepted")
            try:
                return producer.produce(topic, value, key, partition)
            except BufferError:
                continue

    def _commit(self, producer: Producer) -> None:
        # The commit itself flushes, but the flush of a large transaction may take longer than an answer.
        waiting, progress, look = -1, time.monotonic(), 0.0
        while left := _flush(producer):
            now = time.monotonic()
            if left != waiting:
                waiting, progress, look = left, now, now + _STUCK_SECONDS
            if self._failed is not None:
                raise KafkaException(self._failed)
            if now > progress + self._cluster.answer_seconds:
                raise out_of_reach(self._cluster.servers, "messages are not acknowledged")
            if now > look:
                self._require_topics()
                look = now + _STUCK_SECONDS
        deadline = time.monotonic() + self._cluster.answer_seconds
        while True:
            try:
                return producer.commit_transaction(self._cluster.answer_seconds)
            except KafkaException as error:
                found = error.args[0]
                if not found.retriable() or time.monotonic() > deadline:
                    raise

    def _require_topics(self) -> None:
        """Raise if a topic of the transaction was deleted: its messages would wait until they expire."""
        for topic in self._topics:
            if not self._cluster.partitions(topic):
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))

    def _abandon(self, producer: Producer, error: KafkaException | None) -> None:
        """Abort, or leave it to the next producer of this id."""
        found = None if error is None else error.args[0]
        # After an error of the commit that may be retried, nobody knows whether it has happened: only a new producer
        # of the same id makes that certain.
        if found is None or found.txn_requires_abort() or found.code() in _NO_TOPIC or self._failed is not None:
            try:
                producer.purge(in_flight=False, blocking=False)
                producer.abort_transaction(self._cluster.answer_seconds)
                return
            except KafkaException as refusal:
                logger.info("a transaction could not be aborted id=%s code=%s", self.id, refusal.args[0].name())
        self.discard()

    def _on_failure(self, error: KafkaError | None, _: Message) -> None:
        if error is not None and self._failed is None and error.code() not in _PURGED:
            self._failed = error


def _flush(producer: Producer) -> int:
    """Wait for a while; return how many messages are not acknowledged."""
    try:
        return producer.flush(1.0)
    except SystemError:
        # The client fails to say that the producer was fenced; the commit says it.
        return 0


_PURGED = frozenset({KafkaError._PURGE_INFLIGHT, KafkaError._PURGE_QUEUE})


def code_of(error: KafkaException) -> int:
    """Return the code of an error."""
    return int(error.args[0].code())


@contextmanager
def translated(cluster: Cluster, table: str | None = None) -> Iterator[None]:
    """Raise errors of Kafka as those of a destination; `table` is the one that they concern."""
    try:
        yield
    except KafkaException as error:
        raise _error(cluster, error, table) from None


def _error(cluster: Cluster, error: KafkaException, table: str | None) -> PenstockError:
    """Return the error of a destination; only codes are quoted, because texts may contain values."""
    found: KafkaError = error.args[0]
    code, name = found.code(), found.name()
    what = table or cluster.servers
    if code in _ACCESS:
        return unusable(f"{cluster.servers} refuses access ({name})", hint=_GRANTS)
    if code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE, KafkaError.RECORD_LIST_TOO_LARGE):
        return rejected(
            what,
            f"a message is larger than the topic allows ({name})",
            hint="Raise max.message.bytes of the topic, then run: penstock rollback.",
        )
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return unusable(
            f"{cluster.servers} does not allow transactions of {cluster.transaction_seconds:g} seconds",
            hint="Lower transaction_timeout, or raise transaction.max.timeout.ms of the broker.",
        )
    if code in _NO_TOPIC:
        return not_copied(what)
    if code == KafkaError.INVALID_RECORD:
        return rejected(
            what,
            "the broker refused a message: a compacted topic takes none without a key",
            hint="Set cleanup.policy of the topic to delete, or truncates = false; then run: penstock rollback.",
        )
    if code in _PASSING or found.retriable():
        return out_of_reach(cluster.servers, name)
    return rejected(what, f"{cluster.servers} refused a request ({name})", hint="The broker's log has the reason.")


def _objects(array: pa.Array) -> list[bytes | None]:
    return array.to_numpy(zero_copy_only=False).tolist()


def _ignore(_: object) -> None:
    """Do nothing: errors of connections are those of the request that needs one."""
