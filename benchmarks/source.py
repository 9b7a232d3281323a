"""Compare `spark.read.format("penstock")` with Spark's own JDBC reader, and `spark.readStream` with `pg_recvlogical`.

    python benchmarks/source.py [--rows 2000000] [--changes 1000000] [--rounds 3] [--server 18] [--only read|stream]
                                [--session own|pipeline]

All ways read a table of ten columns and count the values of each. The JDBC reader runs as it comes, with one
connection, and partitioned by the key, with a connection per core. Then amounts are moved between two rows while each
way adds them up: only a consistent read always finds the same sum.

Streams read the changes of a table from a slot into Spark's `noop` sink, and `pg_recvlogical` into /dev/null.

The session is one of a user's own, as the guides create it: Spark's settings, and Penstock's daemon for Python workers.
The session of `penstock run` has one compiler, which makes all of Spark's own row processing slower, also that of JDBC.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from draining import RECVLOGICAL, Load, create_slot, drain_by_recvlogical, drop_slot, run_load, wait_for_start
from harness import BenchmarkFailed, format_table, load_average, median, print_result, say, spread, take_turns
from stages import CORES, Stage, open_stage
from workloads import PUBLICATION, WORKLOADS, create_orders

import penstock
from penstock.spark.java import find_java
from penstock.spark.session import PYTHON_DAEMON, SparkSettings, build_session
from penstock.testing.postgres import PostgresServer

DRIVER = "org.postgresql:postgresql:42.7.8"
TABLE = "orders"
OURS, DEFAULT, PARTITIONED = "penstock", "JDBC", "JDBC, partitioned"
STREAM = "readStream"
OWN, PIPELINE = "own", "pipeline"
BATCH_ROWS = 200_000
"""Of a stream: Spark reads a batch while capture reads the next one."""
SERVER_SETTINGS: Mapping[str, str] = {
    "shared_buffers": "1GB",
    "max_wal_size": "64GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
    "max_replication_slots": "100",
}
CONSISTENT_READS = 5


def main() -> None:
    arguments = _parse_arguments()
    result: dict[str, Any] = {}
    with open_stage(arguments.server, SERVER_SETTINGS) as stage, _session(arguments.session) as session:
        if arguments.only != "stream":
            result |= _read(stage, session, arguments)
        if arguments.only != "read":
            result |= _stream(stage, session, arguments)
    print_result(result | {"session": arguments.session, "load": load_average()})


def _stream(stage: Stage, session: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Drain the same changes in turns by both readers."""
    workload = WORKLOADS["mixed"]
    changes = arguments.changes // workload.transaction_rows * workload.transaction_rows
    turns = list(take_turns(RECVLOGICAL, STREAM, arguments.rounds + 1))
    seconds: dict[str, list[float]] = {RECVLOGICAL: [], STREAM: []}
    database = stage.server.create_database()
    with stage.server.connect(database) as connection:
        workload.prepare(connection, changes)
        connection.execute(f"create publication {PUBLICATION} for all tables".encode())
        slots = [create_slot(connection, number)[0] for number in range(len(turns))]
        load = run_load(connection, changes)
        for number, (slot, reader) in enumerate(zip(slots, turns, strict=True)):
            if reader == RECVLOGICAL:
                took = drain_by_recvlogical(stage.server, connection, database, slot, load.end).seconds
            else:
                took = _drain_by_stream(session, stage, connection, database, slot, load)
            drop_slot(connection, slot)
            if number > 1:  # the first of each warms up
                seconds[reader].append(took)
                say(f"{reader}: {load.changes / took:,.0f} changes/s in {took:.2f} s")
    rates = {reader: load.changes / median(each) for reader, each in seconds.items()}
    rows = [[name, f"{rates[name]:,.0f}", f"{spread(each):.2f}"] for name, each in seconds.items()]
    print(format_table(["reader", "changes/s", "spread of seconds"], rows))
    return {"changes_per_second": rates[STREAM], "ratio_recvlogical": rates[STREAM] / rates[RECVLOGICAL]}


def _drain_by_stream(session: Any, stage: Stage, connection: Any, database: str, slot: str, load: Load) -> float:
    """Return the seconds from the start of replication until Spark has committed the last change."""
    with tempfile.TemporaryDirectory(dir=stage.folder) as folder:
        frame = session.readStream.format("penstock").options(
            url=stage.server.dsn(database),
            table=TABLE,
            slot=slot,
            publication=PUBLICATION,
            spoolLocation=f"{folder}/spool",
            maxRowsPerBatch=str(BATCH_ROWS),
        )
        writer = frame.load().writeStream.format("noop").option("checkpointLocation", f"{folder}/checkpoint")
        query = writer.start()
        try:
            started = wait_for_start(connection, slot, lambda: query.isActive)
            while sum({each["batchId"]: each["numInputRows"] for each in query.recentProgress}.values()) < load.changes:
                if not query.isActive:
                    raise BenchmarkFailed(f"the query ended: {query.exception()}")
                time.sleep(0.02)
            return time.time() - started.at
        finally:
            query.stop()


