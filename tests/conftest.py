"""Fixtures that every test can use: real servers, and a database per test.

`database` is an empty database on PostgreSQL 18 (or on the server that PENSTOCK_TEST_DSN names); `any_database` runs
its test on the oldest and the newest version, and `each_database` on the newest: in `make soak`, both run on every
version, and where the version matters, `any_database` always does. `make_server` starts servers for one test, to
restart, kill or reconfigure them.
`spark` is a Spark session that all tests share; `delta_spark` is the same one where it can read Delta tables.
`opensearch` is a search server that all tests of a run share (or the one that PENSTOCK_TEST_OPENSEARCH names), and
`index_name` a name on it that is free; `pressed` is one that is overloaded, and may be killed; `make_opensearch` gives
servers of one's own.
`s3` is an object store with a bucket `lake`: an emulator, and in `make soak` a real server.
"""

from __future__ import annotations

import gc
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings as hypothesis_settings

from penstock.errors import ConfigError
from penstock.testing.apicurio import find_apicurio
from penstock.testing.kafka import KafkaServer
from penstock.testing.kafka import why_not as kafka_is_missing
from penstock.testing.opensearch import QUICK_START, ExistingOpenSearch, OpenSearchServer, find_java, why_not
from penstock.testing.postgres import DatabaseServer, ExistingServer, PostgresServer, execute_on
from penstock.testing.postgres_binaries import find_binaries, installed_binaries
from tests.support.delta_jars import delta_spark_options, find_delta_jars, find_postgres_driver
from tests.support.examples import examples
from tests.support.least_privilege import documented_dsn, is_wanted
from tests.support.s3 import S3Emulator, S3Gateway, S3Server, find_gateway
from tests.support.shared_server import shared_kafka, shared_opensearch, shared_registry

# Most JVMs of a test run live for seconds: the second compiler would cost half of the processor time and pay off too
# late. Verifying classes is skipped too, and `make` has written an archive of those of Spark.
SPARK_CLASSES = Path(sys.prefix) / "spark-classes.jsa"
QUICK_SPARK = " ".join(
    (
        *QUICK_START,
        *("-XX:+UseSerialGC", "-XX:ReservedCodeCacheSize=240m"),
        *(f"-XX:SharedArchiveFile={SPARK_CLASSES}", "-Xlog:cds*=off"),
    )
)
os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{QUICK_SPARK} -Dspark.ui.enabled=false")

# No test does linear algebra; without this, every process that imports numpy starts threads for it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that runs tests in the background has them ignore Ctrl-C, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEFAULT_MAJOR = 18
MAJORS = (15, 16, 18)
BETWEEN = MAJORS[1:-1]
"""Only `penstock.source` tells these from the oldest version."""
DSN_VARIABLE = "PENSTOCK_TEST_DSN"
OPENSEARCH_VARIABLE = "PENSTOCK_TEST_OPENSEARCH"
_SLOT_SECONDS = 120.0
"""A guard against hangs."""

# A slow machine is no failure; hangs are caught by the time-out of each test.
hypothesis_settings.register_profile("penstock", max_examples=examples(30), deadline=None, print_blob=True)
hypothesis_settings.load_profile("penstock")


