"""A real Kafka broker for tests, demos and benchmarks, started as a process in a temporary folder.

    with KafkaServer() as server:
        print(server.bootstrap_servers)

`make kafka` downloads the broker into the environment; it needs Java 17. One node is broker and controller, listens on
a free port of 127.0.0.1, and takes 0.5 GB of memory. It can be stopped, killed and started again with its data, and
ends with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from penstock.errors import ConfigError, ServerUnavailable
from penstock.testing.server import OwnServer, free_port, java_environment

HOME_VARIABLE = "PENSTOCK_KAFKA_HOME"
"""The folder that has the broker's jars in `libs`; by default `kafka` in the interpreter's environment."""
START_SECONDS = 240.0
DEFAULT_SETTINGS: Mapping[str, object] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": 4,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "group.initial.rebalance.delay.ms": 0,
    # As on a production cluster: a topic that nobody created is a mistake.
    "auto.create.topics.enable": "false",
}
_JAVA_OPTIONS = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_LOG_CONFIG = """\
<Configuration><Appenders><Console name="out"><PatternLayout pattern="%d %p %m (%c)%n"/></Console></Appenders>
<Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers></Configuration>
"""


def find_kafka() -> Path | None:
    """Return the folder with the broker's jars, or None."""
    home = Path(os.environ.get(HOME_VARIABLE) or Path(sys.prefix) / "kafka")
    return home if next((home / "libs").glob("kafka_*.jar"), None) else None


def why_not() -> str | None:
    """Return what is missing to run a broker here, with the remedy; None if nothing is."""
    if find_kafka() is None:
        return "Kafka is not installed: make kafka"
    return None if shutil.which("java") else "Kafka needs Java 17"


class KafkaServer(OwnServer):
    """A broker in a temporary folder; `settings` go into its `server.properties`. Port and data survive restarts."""

    def __init__(
        self, *, settings: Mapping[str, object] | None = None, java_options: Sequence[str] = _JAVA_OPTIONS
    ) -> None:
        home, java = find_kafka(), shutil.which("java")
        if home is None or java is None:
            raise ConfigError(why_not() or "", hint="make kafka")
        super().__init__("penstock-kafka-", pid_file="pid", end_signal="KILL")
        try:
            self._java = [java, *java_options, f"-Dlog4j2.configurationFile={self.folder}/log4j2.xml"]
            self._java += ["-cp", f"{self._reachable(home, 'home')}/libs/*"]
            self._settings = dict(DEFAULT_SETTINGS) | dict(settings or {})
            self._settled = False
            self._format()
        except BaseException:
            self.close()
            raise

    @property
    def bootstrap_servers(self) -> str:
        """What clients connect to."""
        return f"127.0.0.1:{self.port}"

    def start(self, *, timeout: float = START_SECONDS) -> Self:
        """Start it and wait until a transaction can be committed, which is later than the first answer."""
        self._start_on_a_free_port(
            self.launch,
            lambda: commits_a_transaction(self.bootstrap_servers),
            timeout=timeout,
            settled=self._settled,
        )
        self._settled = True
        return self

    def launch(self) -> None:
        """Start it without waiting."""
        if not self._settled:
            self._write_properties()
        self._launch([*self._java, "kafka.Kafka", str(self.folder / "server.properties")], java_environment())

    def _write_properties(self) -> Path:
        controller = free_port()
        settings = {
            **self._settings,
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "log.dirs": str(self.folder / "data"),
        }
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        self._give(properties)
        return properties

    def _format(self) -> None:
        (self.folder / "data").mkdir()
        (self.folder / "log4j2.xml").write_text(_LOG_CONFIG)
        for path in (self.folder / "data", self.folder / "log4j2.xml"):
            self._give(path)
        properties = self._write_properties()
        cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = ["kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)]
        if self._spawn([*self._java, *command], java_environment()).wait(START_SECONDS):
            raise ServerUnavailable(f"Kafka cannot format its folder:\n{self.log_tail()}", hint="")


def commits_a_transaction(servers: str) -> bool:
    """Return True if a broker commits a transaction."""
    from confluent_kafka import KafkaException, Producer

    # Another id each time: a fenced one would wait for the transaction that it fences.
    settings = {"bootstrap.servers": servers, "transactional.id": f"probe-{uuid.uuid4()}", "log_level": 0}
    producer = Producer(settings | {"error_cb": _ignore})
    try:
        producer.init_transactions(10)
    except KafkaException:
        return False
    return True


def _ignore(_: object) -> None:
    """Say nothing: a broker that starts refuses connections for a while."""