def _read(stage: Stage, session: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Read a table in all ways, at rest and while it changes."""
    database = stage.server.create_database()
    say(f"making a table of {arguments.rows:,} rows")
    with stage.server.connect(database) as connection:
        create_orders(connection, TABLE, arguments.rows)
        connection.execute("vacuum (freeze, analyze)")
        connection.execute("checkpoint")
    ways = _ways(session, stage.server, database, arguments.rows)
    seconds = _measure(ways, arguments.rows, arguments.rounds)
    wrong = _disturb(ways, stage.server, database, arguments.rows)
    ours = median(seconds[OURS])
    rows = [
        [
            *(name, f"{median(each):.2f}", f"{spread(each):.2f}", f"{arguments.rows / median(each):,.0f}"),
            *(f"{median(each) / ours:.2f}", f"{wrong[name]} of {CONSISTENT_READS}"),
        ]
        for name, each in seconds.items()
    ]
    print(format_table(["way", "seconds", "spread", "rows/s", "penstock is faster by", "wrong sums"], rows))
    return {
        "rows_per_second": arguments.rows / ours,
        "ratio_default": median(seconds[DEFAULT]) / ours,
        "ratio_partitioned": median(seconds[PARTITIONED]) / ours,
        "wrong_sums": wrong,
    }


@contextmanager
def _session(kind: str) -> Iterator[Any]:
    """A session with the JDBC driver, which Spark fetches into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-jars-") as folder:
        options = {"spark.jars.packages": DRIVER, "spark.jars.ivy": folder}
        session = _own_session(options) if kind == OWN else _pipeline_session(options)
        try:
            penstock.register(session)
            yield session
        finally:
            session.stop()


def _own_session(options: Mapping[str, str]) -> Any:
    """A session as in the guides."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("JAVA_HOME", str(find_java().home))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(f"local[{CORES}]").appName("bench-source")
    own = {"spark.ui.showConsoleProgress": "false", "spark.python.daemon.module": PYTHON_DAEMON}
    for name, value in (own | dict(options)).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _pipeline_session(options: Mapping[str, str]) -> Any:
    return build_session(SparkSettings(master=f"local[{CORES}]", app_name="bench-source", options=options))


def _ways(session: Any, server: PostgresServer, database: str, rows: int) -> dict[str, Callable[[], Any]]:
    """Make a data frame of the table in each way."""
    url = f"jdbc:postgresql://127.0.0.1:{server.port}/{database}"
    jdbc = {"url": url, "dbtable": TABLE, "user": server.user, "password": server.password}
    jdbc["driver"] = "org.postgresql.Driver"
    parts = {"partitionColumn": "id", "lowerBound": "1", "upperBound": str(rows), "numPartitions": str(CORES)}
    return {
        OURS: lambda: session.read.format("penstock").options(url=server.dsn(database), table=TABLE).load(),
        DEFAULT: lambda: session.read.format("jdbc").options(**jdbc).load(),
        PARTITIONED: lambda: session.read.format("jdbc").options(**jdbc, **parts).load(),
    }


def _measure(ways: Mapping[str, Callable[[], Any]], rows: int, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            began = time.monotonic()
            frame = ways[name]()
            counts = frame.selectExpr("count(*)", *(f"count(`{column}`)" for column in frame.columns)).collect()[0]
            took = time.monotonic() - began
            if counts[0] != rows:
                raise BenchmarkFailed(f"{name} read {counts[0]} rows of {rows}")
            if number >= 0:  # the first round warms up
                seconds[name].append(took)
                say(f"{name}: {took:.2f} s")
    return seconds


def _disturb(ways: Mapping[str, Callable[[], Any]], server: PostgresServer, database: str, rows: int) -> dict[str, int]:
    """Return how often each way finds another sum while amounts move between two rows, which never changes the sum."""
    ended = threading.Event()

    def move() -> None:
        with server.connect(database) as connection:
            while not ended.is_set():
                connection.execute(
                    f"update {TABLE} set customer_id = customer_id + case id when 1 then 1 else -1 end"
                    f" where id in (1, {rows})".encode()
                )

    with server.connect(database) as connection:
        [(expected,)] = connection.execute(f"select sum(customer_id) from {TABLE}".encode()).fetchall()
    thread = threading.Thread(target=move)
    thread.start()
    try:
        return {
            name: sum(
                frame().selectExpr("sum(customer_id)").collect()[0][0] != expected for _ in range(CONSISTENT_READS)
            )
            for name, frame in ways.items()
        }
    finally:
        ended.set()
        thread.join()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare reading a table with Spark's JDBC reader.")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--changes", type=int, default=1_000_000, help="that streams read")
    parser.add_argument("--rounds", type=int, default=3, help="reads per way")
    parser.add_argument("--only", choices=["read", "stream"], help="default: both")
    parser.add_argument("--session", choices=[OWN, PIPELINE], default=OWN, help="as a user's, or as of `penstock run`")
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.changes, arguments.rounds) < 1:
        parser.error("--rows, --changes and --rounds must be at least 1")
    return arguments


if __name__ == "__main__":
    main()