@dataclass(frozen=True, slots=True)
class Database:
    """A database that lives as long as its test."""

    server: DatabaseServer
    name: str
    idle: list[psycopg.Connection[tuple[Any, ...]]] | None = None
    """Connections that `execute` uses again; None opens one for each statement, as tests that stop the server need."""

    role_dsn: str | None = None
    """The address for the documented role, in a run with that role (`tests.support.least_privilege`)."""

    @property
    def dsn(self) -> str:
        """The address for pipelines."""
        return self.role_dsn or self.server.dsn(self.name)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection that commits by itself, unless `autocommit=False` is given."""
        return self.server.connect(self.name, **options)

    def execute(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run a statement in a session without a past; gives the rows, if it has any."""
        if self.idle is None:
            return self.server.execute(query, parameters, database=self.name)
        connection = self._take(self.idle)
        try:
            rows = execute_on(connection, query, parameters)
            connection.commit()
            connection.execute("discard all")
        except BaseException:
            connection.close()
            raise
        self.idle.append(connection)
        return rows

    def idle_slot(self, name: str) -> str:
        """Return the slot's name once no session uses it: that of a capture which has just ended does for a moment."""
        deadline = time.monotonic() + _SLOT_SECONDS
        while self.execute("select from pg_replication_slots where slot_name = %s and active", [name]):
            assert time.monotonic() < deadline, f"slot {name} is still in use"
            time.sleep(0.01)
        return name

    def close(self) -> None:
        """Close the connections of `execute`."""
        for connection in self.idle or ():
            connection.close()

    def _take(self, idle: list[psycopg.Connection[tuple[Any, ...]]]) -> psycopg.Connection[tuple[Any, ...]]:
        with suppress(IndexError):
            while connection := idle.pop():
                # The server says something to an idle session only when it ends it.
                if not select.select([connection.fileno()], [], [], 0)[0]:
                    return connection
                connection.close()
        # Discarding the session would discard what psycopg has prepared.
        return self.connect(prepare_threshold=None)


class ServerPool:
    """The servers of a test run, each started when it is first asked for."""

    def __init__(self) -> None:
        self._servers: dict[int, PostgresServer] = {}

    def get(self, major: int) -> PostgresServer:
        if major not in self._servers:
            self._servers[major] = PostgresServer(binaries=_binaries_or_skip(major)).start()
        server = self._servers[major]
        return server if server.running else server.start()

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


@pytest.fixture(scope="session")
def server_pool() -> Iterator[ServerPool]:
    pool = ServerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def server(server_pool: ServerPool) -> DatabaseServer:
    """The server that tests share; do not stop or reconfigure it."""
    dsn = os.environ.get(DSN_VARIABLE)
    return ExistingServer(dsn) if dsn else server_pool.get(DEFAULT_MAJOR)


@pytest.fixture
def database(server: DatabaseServer) -> Iterator[Database]:
    """An empty database; dropped after the test with its sessions, walsenders and slots."""
    yield from _database_on(server)


@pytest.fixture(params=MAJORS, ids=[f"pg{major}" for major in MAJORS])
def every_server(request: pytest.FixtureRequest, server_pool: ServerPool) -> DatabaseServer:
    """A shared server of each version; a version that is not installed skips its tests by name."""
    return server_pool.get(request.param)


@pytest.fixture(
    params=[pytest.param(major, marks=[pytest.mark.soak] if major in BETWEEN else []) for major in MAJORS],
    ids=[f"pg{major}" for major in MAJORS],
)
def any_server(request: pytest.FixtureRequest, server_pool: ServerPool) -> DatabaseServer:
    """A shared server of the oldest and of the newest version; in `make soak`, of each."""
    return server_pool.get(request.param)


@pytest.fixture(
    params=[pytest.param(major, marks=[] if major == DEFAULT_MAJOR else [pytest.mark.soak]) for major in MAJORS],
    ids=[f"pg{major}" for major in MAJORS],
)
def each_database(request: pytest.FixtureRequest, server_pool: ServerPool) -> Iterator[Database]:
    """An empty database on the newest version; in `make soak`, on each."""
    yield from _database_on(server_pool.get(request.param))


@pytest.fixture
def any_database(any_server: DatabaseServer) -> Iterator[Database]:
    """An empty database on each version of `any_server`."""
    yield from _database_on(any_server)


