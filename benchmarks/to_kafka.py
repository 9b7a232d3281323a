"""Compare sending changes to Kafka with `pg_recvlogical`, on one machine.

    python benchmarks/to_kafka.py [--changes N] [--rows N] [--rounds 3] [--envelope flat]

A broker on the same machine receives the messages of the workload `mixed`. docs/reference/benchmarks.md says what is
timed. Afterwards the records of the topics are counted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draining import (
    RECVLOGICAL,
    SERVER_SETTINGS,
    create_slot,
    drain_by_recvlogical,
    drop_slot,
    run_load,
    wait_for_start,
)
from harness import BenchmarkFailed, load_average, median, print_result, say
from processes import TreeWatch
from stages import open_stage
from to_postgres import all_ready, failed, wait_until
from workloads import PUBLICATION, prepare_mixed_into

from penstock.coordinator import Coordinator
from penstock.destinations.kafka.client import Cluster
from penstock.destinations.registry import create_destination
from penstock.lsn import reaches
from penstock.output import RunningOutput
from penstock.source.connections import SourceSettings
from penstock.spool import SpoolSettings
from penstock.state import open_store
from penstock.tables import TablesOutput, TablesSettings
from penstock.testing.kafka import KafkaServer
from penstock.workers.process_tasks import ProcessTasks

PIPELINE = "pipeline"


def main() -> None:
    arguments = _parse_arguments()
    with ExitStack() as stack:
        stage = stack.enter_context(open_stage(None, SERVER_SETTINGS))
        broker = stack.enter_context(KafkaServer(java_options=("-Xms1g", "-Xmx1g")))
        database = stage.server.create_database()
        source = SourceSettings(stage.server.dsn(database))
        readers = [each for _ in range(arguments.rounds) for each in (RECVLOGICAL, PIPELINE)]
        rates: dict[str, list[float]] = {RECVLOGICAL: [], PIPELINE: []}
        processor: list[float] = []
        with stage.server.connect(database) as connection:
            prepare_mixed_into(connection, arguments.changes, rows=arguments.rows)
            connection.execute(f"create publication {PUBLICATION} for all tables".encode())
            connection.execute("vacuum (freeze, analyze)")
            tables = len(connection.execute("select from pg_catalog.pg_publication_tables").fetchall())
            for number, reader in enumerate(readers):
                if reader == RECVLOGICAL:
                    create_slot(connection, number)
                    continue
                began = time.monotonic()
                with _pipeline(source, stage.folder, broker, number, arguments.envelope) as pipeline:
                    wait_until(lambda running=pipeline: all_ready(running, tables), "the copy")
                say(f"copied {arguments.rows:,} rows in {time.monotonic() - began:.1f} s")
            connection.execute("checkpoint")
            before = {number: _count(broker, number) for number, reader in enumerate(readers) if reader == PIPELINE}
            load = run_load(connection, arguments.changes)
            for number, reader in enumerate(readers):
                slot = f"bench_{number}"
                if reader == RECVLOGICAL:
                    taken = drain_by_recvlogical(stage.server, connection, database, slot, load.end).seconds
                else:
                    with _pipeline(source, stage.folder, broker, number, arguments.envelope) as pipeline:
                        with TreeWatch(os.getpid()) as watch:
                            started = wait_for_start(connection, slot, lambda: True)
                            wait_until(
                                lambda running=pipeline: (
                                    failed(running) or reaches(running.status.acknowledged, load.end)
                                ),
                                "the load's end",
                            )
                            taken = time.time() - started.at
                        processor.append(watch.cpu_seconds)
                    sent = _count(broker, number) - before[number]
                    if sent < load.changes:
                        raise BenchmarkFailed(f"{sent:,} messages of {load.changes:,} changes")
                drop_slot(connection, slot)
                rates[reader].append(load.changes / taken)
                say(
                    f"{reader} {load.changes / taken:,.0f} changes/s in {taken:.2f} s, "
                    f"load average {load_average():.1f}"
                )
    found = {reader: median(each) for reader, each in rates.items()}
    print_result(
        {
            "mixed": {
                "ratio": round(found[PIPELINE] / found[RECVLOGICAL], 3),
                "per_second": round(found[PIPELINE]),
                "cpu_s_per_million": round(median(processor) * 1e6 / load.changes, 3),
            }
        }
    )


@contextmanager
def _pipeline(
    source: SourceSettings, folder: Path, broker: KafkaServer, number: int, envelope: str
) -> Iterator[RunningOutput]:
    name = f"bench_{number}"
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    settings = TablesSettings(
        id=name,
        source=source,
        publication=PUBLICATION,
        slot=name,
        spool=SpoolSettings(own / "spool"),
        manage_publication=False,
    )
    options: dict[str, Any] = {"bootstrap_servers": broker.bootstrap_servers, "envelope": envelope}
    with (
        open_store(f"sqlite:///{own / 'state.db'}", name) as store,
        Coordinator([TablesOutput(settings, store, create_destination("kafka", options), ProcessTasks())]) as running,
    ):
        [pipeline] = running
        yield pipeline


def _count(broker: KafkaServer, number: int) -> int:
    """Return how many records the topics of a pipeline have, with the markers of transactions."""
    cluster = Cluster(broker.bootstrap_servers, ())
    topics = [each for each in cluster.admin().list_topics().topics if each.startswith(f"bench_{number}.")]
    return sum(cluster.end_of(topic) for topic in topics)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare sending changes to Kafka with pg_recvlogical.")
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=500_000, help="initial rows of the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--envelope", choices=["debezium", "flat"], default="debezium")
    return parser.parse_args()


if __name__ == "__main__":
    main()
