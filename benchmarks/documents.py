"""Measure how fast search documents are backfilled and updated, against `psql` building the same JSON.

    python benchmarks/documents.py [--rows 1000000] [--rounds 2] [--master 'local[2]' | none] [--search-rows 200000]
    python benchmarks/documents.py --apart [--search-rows 200000]

docs/reference/benchmarks.md describes the stages. `psql` is timed as a whole program, the documents output from the
rebuild command until the index would serve, without Spark's start-up. Every round is checked: as many documents as
rows, and every changed document.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import urllib3
from harness import (
    BenchmarkFailed,
    cleaned_up,
    describe_machine,
    format_table,
    load_average,
    median,
    print_result,
    say,
    spread,
    take_turns,
)

from penstock.coordinator import Coordinator
from penstock.documents.base import BatchStatistics, FlushReport, NoopObserver, Sink
from penstock.documents.build import compile_build
from penstock.documents.catalog import load_catalog
from penstock.documents.output import DocumentsOutput, DocumentsSettings
from penstock.documents.relation_map import open_relation_map
from penstock.documents.sinks import CountingSink
from penstock.lsn import Lsn, reaches
from penstock.source.connections import SourceSettings
from penstock.specification import parse_specification
from penstock.spool import SpoolReader, SpoolSettings
from penstock.state import CommandKind, IndexStatus, MemoryStore
from penstock.stream import StreamSettings
from penstock.testing.postgres import PostgresServer
from penstock.workers.process_tasks import ProcessTasks

CORES = 2
PSQL, OURS, BULKS = "psql", "documents", "plain bulk requests"
INDEX = "customers"
WARM_UPS = 3
"""Java compiles what runs often: after the first few hundred thousand documents the server takes twice as many."""
FAN_OUTS = (1, 10, 1000)
HANG_SECONDS = 3600.0
SERVER_SETTINGS: Mapping[str, str] = {
    "shared_buffers": "1GB",
    "max_wal_size": "64GB",
    "checkpoint_timeout": "1h",
    "autovacuum": "off",
}
SPECIFICATION = """
version: 1
table: customers
fields:
  - {text: name}
  - {keyword: email}
  - {timestamp: changed_at}
  - {belongs_to: region, column: region_id, table: regions, primary_key: id, fields: [{text: label}]}
  - {belongs_to: household, column: household_id, table: households, primary_key: id, fields: [{text: label}]}
  - has_many: orders
    table: orders
    foreign_key: customer_id
    primary_key: id
    order_by: [{column: id, direction: asc}]
    fields: [{long: id}, {keyword: status}, {decimal: total}]
  - {count: order_count, table: orders, foreign_key: customer_id}
  - {sum: spent, table: orders, foreign_key: customer_id, column: total, value_type: decimal}
"""
TABLES = """
create table regions (id int primary key, label text);
create table households (id int primary key, label text);
create table customers (
    id int primary key, name text, email text, region_id int, household_id int, changed_at timestamptz default now()
);
create table orders (id int primary key, customer_id int, status text, total numeric(10, 2));
insert into regions select n, 'region ' || n from generate_series(0, {rows} / 1000) n;
insert into households select n, 'household ' || n from generate_series(0, {rows} / 10) n;
insert into customers
    select n, 'customer ' || n, n || '@example.org', n / 1000, n / 10 from generate_series(1, {rows}) n;
insert into orders select n, 1 + n / 2, 'paid', n % 1000 from generate_series(0, 2 * {rows} - 1) n;
create index on customers (region_id);
create index on customers (household_id);
create index on orders (customer_id);
"""


class Timed(Sink):
    """Counts, and notes when documents that were written in this process have come, with the time in their body."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.watching = False
        self._counting = CountingSink()
        self._waiting: list[pa.Table] = []

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def write(self, batch: pa.Table) -> None:
        self._counting.write(batch)
        if self.watching:
            self._waiting.append(batch)

    def flush(self, caught_up: bool) -> FlushReport:
        now = time.time()
        for batch in self._waiting:
            for body in batch.column("body").to_pylist():
                self.lags.append(now - _seconds(json.loads(body)["changed_at"]))
        self._waiting.clear()
        return FlushReport()