@pytest.fixture
def make_server() -> Iterator[Callable[..., PostgresServer]]:
    """Start servers for this test only: `make_server(settings={...}, major=15, hba=[...])`."""
    servers: list[PostgresServer] = []

    def make(*, major: int = DEFAULT_MAJOR, **options: Any) -> PostgresServer:
        servers.append(PostgresServer(binaries=_binaries_or_skip(major), **options))
        return servers[-1].start()

    yield make
    for each in servers:
        each.close()


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The Spark session of a test run, on two cores, started on first use. Do not stop it."""
    # Imported here, so that tests without Spark start without it.
    from penstock.spark.session import SparkSettings, build_session

    options = delta_spark_options()
    session = build_session(SparkSettings(master="local[2]", app_name="penstock-tests", options=options))
    yield session
    session.stop()


@pytest.fixture(scope="session")
def delta_spark(request: pytest.FixtureRequest) -> Any:
    """The shared session, for tests that read Delta tables; skips them if the jars are missing."""
    if not find_delta_jars():
        pytest.skip("needs Delta's jars for Spark: make jars")
    return request.getfixturevalue("spark")


@pytest.fixture(scope="session")
def jdbc_spark(request: pytest.FixtureRequest) -> Any:
    """The shared session, for tests that write to PostgreSQL by JDBC; skips them if the driver is missing."""
    if not find_delta_jars() or not find_postgres_driver():
        pytest.skip("needs PostgreSQL's JDBC driver for Spark: make jars")
    return request.getfixturevalue("spark")


@pytest.fixture(scope="session")
def opensearch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExistingOpenSearch]:
    """The search server that all processes of a test run share; do not stop or reconfigure it."""
    if url := os.environ.get(OPENSEARCH_VARIABLE):
        yield ExistingOpenSearch(url)
        return
    _skip_without_opensearch()
    with shared_opensearch(_folder_of_the_run(tmp_path_factory)) as server:
        yield server


@pytest.fixture
def index_name(opensearch: ExistingOpenSearch) -> Iterator[str]:
    """An unused index name; indexes whose names begin with it are removed after the test."""
    name = f"test-{secrets.token_hex(6)}"
    yield name
    found = opensearch.request("GET", f"/_cat/indices/{name}*?format=json&h=index&expand_wildcards=all")
    for each in found:
        opensearch.request("DELETE", f"/{each['index']}")


@pytest.fixture(scope="session")
def clickhouse_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of ClickHouse's engine in this process, which has one: it locks its folder against other processes."""
    connect = pytest.importorskip("clickhouse_connect")
    pytest.importorskip("chdb")
    url = f"chdb://{tmp_path_factory.mktemp('clickhouse')}"
    with closing(connect.get_client(dsn=url)):
        yield url


@pytest.fixture
def clickhouse(clickhouse_engine: str) -> Iterator[Any]:
    """A database of its own for each test."""
    from tests.support.clickhouse import ClickHouse

    clickhouse = ClickHouse(clickhouse_engine, f"test_{secrets.token_hex(8)}")
    yield clickhouse
    clickhouse.drop()


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the broker that all processes of a test run share; do not stop it."""
    if servers := os.environ.get("PENSTOCK_TEST_KAFKA"):
        yield servers
        return
    _skip_without_kafka()
    with shared_kafka(_folder_of_the_run(tmp_path_factory)) as servers:
        yield servers


@pytest.fixture
def kafka(kafka_server: str) -> Any:
    """The shared broker, with names of its own for each test."""
    from tests.support.kafka import Kafka

    return Kafka(kafka_server, f"test-{secrets.token_hex(6)}")


@pytest.fixture(scope="session")
def schema_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the schema registry that all processes of a test run share."""
    if url := os.environ.get("PENSTOCK_TEST_REGISTRY"):
        yield url
        return
    if find_apicurio() is None or find_java() is None:
        pytest.skip("Apicurio is not installed: make kafka")
    with shared_registry(_folder_of_the_run(tmp_path_factory)) as url:
        yield url


@pytest.fixture
def make_kafka() -> Iterator[Callable[..., KafkaServer]]:
    """Start brokers for this test only, to stop and kill: `make_kafka(settings={...})`."""
    _skip_without_kafka()
    with ExitStack() as servers:
        yield lambda **options: servers.enter_context(KafkaServer(**options))


@pytest.fixture
def make_opensearch() -> Iterator[Callable[..., OpenSearchServer]]:
    """Start search servers for this test only: `make_opensearch(settings={...})`."""
    _skip_without_opensearch()
    servers: list[OpenSearchServer] = []

    def make(**options: Any) -> OpenSearchServer:
        servers.append(OpenSearchServer(**options))
        return servers[-1].start()

    yield make
    for each in servers:
        each.close()


@pytest.fixture(scope="session")
def pressed() -> Iterator[OpenSearchServer]:
    """An overloaded search server. Tests may kill it: start it before use, and use unused names."""
    _skip_without_opensearch()
    settings: dict[str, object] = {
        # Of a bulk's shards, about two at a time are accepted; the others get 429.
        "node.processors": 1,
        "thread_pool.write.queue_size": 1,
        "http.max_content_length": "1mb",
    }
    with OpenSearchServer(settings=settings) as server:
        yield server


def _skip_without_kafka() -> None:
    pytest.importorskip("confluent_kafka")
    if missing := kafka_is_missing():
        pytest.skip(missing)


def _skip_without_opensearch() -> None:
    if missing := why_not():
        pytest.skip(missing)


def _folder_of_the_run(factory: pytest.TempPathFactory) -> Path:
    """Return the folder that all processes of a run share; each has its own below it."""
    folder = factory.getbasetemp()
    return folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder


_LONG_SECONDS = 900
"""The timeout of tests that are known to be long."""
_ONE_PROCESS = {"spark": "spark", "delta_spark": "spark", "jdbc_spark": "spark", "pressed": "pressed", "s3": "s3"}
"""Fixtures that take seconds to start, with the xdist group of their tests."""
_SOURCES = Path(__file__).parent / "integration" / "spark"


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Run tests on slow fixtures in one process, so that not every process starts and warms up its own.

    Long tests begin first, so that none of them runs alone at the end.
    """
    # Before xdist reads the groups, and after the random order is set.
    for item in items:
        groups = {_ONE_PROCESS[name] for name in getattr(item, "fixturenames", ()) if name in _ONE_PROCESS}
        if groups:
            # A test that uses two goes to the slower one. Those on Spark take longest; half of them have their own.
            group = "spark" if "spark" in groups else groups.pop()
            own = group == "spark" and _SOURCES in item.path.parents
            item.add_marker(pytest.mark.xdist_group("spark sources" if own else group))
    yield
    items.sort(key=lambda item: not _is_long(item))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free it at its end: libraries report what is left then."""
    gc.unfreeze()


def _is_long(item: pytest.Item) -> bool:
    limit = item.get_closest_marker("timeout")
    return limit is not None and limit.args[0] >= _LONG_SECONDS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how to repeat the order, which servers were used, and which tests were skipped without one."""
    seed = terminalreporter.config.getoption("randomly_seed", default=None)
    terminalreporter.write_line(f"order of tests: --randomly-seed={seed}")
    there = installed_binaries()
    found = [f"{there[major].version} ({there[major].origin})" for major in MAJORS if major in there]
    terminalreporter.write_line(f"PostgreSQL for tests: {', '.join(found) or 'none'}")
    if os.environ.get(DSN_VARIABLE):
        terminalreporter.write_line(f"tests of the default server used {DSN_VARIABLE}")
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if _SKIP_REASON in str(report.longrepr)]
    for major in MAJORS:
        if major not in there:
            names = sorted(report.nodeid for report in skipped if f"{_SKIP_REASON} {major} " in str(report.longrepr))
            terminalreporter.write_line(
                f"PostgreSQL {major} is not installed: {len(names)} tests skipped{':' if names else ''}", yellow=True
            )
            for name in names:
                terminalreporter.write_line(f"  {name}", yellow=True)


_SKIP_REASON = "needs PostgreSQL"


def _binaries_or_skip(major: int) -> Any:
    try:
        return find_binaries(major)
    except ConfigError as error:
        pytest.skip(f"{_SKIP_REASON} {major} ({error.hint})")


def _database_on(server: DatabaseServer) -> Iterator[Database]:
    name = server.create_database()
    database = Database(server, name, [], documented_dsn(server, name) if is_wanted() else None)
    yield database
    database.close()
    server.drop_database(database.name)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(S3Emulator, id="emulator"),
        pytest.param(S3Gateway, id="versitygw", marks=pytest.mark.soak),
    ],
)
def s3(request: pytest.FixtureRequest) -> Iterator[S3Server]:
    if request.param is S3Gateway and find_gateway() is None:
        pytest.skip("versitygw is not installed: make s3-server")
    with request.param() as server:
        server.create_bucket("lake")
        yield server