class Counted(NoopObserver):
    """How many documents changes were made of."""

    def __init__(self) -> None:
        self.documents = 0
        self.batches = 0

    def on_batch_committed(self, statistics: BatchStatistics) -> None:
        self.documents += sum(statistics.documents.values())
        self.batches += 1


class Bench:
    """A server with the tables, and an output over them."""

    def __init__(self, server: PostgresServer, folder: Path, rows: int, tasks: Any, sink: Sink) -> None:
        self.server = server
        self.rows = rows
        self.spool = folder / "spool"
        self.observer = Counted()
        self.database = server.create_database()
        self.store = MemoryStore("bench:documents")
        say(f"making tables of {rows:,} customers and {2 * rows:,} orders")
        with server.connect(self.database) as connection:
            connection.execute(TABLES.format(rows=rows).encode())
            connection.execute("vacuum (freeze, analyze)")
        self.source = SourceSettings(server.dsn(self.database))
        self.specification = parse_specification(SPECIFICATION, INDEX)
        self.output = DocumentsOutput(
            StreamSettings(
                id="bench",
                source=self.source,
                publication="bench",
                slot=f"bench_{self.database[-12:]}",
                spool=SpoolSettings(self.spool, min_free_bytes=0),
                tables=("public.*",),
            ),
            self.store,
            [self.specification],
            sink,
            tasks,
            relations=lambda: open_relation_map(f"sqlite:///{folder}/state.db", "bench"),
            documents=DocumentsSettings(),
            observer=self.observer,
        )

    @contextmanager
    def started(self) -> Iterator[None]:
        with Coordinator([self.output]) as coordinator:
            [self.running] = coordinator
            self.wait(lambda: self.running.is_complete, "the first build")
            yield

    def wait(self, look: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not look():
            self.running.wait(0)
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"waited too long for {what}")
            time.sleep(0.01)

    def _position(self) -> Lsn:
        """Behind all that is committed; something comes after it, so that the server sends what is before."""
        with self.server.connect(self.database) as connection:
            row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
            connection.execute("create table behind (); drop table behind")
        assert row is not None
        return Lsn.parse(row[0])

    def wait_followed(self) -> None:
        end = self._position()

        def look() -> bool:
            status = self.running.status
            return reaches(status.acknowledged, end) and self.running.is_complete

        self.wait(look, "changes")

    def fill(self) -> float:
        """Build the index anew; the seconds that it took."""
        before = self.running.indexes[INDEX].build
        began = time.monotonic()
        self.store.add_command(CommandKind.REBUILD_INDEX)
        self.wait(lambda: self.running.indexes[INDEX].build != before, "the command")
        self.wait(lambda: self.running.indexes[INDEX].status is IndexStatus.SEEDED, "the index")
        seconds = time.monotonic() - began
        found = sum(self.store.get_index_ranges(INDEX, self.running.indexes[INDEX].build).values())
        if found != self.rows:
            raise BenchmarkFailed(f"{found:,} documents were built of {self.rows:,} rows")
        return seconds

    def psql(self) -> float:
        """The same documents for nobody; the seconds of the program."""
        with psycopg.connect(self.server.dsn(self.database), autocommit=True) as connection:
            catalog = load_catalog(connection, self.specification.tables())
        query = compile_build(self.specification, catalog)
        text = f"copy ({query.range_head}(select * from only public.customers){query.range_tail}) to stdout"
        command = [
            str(self.server.binaries.program("psql")),
            *("-X", "-q", "-h", "127.0.0.1", "-p", str(self.server.port), "-U", self.server.user, "-d", self.database),
            *("-c", text),
        ]
        began = time.monotonic()
        environment = os.environ | {"PGPASSWORD": self.server.password}
        ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
        if ended.returncode != 0:
            raise BenchmarkFailed(f"psql ended with exit code {ended.returncode}")
        return time.monotonic() - began

    def change(self, fan_out: int, documents: int) -> dict[str, float]:
        """Change rows that `fan_out` documents show each; how many documents that makes a second."""
        table = {1: "customers", 10: "households", 1000: "regions"}[fan_out]
        column = "name" if table == "customers" else "label"
        count = max(1, min(documents, self.rows) // fan_out)
        self.wait_followed()
        self.store.add_command(CommandKind.PAUSE)
        self.wait(lambda: self.running.paused, "the pause")
        with self.server.connect(self.database) as connection:
            for first in range(1, count + 1, 1000):
                connection.execute(
                    f"update {table} set {column} = {column} || '+' where id between %s and %s".encode(),
                    [first, min(first + 999, count)],
                )
        end = self._position()
        self.wait(lambda: SpoolReader(self.spool).wait(end, 0.0), "capture")
        before, batches = self.observer.documents, self.observer.batches
        self.store.add_command(CommandKind.RESUME)
        self.wait(lambda: not self.running.paused, "the end of the pause")
        began = time.monotonic()
        self.wait_followed()
        seconds = time.monotonic() - began
        made = self.observer.documents - before
        if not count * fan_out * 0.9 <= made:
            raise BenchmarkFailed(f"{made:,} documents were built of {count:,} rows with {fan_out} each")
        batches = self.observer.batches - batches
        say(f"fan-out {fan_out}: {made / seconds:,.0f} documents/s, {made:,} in {seconds:.2f} s, {batches} batches")
        return {"documents_per_second": made / seconds, "documents": made, "batches": batches}

    def commit_steadily(self, rate: float, seconds: float) -> list[float]:
        """Single rows that say when they were changed; these times."""
        pause = threading.Event()
        committed: list[float] = []
        with self.server.connect(self.database) as connection:
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                row = connection.execute(
                    "update customers set changed_at = clock_timestamp() where id = %s"
                    " returning extract(epoch from changed_at)::float8",
                    [1 + (len(committed) + 1) * 7919 % self.rows],
                ).fetchone()
                assert row is not None
                committed.append(row[0])
                pause.wait(max(0.0, began + len(committed) / rate - time.monotonic()))
        return committed

    def lag(self, sink: Timed, rate: float, seconds: float) -> dict[str, float]:
        """Single rows at a steady rate: from their commit until the sink has the document."""
        self.wait_followed()
        sink.watching = True
        number = len(self.commit_steadily(rate, seconds))
        self.wait_followed()
        sink.watching = False
        if len(sink.lags) < number * 0.9:
            raise BenchmarkFailed(f"{len(sink.lags)} documents came of {number} changes")
        p50, p99 = (float(np.percentile(sink.lags, each)) for each in (50, 99))
        say(f"commit to sink: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, at {number / seconds:.0f} changes/s")
        return {"p50_s": p50, "p99_s": p99, "changes": number}


def main() -> None:
    arguments = _parse_arguments()
    if arguments.apart:
        arguments.search_core, *others = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, others)
    try:
        with (
            cleaned_up(),
            PostgresServer(major=arguments.server, settings=SERVER_SETTINGS) as server,
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
            _tasks(arguments) as tasks,
        ):
            print(f"PostgreSQL {server.version}; {describe_machine()}")
            measure = _search if arguments.apart else run
            result = measure(server, Path(folder), tasks, arguments)
    except BenchmarkFailed as error:
        raise SystemExit(f"benchmark failed: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print_result(result)


def run(server: PostgresServer, folder: Path, tasks: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    sink = Timed()
    bench = Bench(server, folder, arguments.rows, tasks, sink)
    with bench.started():
        seconds: dict[str, list[float]] = {PSQL: [], OURS: []}
        for who in take_turns(PSQL, OURS, arguments.rounds):
            seconds[who].append(bench.psql() if who == PSQL else bench.fill())
            rate = arguments.rows / seconds[who][-1]
            say(f"{who}: {rate:,.0f} documents/s in {seconds[who][-1]:.1f} s, load average {load_average():.1f}")
        changed = {fan_out: bench.change(fan_out, arguments.documents) for fan_out in FAN_OUTS}
        lag = bench.lag(sink, arguments.rate, arguments.seconds)
    rates = {who: arguments.rows / median(each) for who, each in seconds.items()}
    ratio = rates[OURS] / rates[PSQL]
    result: dict[str, Any] = {
        "ratio": round(ratio, 3),
        "documents_per_second": round(rates[OURS]),
        "psql_documents_per_second": round(rates[PSQL]),
        "changed": {str(each): round(found["documents_per_second"]) for each, found in changed.items()},
        "lag": {name: round(value, 4) for name, value in lag.items()},
    }
    if arguments.search_rows:
        result["opensearch"] = _search(server, folder, tasks, arguments)
    table = [
        *([who, f"{rates[who]:,.0f}", f"{spread(seconds[who]):.2f}"] for who in (PSQL, OURS)),
        *([f"changed, fan-out {each}", f"{found['documents_per_second']:,.0f}", ""] for each, found in changed.items()),
    ]
    print(f"\n{arguments.rows:,} documents on {arguments.master}; load average {load_average():.1f}; ratio {ratio:.2f}")
    print(f"{format_table(['what', 'documents/s', 'spread'], table)}\n", flush=True)
    return result


def _search(server: PostgresServer, folder: Path, tasks: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same with a search server: filled, and from a commit until a search finds it."""
    from penstock.sinks.opensearch import OpenSearchSink
    from penstock.testing.opensearch import OpenSearchServer

    own = folder / "opensearch"
    own.mkdir()
    # With both compilers: what its quick start saves is lost many times over here.
    with OpenSearchServer(heap_megabytes=2048, java_options=()) as search:
        if arguments.apart:
            _move(search.pid, arguments.search_core)
        bench = Bench(server, own, arguments.search_rows, tasks, OpenSearchSink(search.url, replicas=0))
        with bench.started():
            bulks = Bulks(search)
            measures: dict[str, Callable[[], float]] = {BULKS: bulks.send, OURS: bench.fill}
            for _ in range(WARM_UPS):
                bulks.send()
            seconds: dict[str, list[float]] = {BULKS: [], OURS: []}
            busy: dict[str, list[float]] = {BULKS: [], OURS: []}
            for who in take_turns(BULKS, OURS, arguments.rounds):
                before = _processor_seconds(search.pid)
                seconds[who].append(measures[who]())
                busy[who].append((_processor_seconds(search.pid) - before) / seconds[who][-1])
                rate = arguments.search_rows / seconds[who][-1]
                say(f"opensearch, {who}: {rate:,.0f} documents/s, {busy[who][-1]:.2f} cores of the server busy")
            rates = {who: arguments.search_rows / median(each) for who, each in seconds.items()}
            with Searching(search) as searching:
                committed = bench.commit_steadily(arguments.rate, arguments.seconds)
                bench.wait_followed()
                bench.wait(lambda: searching.newest >= committed[-1], "a search that finds the last change")
    lags = searching.lags(committed)
    p50, p99 = (float(np.percentile(lags, each)) for each in (50, 99))
    say(f"commit to search: p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, of {len(lags)} changes")
    return {
        "documents_per_second": round(rates[OURS]),
        "bulk_documents_per_second": round(rates[BULKS]),
        "ratio": round(rates[OURS] / rates[BULKS], 3),
        "server_cores": {who: round(median(each), 2) for who, each in busy.items()},
        "searchable": {"p50_s": round(p50, 4), "p99_s": round(p99, 4)},
    }


def _move(pid: int, core: int) -> None:
    """Give a process one core; threads that it starts later inherit that from those that are there."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Bulks:
    """The documents that a search server has, as bulk requests made beforehand: what the server takes at best."""

    PAGE = 5_000
    CLIENTS = CORES

    def __init__(self, server: Any) -> None:
        self._server = server
        [described] = server.request("GET", f"/{INDEX}").values()
        self._mappings = described["mappings"]
        self._analysis = {"analysis": described["settings"]["index"].get("analysis", {})}
        self._bodies = [self._body(page) for page in self._pages()]
        self._count = server.request("GET", f"/{INDEX}/_count")["count"]

    def send(self) -> float:
        """Fill an index with the same mapping; return the seconds until all documents can be searched."""
        name = f"bulk_{secrets.token_hex(4)}"
        settings = self._analysis | {"number_of_shards": 1, "number_of_replicas": 0, "refresh_interval": "-1"}
        self._server.request("PUT", f"/{name}", {"settings": settings, "mappings": self._mappings})
        began = time.monotonic()
        with ThreadPoolExecutor(self.CLIENTS) as clients:
            for errors in clients.map(self._send_some, [name] * self.CLIENTS, range(self.CLIENTS)):
                if errors:
                    raise BenchmarkFailed("a bulk request had errors")
        self._server.request("POST", f"/{name}/_refresh")
        seconds = time.monotonic() - began
        found = self._server.request("GET", f"/{name}/_count")["count"]
        if found != self._count:
            raise BenchmarkFailed(f"{found:,} documents came of {self._count:,}")
        self._server.request("DELETE", f"/{name}")
        return seconds

    def _send_some(self, name: str, first: int) -> bool:
        pool = urllib3.PoolManager(headers={"Content-Type": "application/x-ndjson"})
        url = f"{self._server.url}/{name}/_bulk?filter_path=errors"
        for body in self._bodies[first :: self.CLIENTS]:
            answer = pool.request("POST", url, body=body)
            if answer.status != 200:
                raise BenchmarkFailed(f"the search server answered {answer.status} to a bulk request")
            if answer.json()["errors"]:
                return True
        return False

    def _pages(self) -> Iterator[list[Any]]:
        after: list[Any] = []
        while True:
            query = {"size": self.PAGE, "sort": [{"email": "asc"}], **({"search_after": after} if after else {})}
            page = self._server.request("POST", f"/{INDEX}/_search", query)["hits"]["hits"]
            if not page:
                return
            yield page
            after = page[-1]["sort"]

    @staticmethod
    def _body(page: list[Any]) -> bytes:
        lines = ((json.dumps({"index": {"_id": each["_id"]}}), json.dumps(each["_source"])) for each in page)
        return "".join(f"{head}\n{source}\n" for head, source in lines).encode()


class Searching:
    """Searches again and again for the newest change, and notes when which one was found."""

    QUERY: Mapping[str, Any] = {"size": 0, "aggs": {"newest": {"max": {"field": "changed_at"}}}}
    PAUSE_SECONDS = 0.02

    def __init__(self, server: Any) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._seen: list[tuple[float, float]] = []

    def __enter__(self) -> Searching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def newest(self) -> float:
        return self._seen[-1][1] if self._seen else 0.0

    def lags(self, committed: list[float]) -> list[float]:
        """The seconds from each commit, which come in order, to the first search that found it or a later one."""
        times, newest = np.array(self._seen).T
        return list(times[np.searchsorted(newest, np.array(committed))] - np.array(committed))

    def _look(self) -> None:
        while not self._stop.is_set():
            found = self._server.request("POST", f"/{INDEX}/_search", self.QUERY)["aggregations"]["newest"]["value"]
            # Of a millisecond that a change was made in, the search server keeps no part.
            newest = max(self.newest, (found or 0.0) / 1000 + 0.001)
            self._seen.append((time.time(), newest))
            self._stop.wait(self.PAUSE_SECONDS)


@contextmanager
def _tasks(arguments: argparse.Namespace) -> Iterator[Any]:
    if arguments.master == "none":
        yield ProcessTasks()
        return
    from penstock.spark.session import SparkSettings, build_session
    from penstock.spark.tasks import SparkTasks

    began = time.monotonic()
    session = build_session(SparkSettings(master=arguments.master, app_name="bench-documents"))
    say(f"Spark started in {time.monotonic() - began:.1f} s")
    try:
        yield SparkTasks(session, copy_tasks=arguments.tasks)
    finally:
        session.stop()


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare building search documents with psql building the same JSON.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the root table")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each backfill")
    parser.add_argument("--documents", type=int, default=20_000, help="documents to update per fan-out")
    parser.add_argument("--rate", type=float, default=100.0, help="changes per second, for the latency")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of these changes")
    parser.add_argument("--master", default=f"local[{CORES}]", help="Spark master; none runs without Spark")
    parser.add_argument("--tasks", type=int, default=CORES, help="backfill tasks at the same time")
    parser.add_argument(
        "--search-rows", type=int, default=200_000, help="documents to backfill into a real OpenSearch; 0 skips it"
    )
    parser.add_argument(
        "--apart", action="store_true", help="only the search server, on a core of its own: is it the limit?"
    )
    parser.add_argument("--server", type=int, help="major version (default: the newest installed)")
    arguments = parser.parse_args()
    if min(arguments.rows, arguments.rounds, arguments.documents, arguments.rate, arguments.seconds) <= 0:
        parser.error("all numbers must be above 0")
    return arguments


if __name__ == "__main__":
    main()
